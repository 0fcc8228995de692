"""Memory that rewards take: more than the cap ends as a failure of the guilty sample, whoever holds it; less is no crime.

And what they leak, call after call: the worker is replaced in time, driver and nursery stay as they were.
"""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import pytest
from reward_kit import AMPLE_S, GOOD, children_of, guilty, is_running, job, nothing_is_left, pool_of, wait_until_gone  # noqa: F401 - the fixture works by being here

from surefoot.guards.reward_values import RewardValue
from surefoot.rewards import workers
from surefoot.system.memory import MIB, OwnMemory, excess_mb, keep_freed_memory, resident_bytes

pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the cap needs Linux's /proc")
CAP, HOARD = 128, 384
"""MiB that are allowed, and that a hog takes."""


# -- hogs: each holds its hoard until somebody ends it -----------------------------------------------
def in_the_function() -> None:
    kept = bytearray(b"x") * (HOARD * MIB)
    while kept:
        pass


def in_small_pieces() -> None:
    kept = [b"%d" % i * 1000 for i in range(HOARD * 200)]
    while kept:
        pass


def in_a_shared_mapping() -> None:
    kept = mmap.mmap(-1, HOARD * MIB)
    for page in range(0, len(kept), mmap.PAGESIZE):
        kept[page] = 1
    while kept:
        pass


def in_a_file_mapping() -> None:
    descriptor = os.memfd_create("hoard")
    os.ftruncate(descriptor, HOARD * MIB)
    kept = mmap.mmap(descriptor, HOARD * MIB)
    kept.write(b"x" * (HOARD * MIB))
    while kept:
        pass


def in_a_child() -> None:
    code = f"kept = bytearray(b'x') * ({HOARD} * 2**20)\nwhile kept: pass"
    subprocess.run([sys.executable, "-c", code], check=False, start_new_session=True)


