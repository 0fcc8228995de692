"""PASS needs every planned step, evidence that something was learned, and the target; a missing number is no pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from surefoot.guards.verdict import LearningEvidence, RunJudgement, compare
from surefoot.guards.verdict import judge_run as real_judge_run
from surefoot.records import Verdict

TARGET = ("eval_accuracy", 0.85)
LEARNED = LearningEvidence(
    1e-4, groups=20, differing=12, changed_entries=900, metric="eval_accuracy", measured=True,
    change=compare([0.0] * 80, [1.0] * 40 + [0.0] * 40),
)  # fmt: skip
NEVER = dataclasses.replace(LEARNED, change=None, measured=False)
WORSE = dataclasses.replace(LEARNED, change=compare([1.0] * 40 + [0.0] * 40, [0.0] * 80))


def judge_run(**facts: Any) -> RunJudgement:
    """Of a run that learned, where nothing else is said."""
    return real_judge_run(**({"evidence": LEARNED} | facts))


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


# -- evidence that something was learned ------------------------------------------------------------


def without(**facts: Any) -> RunJudgement:
    evidence = dataclasses.replace(LEARNED, **facts)
    return judge_run(planned=5, executed=5, target=TARGET, metrics={"eval_accuracy": 0.9}, evidence=evidence)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"learning_rate": 0.0, "changed_entries": 0}, "nothing was learned: learning_rate = 0"),
        ({"learning_rate": 0.0, "changed_entries": 0, "differing": 0}, "nothing was learned: learning_rate = 0"),
        (
            {"differing": 0, "changed_entries": 0},
            "nothing was learned: all rewards were equal, in none of 20 groups did they differ",
        ),
        (
            {"differing": 0},
            "nothing was learned: all rewards were equal, in none of 20 groups did they differ",
        ),  # weight decay moves too
        ({"changed_entries": 0}, "nothing was learned: no parameter entry ever changed"),
        ({"changed_entries": 0, "channels": ("beta_replay",)}, "nothing was learned: no parameter entry ever changed"),
    ],
    ids=str,
)
def test_a_run_that_learned_nothing_fails_with_that_as_its_first_reason(facts: dict[str, Any], said: str) -> None:
    judgement = without(**facts)
    assert judgement.status is Verdict.FAIL, "whatever was reached, it was not by training"
    assert judgement.reasons[0] == said
    assert "all 5 planned steps ran" in judgement.reasons


def test_a_channel_that_needs_no_rewards_may_teach_where_all_are_equal() -> None:
    judgement = without(differing=0, channels=("beta_replay",))
    assert judgement.status is Verdict.PASS
    assert "all rewards were equal: only beta_replay trained" in judgement.reasons


def test_steps_that_were_refused_and_rollouts_nobody_graded_are_the_first_reason_too() -> None:
    refused = judge_run(planned=2, executed=2, target=None, metrics={}, refused=2)
    assert refused.reasons[0] == "nothing was learned: none of 2 updates was finite"
    ungraded = judge_run(planned=2, executed=2, target=None, metrics={}, samples=0)
    assert ungraded.status is Verdict.FAIL
    assert ungraded.reasons[0] == "nothing was learned: no rollout ever got a verdict"


def test_a_model_that_got_worse_fails_even_when_the_target_was_reached() -> None:
    judgement = judge_run(planned=5, executed=5, target=TARGET, metrics={"eval_accuracy": 0.9}, evidence=WORSE)
    assert judgement.status is Verdict.FAIL
    assert judgement.reasons[0].startswith("worse than the model you started with: eval_accuracy 0.5 -> 0, noise ±0.15")
    assert "eval_accuracy is 0.9, target 0.85" in judgement.reasons


@pytest.mark.parametrize(
    ("evidence", "said"),
    [
        (LEARNED, "better than the model you started with: eval_accuracy 0 -> 0.5, noise ±0.15 at 80 tasks"),
        (
            dataclasses.replace(LEARNED, change=compare([1.0] * 5 + [0.0] * 4, [1.0] * 2 + [0.0] * 7)),
            "no measurable change (±0.59 at 9 tasks): eval_accuracy 5 of 9 -> 2 of 9",
        ),
        (NEVER, "held-out: not measured"),
        (
            dataclasses.replace(NEVER, measured=True),
            "held-out: not measured before training, nothing to compare with (see eval_on_start)",
        ),
    ],
    ids=["better", "the same", "not measured", "measured once"],
)
def test_a_pass_says_what_held_out_tasks_say(evidence: LearningEvidence, said: str) -> None:
    judgement = judge_run(planned=5, executed=5, target=None, metrics={}, evidence=evidence)
    assert judgement.status is Verdict.PASS
    assert said in judgement.reasons


def test_the_target_of_few_answers_is_a_count() -> None:
    metrics = {"eval_accuracy": 0.25, "eval_right": 1.0, "eval_n": 4.0}
    judgement = judge_run(planned=5, executed=5, target=TARGET, metrics=metrics)
    assert judgement.reasons[-1] == "eval_accuracy is 1 of 4, below the target 0.85"
