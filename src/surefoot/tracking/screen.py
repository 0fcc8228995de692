"""Where a run is shown, for as long as somebody looks.

Promises   a reader who goes away (a closed pipe, a closed terminal) or stops reading (a paused terminal, a full pipe)
           never stops a training run, and never raises.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import TextIO

_PIECE = 1000
"""Characters written at once: at most 4000 bytes, which a pipe that has room takes whole."""


class Screen:
    """A stream as far as anybody reads it; for everything that is shown, by whichever thread.

    A reader who is gone is not missed: the numbers are in metrics.jsonl. One who stops reading (a paused terminal, a
    full pipe) is waited for once; then lines are left out until there is room again, and their number is said.
    """

    def __init__(self, stream: TextIO | None, *, patience_s: float = 5.0) -> None:
        self._stream, self._patience_s = stream, patience_s
        self._blocked = False
        self._left_out = 0

    @property
    def encoding(self) -> str:
        """What characters can be shown."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether somebody sits before it."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Show it, if that is possible. Never raises for want of a reader."""
        shown = text.encode(self.encoding, errors="backslashreplace").decode(self.encoding)
        for begin in range(0, len(shown), _PIECE):
            self._put(shown[begin : begin + _PIECE])
        return len(text)

    def flush(self) -> None:
        """Nothing waits here: `write` has flushed."""

    def _put(self, piece: str) -> None:
        if self._stream is None:
            return
        try:
            if not self._has_room(self._stream):
                self._left_out += piece.count("\n")
                return
            if self._left_out:
                piece = f"[{self._left_out} lines were left out: nobody read them]\n{piece}"
                self._left_out = 0
            self._stream.write(piece)
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed terminal, a closed stream, a full disk behind it
            if self._stream in (sys.stdout, sys.__stdout__):
                silence_stdout()
            self._stream = None

    def _has_room(self, stream: TextIO) -> bool:
        """Whether one piece can be written without waiting for a reader."""
        poll = select.poll()
        try:
            poll.register(stream.fileno(), select.POLLOUT)
        except (OSError, AttributeError):  # not a file of the system: nobody to wait for
            return True
        self._blocked = not poll.poll(0 if self._blocked else self._patience_s * 1000)
        return not self._blocked


def silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.dup2(nowhere, 1)
    if nowhere != 1:
        os.close(nowhere)
