"""Length-framed messages between our own processes, with a size cap.

Owns       the 8-byte header and the cap.
Promises   a frame arrives whole or not at all; an announced size above the cap is refused
           before a byte of it is stored.
Never      interprets what is inside.
"""

from __future__ import annotations

import socket
import struct

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
