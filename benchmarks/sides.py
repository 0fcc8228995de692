"""Two sides, each in a process of its own, that work in turns.

The parent says "step"; the child does one unit of work, reports, and waits. While it waits it uses no CPU, so the sides
can alternate step by step without sharing an interpreter, threads, flags or an allocator.

    parent: Side(argv)  --step-->  child: Gate.turn()   ... one unit of work ...   Gate.turn(facts)  --facts--> parent
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SideFailedError(Exception):
    """A side ended before it answered."""


class Side:
    """A child process, seen from the parent. `ready_s` is the time from start to its first turn."""

    def __init__(self, name: str, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, log
        started = time.perf_counter()
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True,
                env={**os.environ, **(env or {})},
            )  # fmt: skip
        self.setting = self._answer()
        self.ready_s = time.perf_counter() - started

    def step(self) -> dict[str, Any]:
        """One unit of work; what the child says about it, `seconds` among it."""
        assert self._process.stdin is not None, "the child was started with a pipe"
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed() from None
        return self._answer()

    def close(self) -> None:
        """Let the child end by itself; a second call does nothing."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it is gone already, and has said why
                self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "the child was started with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failed(self) -> SideFailedError:
        self._process.wait()
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        return SideFailedError(f"{self.name} ended with status {self._process.returncode}; its last words:\n{tail}")


class Gate:
    """The child's end. Libraries may print what they like: it goes to the log."""

    def __init__(self) -> None:
        self._channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._started = 0.0

    def ready(self, setting: Mapping[str, Any]) -> None:
        """Say how this side is configured."""
        self._say(setting)

    def turn(self, facts: Mapping[str, Any] | None = None) -> bool:
        """Report the step that just ended, if one did, and wait for the next; False when there is none."""
        if facts is not None:
            self._say({"seconds": time.perf_counter() - self._started, **facts})
        told = sys.stdin.readline()
        self._started = time.perf_counter()
        return told.strip() == "step"

    def _say(self, values: Mapping[str, Any]) -> None:
        self._channel.write(json.dumps(values, default=str) + "\n")
        self._channel.flush()
