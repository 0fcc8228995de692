"""Attempts of contained tool servers to reach the network, in a run's logs: who counts writes, the report reads.

Owns       `logs/egress.jsonl`: {"who": one process's toolkit, "server": its name, "attempts": so many until then}.
Promises   a server that tries without end writes few lines: only when its count has doubled, and at the end; reading is
           bounded, follows no link and believes no line that is not of this form.
"""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path

FILE = "egress.jsonl"
_LARGEST = 1 << 20


class EgressLog:
    """What one toolkit has counted. Without a folder nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._who = folder, f"{os.getpid()}-{time.time_ns()}"
        self._told: dict[str, int] = {}

    def note(self, server: str, attempts: int, *, last: bool = False) -> None:
        """So many attempts of this server until now; an OSError when that cannot be written.

        Args:
            last: there will be no further note, so that the exact count is due.
        """
        told = self._told.get(server, 0)
        if self._folder is None or attempts <= told or (attempts < 2 * told and not last):
            return
        self._told[server] = attempts
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        line = json.dumps({"who": self._who, "server": server, "attempts": attempts}) + "\n"
        with open(os.open(self._folder / FILE, flags, 0o600), "a", encoding="utf-8") as file:
            file.write(line)


def attempts_of(folder: Path) -> dict[str, int]:
    """Server -> attempts, over all processes of the run; empty where nothing was counted."""
    counted: dict[tuple[str, str], int] = {}
    for line in _text(folder / FILE).splitlines():
        try:
            row = json.loads(line)
            who, server, attempts = str(row["who"]), str(row["server"]), int(row["attempts"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        counted[who, server] = max(attempts, counted.get((who, server), 0))
    totals: dict[str, int] = {}
    for (_, server), attempts in counted.items():
        totals[server] = totals.get(server, 0) + attempts
    return totals


def _text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return file.read(_LARGEST).decode("utf-8", errors="replace")
