"""Silent failure 23: a NaN in the padding survives a multiplication with the mask, since 0 times NaN is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surefoot.maths.losses import LossSettings, StepTotals, policy_loss

MASK = torch.tensor([[True, True, False], [True, False, False]])
TOTALS = StepTotals(rows=2, tokens=3, max_completion_length=3)


def run(loss_type: str, filler: float) -> tuple[Tensor, Tensor]:
    """(loss, gradient) with `filler` at every masked position of every input."""

    def poisoned(values: list[list[float]]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).masked_fill(~MASK, filler)

    logp = poisoned([[-1.0, -0.5, 0.0], [-2.0, 0.0, 0.0]]).requires_grad_()
    high = 5.0 if loss_type == "cispo" else None
    terms = policy_loss(
        logp, poisoned([[-1.1, -0.4, 0.0], [-2.2, 0.0, 0.0]]), torch.tensor([1.0, -1.0]), MASK,
        settings=LossSettings(loss_type=loss_type, beta=0.1, correction="token_truncate", epsilon_high=high),  # type: ignore[arg-type]
        totals=TOTALS, ref_logp=poisoned([[-1.2, -0.6, 0.0], [-1.9, 0.0, 0.0]]),
        sampler_logp=poisoned([[-1.0, -0.5, 0.0], [-2.1, 0.0, 0.0]]),
    )  # fmt: skip
    return terms.loss.detach(), torch.autograd.grad(terms.loss, logp)[0]


def check(loss_type: str) -> None:
    clean = run(loss_type, 0.0)
    for filler in (float("nan"), float("inf"), float("-inf"), 1e30):
        loss, gradient = run(loss_type, filler)
        assert torch.equal(loss, clean[0])
        assert torch.equal(gradient, clean[1])
        assert (gradient[~MASK] == 0).all()


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"])
def test_what_stands_at_masked_positions_does_not_matter(loss_type: str) -> None:
    check(loss_type)


def test_planted_multiplication_with_the_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real_fill = Tensor.masked_fill

    def multiply(self: Tensor, hidden: Tensor, value: float) -> Tensor:
        return (
            self * (~hidden).to(self.dtype)
            if value == 0.0 and self.is_floating_point()
            else real_fill(self, hidden, value)
        )

    clean = run("dapo", 0.0)
    assert torch.isfinite(clean[0])
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "masked_fill", multiply)
        with pytest.raises(AssertionError):
            check("dapo")
