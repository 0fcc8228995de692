"""Silent failure 20: the mask is one position off, so that the first or the last token is never trained; the run still learns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.errors import InvariantError
from surefoot.learner import grpo
from surefoot.maths.packing import make_batch


def test_trained_tokens_are_the_sampled_tokens_in_number_and_place() -> None:
    net = tiny_net()
    samples = sampled(net)
    learner = make_learner(net)
    metrics = learner.learn(samples).metrics
    moving = [s for s in samples if s.advantage != 0]
    assert metrics["trained_tokens"] == learner.checked_tokens == sum(len(s.completion_ids) for s in moving) > 0
    batch, _ = make_batch(samples, pad_token_id=0)
    assert batch.mask[:, 0].all(), "the first token of every completion is trained"


@pytest.mark.parametrize("shift", [-1, 1], ids=["left", "right"])
def test_planted_shift_is_refused_at_step_1(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    def shifted(samples: Any, **keys: Any) -> Any:
        batch, stats = make_batch(samples, **keys)
        mask = batch.mask.roll(shift, dims=1)
        mask[:, 0 if shift > 0 else -1] = False
        return replace(batch, mask=mask), stats

    net = tiny_net()
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    samples = sampled(net)
    monkeypatch.setattr(grpo, "make_batch", shifted)
    with pytest.raises(InvariantError, match="by who made them"):
        make_learner(net).learn(samples)
    assert torch.equal(before, torch.cat([p.detach().flatten() for p in net.parameters()]))
