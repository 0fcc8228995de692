"""Silent failure 21: everything after the stop token counts as sampled, so that all completions look equally long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from silent_kit import LONGEST, STOP_ID, TASKS, VOCAB, make_engine, make_learner, make_runtime, sampled, tiny_net

from surefoot.errors import InvariantError
from surefoot.guards.invariants import check_groups
from surefoot.learner import grpo
from surefoot.maths.packing import make_batch
from surefoot.records import STOP, Group


def check(groups: list[Group]) -> None:
    check_groups(groups, vocab_size=VOCAB, stop_ids=frozenset({STOP_ID}))


def collected() -> list[Group]:
    groups = make_runtime(make_engine(tiny_net(3)), size=16).collect(TASKS, step=1)
    assert any(r.finish_reason == STOP and r.sampled_tokens < LONGEST for g in groups for r in g.rollouts)
    return groups


def test_a_completion_ends_with_its_first_stop_token() -> None:
    groups = collected()
    check(groups)
    for rollout in (r for g in groups for r in g.rollouts):
        ids = rollout.turns[0].completion_ids
        ended = ids.index(STOP_ID) + 1 if STOP_ID in ids else LONGEST
        assert len(ids) == ended


def test_planted_tail_of_stop_tokens_is_refused() -> None:
    def filled(group: Group) -> Group:
        """The engine hands over its padded rows as they are."""
        turns = [r.turns[0] for r in group.rollouts]
        longer = [
            replace(
                t, completion_ids=(*t.completion_ids, *[STOP_ID] * (LONGEST - len(t.completion_ids))),
                logprobs=(*t.logprobs, *[-0.5] * (LONGEST - len(t.logprobs))),
            )
            for t in turns
        ]  # fmt: skip
        return replace(
            group, rollouts=tuple(replace(r, turns=(t,)) for r, t in zip(group.rollouts, longer, strict=True))
        )

    with pytest.raises(InvariantError):
        check([filled(group) for group in collected()])


def test_planted_mask_over_the_whole_width_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(samples: Any, **keys: Any) -> Any:
        batch, stats = make_batch(samples, **keys)
        return replace(batch, mask=torch.ones_like(batch.mask)), stats

    net = tiny_net(3)
    samples = sampled(net, size=16)
    monkeypatch.setattr(grpo, "make_batch", whole)
    with pytest.raises(InvariantError, match="trains"):
        make_learner(net).learn(samples)
