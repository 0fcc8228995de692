"""Silent failure 22: truncated answers are masked in the loss but still counted below it, so that steps shrink with truncation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from silent_kit import gradient, make_learner, sampled, tiny_net
from torch import Tensor

from surefoot.learner import grpo
from surefoot.maths.packing import make_batch, step_totals
from surefoot.records import LENGTH, STOP, TrainSample


def samples_with_truncation(net: Any) -> list[TrainSample]:
    """Every third answer was cut by the limit."""
    return [replace(s, finish_reason=LENGTH if i % 3 == 0 else STOP) for i, s in enumerate(sampled(net))]


def gradient_of(samples: list[TrainSample], loss_type: str, *, mask_truncated: bool) -> Tensor:
    learner = make_learner(tiny_net(), loss={"loss_type": loss_type}, mask_truncated=mask_truncated)
    learner.learn(samples)
    return gradient(learner)


def check(loss_type: str) -> None:
    """Masking truncated answers is the same as never having had them."""
    samples = samples_with_truncation(tiny_net())
    masked = gradient_of(samples, loss_type, mask_truncated=True)
    absent = gradient_of([s for s in samples if s.finish_reason != LENGTH], loss_type, mask_truncated=False)
    torch.testing.assert_close(masked, absent, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
def test_the_denominator_counts_the_tokens_that_carry_loss(loss_type: str) -> None:
    check(loss_type)


def test_all_masks_of_a_row_come_from_one_object() -> None:
    samples = samples_with_truncation(tiny_net())
    batch, _ = make_batch(samples, pad_token_id=0)
    totals = step_totals(samples, max_completion_length=8, mask_truncated=True)
    mask = batch.mask & ~batch.truncated.unsqueeze(1)
    assert (totals.tokens, totals.rows) == (int(mask.sum()), int(mask.any(1).sum()))


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_planted_count_taken_before_masking_is_seen(monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:
    def early(samples: Any, *, max_completion_length: int, mask_truncated: bool) -> Any:
        return step_totals(samples, max_completion_length=max_completion_length)

    monkeypatch.setattr(grpo, "step_totals", early)
    with pytest.raises(AssertionError):
        check(loss_type)
