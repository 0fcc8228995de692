"""Silent failure 53: what a tool said counts as the policy's own words, and is reinforced with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from tool_kit import Box, Kit, call, play

from surefoot.errors import InvariantError
from surefoot.guards.invariants import check_samples
from surefoot.learner import samples
from surefoot.learner.samples import to_samples
from surefoot.protocols import Request
from surefoot.records import Group, Rollout, TrainSample


def asks_once(request: Request, context: str) -> str:
    return "42" if "<|tool|>" in context else call()


def played() -> Group:
    (one,) = play(asks_once, Kit(lambda rollout: Box(lambda *_: "the answer is 42")))
    return one.group


def test_tokens_of_tools_carry_no_loss_and_every_sampled_token_does() -> None:
    group = played()
    weighed = to_samples([group], scale="group")
    assert check_samples(weighed, [group]) == 2
    for sample, rollout in zip(weighed, group.rollouts, strict=True):
        read = (
            len(rollout.turns[1].prompt_ids) - len(rollout.turns[0].prompt_ids) - len(rollout.turns[0].completion_ids)
        )
        assert read > 10
        assert len(sample.completion_ids) - sample.trained_tokens == read
        assert all(p == 0.0 for p, own in zip(sample.logprobs, sample.sampled, strict=True) if not own)


def test_planted_mask_over_everything_after_the_prompt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = samples.to_sample

    def everything(rollout: Rollout, group: Group) -> TrainSample:
        sample = honest(rollout, group)
        return dataclasses.replace(sample, sampled=(True,) * len(sample.sampled))

    monkeypatch.setattr(samples, "to_sample", everything)
    group = played()
    weighed: Sequence[TrainSample] = to_samples([group], scale="group")
    with pytest.raises(InvariantError, match=r"would train \d+ tokens, the policy sampled \d+"):
        check_samples(weighed, [group])
