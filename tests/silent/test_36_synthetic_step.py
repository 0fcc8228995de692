"""Silent failure 36: an empty optimiser step, taken to allocate memory, spoils the bias correction of the first real ones."""

from __future__ import annotations

import pytest
import torch
from silent_kit import flat, make_learner, sampled, tiny_net

from surefoot.learner.grpo import GRPOLearner

RATE = 1e-3


def check(learner: GRPOLearner) -> None:
    """Adam's first step moves a weight by the learning rate, whatever the size of its gradient."""
    before = flat(learner.net)
    learner.learn(sampled(learner.net))
    moved = (flat(learner.net) - before).abs()
    assert float(moved[moved > 0].median()) == pytest.approx(RATE, rel=0.02)


def make() -> GRPOLearner:
    return make_learner(tiny_net(), learning_rate=RATE)


def test_the_first_update_is_as_large_as_the_rate() -> None:
    check(make())


def test_the_optimiser_has_counted_nothing_before_the_first_step() -> None:
    learner = make()
    assert learner.optimiser.state == {}
    learner.learn(sampled(learner.net))
    assert {int(state["step"]) for state in learner.optimiser.state.values()} == {1}


def test_planted_empty_step_is_seen() -> None:
    learner = make()
    for parameter in learner.net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimiser.step()
    with pytest.raises(AssertionError):
        check(learner)
