"""The executor interface: a job goes in, a state comes out."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

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
