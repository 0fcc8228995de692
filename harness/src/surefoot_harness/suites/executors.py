"""The executor interface: a job goes in, a state comes out."""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import write_atomic
from surefoot_harness.own_command import own_name
from surefoot_harness.system.process import Child
from surefoot_harness.system.signals import Deadline

KEPT_BYTES = 64 * 1024
"""Of a log's end, what `fetch` returns at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run of a trainer. Every word of `argv` and every value of `env` arrives exactly as it is here."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the caller's; no job sees those of another."""
    cwd: Path
    """The code snapshot."""
    folder: Path
    """The trial's folder, which must be writable where the job runs."""
    log: Path
    exit_file: Path
    """Gets the exit status as a number, whole or not at all."""
    minutes: float
    nodes: int = 1
    gpus_per_node: int = 0
    segment_size: int | None = None
    container: str | None = None
    after: str | None = None
    """A job that must have ended well before this one may start."""
    after_exit_file: Path | None = None


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job is doing. `exit_code` None with `done` means that nobody can tell how it ended."""

    done: bool
    exit_code: int | None = None
    why: str = ""
    out_of_time: bool = False
    infrastructure: bool = False
    """Not the trainer failed but what should have run it."""


RUNNING = JobState(False)


class Executor(Protocol):
    """Runs jobs somewhere."""

    name: str
    python: str
    """What `{python}` means there."""
    interval: float
    """Seconds between two polls."""

    def submit(self, job: Job) -> str:
        """Start a job; the id under which it is known from now on."""
        ...

    def poll(self, job_id: str) -> JobState:
        """Look without waiting."""
        ...

    def cancel(self, job_id: str) -> None:
        """Stop a job with everything it started; a job that has ended is left alone."""
        ...

    def fetch(self, job_id: str) -> str:
        """The end of what the job said so far."""
        ...


def tail(path: Path, size: int = KEPT_BYTES) -> str:
    """The last `size` bytes of a text file; empty when there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def exit_words(code: int) -> str:
    """An exit status for people: `exit 3`, or the signal's name."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    try:
        return f"{signal.Signals(number).name} (exit {code})" if number else f"exit {code}"
    except ValueError:
        return f"exit {code}"


# -- Jobs as processes of this machine, each in a session of its own ------------------------------
# Promises   a job leaves no process of its session behind, whether it ends, runs out of time or is cancelled;
# standard input is empty, so nothing can wait for a person.


GRACE_S = 20.0
"""Between the polite signal and the last one; a trainer may save within this time."""


@dataclass(slots=True)
class _JobProcess:
    job: Job
    process: Child
    deadline: Deadline
    state: JobState = RUNNING


class LocalExecutor:
    """Starts processes; `argv` is taken as it is."""

    name = "local"
    python = sys.executable
    interval = 0.05

    def __init__(self) -> None:
        self._children: dict[str, _JobProcess] = {}

    def submit(self, job: Job) -> str:
        """Start the job's command in its snapshot."""
        return self.start(job, job.argv, {**os.environ, **job.env}, job.cwd)

    def start(self, job: Job, argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> str:
        """Start any command on behalf of a job."""
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            try:
                process = Child.start(
                    argv, cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
                )
            except OSError as error:
                raise ConfigError(
                    f"{argv[0]!r} cannot be started: {error.strerror}",
                    f"{job.name} runs this command",
                    "correct command in the manifest, or install it",
                ) from error
        name = str(process.pid)
        self._children[name] = _JobProcess(job, process, Deadline(60 * job.minutes))
        return name

    def poll(self, job_id: str) -> JobState:
        """Look without waiting; time that has run out ends the job here."""
        child = self._children[job_id]
        if child.state.done:
            return child.state
        if not child.process.alive:
            self._finish(child)
        elif child.deadline.expired:
            self._finish(child, GRACE_S, out_of_time=True)
        return child.state

    def cancel(self, job_id: str) -> None:
        """Ask the whole group to stop, then make it."""
        child = self._children[job_id]
        if not child.state.done:
            self._finish(child, GRACE_S)

    def fetch(self, job_id: str) -> str:
        """The end of the log."""
        return tail(self._children[job_id].job.log)

    def _finish(self, child: _JobProcess, grace_s: float = 0.0, *, out_of_time: bool = False) -> None:
        """End it and everything it started; its state is written even if a signal interrupts the grace."""
        try:
            child.process.end(grace_s)
        finally:
            code = child.process.code
            write_atomic(child.job.exit_file, f"{code}\n")
            child.state = JobState(True, code, out_of_time=out_of_time)


# -- Jobs in containers: the same folders at the same places, the same words, the same exit status
# Promises   never interactive; no value of a variable is on the command line, only its name; files belong to the
# caller.


PASSED_ON = ("HF_TOKEN", "HF_HOME", "HF_DATASETS_CACHE", "WANDB_API_KEY")
"""Variables of the caller that a container gets, when they are set."""
_OWN_FAILURE = 125
"""What `docker run` returns when docker itself failed."""


class DockerExecutor:
    """Runs each job by `docker run` as a child process of ours."""

    name = "docker"
    python = "python"
    interval = 0.1

    def __init__(self, container: str | None = None) -> None:
        self._container = container
        self._local = LocalExecutor()
        self._names: dict[str, str] = {}

    def submit(self, job: Job) -> str:
        """Start the container; it is removed when it ends."""
        image = job.container or self._container
        if not image:
            raise ConfigError(
                f"{job.name} has no container", "docker needs an image", "set CONTAINER, or container in the manifest"
            )
        slug = re.sub(r"[^A-Za-z0-9_.-]", "-", job.name)
        name = f"surefoot-{slug}-{secrets.token_hex(4)}"
        argv = docker_argv(job, image, name)
        job_id = self._local.start(job, argv, {**os.environ, **job.env}, job.cwd)
        self._names[job_id] = name
        return job_id

    def poll(self, job_id: str) -> JobState:
        """Look without waiting; 125 is docker's own failure, not the trainer's."""
        state = self._local.poll(job_id)
        if state.out_of_time:
            self._kill(job_id)
        if state.done and state.exit_code == _OWN_FAILURE:
            return JobState(True, _OWN_FAILURE, "docker itself failed", infrastructure=True)
        return state

    def cancel(self, job_id: str) -> None:
        """Stop the container, then its client."""
        if not self._local.poll(job_id).done:
            self._kill(job_id)
        self._local.cancel(job_id)

    def fetch(self, job_id: str) -> str:
        """The end of the log."""
        return self._local.fetch(job_id)

    def _kill(self, job_id: str) -> None:
        """The client's end does not end the container; a container that is gone already is what we want."""
        subprocess.run(
            ["docker", "kill", self._names[job_id]],  # noqa: S607 - docker is found where the user's shell finds it
            stdin=subprocess.DEVNULL, capture_output=True, check=False,
        )  # fmt: skip


def docker_argv(job: Job, image: str, name: str) -> list[str]:
    """The whole `docker run` command of a job, image and command last."""
    if image.startswith("-"):
        raise ConfigError(f"container {image!r} looks like an option", "docker would take it for one", "name an image")
    variables = [*job.env, *(name for name in PASSED_ON if name in os.environ and name not in job.env)]
    words = ["docker", "run", "--rm", "--init", "--name", name, "--user", f"{os.getuid()}:{os.getgid()}"]
    words += ["--mount", mount(job.cwd), "--mount", mount(job.folder), "--workdir", str(job.cwd)]
    for variable in ("HF_HOME", "HF_DATASETS_CACHE"):
        cache = job.env.get(variable) or os.environ.get(variable)
        if cache and Path(cache).is_dir():
            words += ["--mount", mount(Path(cache).absolute())]
    for variable in variables:
        words += ["--env", variable]  # the value stays in the environment: other users can read argv
    if job.gpus_per_node:
        words += ["--gpus", str(job.gpus_per_node)]
    return [*words, image, *job.argv]


def mount(path: Path) -> str:
    """A bind mount at the same place; docker reads the option as one CSV line, so commas and quotes are quoted."""
    if not path.is_absolute() or "\n" in str(path):
        raise StateError(f"{path} cannot be mounted", "docker needs a plain absolute path", "choose another --out")
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={path}", f"target={path}"])
    return line.getvalue()


# -- Jobs for Slurm: one script per job, every value quoted, submitted as argv lists --------------
# Promises   the trainer's exit status comes from a file that the job itself writes; a job that leaves the queue without
# one has failed, whatever its log says.
# Never      evaluates text of a manifest or a variable: values reach the script through `shlex.quote` only.


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
                f"the jobs go on; look at the cluster, then judge by `{own_name()} suite run` with the same --out",
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
