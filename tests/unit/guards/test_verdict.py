"""PASS needs every planned step and the target; missing or non-finite evidence is never a pass."""

from __future__ import annotations

import math

import pytest

from surefoot.guards.verdict import judge_run
from surefoot.records import Verdict

TARGET = ("eval_accuracy", 0.85)


def test_all_steps_without_a_target_pass_and_say_that_none_was_set() -> None:
    judgement = judge_run(planned=5, executed=5, target=None, metrics={})
    assert judgement.status is Verdict.PASS
    assert "no target was set" in judgement.reasons
    assert "all 5 planned steps ran" in judgement.reasons


@pytest.mark.config_key("target_metric", "target_value")
@pytest.mark.parametrize(
    ("value", "status"),
    [(0.85, Verdict.PASS), (0.9, Verdict.PASS), (math.nextafter(0.85, 0), Verdict.FAIL), (0.0, Verdict.FAIL)],
)
def test_the_target_itself_is_enough_and_less_is_not(value: float, status: Verdict) -> None:
    judgement = judge_run(planned=5, executed=5, target=TARGET, metrics={"eval_accuracy": value})
    assert judgement.status is status
    assert "eval_accuracy" in judgement.reasons[-1]
    assert "0.85" in judgement.reasons[-1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_no_pass(value: float) -> None:
    assert judge_run(planned=5, executed=5, target=TARGET, metrics={"eval_accuracy": value}).status is Verdict.FAIL


def test_a_target_that_was_never_measured_is_no_pass_and_the_known_names_are_shown() -> None:
    judgement = judge_run(planned=5, executed=5, target=TARGET, metrics={"reward": 1.0, "accuracy": 1.0})
    assert judgement.status is Verdict.FAIL
    assert "never measured (known: accuracy, reward)" in judgement.reasons[-1]
    assert "known: none" in judge_run(planned=5, executed=5, target=TARGET, metrics={}).reasons[-1]


def test_fewer_steps_than_planned_are_incomplete_whatever_was_reached() -> None:
    judgement = judge_run(planned=5, executed=4, target=TARGET, metrics={"eval_accuracy": 1.0})
    assert judgement.status is Verdict.INCOMPLETE
    assert judgement.reasons == ("4 of 5 planned steps ran",)


def test_updates_that_were_not_applied_are_told() -> None:
    judgement = judge_run(planned=5, executed=5, target=None, metrics={}, refused=2)
    assert any("2 updates were not finite" in reason for reason in judgement.reasons)


def test_a_run_none_of_whose_updates_was_applied_is_no_pass() -> None:
    """Every step ran and not one reached the weights: nothing was trained."""
    assert judge_run(planned=2, executed=2, target=None, metrics={}, refused=2).status is not Verdict.PASS
