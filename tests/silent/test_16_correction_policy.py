"""Silent failure 16: the mismatch correction is taken from the moving policy, so that it counts the update twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.maths import losses
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss
from surefoot.maths.stats import finish

OLD = torch.tensor([[-1.0, -0.7, -2.0], [-0.4, -1.1, 0.0]])
SAMPLER = OLD + torch.tensor([[0.05, -0.02, 0.01], [-0.1, 0.03, 0.0]])  # a small, honest mismatch
MASK = torch.tensor([[True, True, True], [True, True, False]])
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def used(logp: Tensor, mode: Any) -> float:
    terms = policy_loss(
        logp, OLD, torch.tensor([1.0, -1.0]), MASK, settings=LossSettings(correction=mode),
        totals=StepTotals(2, 5, 3), sampler_logp=SAMPLER,
    )  # fmt: skip
    return finish(terms.sums)["correction/used_mean"]


def check(mode: str) -> None:
    """The weight at a later inner step equals the weight at the first."""
    assert used(OLD + 0.3, mode) == used(OLD, mode) != 1.0


@pytest.mark.parametrize("mode", MODES)
def test_the_correction_does_not_change_with_inner_steps(mode: str) -> None:
    check(mode)


@pytest.mark.parametrize("mode", MODES)
def test_planted_correction_from_the_current_policy_is_seen(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    real = losses._correction
    moved = OLD + 0.3

    def doubled(gap: Tensor, mask: Tensor, settings: LossSettings) -> Any:
        return real((moved - SAMPLER).masked_fill(~MASK, 0.0), mask, settings)

    before = used(OLD, mode)
    monkeypatch.setattr(losses, "_correction", doubled)
    with pytest.raises(AssertionError):
        assert used(moved, mode) == before
