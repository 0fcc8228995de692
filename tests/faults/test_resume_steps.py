"""A run of three epochs, interrupted at every one of its steps: planned = executed, every task once per epoch.

The tasks are not divisible by tasks_per_step, so that batches lie across both borders between epochs.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import figures
import pytest
from kill_runs import Bench, Case, wait_for

EPOCHS, TASKS, PER_STEP = 3, 10, 3
STEPS = EPOCHS * TASKS // PER_STEP
THREE = Case(
    "three epochs",
    {"tasks_per_step": PER_STEP, "max_steps": STEPS, "heldout_fraction": 0.0, "save_steps": 4, "eval_steps": 0},
    rows=TASKS,
)
TWO_PASSES = Case("two passes, saved between them", {"num_iterations": 2, "save_steps": 3, "max_steps": 8})
ROUNDS, ROUNDS_AT_NIGHT = 8, 50


def note(record_property: Callable[[str, object], None], what: str, n: int = 1) -> None:
    figures.note(record_property, "P5", what, n)


def test_every_task_is_trained_once_per_epoch_and_batches_lie_across_the_borders(bench: Bench) -> None:
    """What the other tests compare with has to be right itself."""
    found = bench.whole(THREE).facts
    assert TASKS % PER_STEP, "no batch would lie across a border"
    assert Counter(item.partition("#")[0] for item in found["trained"]) == dict.fromkeys(tasks(found), EPOCHS)
    assert Counter(item.partition("#")[2] for item in found["trained"]) == {str(e): TASKS for e in range(EPOCHS)}
    assert Counter(found["trained"].values()) == dict.fromkeys(range(1, STEPS + 1), PER_STEP)
    assert found["verdict"]["executed_steps"] == found["verdict"]["planned_steps"] == STEPS


def tasks(found: dict[str, dict[str, int]]) -> set[str]:
    names = {item.partition("#")[0] for item in found["trained"]}
    assert len(names) == TASKS
    return names


def by_turns(steps: range) -> list[Any]:
    """Every other step each day, all of them at night; killed and asked take turns, so that each has one every day."""
    return [pytest.param(step, marks=pytest.mark.nightly if place % 2 else []) for place, step in enumerate(steps)]


@pytest.mark.parametrize("step", by_turns(range(STEPS, 0, -1)))
def test_killed_in_this_step_the_run_does_every_planned_step_once(
    bench: Bench, step: int, record_property: Callable[[str, object], None]
) -> None:
    folder = bench.folder(THREE)
    assert bench.train(folder, failpoints=f"loop.before_log=kill@{step}").code == -signal.SIGKILL
    bench.check(THREE, folder, bench.resume(folder))
    note(record_property, "killed in a step of a 3-epoch run, then resumed: planned = executed, bit-equal")


@pytest.mark.parametrize("hit", [4, 5])
def test_killed_behind_a_checkpoint_between_two_passes_every_number_is_as_if_nothing_had_happened(
    bench: Bench, hit: int
) -> None:
    """The resumed run has to give its engine the weights of step 3; the next move is measured from those of step 2."""
    folder = bench.folder(TWO_PASSES)
    assert bench.train(folder, failpoints=f"loop.before_learn=kill@{hit}").code == -signal.SIGKILL
    bench.check(TWO_PASSES, folder, bench.resume(folder))


@pytest.mark.parametrize("step", by_turns(range(1, STEPS)))
def test_asked_to_stop_in_this_step_the_run_saves_and_goes_on(
    bench: Bench, step: int, record_property: Callable[[str, object], None]
) -> None:
    folder = bench.folder(THREE)
    stopped = bench.train(folder, before=[("signal_at", "loop.before_log", step, int(signal.SIGTERM))])
    assert stopped.code == 75, stopped.said
    assert f"stopped after step {step} of {STEPS}" in stopped.said
    assert (folder / "run" / "checkpoints" / f"step_{step}").is_dir()
    assert json.loads((folder / "run" / "verdict.json").read_text())["status"] == "INCOMPLETE"
    bench.check(THREE, folder, bench.resume(folder))
    note(record_property, "asked to stop in a step of a 3-epoch run, then resumed: planned = executed, bit-equal")


def test_stopped_at_every_step_in_turn_one_run_still_ends_bit_for_bit(bench: Bench) -> None:
    """Not nine runs with one stop each, but one run with nine."""
    folder = bench.folder(THREE)
    stop = [("signal_at", "loop.before_log", 1, int(signal.SIGTERM))]
    assert bench.train(folder, before=stop).code == 75
    for _ in range(STEPS - 2):
        assert bench.resume(folder, before=stop).code == 75
    bench.check(THREE, folder, bench.resume(folder))


def kill_resumes(bench: Bench, rounds: int) -> None:
    folder = bench.folder(THREE)
    assert bench.train(folder, failpoints="loop.after_learn=kill@6").code == -signal.SIGKILL
    places = ("ledger.opened", "resume.found", "resume.rewound", "durable.after_rename", "session.before_build")
    for number in range(rounds):
        place = places[number % len(places)]
        killed = bench.resume(folder, failpoints=f"{place}=kill")
        assert killed.code == -signal.SIGKILL, f"round {number}: {place} was not reached\n{killed.said}"
    bench.check(THREE, folder, bench.resume(folder))


def test_killed_during_the_resume_itself_again_and_again_the_run_still_goes_on(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    kill_resumes(bench, ROUNDS)
    note(record_property, "kill -9 during the resume itself, in a row", ROUNDS)


@pytest.mark.nightly
def test_fifty_kills_during_the_resume_in_a_row_change_nothing(
    bench: Bench, record_property: Callable[[str, object], None]
) -> None:
    kill_resumes(bench, ROUNDS_AT_NIGHT)
    note(record_property, "kill -9 during the resume itself, in a row", ROUNDS_AT_NIGHT)


def test_ended_by_a_second_sigint_in_the_middle_of_a_step_the_run_goes_on(bench: Bench) -> None:
    folder = bench.folder(THREE)
    driver = bench.start(folder, failpoints="learner.after_backward=sleep:1000@5", before=[("trace", folder / "trace")])
    wait_for(folder / "trace", "learner.after_backward", 5)
    os.kill(driver.pid, signal.SIGINT)
    while (ended := driver.wait(0.3)) is None:
        os.kill(driver.pid, signal.SIGINT)
    assert ended.code == 75, ended.said
    bench.check(THREE, folder, bench.resume(folder))
