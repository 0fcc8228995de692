"""The learning rate as a function of the step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from surefoot.errors import InvariantError
from surefoot.learner.schedule import learning_rate_at


def rates(kind: str, *, warmup: int, steps: int) -> list[float]:
    return [learning_rate_at(s, peak=2.0, kind=kind, warmup_steps=warmup, max_steps=steps) for s in range(1, steps + 1)]


@pytest.mark.config_key("lr_scheduler_type")
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [2.0, 2.0, 2.0, 2.0]),
        ("linear", [2.0, 1.5, 1.0, 0.5]),
        ("cosine", [2.0, 1.7071067811865475, 1.0, 0.2928932188134524]),
    ],
)
def test_the_shape_is_the_named_one(kind: str, expected: list[float]) -> None:
    assert rates(kind, warmup=0, steps=4) == pytest.approx(expected)


@pytest.mark.config_key("warmup_steps")
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_warm_up_rises_in_equal_parts_to_the_peak_and_never_starts_at_zero(kind: str) -> None:
    got = rates(kind, warmup=4, steps=8)
    assert got[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert got[4] == pytest.approx(2.0), "the first step after warm-up has the peak, whatever comes later"


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3, 8, 20])
def test_no_planned_step_has_a_rate_of_zero(kind: str, warmup: int) -> None:
    assert min(rates(kind, warmup=warmup, steps=8)) > 0


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_falls_strictly_after_warm_up(kind: str) -> None:
    got = rates(kind, warmup=2, steps=12)[2:]
    assert all(later < earlier for earlier, later in pairwise(got))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("step", [0, -1, 5, 400])
def test_a_step_outside_the_schedule_has_no_rate(kind: str, step: int) -> None:
    """Behind its end a linear rate is negative: step 6 of 4 was -0.5 of the peak, and unlearned."""
    with pytest.raises(InvariantError, match=f"optimiser step {step} has no learning rate"):
        learning_rate_at(step, peak=2.0, kind=kind, warmup_steps=1, max_steps=4)
