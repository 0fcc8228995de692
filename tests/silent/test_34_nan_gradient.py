"""Silent failure 34: one NaN in a gradient is written into every weight, and the job keeps running."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import flat, make_learner, sampled, tiny_net

from surefoot.errors import NumericsError
from surefoot.learner.grpo import GRPOLearner, nonfinite_error


def poison(learner: GRPOLearner, value: float = float("nan")) -> None:
    """One entry of one gradient goes bad in the backward pass; loss and log-probabilities stay fine."""
    parameter = next(iter(learner.net.parameters()))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[3, 1] = value
        return gradient

    parameter.register_hook(spoil)


def check(learner: GRPOLearner) -> None:
    before, version = flat(learner.net), learner.version
    report = learner.learn(sampled(learner.net))
    assert torch.equal(flat(learner.net), before)
    assert (report.applied, report.version, learner.version) == (False, version, version)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_step_that_is_not_finite_never_reaches_the_weights(value: float, clip: float) -> None:
    learner = make_learner(tiny_net(), max_grad_norm=clip)
    poison(learner, value)
    check(learner)
    assert learner.optimiser.state == {}


def test_a_good_step_after_a_refused_one_is_applied() -> None:
    learner = make_learner(tiny_net())
    handle: Any = next(iter(learner.net.parameters())).register_hook(lambda g: g * float("nan"))
    check(learner)
    handle.remove()
    assert learner.learn(sampled(learner.net)).applied
    assert torch.isfinite(flat(learner.net)).all()


def test_too_many_in_a_row_end_the_run_with_the_tasks_named() -> None:
    error = nonfinite_error(sampled(tiny_net()), 3)
    assert isinstance(error, NumericsError)
    assert error.exit_code == 78
    assert "long" in str(error)


def test_planted_optimiser_that_steps_anyway_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GRPOLearner._apply

    def careless(self: GRPOLearner, *everything: Any) -> Any:
        self.optimiser.step()
        return real(self, *everything)

    monkeypatch.setattr(GRPOLearner, "_apply", careless)
    learner = make_learner(tiny_net())
    poison(learner)
    with pytest.raises(AssertionError):
        check(learner)
