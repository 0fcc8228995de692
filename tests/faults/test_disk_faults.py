"""One save inside a run, broken at every call that touches the disk: a good checkpoint stays, and the run goes on.

`test_checkpoint_faults.py` breaks a save alone; here the save is the third of a run, with journal, pruning and all.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import figures
import kill_plants
import pytest
from kill_kit import PATIENCE_S, Driver, Ended
from kill_runs import Bench, Case

from surefoot.storage.checkpoints import newest_good

SAVES = Case("saves", {"save_steps": 0, "save_minutes": 1e-9, "eval_steps": 0, "max_steps": 4})
THIRD = 3
"""The save that is broken: two good checkpoints lie before it, so it also prunes and forgets."""
KINDS = ("kill", "ENOSPC", "EIO")
PARTS = 20
"""Of every so many (call, kind) pairs one is tried each day; all of them at night."""
CALLS = "write,pwrite64,fsync,rename,mkdir,openat,unlink,unlinkat,rmdir,ftruncate"
STEP = 16 * 1024


def calls_of_a_save(bench: Bench) -> list[str]:
    folder = bench.folder(SAVES)
    ended = bench.train(folder, before=[("break_save", folder / "calls", THIRD, 0, "-")])
    names = kill_plants.passed(folder / "calls")
    bench.check(SAVES, folder, ended)
    return names


@pytest.fixture(scope="session")
def calls(bench: Bench) -> list[str]:
    """Every call of one undisturbed save, in order."""
    return calls_of_a_save(bench)


def note(record_property: Callable[[str, object], None], what: str, tried: int, detail: str) -> None:
    figures.note(record_property, "P6", what, tried, detail)


def after_fault(bench: Bench, folder: Path, kind: str, ended: Ended) -> None:
    """It ended as it should, with something to go on from, and it goes on."""
    assert ended.code == (-signal.SIGKILL if kind == "kill" else 74), f"exit {ended.code}\n{ended.said}"
    assert newest_good(folder / "run").path is not None, "no good checkpoint is left"
    partial = [path.name for path in (folder / "run" / "checkpoints").glob(".*.partial")]
    assert kind == "kill" or partial == [], "half a checkpoint lies about"
    bench.check(SAVES, folder, bench.resume(folder))


def break_at(bench: Bench, calls: list[str], pairs: list[tuple[int, str]]) -> None:
    for nth, kind in pairs:
        name = calls[nth - 1]
        folder = bench.folder(SAVES)
        ended = bench.train(folder, before=[("break_save", folder / "calls", THIRD, nth, kind)])
        try:
            if (
                name == "pwrite" and ended.code == 0
            ):  # the seal of a journal's last file, which only helps to see damage
                bench.check(SAVES, folder, ended)
            else:
                after_fault(bench, folder, kind, ended)
        except AssertionError as error:
            raise AssertionError(f"{kind} at call {nth} of the save ({name}), in {folder}: {error}") from error


def every_pair(calls: list[str]) -> list[tuple[int, str]]:
    return [(nth, kind) for nth in range(1, len(calls) + 1) for kind in KINDS]


def test_a_save_has_as_many_places_to_break_as_it_should(calls: list[str]) -> None:
    count = Counter(calls)
    assert count["fsync"] >= 12
    assert count["write"] >= 6
    assert count["rename"] + count["replace"] >= 4
    assert {"open", "mkdir", "unlink", "pwrite"} <= count.keys()


@pytest.mark.turns(2)
@pytest.mark.parametrize("part", range(2))
def test_a_fault_at_calls_of_a_save_leaves_a_good_checkpoint_and_a_run_that_goes_on(
    bench: Bench, calls: list[str], part: int, record_property: Callable[[str, object], None]
) -> None:
    """Few pairs of call and fault, each kind of fault at other calls; in two parts, for two cores."""
    pairs = [pair for number, pair in enumerate(every_pair(calls)) if number % (PARTS + 1) == 0][part::2]
    break_at(bench, calls, pairs)
    note(record_property, "kill, ENOSPC, EIO at calls of one save", len(pairs), f"{len(calls)} calls in a save")


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_a_fault_at_every_call_of_a_save_leaves_a_good_checkpoint_and_a_run_that_goes_on(
    bench: Bench, calls: list[str], part: int, record_property: Callable[[str, object], None]
) -> None:
    pairs = every_pair(calls)[part::8]
    break_at(bench, calls, pairs)
    note(record_property, "kill, ENOSPC, EIO at calls of one save", len(pairs), f"{len(calls)} calls in a save")


# -- what a power cut would take --------------------------------------------------------------------


def unsynced_numbers(bench: Bench, *more: tuple[str, str]) -> list[str]:
    """Checkpoints that got their names while numbers of their steps were not yet on the disk."""
    folder = bench.folder(SAVES)
    ended = bench.train(folder, before=[*more, ("watch_disk", folder / "disk")])
    lines = kill_plants.passed(folder / "disk")
    bench.check(SAVES, folder, ended)
    late, synced = [], False
    for line in lines:
        synced |= line.startswith("fsync ") and line.endswith("/run/metrics.jsonl")
        if re.fullmatch(r"rename .*/checkpoints/step_\d+", line):
            late += [] if synced else [line]
            synced = False
    return late


def test_the_numbers_of_a_step_are_on_the_disk_before_its_checkpoint_is(bench: Bench) -> None:
    """A resume begins after the checkpoint, and would not write them again."""
    assert unsynced_numbers(bench) == []


def test_planted_save_that_does_not_wait_for_the_numbers_is_seen(bench: Bench) -> None:
    assert len(unsynced_numbers(bench, ("plant", "metrics_not_synced"))) == 4


# -- the kernel's own answers -----------------------------------------------------------------------


def trace(bench: Bench, folder: Path, options: list[str]) -> Ended:
    """A run that strace takes hold of before its third save."""
    driver = bench.start(folder, before=[("stop_at_save", THIRD)])
    wait_until(driver, "State:\tT")
    command = ["strace", "-q", "-o", str(folder / "strace"), "-e", f"trace={CALLS}", *options, "-p", str(driver.pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait_until(driver, r"TracerPid:\t[1-9]")
    os.kill(driver.pid, signal.SIGCONT)
    ended = driver.end()
    tracer.wait(PATIENCE_S)
    return ended


def wait_until(driver: Driver, pattern: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not re.search(pattern, Path(f"/proc/{driver.pid}/status").read_text()):
        assert time.monotonic() < deadline, f"{pattern!r} never came"
        time.sleep(0.002)


def places(log: Path) -> list[tuple[str, int]]:
    """(call, number among the calls of its name) for everything that changes the disk, until the save's end."""
    counts: Counter[str] = Counter()
    found = []
    for line in log.read_text(errors="replace").splitlines():
        name = line.partition("(")[0]
        if line.startswith('mkdir("/", '):
            return found
        if name not in CALLS.split(",") or "/dev/" in line:
            continue
        counts[name] += 1
        if "EEXIST" not in line and "ENOENT" not in line and (name != "openat" or "O_CREAT" in line):
            found.append((name, counts[name]))
    raise AssertionError("the save's end was not seen")


