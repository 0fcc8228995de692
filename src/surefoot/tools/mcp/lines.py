"""What a server's bytes become: lines within limits, strict messages, or a fault with its reason.

Promises   of a line that is too long only the beginning is kept; one that does not end is a flood; the beginning of a
           huge answer is still read where that can be done honestly.

Read next: `stdio.py`, the process behind it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from surefoot.system.json import loads

CRASHED, TIMEOUT, FLOODED, PROTOCOL = "tool_crashed", "tool_timeout", "tool_flooded", "tool_protocol"
UNAVAILABLE, OVERLOADED = "tool_unavailable", "tool_overloaded"
"""Reasons under which a rollout has no verdict."""
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+(")?|[\[{\]}]', re.DOTALL)
"""A whole text, one that has no end (and so no first group), or a bracket."""
_HALF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?\Z")


class WireFault(Exception):  # noqa: N818 - a fault of the other side, not an error of ours
    """The server broke a rule; its connection is over."""

    def __init__(self, reason: str, text: str, tail: str | None = None, whole: str = "") -> None:
        super().__init__(text)
        self.reason, self.text = reason, text
        self.tail, self.whole = tail, whole or tail or ""
        """What its standard error says of the fault, None when nobody looked; and the last of it whatever it says."""


class Bucket:
    """So many per second, saved up for one second at most."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self._clock, self._left, self._at = per_s, clock, per_s, clock()

    def take(self, n: float) -> bool:
        """Whether there was enough."""
        now = self._clock()
        self._left = min(self.per_s, self._left + (now - self._at) * self.per_s)
        self._at = now
        self._left -= n
        return self._left >= 0


class LineCutter:
    """Bytes in, lines out; of a line that is too long the beginning and the full length.

    Example:
        >>> list(LineCutter(4, 100).feed(b"ab\\nabcdefg\\n"))
        [(b'ab', 2), (b'abcd', 7)]
    """

    def __init__(self, keep: int, most: int) -> None:
        self.keep, self.most = keep, most
        self._line, self._size = bytearray(), 0

    def feed(self, piece: bytes) -> Iterator[tuple[bytes, int]]:
        """Every line that ended with this piece."""
        *whole, rest = piece.split(b"\n")
        for part in whole:
            self._add(part)
            yield bytes(self._line), self._size
            self._line, self._size = bytearray(), 0
        self._add(rest)

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self.most:
            raise WireFault(FLOODED, f"a message went on beyond {self.most} bytes")
        self._line += part[: max(0, self.keep - len(self._line))]


def message_of(line: bytes, size: int) -> dict[str, Any]:
    """One line as a message; a `WireFault` for anything that is none.

    Args:
        size: bytes of the whole line, of which `line` may be only the beginning.
    """
    if size > len(line):
        return salvage(line, size)
    try:
        message = loads(line.decode("utf-8"), max_chars=size)
    except UnicodeDecodeError as error:
        raise WireFault(PROTOCOL, f"said something that is not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise WireFault(PROTOCOL, f"said something that cannot be read: {error}") from error
    if not isinstance(message, dict):
        raise WireFault(PROTOCOL, f"said a {type(message).__name__}, which is no message")
    return message


def salvage(head: bytes, size: int) -> dict[str, Any]:
    """The beginning of a message that was too long to keep, closed where it was cut; only if that was inside a text.

    Example:
        >>> salvage(b'{"id": 3, "result": {"text": "aaaa', 5000)
        {'id': 3, 'result': {'text': 'aaaa'}}
    """
    brackets, place = bytearray(), 0
    for match in _TOKEN.finditer(head):
        token = match.group()
        if token in (b"[", b"{"):
            brackets += b"]" if token == b"[" else b"}"
        elif token in (b"]", b"}"):
            del brackets[-1:]
        elif match[1] is None:
            place = match.start()
            break
    else:
        raise WireFault(FLOODED, f"sent a message of {size} bytes")
    text = head[place:].decode("utf-8", errors="ignore")
    text = _HALF_ESCAPE.sub(r"\1", text)
    closed = head[:place].decode("utf-8", errors="replace") + text + '"' + bytes(reversed(brackets)).decode()
    try:
        message = loads(closed, max_chars=len(closed))
    except (ValueError, RecursionError) as error:
        raise WireFault(FLOODED, f"sent a message of {size} bytes, which cannot be read in part") from error
    if not isinstance(message, dict) or "id" not in message:
        raise WireFault(FLOODED, f"sent a message of {size} bytes that does not say first what it answers")
    return message
