"""Silent failure 48: a guard that is wired in and cannot stop anything: fed the reward as held-out, or never latched."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from surefoot.guards import HeldOutGuard

Feed = Callable[[HeldOutGuard, int, float, float], None]


def honest(guard: HeldOutGuard, step: int, reward: float, heldout: float) -> None:
    guard.update(step, reward, heldout)


def check(feed: Feed = honest) -> None:
    """After a collapse the guard halts, and goes on to halt when the curves look better again."""
    guard, dice = HeldOutGuard(), random.Random(48)
    for t in range(200):
        hacked = min(max(t - 40, 0) / 40, 1.0) if t < 120 else 0.0  # and back: somebody looks too late
        feed(guard, t, 0.5 + 0.4 * hacked + dice.gauss(0, 0.02), 0.6 - 0.4 * hacked + dice.gauss(0, 0.02))
        if t == 119:
            assert guard.should_halt(), "the collapse was not seen"
    assert guard.should_halt(), "it fired, and forgot"
    status = guard.last_status
    assert status is not None
    assert status.fire
    assert "held-out" in status.reason


def test_a_guard_that_is_fed_both_curves_fires_and_stays_fired() -> None:
    check()


def test_planted_reward_in_the_place_of_heldout_is_seen() -> None:
    """Two equal curves cannot part: a guard that watches the proxy twice never fires."""

    def proxy_twice(guard: HeldOutGuard, step: int, reward: float, heldout: float) -> None:
        del heldout
        guard.update(step, reward, reward)

    with pytest.raises(AssertionError, match="not seen"):
        check(proxy_twice)


def test_planted_guard_that_asks_only_its_last_fold_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(guard: HeldOutGuard, step: int, reward: float, heldout: float) -> None:
        guard._fired = None  # what a guard without a latch does at every fold
        guard.update(step, reward, heldout)

    with pytest.raises(AssertionError):
        check(forget)
