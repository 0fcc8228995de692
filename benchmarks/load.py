"""How much of the machine somebody else used while we measured.

Foreign load is what `/proc/stat` says the CPUs did, less what this process and everything below it did, as a share of
all CPU time in the window. One stray process can move a result 2.5 times, so a figure without this one beside it is
worth nothing. Time that the hypervisor took away (steal) and interrupts count as foreign.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LIMIT = 0.02
"""A window in which others used a larger share than this is dirty."""

GRAIN = 3
"""Clock ticks that may be miscounted at the edges of a window; short windows need the allowance."""


@dataclass(frozen=True)
class Load:
    """What others did in one window."""

    share: float
    """Foreign CPU time over all CPU time there was, 0 to 1."""
    seconds: float
    """Length of the window."""
    dirty: bool


@dataclass(frozen=True)
class Mark:
    """The counters at one moment, in clock ticks."""

    clock: float
    busy: int
    own: int


class LoadProbe:
    """Reads the counters. `root` is the top of the process tree that counts as ours."""

    def __init__(self, proc: Path = PROC, root: int | None = None) -> None:
        self.proc, self.root = proc, os.getpid() if root is None else root
        self.ticks_per_second = os.sysconf("SC_CLK_TCK")

    def mark(self) -> Mark:
        """The counters now."""
        return Mark(time.perf_counter(), busy_ticks(self.proc), tree_ticks(self.proc, self.root))

    def since(self, mark: Mark) -> Load:
        """What happened from `mark` to now."""
        now = self.mark()
        return judge(mark, now, cpus=cpu_count(self.proc), ticks_per_second=self.ticks_per_second)


def judge(start: Mark, end: Mark, *, cpus: int, ticks_per_second: int) -> Load:
    """The load between two marks."""
    seconds = end.clock - start.clock
    available = max(seconds * cpus * ticks_per_second, 1.0)
    # Never below 0: the two files are not read at the same instant.
    foreign = max(0, (end.busy - start.busy) - (end.own - start.own))
    return Load(foreign / available, seconds, foreign > max(LIMIT * available, GRAIN))


def busy_ticks(proc: Path = PROC) -> int:
    """Ticks in which any CPU did something: user, nice, system, irq, softirq, steal."""
    fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    return user + nice + system + irq + softirq + steal


def cpu_count(proc: Path = PROC) -> int:
    """CPUs that the file counts."""
    lines = (proc / "stat").read_text().splitlines()
    return sum(line.startswith("cpu") and line[3].isdigit() for line in lines)


def tree_ticks(proc: Path, root: int) -> int:
    """Ticks used by a process, its living descendants, and the dead children they waited for."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended between the listing and the reading; its parent's figures have it
            fields = text[text.rindex(")") + 2 :].split()  # the name before may hold spaces and brackets
            parents[int(entry.name)] = int(fields[1])
            used[int(entry.name)] = sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return sum(ticks for pid, ticks in used.items() if _descends(pid, root, parents))


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    while pid > 0:
        if pid == root:
            return True
        pid = parents.get(pid, 0)
    return False
