"""Stop when asked, and never in the middle of putting things back.

Owns       the handlers of SIGINT, SIGTERM and SIGHUP, and the one child process that may be running.
Promises   a signal only sets a flag and ends the child; nothing is thrown into code that is cleaning up, so a second
           or a tenth signal cannot break the way home. A child that ignores the first signal is killed by the second.
Never      lets a terminal's Ctrl-C reach the child or git directly: each runs in a session of its own.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from surefoot.errors import StoppedError

NOT_EXECUTABLE, NOT_FOUND = 126, 127
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Listens while it is entered; `check()` is where a request takes effect."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup a hang-up stays ignored
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `StoppedError` when a stop was asked for."""
        if self.asked is not None:
            raise StoppedError(
                f"stopped by {signal.Signals(self.asked).name}",
                "it was asked for",
                "resume with the line printed below",
            )

    def call(self, argv: Sequence[str], folder: Path, env: Mapping[str, str], output: Path) -> int:
        """Exit code of one command, its words added to `output`; 126 and 127 as a shell says, negative for a signal."""
        self.check()
        with output.open("ab") as sink:
            try:
                child = _start(argv, folder, env, sink)
            except OSError as error:
                sink.write(f"{argv[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            self._child = child
            try:
                if self.asked is not None:  # it came between the start of the child and the line above
                    self._end(signal.SIGTERM)
                return child.wait()
            finally:
                self._child = None
                _end_group(
                    child.pid, signal.SIGTERM
                )  # what it left in the background would follow us to the next commit

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.asked is not None
        self.asked = self.asked if self.asked is not None else number
        self._end(signal.SIGKILL if again else signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._child is not None:
            _end_group(self._child.pid, number)


def _start(argv: Sequence[str], folder: Path, env: Mapping[str, str], sink: Any) -> subprocess.Popen[bytes]:
    words = list(argv)
    try:
        return _popen(words, folder, env, sink)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return _popen(["/bin/sh", *words], folder, env, sink)  # a script without #!: what a shell would do


def _popen(words: list[str], folder: Path, env: Mapping[str, str], sink: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        cwd=folder,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _end_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return  # gone already
