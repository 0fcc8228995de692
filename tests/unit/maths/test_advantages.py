"""Advantages compare siblings: ids decide, constants are exactly zero, nothing is filled in."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import ConfigError, PartialGroupError, ShapeError
from surefoot.maths.advantages import compute_advantages, zero_variance

SCALES = ["group", "batch", "rank", "none"]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 0.7, 1e3, -2.2, 1e-9])
@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_a_constant_group_is_exactly_zero_at_any_float_value(scale: str, value: float, size: int) -> None:
    rewards = [value] * size + [0.0, 1.0]
    advantages = compute_advantages(rewards, ["same"] * size + ["other"] * 2, scale=scale)  # type: ignore[arg-type]
    assert advantages[:size].tolist() == [0.0] * size
    assert advantages[size] < 0 < advantages[size + 1]


def test_constant_inputs_are_chosen_to_expose_a_mean_that_rounds() -> None:
    """Teeth: with plain mean subtraction, three times 0.1 is not zero, and an unfloored std makes it 1."""
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    centred = rewards - (0.1 + 0.1 + 0.1) / 3
    assert (centred / centred.square().mean().sqrt()).abs().max().item() == pytest.approx(1.0)


def test_groups_have_zero_mean_and_unit_population_variance() -> None:
    rewards, groups = [1.0, 2.0, 4.0, 9.0, 0.0, 0.5], ["a", "a", "a", "a", "b", "b"]
    advantages = compute_advantages(rewards, groups)
    for rows in ([0, 1, 2, 3], [4, 5]):
        assert advantages[rows].mean().item() == pytest.approx(0.0, abs=1e-12)
        assert advantages[rows].square().mean().item() == pytest.approx(1.0, abs=1e-12)
    assert advantages.dtype == torch.float64


def test_known_values_of_every_scale() -> None:
    rewards, groups = [0.0, 0.0, 1.0, 3.0, 3.0], [5, 5, 5, 9, 9]
    third, std = 1 / 3, math.sqrt(2 / 9)
    batch = math.sqrt(sum((r - 1.4) ** 2 for r in rewards) / 5)
    expected = {
        "none": [-third, -third, 2 * third, 0, 0],
        "group": [-third / std, -third / std, 2 * third / std, 0, 0],
        "batch": [-third / batch, -third / batch, 2 * third / batch, 0, 0],
        "rank": [-0.5, -0.5, 1.0, 0, 0],
    }
    for scale, values in expected.items():
        torch.testing.assert_close(
            compute_advantages(rewards, groups, scale=scale),  # type: ignore[arg-type]
            torch.tensor(values, dtype=torch.float64),
        )


def test_a_zero_reward_failure_gets_its_negative_signal() -> None:
    assert compute_advantages([1.0, 0.0], ["t", "t"]).tolist() == [1.0, -1.0]


def test_dropping_a_sibling_of_one_task_leaves_the_other_task_alone() -> None:
    rewards, groups = [1.0, 0.0, 0.5, 1.0, 0.0, 0.25], ["a"] * 3 + ["b"] * 3
    whole = compute_advantages(rewards, groups)
    cut = compute_advantages(rewards[1:], groups[1:])
    assert cut[2:].tolist() == whole[3:].tolist()
    by_position = torch.tensor(rewards[1:4])  # teeth: groups of three by position mix the tasks
    assert (by_position - by_position.mean())[2].item() != pytest.approx(cut[2].item())


@settings(max_examples=60, deadline=None)
@given(
    rewards=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=24),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from(SCALES),
)
def test_advantages_follow_the_ids_through_any_order(rewards: list[float], seed: int, scale: str) -> None:
    rng = random.Random(seed)
    groups = [f"g{rng.randrange(4)}" for _ in rewards]
    order = list(range(len(rewards)))
    rng.shuffle(order)
    straight = compute_advantages(rewards, groups, scale=scale)  # type: ignore[arg-type]
    shuffled = compute_advantages([rewards[i] for i in order], [groups[i] for i in order], scale=scale)  # type: ignore[arg-type]
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-9, atol=1e-9)
    numbers = torch.tensor([int(g[1]) for g in groups])
    torch.testing.assert_close(compute_advantages(torch.tensor(rewards), numbers, scale=scale), straight)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_no_advantage_exceeds_the_root_of_the_number_of_siblings(rewards: list[float]) -> None:
    advantages = compute_advantages(rewards, [0] * len(rewards))
    assert advantages.abs().max().item() <= math.sqrt(len(rewards) - 1)
    assert abs(advantages.sum().item()) < 1e-6


def test_one_winner_among_many_reaches_the_bound() -> None:
    advantages = compute_advantages([1.0] + [0.0] * 15, [0] * 16)
    assert advantages[0].item() == pytest.approx(math.sqrt(15))


def test_rewards_that_differ_by_rounding_only_are_not_blown_up() -> None:
    advantages = compute_advantages([0.3, 0.1 + 0.2], ["a", "a"])
    assert 0 < advantages.abs().max().item() < 1e-9


def test_huge_rewards_keep_their_order_instead_of_turning_zero() -> None:
    assert compute_advantages([1e200, -1e200], [0, 0]).tolist() == [1.0, -1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_reward_is_refused_with_its_row(bad: float) -> None:
    with pytest.raises(ShapeError, match="row 1"):
        compute_advantages([0.0, bad], ["a", "a"])
    with pytest.raises(ValueError):
        zero_variance([0.0, bad], ["a", "a"])


def test_mismatched_lengths_and_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="3 rewards but 2 group ids"):
        compute_advantages([0.0, 1.0, 2.0], ["a", "a"])
    with pytest.raises(ShapeError, match="shape"):
        compute_advantages(torch.zeros(2, 2), [0, 0])
    with pytest.raises(ShapeError, match="float32"):
        compute_advantages([0.0, 1.0], torch.zeros(2))
    with pytest.raises(ShapeError, match="not numbers"):
        compute_advantages([0.0, None], ["a", "a"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="scale"):
        compute_advantages([0.0], ["a"], scale="std")  # type: ignore[arg-type]


def test_partial_groups_follow_the_stated_policy() -> None:
    rewards, groups = [1.0, 0.0, 1.0, 0.0, 0.0], ["whole", "whole", "whole", "short", "short"]
    rewards[3] = 1.0
    trained = compute_advantages(rewards, groups, expected_size=3, partial="train")
    dropped = compute_advantages(rewards, groups, expected_size=3, partial="drop")
    assert trained[3:].tolist() == [1.0, -1.0]
    assert dropped[3:].tolist() == [0.0, 0.0]
    assert dropped[:3].tolist() == trained[:3].tolist()
    with pytest.raises(PartialGroupError, match="group short has 2 of 3"):
        compute_advantages(rewards, groups, expected_size=3, partial="refuse")
    assert compute_advantages(rewards, groups, expected_size=9, partial="drop").tolist() == [0.0] * 5


def test_a_dropped_group_does_not_move_the_batch_std() -> None:
    rewards, groups = [1.0, 0.0, 500.0], ["a", "a", "short"]
    advantages = compute_advantages(rewards, groups, scale="batch", expected_size=2, partial="drop")
    assert advantages.tolist() == [1.0, -1.0, 0.0]


def test_zero_variance_groups_are_counted_by_kind() -> None:
    rewards = [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.4, 0.4, 1.0]
    groups = ["r", "r", "w", "w", "mixed", "mixed", "half", "half", "single"]
    assert zero_variance(rewards, groups) == {"groups": 5, "all_equal": 4, "all_correct": 2, "all_wrong": 1}


def test_when_all_rewards_are_equal_nobody_guesses_which_it_was() -> None:
    assert zero_variance([0.1] * 3, [0, 0, 1]) == {"groups": 2, "all_equal": 2}
    told = zero_variance([0.0] * 3, [0, 0, 1], best=1.0, worst=0.0)
    assert told == {"groups": 2, "all_equal": 2, "all_correct": 0, "all_wrong": 2}
