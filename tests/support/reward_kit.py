"""What the tests of misbehaving rewards share: pools, jobs, and a look at what was left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.rewards.pool import RewardJob, RewardPool

GOOD = 0.75
HANG_S, AMPLE_S = 0.5, 30.0
"""Deadlines for calls that never answer, and for calls that do, on however busy a machine."""


# -- what is left behind ------------------------------------------------------------
def children_of(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int], patience_s: float = 20.0) -> set[int]:
    deadline = time.monotonic() + patience_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {pid for pid in pids if is_running(pid)}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test here, whatever its reward did: no process and no descriptor more than before."""
    descriptors, children = len(os.listdir("/proc/self/fd")), children_of(os.getpid())
    yield
    assert children_of(os.getpid()) - children == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def pool_of(function: Callable[..., Any], **settings: Any) -> RewardPool:
    return RewardPool({"f": function}, **{"workers": 2, "timeout_s": AMPLE_S, **settings})


def job(*completions: str) -> RewardJob:
    return RewardJob(["p"] * len(completions), list(completions))


def guilty(crime: Callable[[], Any]) -> Callable[..., list[Any]]:
    """A reward that commits `crime` when it meets the completion "bad", and is healthy otherwise."""

    def f(completions: list[str], **_: Any) -> list[Any]:
        return [crime() if c == "bad" else GOOD for c in completions]

    return f