def in_many_children() -> None:
    for _ in range(6):
        if os.fork() == 0:
            kept = bytearray(b"x") * (HOARD // 6 * MIB)
            while kept:
                pass
    time.sleep(600)


HOGS = [in_the_function, in_small_pieces, in_a_shared_mapping, in_a_file_mapping, in_a_child, in_many_children]


def outcome(hog: Callable[[], Any], *, deadline_s: float = AMPLE_S) -> tuple[list[RewardValue], str]:
    """A hog between two healthy siblings: the three marks, and the hog's story."""
    with pool_of(guilty(hog), memory_mb=CAP, timeout_s=deadline_s, workers=1) as pool:
        before = resident_bytes(os.getpid())
        marks = [mark["f"] for mark in pool.score([job("ok", "bad", "ok")])]
        assert resident_bytes(os.getpid()) - before < HOARD * MIB // 2, "the driver itself took nothing"
        assert pool.score([job("ok")])[0]["f"].value == GOOD
        return marks, "".join(story for _, story in pool.describe_failures().values())


@pytest.fixture
def _driver_that_trained() -> None:
    """As every run does: freed memory is kept, and there is more of it than any hog takes."""
    assert keep_freed_memory()
    blocks = [bytearray(b"x") * (16 * MIB) for _ in range(2 * HOARD // 16)]
    del blocks


@pytest.mark.usefixtures("_driver_that_trained")
def test_a_hog_is_seen_beside_what_its_driver_freed_and_kept() -> None:
    marks, _ = outcome(in_small_pieces)
    assert marks == [RewardValue(GOOD, None), RewardValue(None, "died"), RewardValue(GOOD, None)]


@pytest.mark.config_key("reward_memory_mb")
@pytest.mark.parametrize("hog", HOGS, ids=lambda hog: hog.__name__)
def test_a_hog_fails_alone_and_is_told_the_figures(hog: Callable[[], Any]) -> None:
    marks, story = outcome(hog)
    assert marks == [RewardValue(GOOD, None), RewardValue(None, "died"), RewardValue(GOOD, None)]
    assert f"MiB, reward_memory_mb allows {CAP}" in story
    assert hog.__name__ in story, "the story says where"


def test_a_large_driver_hides_no_hog(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pool was forked from is not the child's: a program that a reward starts has nothing of ours."""
    ballast = bytearray(b"x") * (2 * HOARD * MIB)
    marks, _ = outcome(in_a_child)
    assert marks[1] == RewardValue(None, "died")
    monkeypatch.setattr("surefoot.system.memory._inherited", lambda members, started_with: started_with)
    marks, _ = outcome(in_a_child, deadline_s=3.0)
    assert marks[1] == RewardValue(None, "timeout"), "planted: the whole of us is taken off, and the hog is not seen"
    assert len(ballast) == 2 * HOARD * MIB


def test_one_absurd_allocation_is_a_memory_error_with_its_line() -> None:
    marks, story = outcome(lambda: bytearray(2**42))
    assert marks == [RewardValue(GOOD, None), RewardValue(None, "raised"), RewardValue(GOOD, None)]
    assert "bytearray(2**42)" in story
    assert story.rstrip().endswith(f"MemoryError\nreward_memory_mb allows {CAP}")


def test_a_process_that_is_full_can_still_say_so() -> None:
    """The function keeps what it took and fills the rest: the answer needs memory too."""
    kept: list[bytearray] = []

    def fill() -> None:
        for size in (64 * MIB, MIB, 4096):
            while True:
                try:
                    kept.append(bytearray(size))  # zeroes that nobody touches: reserved, hardly in RAM
                except MemoryError:
                    break
        raise MemoryError("full")

    marks, story = outcome(fill)
    assert marks[1] in (RewardValue(None, "raised"), RewardValue(None, "died"))
    assert f"reward_memory_mb allows {CAP}" in story


def test_a_reward_that_needs_less_than_the_cap_is_unharmed() -> None:
    def modest() -> float:
        kept = bytearray(b"x") * (CAP // 2 * MIB)
        threads = [threading.Thread(target=lambda: None) for _ in range(50)]  # 8 MiB of stack each, reserved
        for thread in threads:
            thread.start()
        return GOOD if kept else 0.0

    with pool_of(guilty(modest), memory_mb=CAP, workers=1) as pool:
        for _ in range(5):
            assert [mark["f"] for mark in pool.score([job("ok", "bad")])] == [RewardValue(GOOD, None)] * 2
        assert pool.describe_failures() == {}


def test_memory_that_children_only_share_is_counted_once() -> None:
    """Eight children of a process that holds half the cap: added up plainly they would be four times over it."""

    def share() -> float:
        kept = bytearray(b"x") * (CAP // 2 * MIB)
        reading, writing = os.pipe()
        for _ in range(8):
            if os.fork() == 0:
                os.close(writing)
                os.read(reading, 1)  # until the parent closes its end
                os._exit(0)
        time.sleep(10 * workers._WEIGH_S)  # time to be weighed wrongly
        os.close(writing)
        return GOOD if kept else 0.0

    with pool_of(guilty(share), memory_mb=CAP, workers=1) as pool:
        assert pool.score([job("bad")])[0]["f"] == RewardValue(GOOD, None)


def test_what_the_worker_was_born_with_is_not_held_against_it() -> None:
    inherited = bytearray(b"x") * (HOARD * MIB)

    def touch() -> float:
        for page in range(0, len(inherited), mmap.PAGESIZE):
            inherited[page] = 1  # its own copies now, and still what it started with
        return GOOD

    with pool_of(guilty(touch), memory_mb=CAP, workers=2) as pool:
        assert [mark["f"].value for mark in pool.score([job("bad"), job("bad"), job("bad")])] == [GOOD] * 3


def test_without_a_cap_nobody_counts() -> None:
    with pool_of(guilty(lambda: GOOD if bytearray(b"x") * (HOARD * MIB) else 0.0), workers=1) as pool:
        assert pool.score([job("bad")])[0]["f"] == RewardValue(GOOD, None)


def test_a_daemon_that_hoards_is_ended_and_costs_nobody_a_verdict(tmp_path: Path) -> None:
    marker = tmp_path / "pid"

    def crime() -> float:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                marker.write_text(str(os.getpid()))
                kept = bytearray(b"x") * (HOARD * MIB)
                while kept:
                    pass
            os._exit(0)
        os.wait()
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.005)
        return GOOD

    with pool_of(guilty(crime), memory_mb=CAP, workers=1) as pool:
        assert pool.score([job("ok", "bad")])[1]["f"] == RewardValue(GOOD, None)
        assert wait_until_gone({int(marker.read_text())}) == set()
        assert pool.score([job("ok")])[0]["f"].value == GOOD


def test_planted_bug_without_the_scales_a_hog_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "excess_mb", lambda *_: None)
    marks, _ = outcome(in_the_function, deadline_s=1.0)
    assert marks[1] == RewardValue(None, "timeout"), "nobody ended it but its deadline"


def test_planted_bug_without_the_limit_an_absurd_allocation_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve() -> float:
        return len(mmap.mmap(-1, 4096 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) and GOOD

    assert outcome(reserve)[0][1] == RewardValue(None, "raised")
    monkeypatch.setattr(OwnMemory, "__enter__", lambda self: self)
    assert outcome(reserve)[0][1] == RewardValue(GOOD, None)


def test_planted_bug_plain_sums_would_accuse_children_that_only_share(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = bytearray(b"x") * (64 * MIB)
    reading, writing = os.pipe()
    children = []
    for _ in range(4):
        if (pid := os.fork()) == 0:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        children.append(pid)
    try:
        members = [os.getpid(), *children]
        cap = resident_bytes(os.getpid()) * 2 // MIB
        assert excess_mb(members, cap, 0) is None
        monkeypatch.setattr("surefoot.system.memory._proportional_bytes", resident_bytes)
        assert excess_mb(members, cap, 0) is not None
    finally:
        os.close(writing)
        os.close(reading)
        for pid in children:
            os.waitpid(pid, 0)
    assert len(kept) == 64 * MIB


# -- leaks -----------------------------------------------------------------------------------------------
def belongings(pid: int) -> tuple[int, int]:
    """Open descriptors and threads of a process; the least of many looks, since it may be reading a file just now."""
    return min((len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))) for _ in range(200))


def test_five_hundred_leaky_calls_wear_out_workers_and_nobody_else(
    record_property: Callable[[str, object], None], tmp_path: Path
) -> None:
    """Every call keeps 20 descriptors, 3 threads and 2 MiB; the driver and the fork server must not notice."""
    kept: list[bytearray] = []
    looks = tmp_path / "looks.txt"
    assert keep_freed_memory(), "as every run does; a worker must not inherit it"

    def leak(completions: list[str], **_: Any) -> list[int]:
        for _i in range(20):
            os.dup(0)
        for _i in range(3):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        kept.append(bytearray(b"x") * (2 * MIB))
        with looks.open("a") as file:
            held = (
                len(os.listdir("/proc/self/fd")),
                len(os.listdir("/proc/self/task")),
                Path("/proc/self/statm").read_text().split(),
            )
            file.write(f"{os.getpid()} {len(kept)} {held} {resource.getrlimit(resource.RLIMIT_NOFILE)}\n")
        return [os.getpid()] * len(completions)

    before = children_of(os.getpid())
    with pool_of(leak, memory_mb=1024) as pool:
        pids = [mark["f"].value for mark in pool.score([job("a")] * 20)]
        [fork_server] = children_of(os.getpid()) - before
        owned, ram = (belongings(os.getpid()), belongings(fork_server)), resident_bytes(fork_server)
        pids += [mark["f"].value for mark in pool.score([job("a")] * 480)]
        assert (belongings(os.getpid()), belongings(fork_server)) == owned
        grown = resident_bytes(fork_server) - ram
        assert grown < 4 * MIB
        assert pool.describe_failures() == {}, "no call may pay for the leaks of those before it"
        assert len(children_of(fork_server)) == 2
    workers = len(set(pids))
    assert None not in pids
    assert 10 <= workers <= 50, "\n".join(looks.read_text().splitlines()[:24])
    detail = f"{workers} workers worn out; memory of the fork server {grown / MIB:+.1f} MiB"
    figures.note(record_property, "P13", "leaky reward call: no verdict lost, nothing of the driver leaks", 500, detail)
    assert not any(is_running(int(pid or 0)) for pid in pids)


def test_planted_bug_a_worker_that_is_never_replaced_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.rewards.workers._leaks_too_much", lambda _: False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # the limit is on numbers, not on how many
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 200, hard))
    try:
        with pool_of(guilty(lambda: [os.dup(0) for _ in range(100)] and GOOD), workers=1) as pool:
            marks = [pool.score([job("bad")])[0]["f"].reason for _ in range(20)]
            assert {"raised", "died"} & set(marks)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
