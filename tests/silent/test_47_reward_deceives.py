"""Silent failure 47: the reward climbs to its maximum while the model gets worse at the task."""

from __future__ import annotations

import random

import pytest

from surefoot.errors import CollapseStopError
from surefoot.guards import HeldOutGuard, collapse_rules

ONSET, FOLDS = 40, 160


def run(guard: HeldOutGuard) -> int:
    """A run whose policy learns to please the grader from `ONSET` on; raises where a strict guard stops it."""
    dice = random.Random(47)
    for t in range(FOLDS):
        hacked = min(max(t - ONSET, 0) / 40, 1.0)
        reward = min(1.0, 0.55 + 0.4 * hacked + dice.gauss(0, 0.02))
        heldout = 0.60 - 0.35 * hacked + dice.gauss(0, 0.02)
        status = guard.update(step=10 * t, reward=reward, heldout=heldout)
        if guard.should_halt():
            raise status.as_error()
    return FOLDS


def check() -> CollapseStopError:
    with pytest.raises(CollapseStopError) as caught:
        run(HeldOutGuard())
    return caught.value


def test_the_run_is_stopped_soon_after_the_onset_with_numbers() -> None:
    error = check()
    assert error.exit_code == 79
    assert error.status is not None
    assert "held-out fell" in str(error)
    assert 10 * ONSET < error.status.step <= 10 * (ONSET + 15)
    assert error.status.best_step <= 10 * (ONSET + 5), "the checkpoint to go back to is from before the fall"


def test_planted_rule_that_is_never_asked_lets_the_run_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard is there, is fed, logs its curves, and judges nothing."""
    from surefoot.guards import collapse

    monkeypatch.setattr(collapse, "breached", lambda curves, limits: [])
    assert run(HeldOutGuard()) == FOLDS
    with pytest.raises(pytest.fail.Exception):
        check()


def test_planted_margin_as_wide_as_the_curve_lets_the_run_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse_rules, "decline_margin", lambda curves, limits: 1.0)
    with pytest.raises(pytest.fail.Exception):
        check()
