"""Silent failure 24: each microbatch divides by its own token count, so that tokens in short ones weigh more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import gradient, make_learner, sampled, tiny_net

from surefoot.learner.grpo import GRPOLearner
from surefoot.maths.packing import step_totals

LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo"]
SIZES = [1, 2, 5, 0]  # 5 does not divide 12: the last microbatch is shorter


def step(loss_type: str, size: int) -> tuple[torch.Tensor, float]:
    net = tiny_net()
    learner = make_learner(net, loss={"loss_type": loss_type, "beta": 0.05}, microbatch_size=size)
    metrics = learner.learn(sampled(net)).metrics
    return gradient(learner), metrics["loss"]


def check(loss_type: str) -> None:
    whole, loss = step(loss_type, 12)
    for size in SIZES:
        cut, cut_loss = step(loss_type, size)
        torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-6 * float(whole.abs().max()) + 1e-6)
        assert cut_loss == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_the_gradient_does_not_depend_on_the_cut(loss_type: str) -> None:
    check(loss_type)


def test_the_completions_differ_in_length_so_that_a_mean_of_means_would_show() -> None:
    assert len({len(s.completion_ids) for s in sampled(tiny_net())}) > 2


@pytest.mark.parametrize("loss_type", ["bnpo", "dapo"])
def test_planted_mean_of_microbatch_means_is_seen(monkeypatch: pytest.MonkeyPatch, loss_type: str) -> None:
    real = GRPOLearner._backward

    def own_mean(self: GRPOLearner, piece: Any, totals: Any, iteration: int) -> Any:
        mine = step_totals(piece, max_completion_length=totals.max_completion_length)
        pieces = 12 // (self.settings.microbatch_size or 12)
        return real(self, piece, mine._replace(tokens=mine.tokens * pieces, rows=mine.rows * pieces), iteration)

    monkeypatch.setattr(GRPOLearner, "_backward", own_mean)
    with pytest.raises(AssertionError):
        check(loss_type)


@pytest.mark.parametrize("loss_type", LOSSES)
def test_planted_missing_division_by_the_number_of_pieces_is_seen(
    monkeypatch: pytest.MonkeyPatch, loss_type: str
) -> None:
    real = GRPOLearner._backward

    def undivided(self: GRPOLearner, piece: Any, totals: Any, iteration: int) -> Any:
        mine = step_totals(piece, max_completion_length=totals.max_completion_length)
        return real(self, piece, mine, iteration)

    monkeypatch.setattr(GRPOLearner, "_backward", undivided)
    with pytest.raises(AssertionError):
        check(loss_type)
