"""Counting memory: what a process took since a moment, and who shares what."""

from __future__ import annotations

import mmap
import os
import resource
from pathlib import Path

import pytest

from surefoot.system.memory import MIB, OwnMemory, excess_mb, resident_bytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the cap needs Linux's /proc")


def test_the_limit_holds_inside_the_block_only_and_leaves_the_old_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with OwnMemory(1):
        with pytest.raises(MemoryError):
            bytearray(2**41)
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_limit_is_lifted_when_the_block_fails() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(KeyboardInterrupt), OwnMemory(1):
        raise KeyboardInterrupt
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_no_cap_is_no_limit() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with OwnMemory(0):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_a_process_that_kept_half_its_cap_is_heavy() -> None:
    memory = OwnMemory(64)
    assert not memory.is_heavy()
    kept = mmap.mmap(-1, 48 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert memory.is_heavy(), "reserved memory counts against the limit, so it counts here"
    kept.close()
    assert not memory.is_heavy()


def test_nobody_exceeds_what_he_started_with() -> None:
    own = resident_bytes(os.getpid())
    assert own > MIB
    assert excess_mb([os.getpid()], 0, own + 8 * MIB) is None
    assert excess_mb([os.getpid()], 0, 0) == pytest.approx(own // MIB, abs=4)
    assert excess_mb([], 0, 0) is None


def test_a_process_that_has_ended_holds_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert resident_bytes(pid) == 0
