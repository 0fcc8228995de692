"""kill -9 of a run that samples ahead: batches that were on the disk are learned from again, bit for bit.

What was not on the disk depends on the clock, so two asynchronous runs are never compared with each other; a resumed one
is compared with what its own former life had written.

A failure prints its seed; `ASYNC_KILL_SEED=17 pytest tests/faults/test_async_kills.py -k random` does the same trial
again, as exactly as clocks allow.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_plants
import pytest
from figures import Record, note
from kill_kit import Ended
from kill_runs import CLOCKED, Bench, Case, timeless_lines

from surefoot.storage.files import NAMES, Journal
from surefoot.storage.ledger import Ledger

AHEAD: dict[str, Any] = {"max_staleness": 2, "importance_sampling_correction": True, "max_steps": 8, "eval_steps": 4}
CASES = {
    "saves": Case("ahead", AHEAD | {"save_steps": 3}),
    "journal only": Case("ahead, journal only", AHEAD | {"save_steps": 0, "save_minutes": 0.0, "save_best": False}),
    "two passes": Case("ahead, two passes", AHEAD | {"num_iterations": 2, "save_steps": 2}),
    "seldom synced": Case("ahead, seldom synced", AHEAD | {"weight_sync_steps": 2, "save_steps": 2}),
    "adapter": Case("ahead, LoRA", AHEAD | {"lora": {"rank": 4}, "save_steps": 3}),
    "four bits": Case("ahead, QLoRA", AHEAD | {"lora": {"rank": 4}, "quantization": "nf4", "save_steps": 3}),
}
STOP_S = 10.0
"""What is promised of every stop, with the default stop_timeout_s."""
NOTICED_S = 5.0
"""How long after stall_timeout_s a stuck run may live."""
STOPPED = "SIGTERM to an asynchronous run, then resumed"
NOTICED = "engine of an asynchronous run hangs: exit code 76 at most 5 s after stall_timeout_s, then resumed"
KILLS = [
    ("saves", "loop.after_learn=kill@5"), ("saves", "batches.after_append=kill@3"),
    ("journal only", "loop.after_learn=kill@6"), ("journal only", "batches.before_compose=kill@5"),
    ("journal only", "ledger.after_event=kill@25"), ("two passes", "loop.after_learn=kill@5"),
    ("seldom synced", "loop.after_publish=kill@3"),
    pytest.param("adapter", "loop.after_learn=kill@5", marks=pytest.mark.nightly),
    pytest.param("four bits", "loop.after_learn=kill@5", marks=pytest.mark.nightly),
]  # fmt: skip


def rows(run: Path) -> dict[int, dict[str, float]]:
    """The numbers of every step, without what the clock or the queue says."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    told = [json.loads(line) for line in lines if line.endswith("\n")]  # a kill may tear the last one
    clocked = (*CLOCKED, "async/", "sync/")
    return {
        row["step"]: {k: v for k, v in row.items() if not k.startswith(clocked) and k != "killswitch/eval_share"}
        for row in told
        if "loss" in row
    }


def check_account(case: Case, run: Path) -> None:
    with Journal.open(run / "journal" / "ledger.journal", readonly=True) as journal:
        ledger = Ledger.read(journal)
    ledger.check()
    balance = ledger.balance()
    assert balance.trained + sum(balance.dropped.values()) == case.visits
    assert (balance.lost, balance.leased) == (0, 0)
    ages = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["async/staleness_max"] for row in ages if "loss" in row) <= 2


@pytest.mark.parametrize(("name", "failpoint"), KILLS)
def test_a_killed_run_repeats_what_was_on_the_disk_and_goes_on(
    name: str, failpoint: str, bench: Bench, record_property: Record
) -> None:
    case = CASES[name]
    folder = bench.folder(case)
    ended = bench.train(folder, failpoints=failpoint)
    assert ended.code == -signal.SIGKILL, f"{failpoint} was not reached: exit {ended.code}\n{ended.said}"
    run = folder / "run"
    before = rows(run) if (run / "metrics.jsonl").exists() else {}
    played = {path.name: timeless_lines(path) for path in (run / "rollouts").glob("*.jsonl")}
    ended = bench.resume(folder)
    assert ended.code == 0, ended.said
    after = rows(run)
    assert sorted(after) == list(range(1, 9))
    assert {step: after[step] for step in before} == before
    assert {name: timeless_lines(run / "rollouts" / name) for name in played} == played
    check_account(case, run)
    assert bench.warm.orphans() == []
    note(record_property, "P2", "kill -9 of an asynchronous run, resumed: journaled steps bit-equal", 1)
    shutil.rmtree(folder)


