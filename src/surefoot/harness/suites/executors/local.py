"""Jobs as processes of this machine, each in a session of its own.

Promises   a job leaves no process of its group behind, whether it ends, runs out of time or is cancelled;
           standard input is empty, so nothing can wait for a person.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.harness.files import write_atomic
from surefoot.harness.suites.executors.base import RUNNING, Job, JobState, tail

GRACE_S = 20.0
"""Between the polite signal and the last one; a trainer may save within this time."""


@dataclass(slots=True)
class _Child:
    job: Job
    process: subprocess.Popen[bytes]
    deadline: float
    state: JobState = RUNNING


class LocalExecutor:
    """Starts processes; `argv` is taken as it is."""

    name = "local"
    python = sys.executable
    interval = 0.05

    def __init__(self) -> None:
        self._children: dict[str, _Child] = {}

    def submit(self, job: Job) -> str:
        """Start the job's command in its snapshot."""
        return self.start(job, job.argv, {**os.environ, **job.env}, job.cwd)

    def start(self, job: Job, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> str:
        """Start any command on behalf of a job."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            try:
                process = subprocess.Popen(
                    list(argv), cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise ConfigError(
                    f"{argv[0]!r} cannot be started: {error.strerror}",
                    f"{job.name} runs this command",
                    "correct command in the manifest, or install it",
                ) from error
        name = str(process.pid)
        self._children[name] = _Child(job, process, time.monotonic() + 60 * job.minutes)
        return name

    def poll(self, job_id: str) -> JobState:
        """Look without waiting; time that has run out ends the job here."""
        child = self._children[job_id]
        if child.state.done:
            return child.state
        if _has_ended(child.process.pid):
            self._finish(child, out_of_time=False)
        elif time.monotonic() > child.deadline:
            try:
                self._end(child)
            finally:
                self._finish(child, out_of_time=True)
        return child.state

    def cancel(self, job_id: str) -> None:
        """Ask the whole group to stop, then make it."""
        child = self._children[job_id]
        if not child.state.done:
            try:
                self._end(child)
            finally:
                self._finish(child, out_of_time=False)

    def fetch(self, job_id: str) -> str:
        """The end of the log."""
        return tail(self._children[job_id].job.log)

    def _end(self, child: _Child) -> None:
        _signal_group(child.process.pid, signal.SIGTERM)
        limit = time.monotonic() + GRACE_S
        while not _has_ended(child.process.pid) and time.monotonic() < limit:
            time.sleep(self.interval)

    def _finish(self, child: _Child, *, out_of_time: bool) -> None:
        """The leader has ended or is about to, and is not reaped: its number is still ours, so its group is too."""
        _signal_group(child.process.pid, signal.SIGKILL)
        code = child.process.wait()
        write_atomic(child.job.exit_file, f"{code}\n")
        child.state = JobState(True, code, out_of_time=out_of_time)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended, without taking away its entry."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return  # everyone has gone
