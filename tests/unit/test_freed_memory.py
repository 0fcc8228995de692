"""Freed memory is kept where the C library can be told so."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import resource, torch
from surefoot.system.memory import keep_freed_memory
{keep}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**21) for _ in range(16)]  # 8 MiB each, all alive, then all freed
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_second_round_of_the_same_allocations_takes_fewer_fresh_pages() -> None:
    counts = {}
    for keep in ("", "assert keep_freed_memory()"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE.format(keep=keep)], capture_output=True, text=True, check=True
        )
        counts[keep] = int(done.stdout)
    assert counts["assert keep_freed_memory()"] < 0.75 * counts[""], f"{counts}: without it every round pays again"