class Memory:
    """What the lives of one run have written; every later one has to repeat it bit for bit."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.rows: dict[int, dict[str, float]] = {}
        self.rollouts: dict[str, list[Any]] = {}

    def check(self) -> None:
        """After a kill or an end: what was there is there as it was, as far as this life came; then remember more."""
        now = rows(self.run)
        assert {step: self.rows[step] for step in now.keys() & self.rows.keys()} == {
            step: now[step] for step in now.keys() & self.rows.keys()
        }
        written = {f"step_{step}.jsonl" for step in now}  # that of the step under way may not be whole
        found = {p.name: timeless_lines(p) for p in (self.run / "rollouts").glob("*.jsonl") if p.name in written}
        assert {name for name in found.keys() & self.rollouts.keys() if found[name] != self.rollouts[name]} == set()
        self.rows |= now
        self.rollouts |= found


def is_over(case: Case, folder: Path, memory: Memory, ended: Ended) -> None:
    """The run ended as it should, with every step that any of its lives had written."""
    assert ended.code == 0, ended.said
    memory.check()
    assert sorted(memory.rows) == sorted(rows(folder / "run")) == list(range(1, 9))
    check_account(case, folder / "run")


SEED = os.environ.get("ASYNC_KILL_SEED", "")
LEVELS = 4


def trial(bench: Bench, seed: int) -> Counter[str]:
    """One run, killed at random instants, its resumes too, then resumed to its end."""
    rng = random.Random(seed)
    case = list(CASES.values())[seed % len(CASES)]
    folder, ends, story = bench.folder(case), Counter[str](), []
    memory, ended = Memory(folder / "run"), None
    try:
        for level in range(LEVELS + 1):
            again = level == 0 or (level < LEVELS and rng.random() < 0.4)
            instant = rng.random() * bench.whole(case).seconds
            driver = bench.go_on(folder)
            ended = driver.wait(instant) if again else driver.end()
            if ended is not None:
                break
            driver.kill()
            ends["killed"] += 1
            story.append(f"killed after {instant:.3f} s")
            assert bench.warm.orphans() == [], "processes outlived their driver"
            memory.check()
        assert ended is not None, "the last level ends"
        is_over(case, folder, memory, ended)
    except AssertionError as error:
        story.append(f"again: ASYNC_KILL_SEED={seed} pytest tests/faults/test_async_kills.py -k random")
        raise AssertionError(f"seed {seed} ({case}), in {folder}: {'; '.join(story)}\n{error}") from error
    shutil.rmtree(folder)
    return ends


def kills(bench: Bench, first: int, wanted: int) -> int:
    """Trials with the seeds from `first` on until so many kills have landed."""
    landed, seed = 0, first
    while landed < wanted:
        landed += trial(bench, seed)["killed"]
        seed += 1
    return landed


RANDOM = "kill -9 of an asynchronous run at random instants, resumed: journaled steps bit-equal"


def test_an_asynchronous_run_killed_at_random_instants_repeats_what_was_on_the_disk(
    bench: Bench, record_property: Record
) -> None:
    note(record_property, "P2", RANDOM, kills(bench, int(SEED or 0), 1 if SEED else 3))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(10_000, 11_000, 100))
def test_an_asynchronous_run_survives_a_hundred_kills_at_random_instants(
    bench: Bench, first: int, record_property: Record
) -> None:
    note(record_property, "P2", RANDOM, kills(bench, first, 10))


def test_planted_resume_that_repeats_a_step_otherwise_is_seen(bench: Bench) -> None:
    case = CASES["journal only"]
    folder = bench.folder(case)
    memory = Memory(folder / "run")
    assert bench.train(folder, failpoints="loop.before_collect=kill@6").code == -signal.SIGKILL
    memory.check()
    assert len(memory.rows) == 5
    ended = bench.resume(folder, before=[("plant", "other_sequence")])
    with pytest.raises(AssertionError):
        is_over(case, folder, memory, ended)


def ended_by_its_grader(bench: Bench, plant: str = "") -> Ended:
    """A run whose grader fails for a while, and then is mended: how the resumed run ends."""
    folder = bench.folder(Case("ahead, graders", AHEAD | {"save_steps": 3, "eval_steps": 8}))
    good = (folder / "reward.py").read_text()
    (folder / "reward.py").write_text(
        good.replace('"Right, and a little', 'assert not open("broken").read()\n    "Right, and')
    )
    (folder / "broken").write_text("")
    driver = bench.start(folder, before=[("plant", plant)] if plant else [])
    wait_until(lambda: (folder / "run" / "rollouts" / "step_2.jsonl").exists())
    (folder / "broken").write_text("yes")
    ended = driver.end()
    assert ended.code == 4, f"exit {ended.code}\n{ended.said}"
    (folder / "reward.py").write_text(good)
    return bench.resume(folder)


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.002)


def test_groups_without_a_verdict_are_asked_for_again_when_their_grader_is_mended(bench: Bench) -> None:
    ended = ended_by_its_grader(bench)
    assert ended.code == 0, ended.said


def test_planted_groups_that_are_only_forgotten_in_memory_come_back_without_a_verdict(bench: Bench) -> None:
    assert ended_by_its_grader(bench, "given_up_in_memory").code == 4


SYNCHRONOUS = {"books.on_disk", "books.delivered"}
"""A stream keeps its groups itself."""


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_an_asynchronous_run_killed_at_any_failpoint_it_passes_repeats_what_was_on_the_disk(
    bench: Bench, part: int, record_property: Record
) -> None:
    """At the first, a middle and the last hit of each that a whole run or a resume passes."""
    case = Case("ahead, busy", AHEAD | {"save_steps": 0, "save_minutes": 1e-9, "eval_steps": 2})
    folder = bench.folder(case)
    assert bench.train(folder, before=[("trace", folder / "trace"), ("small_pieces",)]).code == 0
    passed = Counter(kill_plants.passed(folder / "trace"))
    assert not passed.keys() & SYNCHRONOUS
    assert len(passed) >= 45, sorted(NAMES.keys() - passed.keys())
    landed = 0
    for name in sorted(passed)[part::4]:
        for hit in sorted({1, (passed[name] + 1) // 2, max(1, passed[name] * 2 // 3)}):
            folder = bench.folder(case)
            memory = Memory(folder / "run")
            ended = bench.train(folder, failpoints=f"{name}=kill@{hit}", before=[("small_pieces",)])
            if ended.code == 0:  # how often it comes here depends on the clock
                continue
            assert ended.code == -signal.SIGKILL, f"{name}, hit {hit}: exit {ended.code}\n{ended.said}"
            memory.check()
            is_over(case, folder, memory, bench.go_on(folder).end())
            shutil.rmtree(folder)
            landed += 1
    note(
        record_property,
        "P2",
        "kill -9 of an asynchronous run at a failpoint, resumed: journaled steps bit-equal",
        landed,
    )


@pytest.mark.parametrize(
    "name", ["loop.before_collect", "loop.after_learn", "ledger.after_event", "session.after_save"]
)
def test_asked_to_stop_a_run_that_samples_ahead_stops_and_goes_on(
    name: str, bench: Bench, record_property: Record
) -> None:
    case = CASES["saves"]
    folder = bench.folder(case)
    hit = 20 if name.startswith("ledger") else 2
    ended = bench.train(folder, before=[("signal_at", name, hit, int(signal.SIGTERM), folder / "asked")])
    seconds = seconds_since(folder / "asked")
    assert ended.code == 75, f"exit {ended.code}\n{ended.said}"
    assert seconds <= STOP_S, f"{seconds:.1f} s from the signal to the end\n{ended.said}"
    goes_on(bench, case, folder)
    note(record_property, "P11", STOPPED, 1, seconds=[seconds], limit_s=STOP_S)


def seconds_since(moment: Path) -> float:
    """From what a child wrote down until now; both looked at the one clock of this machine."""
    return time.monotonic() - float(moment.read_text())


def goes_on(bench: Bench, case: Case, folder: Path) -> None:
    ended = bench.resume(folder)
    assert ended.code == 0, ended.said
    check_account(case, folder / "run")
    shutil.rmtree(folder)


# -- its engine hangs -------------------------------------------------------------------------------

HUNG = Case("ahead, hung", AHEAD | {"save_steps": 3, "stall_timeout_s": 3.0, "reward_timeout_s": 1.5})
PATIENT = Case("ahead, patient", AHEAD | {"save_steps": 3})


def test_a_hung_engine_of_a_run_that_samples_ahead_is_noticed_in_time(bench: Bench, record_property: Record) -> None:
    """It shares the process with the learner: whoever waits for it beats no pulse, and the watchdog hears that."""
    folder = bench.folder(HUNG)
    ended = bench.train(folder, before=[("engine_hangs_after", "loop.after_learn", 2, folder / "hung")])
    seconds = seconds_since(folder / "hung")
    assert ended.code == 76, f"exit {ended.code}\n{ended.said}"
    assert "StalledError: no progress for 3 s while" in ended.said
    assert seconds <= 3.0 + NOTICED_S, f"{seconds:.1f} s from the last token to the end\n{ended.said}"
    assert bench.warm.orphans() == []
    goes_on(bench, HUNG, folder)
    note(record_property, "P9", NOTICED, 1, "with 3 s", seconds=[seconds], limit_s=3.0 + NOTICED_S)


def test_asked_to_stop_while_its_engine_hangs_it_stops_in_time(bench: Bench, record_property: Record) -> None:
    folder = bench.folder(PATIENT)
    driver = bench.start(folder, before=[("engine_hangs_after", "loop.after_learn", 2, folder / "hung")])
    wait_until(lambda: (folder / "hung").exists())
    asked = time.monotonic()
    os.kill(driver.pid, signal.SIGTERM)
    ended = driver.end()
    seconds = time.monotonic() - asked
    assert ended.code == 75, f"exit {ended.code}\n{ended.said}"
    assert seconds <= STOP_S, f"{seconds:.1f} s from the signal to the end\n{ended.said}"
    assert bench.warm.orphans() == []
    goes_on(bench, PATIENT, folder)
    note(record_property, "P11", STOPPED, 1, seconds=[seconds], limit_s=STOP_S)
