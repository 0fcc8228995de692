"""Lines over two pipes to a process, with a deadline and a cap.

Promises   writing and reading end at the deadline, whatever the other side does; a line longer than the cap is refused
           before it is kept; bytes that nobody asked for are an error, not the next answer.
Never      interprets a line.
"""

from __future__ import annotations

import os
import select
import time


class PipeEndedError(Exception):
    """The other side closed its end."""


class PipeFloodedError(Exception):
    """The other side sent more than it may."""


class LinePipe:
    """One question at a time: a line there, a line back."""

    def __init__(self, reading: int, writing: int, cap: int) -> None:
        self._reading, self._writing, self._cap = reading, writing, cap
        self._inbox = bytearray()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)

    def exchange(self, line: bytes, seconds: float) -> bytes:
        """Send `line` and wait for one; a TimeoutError when it takes longer."""
        until = time.monotonic() + seconds
        if self._inbox:
            raise PipeFloodedError(f"{len(self._inbox)} bytes came unasked")
        left = memoryview(line)
        while left:
            self._wait(until, writing=True)
            left = left[self._write(left) :]
        while (end := self._inbox.find(b"\n")) < 0:
            if len(self._inbox) > self._cap:
                raise PipeFloodedError(f"a line of more than {self._cap} bytes")
            self._wait(until, writing=False)
            self._read()
        answer = bytes(self._inbox[:end])
        del self._inbox[: end + 1]
        return answer

    def _wait(self, until: float, *, writing: bool) -> None:
        left = until - time.monotonic()
        watch = select.poll()
        watch.register(self._writing if writing else self._reading, select.POLLOUT if writing else select.POLLIN)
        if left <= 0 or not watch.poll(1000 * left):
            raise TimeoutError

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._writing, data[: 1 << 16])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise PipeEndedError(f"it does not listen any more ({error.strerror})") from error

    def _read(self) -> None:
        try:
            block = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            raise PipeEndedError("it ended without an answer")
        self._inbox += block
