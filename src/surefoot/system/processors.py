"""How many processors a process may really use: what torch asks for is the machine, whatever share of it is ours."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
MOST = 8
"""More threads than this do not help the shapes of a rollout, and wait for each other where others compute too."""


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Physical cores, no more than this process is scheduled on, than its container may use, or `MOST`."""
    physical = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical
    return max(1, min(physical, allowed, _quota(cgroup), MOST))


def _quota(cgroup: Path) -> int:
    """Processors that a container may use, rounded down to whole ones; `MOST` where nothing says."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text(encoding="ascii") for name in names).split()[:2]
            if quota != "max" and int(quota) > 0:
                return max(1, int(quota) // int(period))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return MOST