def strace_works() -> bool:
    words = ["strace", "-o", "/dev/null", "true"]
    return (
        shutil.which("strace") is not None and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_the_kernels_own_refusal_of_every_call_of_a_save_costs_nothing(
    bench: Bench, part: int, record_property: Callable[[str, object], None]
) -> None:
    if not strace_works():
        pytest.skip("needs strace with the right to trace")
    tried = strace_all(bench, first=part, every=8)
    note(record_property, "kill, ENOSPC, EIO by strace at calls of one save", tried, "all of them")


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_the_kernels_own_refusal_of_some_calls_of_a_save_costs_nothing(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    if not strace_works():
        pytest.skip("needs strace with the right to trace")
    tried = strace_all(bench, first=0, every=29)
    note(record_property, "kill, ENOSPC, EIO by strace at calls of one save", tried, "a sample")


def strace_all(bench: Bench, first: int, every: int) -> int:
    folder = bench.folder(SAVES)
    bench.whole(SAVES)
    ended = trace(bench, folder, [])
    found = places(folder / "strace")
    bench.check(SAVES, folder, ended)
    assert len(found) > 60, found
    tried = [(*place, kind) for place in found for kind in KINDS][first::every]
    for name, nth, kind in tried:
        if kind == "ENOSPC" and name in ("unlink", "unlinkat", "rmdir", "ftruncate"):
            kind = "EIO"  # taking away needs no space
        how = "signal=KILL" if kind == "kill" else f"error={kind}"
        folder = bench.folder(SAVES)
        ended = trace(bench, folder, ["-e", f"inject={name}:{how}:when={nth}"])
        try:
            if ended.code == 0:  # the seal of a journal's last file, which only helps to see later damage
                assert name == "pwrite64", f"{kind} was not heard"
                bench.check(SAVES, folder, ended)
            else:
                after_fault(bench, folder, kind, ended)
        except AssertionError as error:
            raise AssertionError(f"{kind} at {name} number {nth}, in {folder}: {error}") from error
    return len(tried)


# -- a disk that is too small -----------------------------------------------------------------------


def fill(bench: Bench, sizes: list[int]) -> Counter[int]:
    """Runs on disks of these sizes; each ends with 0 or 74, and goes on to the same end where there is room."""
    ends: Counter[int] = Counter()
    for size in sizes:
        folder = bench.folder(SAVES)
        (folder / "disk").mkdir()
        config = folder / "run.toml"
        config.write_text(config.read_text().replace('output_dir = "run"', 'output_dir = "disk/run"'))
        ended = bench.train(folder, before=[("small_disk", folder / "disk", size, folder / "kept")])
        if "cannot mount here" in ended.said:
            pytest.skip("needs the right to mount, or user namespaces")
        ends[ended.code] += 1
        assert ended.code in (0, 74), f"a disk of {size} bytes: exit {ended.code}\n{ended.said}"
        assert ended.code == 0 or "No space left on device" in ended.said, ended.said
        if (folder / "kept" / "run").exists():
            (folder / "kept" / "run").rename(folder / "run")
        config.write_text(config.read_text().replace('output_dir = "disk/run"', 'output_dir = "run"'))
        bench.check(SAVES, folder, bench.go_on(folder).end())
    return ends


def test_a_disk_that_fills_up_ends_the_run_with_74_and_it_goes_on_elsewhere(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    ends = fill(bench, [3 * STEP, 8 * STEP, 20 * STEP, 640 * STEP])
    assert ends == {74: 3, 0: 1}
    note(record_property, "a whole run on a disk that is too small", ends.total(), "a sample of sizes")


@pytest.mark.nightly
def test_a_disk_of_any_size_ends_the_run_with_74_or_0(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    ends = fill(bench, list(range(STEP, 60 * STEP, STEP)))
    assert ends[74] > 10
    note(record_property, "a whole run on a disk that is too small", ends.total(), f"steps of {STEP} bytes")
