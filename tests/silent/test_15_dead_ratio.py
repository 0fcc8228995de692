"""Silent failure 15: the ratio is a constant, so that only the penalty has a gradient while the loss looks alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.maths import losses
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss

ADVANTAGES = torch.tensor([1.0, -2.0], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
TOTALS = StepTotals(rows=2, tokens=5, max_completion_length=4)
PER_TOKEN = {"dapo": 1 / 5, "bnpo": 1 / 5, "dr_grpo": 1 / 8}


def check(loss_type: Any, beta: float = 0.04) -> None:
    """At the first update every token's gradient is minus its advantage over the denominator."""
    logp = torch.tensor([[-1.0, -0.2, -3.0], [-0.5, -2.0, -9.0]], dtype=torch.float64, requires_grad=True)
    settings = LossSettings(loss_type=loss_type, beta=beta)
    terms = policy_loss(logp, logp.detach(), ADVANTAGES, MASK, settings=settings, totals=TOTALS, ref_logp=logp.detach())
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    expected = -ADVANTAGES[:, None] * MASK * PER_TOKEN[loss_type]
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("loss_type", PER_TOKEN)
def test_the_gradient_of_the_first_update_is_the_advantage(loss_type: str) -> None:
    check(loss_type)


def test_the_first_ratio_of_a_real_step_is_exactly_one_and_moves_the_weights() -> None:
    net = tiny_net()
    learner = make_learner(net)
    metrics = learner.learn(sampled(net)).metrics
    assert metrics["probs_ratio"] == 1.0
    assert metrics["grad_norm"] > 0
    assert learner.parameter_updates is not None
    assert learner.parameter_updates.still == ()


@pytest.mark.parametrize("loss_type", PER_TOKEN)
def test_planted_constant_ratio_is_seen(monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:
    monkeypatch.setattr(losses, "_ratio", lambda log_ratio, *rest: torch.zeros_like(log_ratio).exp())
    with pytest.raises(AssertionError):
        check(loss_type)
