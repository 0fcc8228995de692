"""Finding and ending every descendant of a process.

Owns       process groups, death signals, and (Linux) adoption of orphans.
Promises   after `kill_tree` the process, its group and its descendants have been sent SIGKILL;
           after `end_all_children` this process has no child left, not even a zombie.
Never      decides when.

Outside Linux there is no adoption: a grandchild that left the process group is not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent goes; at once if it is already gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that none can slip away by double fork."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(pid: int) -> None:
    """SIGKILL to a child of ours that was not reaped yet, its process group and its descendants."""
    found = descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # leads no group yet, or only zombies are left
        os.killpg(pid, signal.SIGKILL)
    for each in (pid, *found):
        _kill(each)


def reap_orphans(except_for: set[int]) -> None:
    """Bury adopted children that have ended; leave the given ones for their owner to wait for."""
    if sys.platform != "linux":
        return
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in except_for:
            return
        os.waitpid(ended.si_pid, 0)


def end_all_children(patience_s: float = 5.0) -> None:
    """Kill and bury every child, and what they leave behind, until there is none."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        for pid in descendants(os.getpid()):  # one look for all: a reward may have left hundreds behind
            _kill(pid)
        if not _reap_ended():
            return
        time.sleep(0.005)


def _reap_ended() -> bool:
    """Reap every child that has ended; whether one is left."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if ended == 0:
            return True


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, by one look at the whole process table."""
    return _below(pid, _children_by_parent().get)


def family(pid: int) -> list[int]:
    """The process and its descendants; asks only them for their children, where the kernel answers that."""
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return [pid, *descendants(pid)]
    return [pid, *_below(pid, _children_of)]


def _below(pid: int, children_of: Callable[[int, list[int]], list[int]]) -> list[int]:
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children_of(parent, [])]
        found += frontier
    return found


def _children_of(pid: int, default: list[int]) -> list[int]:
    """Children as the kernel lists them, thread by thread; the default when the process has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        return found or default
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
        os.kill(pid, signal.SIGKILL)


def _children_by_parent() -> dict[int, list[int]]:
    """Parent pid -> child pids, from /proc; empty where there is no /proc."""
    table: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name field may hold spaces and brackets; everything after the last bracket is plain.
            fields = stat.read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended while we looked
        if len(fields) > 1:
            table.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    return table


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
