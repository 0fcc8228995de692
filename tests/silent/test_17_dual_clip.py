"""Silent failure 17: the second clip, meant for negative advantages, also lifts the trust region of positive ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surefoot.maths import losses
from surefoot.maths.losses import LossInputs, LossSettings, StepTotals, policy_loss

SETTINGS = LossSettings(epsilon=0.2, epsilon_high=0.3, delta=3.0)
CASES = [
    # ratio, advantage, loss by hand
    (0.5, 1.0, -0.5),  # worse than before and good: pull back, unclipped
    (1.1, 1.0, -1.1),  # inside
    (5.0, 1.0, -1.3),  # good and already much likelier: clipped at 1 + epsilon_high
    (0.5, -1.0, 0.8),  # bad and already less likely: clipped at 1 - epsilon
    (1.1, -1.0, 1.1),  # inside
    (2.0, -1.0, 2.0),  # bad and likelier: full pressure ...
    (5.0, -1.0, 3.0),  # ... up to delta
]


def loss(ratio: float, advantage: float) -> float:
    logp = torch.tensor([[math.log(ratio) - 1.0]], dtype=torch.float64)
    old, mask = torch.full((1, 1), -1.0, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool)
    terms = policy_loss(logp, old, torch.tensor([advantage]), mask, settings=SETTINGS, totals=StepTotals(1, 1, 1))
    return float(terms.loss)


def check() -> None:
    for ratio, advantage, expected in CASES:
        assert loss(ratio, advantage) == pytest.approx(expected), (ratio, advantage)


def test_all_cases_of_sign_and_range_are_as_by_hand() -> None:
    check()


def test_planted_second_clip_on_both_signs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(inputs: LossInputs) -> Tensor:
        ratio, logp, _, weight, _, settings = inputs
        clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.high)
        return -torch.maximum(torch.minimum(ratio * weight, clipped * weight), 3.0 * weight).expand_as(logp)

    monkeypatch.setitem(losses.LOSSES, "dapo", replace(losses.LOSSES["dapo"], objective=both))
    with pytest.raises(AssertionError):
        check()


def test_planted_clip_before_the_advantage_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(inputs: LossInputs) -> Tensor:
        ratio, logp, _, weight, _, settings = inputs
        clipped = ratio.clamp(1 - settings.epsilon, 1 + settings.high)
        return -(torch.minimum(ratio, clipped) * weight).expand_as(logp)

    monkeypatch.setitem(losses.LOSSES, "dapo", replace(losses.LOSSES["dapo"], objective=early))
    with pytest.raises(AssertionError):
        check()
