"""One step's groups in numbers: what is undefined is left out, never 0."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from surefoot.records import LENGTH, Group, Rollout, Task, Turn
from surefoot.tracking.metrics import group_metrics


def test_rewards_are_averaged_over_verdicts_and_groups_told_apart(make_group: Any) -> None:
    metrics = group_metrics([make_group("a", [1.0, 0.0]), make_group("b", [1.0, 1.0]), make_group("c", [0.0, None])])
    assert metrics["reward"] == pytest.approx(3 / 5)
    assert metrics["reward_std"] == pytest.approx((0.5 + 0 + 0) / 3)
    assert metrics["frac_reward_zero_std"] == pytest.approx(2 / 3)
    assert (metrics["groups/scored"], metrics["groups/all_correct"], metrics["groups/all_wrong"]) == (3.0, 1.0, 1.0)
    assert metrics["failures/timeout"] == 1.0


def test_equal_rewards_have_a_spread_of_exactly_zero(make_group: Any) -> None:
    metrics = group_metrics([make_group("a", [0.1, 0.1, 0.1])])
    assert (metrics["reward_std"], metrics["frac_reward_zero_std"]) == (0.0, 1.0)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_when_every_reward_is_equal_nobody_can_say_whether_all_were_right(value: float, make_group: Any) -> None:
    metrics = group_metrics([make_group("a", [value, value]), make_group("b", [value, value])])
    assert "groups/all_correct" not in metrics
    assert "groups/all_wrong" not in metrics


def test_without_a_single_verdict_there_is_no_reward_metric(make_group: Any) -> None:
    metrics = group_metrics([make_group("a", [None, None])])
    assert not any(name.startswith(("reward", "frac_", "groups/scored")) for name in metrics)
    assert metrics["failures/timeout"] == 2.0
    assert metrics["num_tokens"] == 6.0, "what was sampled was sampled"


def test_lengths_come_from_sampled_tokens_and_ends_from_finish_reasons(make_group: Any) -> None:
    ended = make_group("a", [1.0, 0.0], completions=[(7, 2), (7, 8, 9, 2)])
    cut = make_group("b", [0.0, 0.0], completions=[(7,) * 6, (7,) * 6], finish=LENGTH)
    metrics = group_metrics([ended, cut])
    assert metrics["completions/mean_length"] == 4.5
    assert (metrics["completions/min_length"], metrics["completions/max_length"]) == (2.0, 6.0)
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["completions/mean_terminated_length"] == 3.0
    assert "completions/mean_terminated_length" not in group_metrics([cut]), "nothing ended by itself"


def test_nothing_played_has_no_lengths() -> None:
    rollout = Rollout("a", "g", 0, (), failure="engine_down")
    metrics = group_metrics([Group(Task(id="a", prompt="?"), "g", (rollout,))])
    assert not any(name.startswith("completions/") for name in metrics)
    assert metrics["failures/engine_down"] == 1.0


def test_parts_are_averaged_over_those_that_have_them(make_group: Any) -> None:
    group = make_group("a", [1.0, 0.0, 1.0])
    parts: list[dict[str, float | None]] = [{"x": 1.0, "y": None}, {"x": 0.0, "y": None}, {"y": None}]
    rollouts = tuple(dataclasses.replace(r, reward_parts=p) for r, p in zip(group.rollouts, parts, strict=True))
    metrics = group_metrics([Group(group.task, group.id, rollouts)])
    assert (metrics["rewards/x/mean"], metrics["rewards/x/std"]) == (0.5, 0.5)
    assert "rewards/y/mean" not in metrics


def test_rollouts_of_two_versions_are_counted() -> None:
    pure, mixed = Turn((1,), (2,), (-1.0,), 3), Turn((1,), (2,), (-1.0,), 3, version_end=4)
    rollouts = (Rollout("a", "g", 0, (pure,), reward=1.0), Rollout("a", "g", 1, (mixed,), reward=0.0))
    assert group_metrics([Group(Task(id="a", prompt="?"), "g", rollouts)])["groups/mixed_version"] == 1.0
