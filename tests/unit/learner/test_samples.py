"""Groups become samples: the failed are left out under their reason, tool tokens carry no loss."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import PartialGroupError
from surefoot.learner.samples import drop_ungraded, split_microbatches, to_sample, to_samples
from surefoot.records import Group, Rollout, Task, TrainSample, Turn


def test_whole_groups_are_kept_as_they_are(make_group: Any) -> None:
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [0.0, 0.0])]
    for partial in ("drop", "train", "refuse"):
        kept = drop_ungraded(groups, partial=partial)
        assert kept.groups == groups
        assert not kept.dropped


@pytest.mark.config_key("partial_groups")
def test_a_group_that_lost_siblings_is_dropped_with_all_its_rollouts_counted(make_group: Any) -> None:
    whole, torn = make_group("a", [1.0, 0.0]), make_group("b", [1.0, None, 0.0])
    kept = drop_ungraded([whole, torn], partial="drop")
    assert kept.groups == [whole]
    assert kept.dropped == {"timeout": 1, "partial_group": 2}


def test_survivors_are_trained_on_under_their_own_numbers(make_group: Any) -> None:
    kept = drop_ungraded([make_group("b", [1.0, None, 0.0])], partial="train")
    (group,) = kept.groups
    assert [(r.index, r.reward) for r in group.rollouts] == [(0, 1.0), (2, 0.0)]
    assert kept.dropped == {"timeout": 1}
    assert [s.advantage for s in to_samples(kept.groups, scale="group")] == [1.0, -1.0]


@pytest.mark.parametrize("rewards", [[1.0, None, None], [None, None, None]])
def test_fewer_than_two_survivors_have_nobody_to_compare_with(rewards: list[float | None], make_group: Any) -> None:
    kept = drop_ungraded([make_group("b", rewards)], partial="train")
    assert kept.groups == []
    assert sum(kept.dropped.values()) == 3


def test_a_refused_partial_group_is_named_with_its_reasons(make_group: Any) -> None:
    with pytest.raises(PartialGroupError, match=r"of b has 2 of 3 rollouts \(1 timeout\)"):
        drop_ungraded([make_group("a", [1.0, 0.0]), make_group("b", [1.0, None, 0.0])], partial="refuse")


def test_a_missing_reward_without_a_reason_is_counted_too() -> None:
    turn = Turn((1,), (2,), (-1.0,), 0)
    group = Group(
        Task(id="a", prompt="?"), "g", (Rollout("a", "g", 0, (turn,)), Rollout("a", "g", 1, (turn,), reward=1.0))
    )
    assert drop_ungraded([group], partial="drop").dropped == {"no_verdict": 1, "partial_group": 1}


# -- weights ------------------------------------------------------------------------------------


def test_advantages_compare_siblings_by_the_ids_on_them(make_group: Any) -> None:
    """Groups of different sizes: a fixed size would compare strangers."""
    groups = [make_group("a", [1.0, 0.0, 0.0]), make_group("b", [5.0, 5.0]), make_group("c", [9.0, 7.0])]
    samples = to_samples(groups, scale="none")
    assert [s.advantage for s in samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0, 0.0, 1.0, -1.0])
    assert [(s.item_id, s.index) for s in samples][3:5] == [("b", 0), ("b", 1)]


@pytest.mark.config_key("scale_rewards")
def test_every_scale_is_another_number(make_group: Any) -> None:
    groups = [make_group("a", [1.0, 0.0, 0.0, 0.0]), make_group("b", [4.0, 2.0])]
    firsts = {scale: to_samples(groups, scale=scale)[0].advantage for scale in ("group", "batch", "rank", "none")}
    assert len({round(value, 6) for value in firsts.values()}) == 4


def test_no_groups_make_no_samples() -> None:
    assert to_samples([], scale="group") == []


# -- provenance ---------------------------------------------------------------------------------


def test_between_two_turns_the_tools_tokens_are_kept_and_carry_no_loss() -> None:
    first = Turn((4, 9, 5), (11, 12, 2), (-0.1, -0.2, -0.3), version=7, finish_reason="stop")
    second = Turn((4, 9, 5, 11, 12, 2, 6, 30, 5), (13, 2), (-0.4, -0.5), version=6, finish_reason="length")
    third = Turn((*second.prompt_ids, 13, 2), (14,), (-0.6,), version=8, finish_reason="stop")
    rollout = Rollout("a", "g", 3, (first, second, third), reward=1.0)
    sample = to_sample(rollout, Group(Task(id="a", prompt="?", dataset="d"), "g", (rollout,)))
    assert sample.prompt_ids == (4, 9, 5)
    assert sample.completion_ids == (11, 12, 2, 6, 30, 5, 13, 2, 14)
    assert sample.sampled == (True, True, True, False, False, False, True, True, True)
    assert sample.logprobs == (-0.1, -0.2, -0.3, 0.0, 0.0, 0.0, -0.4, -0.5, -0.6)
    assert (sample.trainer_version, sample.index, sample.finish_reason, sample.dataset) == (6, 3, "stop", "d")
    assert sample.trained_tokens == rollout.sampled_tokens == 6


def test_a_rollout_without_a_verdict_cannot_become_a_sample() -> None:
    rollout = Rollout("a", "g", 0, (Turn((1,), (2,), (-1.0,), 0),))
    with pytest.raises(AssertionError, match="only rollouts with a verdict"):
        to_sample(rollout, Group(Task(id="a", prompt="?"), "g", (rollout,)))


# -- microbatches -------------------------------------------------------------------------------


def rows_of(samples: list[TrainSample], size: int, splits: int, together: int = 1) -> list[int]:
    pieces = list(split_microbatches(samples, size, splits, together=together))
    assert [s for piece in pieces for s in piece] == samples, "every row once, in order"
    return [len(piece) for piece in pieces]


def test_a_piece_is_halved_by_rows_and_rounded_up(make_group: Any) -> None:
    samples = to_samples(
        [make_group("a", [1.0] * 5), make_group("b", [1.0] * 4), make_group("c", [1.0] * 3)], scale="none"
    )
    assert [rows_of(samples, 0, n) for n in range(4)] == [[12], [6, 6], [3] * 4, [2] * 6]
    assert [rows_of(samples, 5, n) for n in range(4)] == [
        [5, 5, 2],
        [3, 2, 3, 2, 1, 1],
        [2, 2, 1, 2, 2, 1, 1, 1],
        [1] * 12,
    ]
    assert rows_of(samples, 1, 3) == [1] * 12
    assert rows_of([], 0, 2) == []


def test_what_belongs_together_is_never_split(make_group: Any) -> None:
    samples = to_samples([make_group(str(i), [1.0, 0.0]) for i in range(3)], scale="none")
    assert [rows_of(samples, 0, n, together=2) for n in range(4)] == [[6], [4, 2], [2, 2, 2], [2, 2, 2]]
