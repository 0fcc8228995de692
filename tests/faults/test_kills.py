"""kill -9 at random instants, as often as you like: the resumed run is the run that was never killed, bit for bit.

A failure prints its seed, and the failpoint that was passed last. `KILL_SEED=17 pytest tests/faults/test_kills.py -k
random` does the same trial again, as exactly as clocks allow; `SUREFOOT_FAILPOINTS=name=kill@hit surefoot train ...`
dies at that very place.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import figures
import kill_plants
import pytest
from kill_runs import ALONE, CASES, PLAIN, SETS, Bench, Case, differences, facts

LEVELS = 5
EVERY_DAY, NIGHTLY = 10, 200
BLOCK = 5
"""Kills per test, so that two workers share them and a failure does not hide the rest."""
REPLAY = os.environ.get("KILL_SEED", "")


def trial(bench: Bench, seed: int) -> Counter[str]:
    """One run, killed at least once unless it was quicker, resumed to its end, held against the undisturbed one."""
    rng = random.Random(seed)
    case = CASES[seed % len(CASES)]
    folder, ends = bench.folder(case), Counter[str]()
    story = []
    for level in range(LEVELS + 1):
        instant = rng.random() * bench.whole(case).seconds
        again = level == 0 or (level < LEVELS and rng.random() < 0.25)
        trace = folder / f"trace_{level}"
        driver = bench.go_on(folder, before=[("trace", trace)])
        ended = driver.wait(instant) if again else driver.end()
        if ended is not None:
            story.append(f"exit {ended.code}")
            break
        driver.kill()
        ends["killed"] += 1
        ends["killed during a resume"] += level > 0
        ends["left processes"] += bool(bench.warm.orphans())
        story.append(f"killed after {instant:.3f} s, {where(trace)}")
    try:
        assert ends["left processes"] == 0, "processes outlived their driver by 5 s"
        bench.check(case, folder, ended)
    except AssertionError as error:
        story.append(f"again: KILL_SEED={seed} pytest tests/faults/test_kills.py -k random")
        raise AssertionError(f"seed {seed} ({case}), in {folder}: {'; '.join(story)}\n{error}") from error
    return ends


def where(trace: Path) -> str:
    """The failpoint that was passed last, with its hit."""
    names = kill_plants.passed(trace) if trace.exists() else []
    return f"{names[-1]} hit {names.count(names[-1])}" if names else "before the first failpoint"


def kills(bench: Bench, first: int, wanted: int) -> Counter[str]:
    """Trials with the seeds from `first` on until so many kills have landed."""
    ends, seed = Counter[str](), first
    while ends["killed"] < wanted:
        ends += trial(bench, seed)
        ends["trials"] += 1
        seed += 1
    return ends


def note(record_property: Callable[[str, object], None], ends: Counter[str], first: int) -> None:
    for figure, what, n in (
        ("P1", "kill -9 at random instants, then resumed: bit-equal", ends["killed"]),
        ("P1", "of these, during a resume", ends["killed during a resume"]),
        ("P10", "kill -9 of the driver: nothing lives 5 s later", ends["killed"]),
    ):
        figures.note(record_property, figure, what, n, seeds=range(first, first + max(1, ends["trials"])))


@pytest.mark.every_day
@pytest.mark.parametrize("first", [int(REPLAY)] if REPLAY else range(0, EVERY_DAY * 10, BLOCK * 10))
def test_a_run_killed_at_random_instants_ends_as_if_nothing_had_happened(
    bench: Bench, first: int, record_property: Callable[[str, object], None]
) -> None:
    note(record_property, kills(bench, first, 1 if REPLAY else BLOCK), first)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(10_000, 10_000 + NIGHTLY * 10, BLOCK * 10))
def test_two_hundred_kills_leave_no_trace(
    bench: Bench, first: int, record_property: Callable[[str, object], None]
) -> None:
    note(record_property, kills(bench, first, BLOCK), first)


@pytest.mark.parametrize(
    "case", [PLAIN, *(pytest.param(case, marks=pytest.mark.nightly) for case in CASES[1:])], ids=str
)
def test_two_undisturbed_runs_are_equal_and_another_seed_is_another_run(bench: Bench, case: Case) -> None:
    """The control: the comparison sees a difference where there is one, and none where there is none."""
    folder = bench.folder(case)
    bench.check(case, folder, bench.train(folder))
    folder = bench.folder(dataclasses.replace(case, keys=case.keys | {"seed": 1}))
    assert bench.train(folder).code == case.code
    found = differences(bench.whole(case).facts, facts(folder / "run"))
    named = {line.partition(":")[0].partition(".")[0] for line in found}
    assert named >= {"rows", "files", "state", "rollouts", "trained"}


@pytest.mark.parametrize(("case", "sets"), [(SETS, {"heldout", "own"}), (ALONE, {"own"})], ids=["two", "one"])
def test_an_evaluation_that_was_killed_is_kept_once_more_and_equal(bench: Bench, case: Case, sets: set[str]) -> None:
    """Between an evaluation and its checkpoint: its answers are on the disk, and are written again."""
    folder = bench.folder(case)
    killed = bench.train(folder, failpoints="loop.after_evaluate=kill@3")
    assert killed.code == -signal.SIGKILL, killed.said
    kept = folder / "run" / "rollouts" / "eval_000004.jsonl"
    assert {json.loads(line)["set"] for line in kept.read_text().splitlines()} == sets
    kept.write_text("half a line")  # what a power cut may leave of a file that was not synced
    bench.check(case, folder, bench.resume(folder))


def test_the_fork_server_starts_no_thread_and_its_children_are_real_drivers(bench: Bench) -> None:
    """One thread, or a fork could copy a lock that nobody will ever release; a session each, or a kill hits too much."""
    tasks = list(Path(f"/proc/{bench.warm.server.pid}/task").iterdir())
    assert len(tasks) == 1
    folder = bench.folder(PLAIN)
    driver = bench.start(folder, failpoints="loop.before_collect=sleep:1000")
    fields = Path(f"/proc/{driver.pid}/stat").read_text().rpartition(")")[2].split()
    parent, _, session = map(int, fields[1:4])
    assert (parent, session) == (bench.warm.server.pid, driver.pid)
    driver.kill()
    assert bench.warm.orphans() == []
