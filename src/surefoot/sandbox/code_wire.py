"""Messages on the pipe between a task's tests and the code that they test, each in a sandbox of its own.

    tests (know what is right) --name, arguments, nonce--> code (knows nothing)
    tests (compare)            <------- plain data ------- code

Owns       how one message travels.
Promises   whole messages of limited size, or an error that no test catches by accident.
Never      imports anything of ours but `code_codec.py`: this file is copied into the sandboxes and runs there.
"""

from __future__ import annotations

import json
import socket
import struct

from surefoot.sandbox.code_codec import NotPlainError

TYPE_CHECKING = False
if TYPE_CHECKING:  # two interpreters load this file for every verdict: `typing` would cost them more than all the rest
    from typing import Any

LINK = 3
CAP = 4 * 2**20


class CodeGoneError(BaseException):
    """The code under test ended, or broke the rules of the pipe. No test can catch it by accident."""


class CodeRaisedError(Exception):
    """The code raised something that is no built-in exception, or that would end a loop of the tests."""


class NotLentError(NotPlainError):
    """A test handed something to the code that would give it power over the test."""


class NoLengthError(NotPlainError, TypeError):
    """The length of what is not plain was asked; `list` asks too, and takes a TypeError for no answer."""


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """One message, whole."""
    data = json.dumps(message).encode()
    if len(data) > CAP:
        raise NotPlainError(f"{len(data)} bytes are more than the {CAP} that one message may have")
    link.sendall(struct.pack("!I", len(data)) + data)


def receive(link: socket.socket) -> dict[str, Any]:
    """One message; CodeGoneError when the other side has ended or sends nonsense."""
    try:
        (size,) = struct.unpack("!I", _exactly(link, 4))
        if size > CAP:
            raise CodeGoneError(f"a message of {size} bytes was announced")
        message = json.loads(_exactly(link, size))
    except (OSError, ValueError, RecursionError) as error:
        raise CodeGoneError(f"the pipe broke: {error}") from error
    if not isinstance(message, dict):
        raise CodeGoneError("a message is an object")
    return message


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 2**16))
        if not piece:
            raise CodeGoneError("the code under test ended")
        data += piece
    return bytes(data)
