"""What foreign code printed, on its way into a log file: whole lines, without secrets, without control characters.

Promises   a secret that arrives in two pieces is still seen, because only whole lines are let through; a line that
           never ends is let through in parts, so that it takes no more memory than `_LONGEST`.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from surefoot.system.text import printable

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


# -- Attempts of contained tool servers to reach the network, in a run's logs: who counts writes, the report reads


FILE = "egress.jsonl"
_LARGEST = 1 << 20
_LONGEST_HOST = 120


class EgressLog:
    """What one toolkit has counted. Without a folder nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._who = folder, f"{os.getpid()}-{time.time_ns()}"
        self._told: dict[str, int] = {}

    def note(
        self, server: str, attempts: int, *, last: bool = False, hosts: Mapping[str, int] | None = None
    ) -> None:  # fmt: skip
        """So many attempts of this server until now; an OSError when that cannot be written.

        Args:
            last: there will be no further note, so that the exact count is due.
            hosts: how many of them asked for which host, where that is known; safe to print.
        """
        told = self._told.get(server, 0)
        if self._folder is None or attempts <= told or (attempts < 2 * told and not last):
            return
        self._told[server] = attempts
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        row = {"who": self._who, "server": server, "attempts": attempts} | ({"hosts": dict(hosts)} if hosts else {})
        line = json.dumps(row) + "\n"
        with open(os.open(self._folder / FILE, flags, 0o600), "a", encoding="utf-8") as file:
            file.write(line)


def attempts_of(folder: Path) -> dict[str, int]:
    """Server -> attempts, over all processes of the run; empty where nothing was counted."""
    counted: dict[tuple[str, str], int] = {}
    for who, server, attempts, _ in _rows(folder):
        counted[who, server] = max(attempts, counted.get((who, server), 0))
    totals: dict[str, int] = {}
    for (_, server), attempts in counted.items():
        totals[server] = totals.get(server, 0) + attempts
    return totals


def hosts_of(folder: Path) -> dict[str, tuple[str, ...]]:
    """Server -> hosts that it asked for and was refused, safe to print; empty where no hosts were granted."""
    found: dict[str, dict[str, None]] = {}
    for _, server, _, hosts in _rows(folder):
        found.setdefault(server, {}).update(dict.fromkeys(printable(host)[:_LONGEST_HOST] for host in hosts))
    return {server: tuple(hosts) for server, hosts in found.items() if hosts}


def _rows(folder: Path) -> Iterator[tuple[str, str, int, list[str]]]:
    """Who, server, attempts and hosts, of every line that has them."""
    for line in _text(folder / FILE).splitlines():
        try:
            row = json.loads(line)
            who, server, attempts = str(row["who"]), str(row["server"]), int(row["attempts"])
            hosts = row.get("hosts")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        yield who, server, attempts, list(hosts) if isinstance(hosts, dict) else []


def _text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return file.read(_LARGEST).decode("utf-8", errors="replace")
