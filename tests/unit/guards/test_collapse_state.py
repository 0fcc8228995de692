"""A resumed guard is the same guard; a state that does not fit is refused; calibration only tightens."""

from __future__ import annotations

import copy
import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.errors import InputError, StateError
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.collapse_rules import RULES

SETTINGS: dict[str, Any] = {
    "rules": tuple(RULES), "kl_hard_stop": 0.5, "max_proxy_real_gap": 0.4, "min_steps": 5, "ema_alpha": 0.3,
}  # fmt: skip


def rows(count: int, *, fall: float = 0.0, seed: int = 0) -> list[dict[str, Any]]:
    dice = random.Random(seed)
    return [
        {
            "step": 10 * t, "reward": 0.5 + dice.gauss(0, 0.02), "heldout": 0.5 - fall * t + dice.gauss(0, 0.02),
            "kl": 0.1 + dice.gauss(0, 0.01) if t > 3 else None, "entropy": 1.0, "length": 100.0, "reward_std": 0.1,
            "heldout_se": 0.01 if t % 2 else None,
        }
        for t in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 2, 5, 30, 59, 60])
@pytest.mark.parametrize("fall", [0.0, 0.01], ids=["healthy", "falling"])
def test_a_split_run_equals_the_whole_run(cut: int, fall: float) -> None:
    whole, first, second = (HeldOutGuard(**SETTINGS) for _ in range(3))
    series = rows(60, fall=fall)
    expected = [whole.update(**row) for row in series]
    found = [first.update(**row) for row in series[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert (second.last_status, second.should_halt()) == (first.last_status, first.should_halt())
    found += [second.update(**row) for row in series[cut:]]
    assert found == expected
    assert second.state_dict() == whole.state_dict()
    assert second.curves() == whole.curves()
    assert whole.should_halt() is (fall > 0)


def test_a_latch_survives_a_resume() -> None:
    guard, again = HeldOutGuard(**SETTINGS), HeldOutGuard(**SETTINGS)
    for row in rows(60, fall=0.02):
        guard.update(**row)
    assert guard.should_halt()
    again.load_state_dict(guard.state_dict())
    assert again.should_halt()
    status = again.update(700, 0.9, 0.9)
    assert status.fire
    assert guard.last_status is not None
    assert status.reason == guard.last_status.reason


def test_the_state_is_a_copy() -> None:
    guard = HeldOutGuard(**SETTINGS)
    for row in rows(10):
        guard.update(**row)
    state = guard.state_dict()
    before = copy.deepcopy(state)
    for row in rows(10, seed=1):
        guard.update(**row)
    assert state == before


def test_a_guard_can_be_pickled_and_copied() -> None:
    guard = HeldOutGuard(**SETTINGS)
    for row in rows(10):
        guard.update(**row)
    for again in (pickle.loads(pickle.dumps(guard)), copy.deepcopy(guard)):
        assert again.state_dict() == guard.state_dict()


def spoiled(change: Callable[[dict[str, Any]], Any]) -> Any:
    guard = HeldOutGuard(**SETTINGS)
    for row in rows(20, fall=0.05):
        guard.update(**row)
    assert guard.should_halt()
    state = json.loads(json.dumps(guard.state_dict()))
    changed = change(state)
    return state if changed is None else changed


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s: {}, "does not consist of"),
        (lambda s: [1, 2], "does not consist of"),
        (lambda s: s.__delitem__("curves"), "does not consist of"),
        (lambda s: s.update(more=1), "does not consist of"),
        (lambda s: s.update(format=2), "format is 2"),
        (lambda s: s["limits"].update(ema_alpha=0.2), "ema_alpha was 0.2, now 0.3"),
        (lambda s: s["limits"].update(rules=["decline"]), "rules was"),
        (lambda s: s["limits"].update(kl_hard_stop=None), "kl_hard_stop was None"),
        (lambda s: s["limits"].__delitem__("margin_se"), "limits are not those"),
        (lambda s: s["curves"].update(streak=-1), "curves.streak is -1"),
        (lambda s: s["curves"].update(streak=True), "curves.streak is True"),
        (lambda s: s["curves"]["heldout"].update(ema=math.nan), "curves.heldout.ema is nan"),
        (lambda s: s["curves"]["heldout"].update(ema=None), "curves.heldout.ema is None"),
        (lambda s: s["curves"]["heldout"]["noise"].update(total="3"), "noise.total is '3'"),
        (lambda s: s["curves"]["heldout"].__delitem__("best"), "curves.heldout does not hold"),
        (lambda s: s["curves"].update(held={"nonsense": 1}), "a rule that does not exist"),
        (lambda s: s["drawn"]["reward"].update(points=[0.1, math.inf]), "drawn.reward.points is inf"),
        (lambda s: s["drawn"].__delitem__("reward"), "drawn does not hold"),
        (lambda s: s.update(fired={"rule": "decline"}), "fired is"),
        (lambda s: s["status"].update(fire=False), "disagree about whether it fired"),
        (lambda s: s.update(fired=None), "disagree about whether it fired"),
        (lambda s: s["status"].update(noise=math.inf), "status.noise is inf"),
        (lambda s: s["status"].__delitem__("reason"), "status does not hold"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change: Callable[[Any], Any], word: str) -> None:
    guard = HeldOutGuard(**SETTINGS)
    guard.update(0, 0.5, 0.5)
    before = guard.state_dict()
    with pytest.raises(StateError, match=word):
        guard.load_state_dict(spoiled(change))
    assert guard.state_dict() == before


# -- calibration ------------------------------------------------------------------


def healthy(count: int = 100, *, seed: int = 0, kl: float = 0.02, noise: float = 0.02) -> list[dict[str, float]]:
    dice = random.Random(seed)
    return [
        {
            "reward": 0.4 + 0.002 * t + dice.gauss(0, noise), "heldout": 0.4 + 0.0015 * t + dice.gauss(0, noise),
            "kl": kl * (1 + t / count),
        }
        for t in range(count)
    ]  # fmt: skip


def test_calibration_tightens_and_never_loosens() -> None:
    loose = HeldOutGuard(kl_hard_stop=1.0, max_proxy_real_gap=0.9)
    changed = loose.calibrate(healthy())
    assert set(changed) == {"kl_hard_stop", "max_proxy_real_gap"}
    assert 0.04 < (loose.limits.kl_hard_stop or 0) < 0.07
    assert 0.05 < (loose.limits.max_proxy_real_gap or 0) < 0.2
    tight = HeldOutGuard(kl_hard_stop=0.05, max_proxy_real_gap=0.9)
    assert "kl_hard_stop" not in tight.calibrate(healthy())
    assert tight.limits.kl_hard_stop == 0.05
    again = HeldOutGuard(kl_hard_stop=1.0)
    again.calibrate(healthy(kl=0.02))
    before = again.limits
    assert again.calibrate(healthy(kl=0.021)) == {}
    assert again.limits == before


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_noisy_healthy_twin_passes_a_calibrated_guard(seed: int) -> None:
    guard = HeldOutGuard(kl_hard_stop=1.0, max_proxy_real_gap=0.9)
    guard.calibrate(healthy(noise=0.01))
    for step, row in enumerate(healthy(seed=seed, noise=0.03)):
        status = guard.update(step, **row)
    assert not status.fire, status.reason


def test_calibration_changes_limits_only_of_rules_that_are_on_and_folds_nothing() -> None:
    guard = HeldOutGuard()
    assert guard.calibrate(healthy()) == {}
    assert guard.last_status is None
    assert guard.state_dict() == HeldOutGuard().state_dict()


def test_calibrated_limits_travel_with_the_state_and_the_tighter_one_wins() -> None:
    guard = HeldOutGuard(kl_hard_stop=1.0)
    guard.calibrate(healthy())
    resumed = HeldOutGuard(kl_hard_stop=1.0)
    resumed.load_state_dict(guard.state_dict())
    assert resumed.limits == guard.limits
    tighter = HeldOutGuard(kl_hard_stop=0.01)
    tighter.load_state_dict(guard.state_dict())
    assert tighter.limits.kl_hard_stop == 0.01


@pytest.mark.parametrize(
    ("series", "word"),
    [
        ([], "0 evaluations"),
        (healthy(19), "19 evaluations"),
        ([{"reward": 0.01 * t, "heldout": 0.9 - 0.01 * t} for t in range(60)], "held-out fell"),
        ([{"reward": 0.5}] * 40, "holds reward"),
        ([{"reward": 0.5, "heldout": 0.5, "accuracy": 1.0}] * 40, "holds accuracy"),
        ([{"reward": math.nan, "heldout": 0.5}] * 40, "reward is nan"),
    ],
    ids=["empty", "short", "declining", "no held-out", "unknown name", "nan"],
)
def test_a_run_that_is_short_or_not_healthy_cannot_calibrate(series: list[dict[str, float]], word: str) -> None:
    guard = HeldOutGuard(kl_hard_stop=1.0)
    before = guard.limits
    with pytest.raises(InputError, match=word):
        guard.calibrate(series)
    assert guard.limits == before


def test_rows_may_carry_their_step() -> None:
    guard = HeldOutGuard(kl_hard_stop=1.0)
    assert guard.calibrate([row | {"step": float(t)} for t, row in enumerate(healthy())])


def test_planted_calibration_that_takes_any_limit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.guards import collapse

    monkeypatch.setattr(collapse, "HEADROOM", 100.0)  # what is found is now looser than what is configured ...
    test_calibration_changes_limits_only_of_rules_that_are_on_and_folds_nothing()
    guard = HeldOutGuard(kl_hard_stop=1.0)
    assert guard.calibrate(healthy()) == {}, "... and is not taken"

    def careless(self: HeldOutGuard, rows: Any) -> dict[str, float]:
        self.limits = collapse.replace(self.limits, kl_hard_stop=4.0)
        return {"kl_hard_stop": 4.0}

    monkeypatch.setattr(HeldOutGuard, "calibrate", careless)
    with pytest.raises(AssertionError):
        test_calibration_tightens_and_never_loosens()
