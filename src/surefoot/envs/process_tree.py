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
    descendants = _descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # leads no group yet, or only zombies are left
        os.killpg(pid, signal.SIGKILL)
    for each in (pid, *descendants):
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
        for pid in _children_by_parent().get(os.getpid(), []):
            kill_tree(pid)
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if ended == 0:
            time.sleep(0.005)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
        os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children = _children_by_parent()
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found += frontier
    return found


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
