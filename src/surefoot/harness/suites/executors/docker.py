"""Jobs in containers: the same folders at the same places, the same words, the same exit status.

Promises   never interactive; no value of a variable is on the command line, only its name; files belong to the caller.
"""

from __future__ import annotations

import csv
import io
import os
import re
import secrets
import subprocess
from pathlib import Path

from surefoot.errors import ConfigError, StateError
from surefoot.harness.suites.executors.base import Job, JobState
from surefoot.harness.suites.executors.local import LocalExecutor

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
