"""One run folder, two drivers: the second is turned away by name, the first does not notice."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from kill_kit import Driver
from kill_runs import PLAIN, Bench, wait_for


@pytest.fixture
def alive(bench: Bench) -> tuple[Path, Driver]:
    """A run in its third step, stopped there until somebody lets it go on."""
    folder = bench.folder(PLAIN)
    driver = bench.start(folder, before=[("trace", folder / "trace"), ("signal_at", "loop.before_learn", 3, 19)])
    wait_for(folder / "trace", "loop.before_collect", 3)
    while "State:\tT" not in Path(f"/proc/{driver.pid}/status").read_text():
        assert driver.wait(0.01) is None
    return folder, driver


def test_a_second_driver_is_refused_by_name_and_the_first_is_unharmed(bench: Bench, alive: tuple[Path, Driver]) -> None:
    folder, first = alive
    for words in (["--resume", "run"], ["run.toml"]):
        second = bench.warm.run("train", *words, cwd=folder)
        assert second.code == 3, second.said
        assert ("is in use by process" in second.said) or ("already holds a run" in second.said), second.said
    assert f"process {first.pid}" in bench.warm.run("train", "--resume", "run", cwd=folder).said
    os.kill(first.pid, signal.SIGCONT)
    bench.check(PLAIN, folder, first.end())


def test_a_dead_owners_lock_is_taken_over_with_a_note(bench: Bench, alive: tuple[Path, Driver]) -> None:
    folder, first = alive
    first.kill()
    assert (folder / "run" / "lock").exists()
    ended = bench.resume(folder)
    assert f"took over the lock of process {first.pid}" in ended.said
    assert "that process has ended" in ended.said
    bench.check(PLAIN, folder, ended)


def test_of_many_drivers_at_once_exactly_one_goes_on(bench: Bench, alive: tuple[Path, Driver]) -> None:
    folder, first = alive
    first.kill()
    rivals = [bench.go_on(folder) for _ in range(4)]
    ends = [rival.end() for rival in rivals]
    codes = sorted(ended.code for ended in ends)
    assert codes[0] == 0, [ended.said for ended in ends]
    assert set(codes) <= {0, 3}
    assert all("is in use by" in ended.said for ended in ends if ended.code == 3)
    told = json.loads((folder / "run" / "verdict.json").read_text())["resumes"]
    assert len(told) == codes.count(0), "a driver that was refused wrote to the journal"
    bench.check(PLAIN, folder, next(ended for ended in ends if ended.code == 0))
