"""Messages between our own processes, whole and with a size cap: behind their length on a socket, or a line on a pipe.

Owns       the 8-byte header, the end of the line, and the cap.
Promises   a message arrives whole or not at all; a size above the cap is refused before it is stored.
Never      interprets what is inside.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time

HEADER = struct.Struct("!Q")
REQUEST_CAP = 256 * 2**20
"""Bytes of one reward call: a group's texts and columns."""
ANSWER_CAP = 16 * 2**20
"""Bytes of one answer: numbers, reasons and a shortened traceback."""


class FrameError(Exception):
    """The other side announced more than the cap, or left in the middle of a frame."""


def pack(payload: bytes) -> bytes:
    """The payload behind its header."""
    return HEADER.pack(len(payload)) + payload


def read_frame(sock: socket.socket, cap: int) -> bytes | None:
    """Block for one payload; None when the other side has closed between frames."""
    header = _read_exactly(sock, HEADER.size, may_end=True)
    if header is None:
        return None
    size = _checked_size(header, cap)
    return _read_exactly(sock, size, may_end=False)


def take_frame(inbox: bytearray, cap: int) -> bytes | None:
    """Cut one payload off the front of what has arrived so far; None when it is not complete yet."""
    if len(inbox) < HEADER.size:
        return None
    end = HEADER.size + _checked_size(bytes(inbox[: HEADER.size]), cap)
    if len(inbox) < end:
        return None
    payload = bytes(inbox[HEADER.size : end])
    del inbox[:end]
    return payload


def _checked_size(header: bytes, cap: int) -> int:
    size = int(HEADER.unpack(header)[0])
    if size > cap:
        raise FrameError(f"a frame of {size} bytes was announced; the cap is {cap}")
    return size


def _read_exactly(sock: socket.socket, size: int, *, may_end: bool) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(min(size - len(data), 2**20))
        if not piece:
            if may_end and not data:
                return None
            raise FrameError(f"the other side closed after {len(data)} of {size} bytes")
        data += piece
    return bytes(data)


class PipeEndedError(OSError):
    """The other side closed its end."""


class PipeFloodedError(ValueError):
    """The other side sent more than it may."""


class LinePipe:
    """Lines over two pipes to a process: one question at a time, a line there, a line back.

    Writing and reading end at the deadline, whatever the other side does; a line longer than the cap is refused before
    it is kept; bytes that nobody asked for are an error, not the next answer. What it says is the caller's business.
    """

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
