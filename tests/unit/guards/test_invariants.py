"""Each invariant: what is well-formed passes and is counted, and every way to break it is refused by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from surefoot.errors import InvariantError, NumericsError
from surefoot.guards import invariants
from surefoot.learner.samples import to_samples
from surefoot.maths.packing import Batch, make_batch
from surefoot.records import STOP, Group, Rollout, Task, TrainSample, Turn

STOPS = frozenset({2})


def check_groups(groups: list[Group]) -> int:
    return invariants.check_groups(groups, vocab_size=50, stop_ids=STOPS)


def with_turn(group: Group, index: int, **changes: Any) -> Group:
    """The same group, one turn of one sibling changed."""
    rollouts = list(group.rollouts)
    turn = dataclasses.replace(rollouts[index].turns[0], **changes)
    rollouts[index] = dataclasses.replace(rollouts[index], turns=(turn, *rollouts[index].turns[1:]))
    return Group(group.task, group.id, tuple(rollouts))


# -- groups -----------------------------------------------------------------------------------------


def test_good_groups_pass_and_are_counted(make_group: Any) -> None:
    dead = Group(Task(id="d", prompt="?"), "d", (Rollout("d", "d", 0, (), failure="engine_down"),))
    assert check_groups([make_group("a", [1.0, 0.0]), make_group("b", [None, 0.0]), dead]) == 3


def test_a_token_at_the_edge_of_the_vocabulary_passes(make_group: Any) -> None:
    assert check_groups([make_group("a", [1.0, 0.0], completions=[(49, 0, 2), (1, 2)])]) == 1


@pytest.mark.parametrize("token", [50, -1])
def test_a_token_outside_the_vocabulary_is_refused(token: int, make_group: Any) -> None:
    with pytest.raises(InvariantError, match=r"rollout=1 holds a token outside 0\.\.49"):
        check_groups([make_group("a", [1.0, 0.0], completions=[(9, 2), (token, 2)])])


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, math.inf, 0.5])
def test_a_logprob_that_is_not_one_is_refused(logprob: float, make_group: Any) -> None:
    bad = with_turn(make_group("a", [1.0, 0.0], completions=[(9, 2), (8, 2)]), 0, logprobs=(-1.0, logprob))
    with pytest.raises(InvariantError, match="logprob that is not one"):
        check_groups([bad])


def test_a_stop_without_a_stop_token_is_refused(make_group: Any) -> None:
    with pytest.raises(InvariantError, match="says stop but ends on 9"):
        check_groups([make_group("a", [1.0, 0.0], completions=[(8, 2), (8, 9)], finish=STOP)])


def test_siblings_with_different_prompts_are_refused(make_group: Any) -> None:
    with pytest.raises(InvariantError, match="different prompts"):
        check_groups([with_turn(make_group("a", [1.0, 0.0]), 1, prompt_ids=(4, 10, 12, 5))])


def test_a_sibling_numbered_twice_is_refused(make_group: Any) -> None:
    group = make_group("a", [1.0, 0.0])
    twice = Group(group.task, group.id, (group.rollouts[0], dataclasses.replace(group.rollouts[1], index=0)))
    with pytest.raises(InvariantError, match="numbers a sibling twice"):
        check_groups([twice])


def test_two_groups_under_one_id_are_refused(make_group: Any) -> None:
    with pytest.raises(InvariantError, match="group ids repeat"):
        check_groups([make_group("a", [1.0, 0.0], id="g"), make_group("b", [1.0, 0.0], id="g")])


def two_turns(second_prompt: tuple[int, ...]) -> Group:
    first = Turn((4, 9, 5), (11, 2), (-0.1, -0.2), 0, finish_reason=STOP)
    second = Turn(second_prompt, (13, 2), (-0.4, -0.5), 0, finish_reason=STOP)
    return Group(Task(id="a", prompt="?"), "g", (Rollout("a", "g", 0, (first, second), reward=1.0),))


@pytest.mark.parametrize(
    ("prompt", "good"),
    [
        ((4, 9, 5, 11, 2, 6, 30, 5), True),
        ((4, 9, 5, 11, 2), True),
        ((4, 9, 5, 12, 2, 6, 30, 5), False),
        ((4, 9, 5, 11), False),
    ],
    ids=["tool reply appended", "nothing between", "history rewritten", "history cut"],
)
def test_a_later_turn_extends_the_tokens_before_it(prompt: tuple[int, ...], good: bool) -> None:
    if good:
        assert check_groups([two_turns(prompt)]) == 1
        return
    with pytest.raises(InvariantError, match="rewrote its history"):
        check_groups([two_turns(prompt)])


# -- samples ----------------------------------------------------------------------------------------


def pair(make_group: Any) -> tuple[list[TrainSample], list[Group]]:
    groups = [make_group("a", [1.0, 0.0]), make_group("b", [0.0, 3.0]), two_turns((4, 9, 5, 11, 2, 6, 30, 5))]
    return to_samples(groups, scale="group"), groups


def test_samples_made_of_their_rollouts_pass_and_are_counted(make_group: Any) -> None:
    samples, groups = pair(make_group)
    assert invariants.check_samples(samples, groups) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group": "elsewhere"}, "belongs to no rollout"),
        ({"item_id": "b"}, "belongs to no rollout"),
        ({"index": 7}, "belongs to no rollout"),
        ({"sampled": (True, True, False)}, "would train 2 tokens, the policy sampled 3"),
        ({"completion_ids": (10, 21, 2)}, "they differ"),
        ({"completion_ids": (20, 10, 2)}, "they differ"),
        ({"logprobs": (-1.0, -1.0, -0.9)}, "other logprobs"),
        ({"reward": 0.5}, "another reward or version"),
        ({"trainer_version": 1}, "another reward or version"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_sample_that_is_not_its_rollout_is_refused(changes: dict[str, Any], words: str, make_group: Any) -> None:
    samples, groups = pair(make_group)
    with pytest.raises(InvariantError, match=words):
        invariants.check_samples([dataclasses.replace(samples[0], **changes), *samples[1:]], groups)


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_off_by_one_is_refused_in_both_directions(shift: int, make_group: Any) -> None:
    samples, groups = pair(make_group)
    mask = samples[4].sampled
    moved = dataclasses.replace(samples[4], sampled=mask[shift:] + mask[:shift])
    with pytest.raises(InvariantError, match="would train"):
        invariants.check_samples([*samples[:4], moved], groups)


def test_a_sample_with_another_prompt_is_refused(make_group: Any) -> None:
    """The tokens are right and stand behind a question that was never asked."""
    samples, groups = pair(make_group)
    with pytest.raises(InvariantError):
        invariants.check_samples([dataclasses.replace(samples[0], prompt_ids=(4, 10, 5)), *samples[1:]], groups)


@pytest.mark.parametrize("damage", [lambda s: s[1:], lambda s: [s[0], *s]], ids=["lost", "doubled"])
def test_a_lost_or_doubled_sample_is_refused(damage: Callable[..., Any], make_group: Any) -> None:
    samples, groups = pair(make_group)
    with pytest.raises(InvariantError):
        invariants.check_samples(damage(samples), groups)


# -- advantages -------------------------------------------------------------------------------------


def weighed(rewards: list[float], advantages: list[float], *, group: str = "g", item: str = "a") -> list[TrainSample]:
    return [
        TrainSample(item, 0, group, (4,), (9, 2), (True, True), (-1.0, -1.0), reward=r, advantage=a, index=i)
        for i, (r, a) in enumerate(zip(rewards, advantages, strict=True))
    ]


@pytest.mark.parametrize("scale", ["group", "batch", "rank", "none"])
def test_our_own_advantages_pass_at_every_scale(scale: str, make_group: Any) -> None:
    groups = [make_group("a", [0.1, 0.1, 0.1]), make_group("b", [1e6, -3.0, 7.0, 7.0]), make_group("c", [1e-9, 0.0])]
    assert invariants.check_advantages(to_samples(groups, scale=scale)) == 3


@pytest.mark.parametrize(
    ("rewards", "advantages", "words"),
    [
        ([1.0, 1.0], [0.1, -0.1], "equal rewards but advantages"),
        ([0.1] * 3, [1e-17, 0.0, 0.0], "equal rewards but advantages"),
        ([1.0, 0.0], [1.0, -0.5], "add up to 0.5"),
        ([1.0, 0.0], [-1.0, 1.0], "sign is turned round"),
        ([3.0, 2.0, 1.0], [0.5, 0.7, -1.2], "lower reward the higher advantage"),
    ],
)
def test_advantages_that_do_not_compare_siblings_are_refused(
    rewards: list[float], advantages: list[float], words: str
) -> None:
    with pytest.raises(InvariantError, match=words):
        invariants.check_advantages(weighed(rewards, advantages))


def test_a_group_of_two_tasks_is_refused() -> None:
    with pytest.raises(InvariantError, match="mixes tasks"):
        invariants.check_advantages(weighed([1.0], [0.5]) + weighed([0.0], [-0.5], item="b"))


def test_sums_are_not_asked_for_where_they_are_not_promised() -> None:
    assert invariants.check_advantages(weighed([1.0, 0.0], [1.0, 0.0]), centred=False) == 1


@pytest.mark.parametrize(
    ("rewards", "advantages"),
    [([1.0, 0.0], [0.0, 0.0]), ([1.0, 1.0, 0.0], [1.5, -0.5, -1.0])],
    ids=["different rewards, no advantage", "equal rewards, different advantages"],
)
def test_siblings_are_told_apart_by_reward_and_by_nothing_else(rewards: list[float], advantages: list[float]) -> None:
    with pytest.raises(InvariantError):
        invariants.check_advantages(weighed(rewards, advantages))


# -- batches ----------------------------------------------------------------------------------------


def packed(make_group: Any) -> tuple[Batch, list[TrainSample]]:
    samples, _ = pair(make_group)
    return make_batch(samples, pad_token_id=0)[0], samples


def test_a_batch_of_its_samples_passes_and_its_tokens_are_counted(make_group: Any) -> None:
    batch, samples = packed(make_group)
    assert invariants.check_batch(batch, samples) == sum(s.trained_tokens for s in samples) == 16


def edited(batch: Batch, name: str, row: int, column: int, value: int) -> Batch:
    tensor = getattr(batch, name).clone()
    tensor[row, column] = value
    return dataclasses.replace(batch, **{name: tensor})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda b: dataclasses.replace(b, mask=b.mask.roll(1, 1)), "trained tokens must be"),
        (lambda b: dataclasses.replace(b, mask=b.mask.roll(-1, 1)), "trained tokens must be"),
        (lambda b: dataclasses.replace(b, mask=torch.ones_like(b.mask)), "trained tokens must be"),
        (lambda b: dataclasses.replace(b, mask=b.completion_ids != 0), "trained tokens must be"),
        (lambda b: edited(b, "completion_ids", 1, 0, 33), "other tokens than its sample"),
        (lambda b: edited(b, "input_ids", 0, 4, 33), "not prompt followed by completion"),
        (lambda b: edited(b, "input_ids", 0, 0, 33), "not prompt followed by completion"),
        (lambda b: dataclasses.replace(b, prompt_lens=b.prompt_lens + 1), "other tokens than its sample"),
        (lambda b: b.rows([0, 1, 2, 3]), "4 rows for 5 samples"),
        (lambda b: b.rows([1, 0, 2, 3, 4]), "other tokens than its sample"),
        (lambda b: dataclasses.replace(b, advantages=b.advantages.roll(1)), "row of a carries another row's advantage"),
        (lambda b: dataclasses.replace(b, advantages=b.advantages * 0.999), "row of a carries another row's advantage"),
        (lambda b: edited(b, "logprobs", 4, 1, -3), "row of a carries another row's advantage or logprobs"),
    ],
    ids=[
        "late",
        "early",
        "all",
        "from the pad id",
        "token",
        "input",
        "prompt",
        "prompt length",
        "row lost",
        "rows swapped",
        "advantages of others",
        "advantages scaled",
        "a logprob",
    ],
)
def test_a_batch_that_would_train_something_else_is_refused(
    damage: Callable[[Batch], Batch], words: str, make_group: Any
) -> None:
    batch, samples = packed(make_group)
    with pytest.raises(InvariantError, match=words):
        invariants.check_batch(damage(batch), samples)


# -- versions and parity ------------------------------------------------------------------------------


def test_samples_of_the_current_version_pass() -> None:
    assert invariants.check_fresh(weighed([1.0, 0.0], [1.0, -1.0]), 0) == 2


def test_a_stale_sample_is_named_with_both_versions() -> None:
    with pytest.raises(
        InvariantError, match=r"2 of 2 samples come from version 0.*learner is at 3 and max_staleness is 0 \(first: a\)"
    ):
        invariants.check_fresh(weighed([1.0, 0.0], [1.0, -1.0]), 3)


@pytest.mark.parametrize("gap", [0.0, 1e-5, 1e-4])
def test_a_small_gap_passes(gap: float) -> None:
    invariants.check_parity(gap, 1e-4, ["a"], 0)


@pytest.mark.parametrize("gap", [1.1e-4, 3.0, math.inf, math.nan])
def test_a_gap_or_a_gap_that_is_no_number_is_refused(gap: float) -> None:
    with pytest.raises(NumericsError, match=r"at version 5 .*tasks a, b, c \.\.\."):
        invariants.check_parity(gap, 1e-4, ["a", "b", "c", "d"], 5)
