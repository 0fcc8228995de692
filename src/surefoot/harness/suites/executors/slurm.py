"""Jobs for Slurm: one script per job, every value quoted, submitted as argv lists.

Promises   the trainer's exit status comes from a file that the job itself writes; a job that leaves the queue without
           one has failed, whatever its log says.
Never      evaluates text of a manifest or a variable: values reach the script through `shlex.quote` only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.errors import ConfigError, StateError
from surefoot.harness.files import write_atomic
from surefoot.harness.suites.executors.base import RUNNING, Job, JobState, tail

_DEAF = 5
"""Failing questions in a row after which the queue counts as unreachable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmSettings:
    """What a cluster needs to know beyond the recipe."""

    account: str
    partition: str
    container: str | None = None
    mounts: str = ""
    """`SOURCE:TARGET,...` on top of the snapshot and the trial's folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    gres: bool = True
    """Whether GPUs are asked for by `--gres`; some clusters refuse it."""
    job_suffix: str = ""


class SlurmExecutor:
    """Submits scripts by `sbatch`, asks `squeue`, stops by `scancel`."""

    name = "slurm"
    python = "python"

    def __init__(self, settings: SlurmSettings, interval: float = 60.0) -> None:
        self.settings, self.interval = settings, interval
        self._jobs: dict[str, Job] = {}
        self._deaf = 0

    def prepare(self, job: Job) -> Path:
        """Write the job's script beside its exit file."""
        script = script_path(job)
        write_atomic(script, job_script(job, self.settings))
        return script

    def submit(self, job: Job) -> str:
        """Write the script and hand it in; the cluster's job id."""
        script = self.prepare(job)
        done = _call(sbatch_argv(job, self.settings, script))
        job_id = done.stdout.strip().split(";")[0]
        if done.returncode or not re.fullmatch(r"[0-9]+", job_id):
            said = (done.stderr or done.stdout).strip()
            raise StateError(
                f"sbatch refused {job.name}: {said}", f"exit {done.returncode}", "correct it, then launch again"
            )
        self._jobs[job_id] = job
        return job_id

    def poll(self, job_id: str) -> JobState:
        """The exit file first; then the queue; then the file again, since it may have come in between."""
        job = self._jobs[job_id]
        state = _from_file(job.exit_file)
        if state.done:
            return state
        if self._in_queue(job_id):
            return RUNNING
        state = _from_file(job.exit_file)
        if state.done:
            return state
        return JobState(True, None, "it left the queue without an exit status: killed, out of time or lost")

    def cancel(self, job_id: str) -> None:
        """Take the job out of the queue or stop it."""
        if not _from_file(self._jobs[job_id].exit_file).done:
            _call(["scancel", job_id])

    def fetch(self, job_id: str) -> str:
        """The end of the log."""
        return tail(self._jobs[job_id].log)

    def _in_queue(self, job_id: str) -> bool:
        done = _call(["squeue", "--noheader", "--jobs", job_id, "--format", "%T"])
        forgotten = "invalid job id" in done.stderr.lower()  # it ended so long ago that the queue does not know it
        if done.returncode == 0 or forgotten:
            self._deaf = 0
            return not forgotten and bool(done.stdout.strip())
        self._deaf += 1
        if self._deaf >= _DEAF:
            raise StateError(
                f"squeue failed {_DEAF} times: {done.stderr.strip()}", "nobody can tell how the jobs are doing",
                "the jobs go on; look at the cluster, then judge by `surefoot suite run` with the same --out",
            )  # fmt: skip
        return True


def script_path(job: Job) -> Path:
    """Where a job's script lies."""
    return job.exit_file.with_name(job.exit_file.name.replace("exit_", "job_") + ".sh")


def sbatch_argv(job: Job, settings: SlurmSettings, script: Path) -> list[str]:
    """The whole `sbatch` command of a job."""
    words = ["sbatch", "--parsable", f"--account={settings.account}", f"--partition={settings.partition}"]
    words += [f"--job-name={job.name}{settings.job_suffix}", f"--nodes={job.nodes}", f"--time={_time(job.minutes)}"]
    words += [f"--output={_no_percent(job.log)}", "--open-mode=append", f"--chdir={job.cwd}"]
    if job.gpus_per_node and settings.gres:
        words.append(f"--gres=gpu:{job.gpus_per_node}")
    if job.segment_size is not None:
        words.append(f"--segment={job.segment_size}")
    if job.after is not None:
        words.append(f"--dependency=afterany:{job.after}")
    return [*words, str(script)]


def job_script(job: Job, settings: SlurmSettings) -> str:
    """The script of one job: variables, the former run's status, the trainer, its exit status into a file."""
    command = ["srun", *_container_words(job, settings), *job.argv]
    lines = ["#!/bin/bash", f"# {job.name}", "set -u"]
    if job.after_exit_file is not None:
        lines += [
            f'if [ "$(cat {shlex.quote(str(job.after_exit_file))} 2>/dev/null)" != 0 ]; then',
            "  echo 'the run before this one did not end well' >&2",
            "  exit 1",
            "fi",
        ]
    lines += [f"export {name}={shlex.quote(text)}" for name, text in {**settings.env, **job.env}.items()]
    target = shlex.quote(str(job.exit_file))
    lines += [
        f"cd {shlex.quote(str(job.cwd))} || exit 1",
        shlex.join(command),
        "code=$?",
        f'echo "$code" > {target}.part && mv {target}.part {target}',
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _container_words(job: Job, settings: SlurmSettings) -> list[str]:
    image = job.container or settings.container
    if image is None:
        return []
    mounts = ",".join(
        [f"{path}:{path}" for path in (job.cwd, job.folder)] + ([settings.mounts] if settings.mounts else [])
    )
    return [f"--container-image={image}", f"--container-mounts={mounts}", f"--container-workdir={job.cwd}"]


def _time(minutes: float) -> str:
    """Slurm's minutes:seconds, rounded up."""
    seconds = -(-int(minutes * 60_000) // 1000)
    return f"{seconds // 60}:{seconds % 60:02d}"


def _no_percent(path: Path) -> str:
    """sbatch replaces %-patterns in file names; two are one."""
    return str(path).replace("%", "%%")


def _from_file(path: Path) -> JobState:
    try:
        text = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return RUNNING
    if not re.fullmatch(r"-?[0-9]{1,3}", text):
        raise StateError(f"{path} holds {text[:40]!r}", "it should hold an exit status", "remove it and run again")
    return JobState(True, int(text))


def _call(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"{argv[0]} cannot be started: {error.strerror}",
            "the slurm executor needs it",
            "run where Slurm is installed",
        ) from error
