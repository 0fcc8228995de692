"""Silent failure 59: weights that are kept in bfloat16 round nearly every update away."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.errors import NumericsError
from surefoot.learner import grpo
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.precision import MasterWeights

pytestmark = pytest.mark.usefixtures("bfloat16_products")
STEPS, RATE = 4, 1e-6


def changed(net: Any) -> list[float]:
    """The share of trained entries that each of four steps changed."""
    learner = make_learner(net, learning_rate=RATE, parity_tolerance=1.0)
    samples = sampled(tiny_net())
    reports = [learner.learn([replace(s, trainer_version=v) for s in samples]) for v in range(STEPS)]
    assert all(report.applied for report in reports)
    return [report.metrics["updates/changed_share"] for report in reports]


def check() -> None:
    """In bfloat16 a step changes as many entries as in float32, to a hundredth; nobody is told anything else."""
    fine, coarse = changed(tiny_net()), changed(tiny_net().to(torch.bfloat16))
    assert min(fine) > 0.9
    assert coarse == pytest.approx(fine, abs=0.01)


def test_bfloat16_changes_as_many_entries_as_float32() -> None:
    check()


def step_the_coarse_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimiser gets the network's own parameters, as plain torch code does."""
    monkeypatch.setattr(grpo, "make_master_weights", lambda net, given: None)


def coarse_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters exist, and are rounded as well after every step."""
    real = grpo.CountedStep.take

    def take(self: Any) -> Any:
        before = [p.detach().clone() for p in self.copies]
        found = real(self)
        for p in self.copies:
            p.data.copy_(p.data.bfloat16().float())
        changed = sum(int((p.detach() != old).sum()) for p, old in zip(self.copies, before, strict=True))
        return replace(found, changed=changed, taken=min(changed, found.due))

    monkeypatch.setattr(grpo.CountedStep, "take", take)


@pytest.mark.parametrize("bug", [step_the_coarse_weights, coarse_masters])
def test_planted_bf16_optimiser_stops_the_run_and_names_the_remedy(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(NumericsError, match=r"(?s)at learning rate 1e-06, had to move.*raise learning_rate.*dtype"):
        check()


def test_planted_rate_below_float32s_own_last_digit_stops_the_run() -> None:
    learner = make_learner(tiny_net(), learning_rate=1e-12)
    with pytest.raises(NumericsError, match=r"(?s)moved \d+ of them.*in float32"):
        learner.learn(sampled(learner.net))


def test_the_check_is_what_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire cut: without the check the old behaviour is back, and nothing else notices."""
    step_the_coarse_weights(monkeypatch)
    monkeypatch.setattr(grpo, "check_taken_in", lambda *args: None)
    assert max(changed(copy.deepcopy(tiny_net()).to(torch.bfloat16))) < 0.1


def test_masters_are_where_bfloat16_is() -> None:
    learner: GRPOLearner = make_learner(tiny_net().to(torch.bfloat16))
    assert isinstance(learner.masters, MasterWeights)
