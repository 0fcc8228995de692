"""When a run is evaluated: evenly, where weights are published, for at most a tenth of the tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config import Config
from surefoot.config.schedule import (
    MOST_EVALUATIONS,
    MOST_SHARE,
    Answered,
    Cadence,
    answered_tasks,
    cadence_of,
    most_tasks,
)
from surefoot.guards.arming import judge_arming
from surefoot.report.plan import batch_arithmetic


def cadence(heldout: int, **keys: Any) -> Cadence:
    return cadence_of(Config(model="m", tasks="t", **keys), Answered(heldout))


SIZES: Any = st.fixed_dictionaries(
    {
        "batches": st.integers(1, 400), "num_iterations": st.integers(1, 4), "weight_sync_steps": st.integers(1, 6),
        "tasks_per_step": st.integers(1, 40), "num_generations": st.integers(2, 16), "eval_on_start": st.booleans(),
        "num_generations_eval": st.integers(1, 3),
    }
)  # fmt: skip


@pytest.mark.config_key("eval_steps")
@given(sizes=SIZES, heldout=st.integers(1, 500))
def test_auto_is_even_within_its_share_and_on_published_weights(sizes: dict[str, Any], heldout: int) -> None:
    batches = sizes.pop("batches")
    found = cadence(heldout, max_steps=batches * sizes["num_iterations"], **sizes)
    steps = found.steps()
    assert found.count == len(steps) <= MOST_EVALUATIONS + sizes["eval_on_start"]
    assert list(steps) == [step for step in range(found.max_steps + 1) if found.due(step)]
    unit = math.lcm(sizes["num_iterations"], sizes["weight_sync_steps"])
    assert all(step % unit == 0 for step in steps[:-1])
    assert steps[-1] == found.max_steps
    assert found.share <= MOST_SHARE or found.count == 1 + sizes["eval_on_start"], "start and end are always there"
    gaps = [b - a for a, b in zip((0, *steps), steps, strict=False) if b]
    assert all(gap == found.every for gap in gaps[:-1])
    assert len(gaps) == 1 or 0.5 * found.every <= gaps[-1] <= 1.5 * found.every


@pytest.mark.parametrize(
    ("heldout", "keys", "steps"),
    [
        (10, {"max_steps": 100}, tuple(range(0, 101, 5))),
        (100, {"max_steps": 100}, (0, 50, 100)),
        (200, {"max_steps": 100}, (0, 100)),
        (40, {"max_steps": 50, "tasks_per_step": 8}, (0, 7, 14, 21, 28, 35, 42, 50)),
        (40, {"max_steps": 50, "tasks_per_step": 8, "eval_on_start": False}, (6, 12, 18, 24, 30, 36, 42, 50)),
        (8, {"max_steps": 1}, (0, 1)),
    ],
    ids=str,
)
def test_auto_by_example(heldout: int, keys: dict[str, Any], steps: tuple[int, ...]) -> None:
    assert cadence(heldout, **keys).steps() == steps


@pytest.mark.parametrize(
    ("every", "steps"), [(0, (0, 20)), (20, (0, 20)), (50, (0, 20)), (7, (0, 7, 14, 20)), (6, (0, 6, 12, 18, 20))]
)
def test_a_number_is_taken_as_it_is_whatever_it_costs(every: int, steps: tuple[int, ...]) -> None:
    found = cadence(200, max_steps=20, eval_steps=every)
    assert found.steps() == steps
    assert found.count == len(steps)


def test_nothing_held_out_is_never_evaluated() -> None:
    assert cadence(0, heldout_fraction=0.0).count == 0
    assert cadence(0, heldout_fraction=0.0).steps() == ()


def test_the_plan_says_how_often_and_for_which_share() -> None:
    line = batch_arithmetic(Config(model="m", tasks="t", max_steps=50, tasks_per_step=8), heldout_tasks=40)[-1]
    assert (
        line == "held out  40 tasks x 1 answer every 7 steps (auto: 9.1 % of the sampled tokens) and before the first"
    )
    explicit = batch_arithmetic(Config(model="m", tasks="t", max_steps=50, eval_steps=10), heldout_tasks=40)[-1]
    assert explicit == "held out  40 tasks x 1 answer every 10 steps and before the first"


def test_evaluation_sets_cost_as_much_and_the_guard_looks_at_its_own() -> None:
    keys: dict[str, Any] = {"max_steps": 100, "tasks_per_step": 8, "eval_sets": {"own": "own.jsonl"}}
    config = Config(model="m", tasks="t", **keys)
    alone = cadence_of(config, Answered(40))
    beside = cadence_of(config, answered_tasks("eval_accuracy", 40, {"own": 160}))
    assert beside.count < alone.count, "the cap is on all answers"
    assert beside.share <= MOST_SHARE
    assert answered_tasks("eval/own/accuracy", 40, {"own": 160}) == Answered(160, 40)


def test_sets_are_evaluated_where_nothing_of_the_tasks_is_held_out() -> None:
    config = Config(model="m", tasks="t", heldout_fraction=0.0, eval_sets={"own": "own.jsonl"})
    assert cadence_of(config, answered_tasks("eval/own/accuracy", 0, {"own": 20})).count > 1


@pytest.mark.config_key("eval_tasks")
def test_an_evaluation_asks_no_more_tasks_than_leave_six_of_them() -> None:
    """A config of two keys: 3,200 rollouts pay for 355 answers."""
    config = Config(model="m", tasks="t")
    assert most_tasks(config) == 59
    assert cadence_of(config, Answered(most_tasks(config))).count == 6
    assert judge_arming(config, heldout=Answered(59), metric="eval_accuracy").armed  # type: ignore[union-attr]
    every_time = Config(model="m", tasks="t", eval_tasks=100)
    assert not judge_arming(every_time, heldout=Answered(100), metric="eval_accuracy").armed  # type: ignore[union-attr]


def test_eval_tasks_by_hand_and_at_the_edges() -> None:
    assert most_tasks(Config(model="m", tasks="t", eval_tasks=7)) == 7
    assert most_tasks(Config(model="m", tasks="t", eval_steps=10)) == 200, "who chooses the cadence chooses the cost"
    assert most_tasks(Config(model="m", tasks="t", max_steps=1)) == 20
    assert most_tasks(Config(model="m", tasks="t", max_steps=10_000)) == 200
    assert most_tasks(Config(model="m", tasks="t", num_generations_eval=2)) == 29
