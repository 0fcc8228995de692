"""What foreign code printed, on its way into a log file: whole lines, without secrets, without control characters.

Promises   a secret that arrives in two pieces is still seen, because only whole lines are let through; a line that
           never ends is let through in parts, so that it takes no more memory than `_LONGEST`.
"""

from __future__ import annotations

from surefoot.safe_text import printable

_LONGEST = 2**16
_OVERLAP = 2**12
"""Of a line without end this much waits for the next piece; a secret at the cut may slip through in parts."""


class PrintedLines:
    """Bytes in, safe bytes out; one for each source, since two sources never share a line.

    Example:
        >>> lines = PrintedLines()
        >>> lines.feed(b"Bearer abc"), lines.feed(b"defgh12345\\nnext")
        (b'', b'Bearer ***\\n')
        >>> lines.rest()
        b'next'
    """

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> bytes:
        """What may be written now."""
        self._waiting += data
        end = self._waiting.rfind(b"\n") + 1
        if len(self._waiting) - end > _LONGEST:  # between two words if there are any: a secret has no blank in it
            end = self._waiting.rfind(b" ", end) + 1 or len(self._waiting) - _OVERLAP
        ready, self._waiting = self._waiting[:end], self._waiting[end:]
        return safe_bytes(ready)

    def rest(self) -> bytes:
        """The last line, which has no end."""
        ready, self._waiting = self._waiting, b""
        return safe_bytes(ready)


def safe_bytes(data: bytes) -> bytes:
    """`data` without secrets and control characters, as UTF-8; bytes that are no text are spelled out."""
    return printable(data.decode("utf-8", errors="backslashreplace")).encode() if data else b""


def safe_tail(data: bytes, most: int) -> str:
    """The last `most` bytes as safe text; a first line that was cut is left out, for it may begin inside a secret."""
    cut = len(data) > most
    kept = data[-most:] if cut else data
    if cut and b"\n" in kept:
        kept = kept[kept.index(b"\n") + 1 :]
    elif cut:
        kept = b""
    return safe_bytes(kept).decode()
