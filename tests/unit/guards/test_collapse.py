"""The guard fires on a decline, on KL and on the gap, as documented, stays fired, and refuses what it cannot judge."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import surefoot.guards
from surefoot.errors import CollapseStopError, ConfigError, InputError, SurefootError
from surefoot.guards.collapse import GuardStatus, HeldOutGuard

SRC = Path(surefoot.guards.__file__).resolve().parents[2]
DOCUMENTED: dict[str, Any] = {"min_steps": 3, "decline_patience": 3, "ema_alpha": 0.5}


def fold_all(guard: HeldOutGuard, *rows: tuple[float, ...]) -> list[GuardStatus]:
    return [guard.update(step, *row) for step, row in enumerate(rows)]


def declining(count: int) -> list[tuple[float, float]]:
    return [(0.30 + 0.03 * t, 0.80 - 0.05 * t) for t in range(count)]


# -- the documented series ------------------------------------------------------


def test_a_noise_free_decline_under_a_rising_reward_fires_at_the_fourth_fold() -> None:
    statuses = fold_all(HeldOutGuard(**DOCUMENTED), *declining(4))
    assert [s.fire for s in statuses] == [False, False, False, True]
    assert "held-out" in statuses[-1].reason
    assert statuses[-1].rule == "decline"
    assert statuses[-1].streak == 3
    assert statuses[-1].proxy_real_gap == pytest.approx(0.17, abs=1e-12)


def test_reward_and_heldout_rising_together_never_fire() -> None:
    guard = HeldOutGuard(**DOCUMENTED, kl_hard_stop=0.15, max_proxy_real_gap=0.2)
    statuses = fold_all(guard, *((0.30 + 0.01 * t, 0.28 + 0.01 * t, 0.03) for t in range(39)))
    assert not any(s.fire for s in statuses)
    assert statuses[-1].reason == ""
    assert not guard.should_halt()


def test_a_jump_in_kl_with_flat_curves_fires_on_kl() -> None:
    guard = HeldOutGuard(min_steps=3, decline_patience=100, ema_alpha=0.5, kl_hard_stop=0.15)
    statuses = fold_all(guard, *((0.5, 0.5, 0.04 if t < 4 else 0.30) for t in range(6)))
    assert [s.fire for s in statuses] == [False] * 4 + [True] * 2
    assert "kl_to_init" in statuses[-1].reason
    assert "held-out" not in statuses[-1].reason


@pytest.mark.parametrize("patience", [2, 3, 5, 8])
@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_patience_is_the_number_of_falls_in_a_row(patience: int, alpha: float) -> None:
    guard = HeldOutGuard(min_steps=1, decline_patience=patience, ema_alpha=alpha)
    fired = [s.fire for s in fold_all(guard, *declining(12))]
    assert fired.index(True) == patience


def test_a_patience_longer_than_the_run_never_fires_on_a_decline() -> None:
    assert not fold_all(HeldOutGuard(min_steps=1, decline_patience=100), *declining(60))[-1].fire


@pytest.mark.parametrize("min_steps", [4, 7, 11])
def test_nothing_fires_before_min_steps(min_steps: int) -> None:
    guard = HeldOutGuard(min_steps=min_steps, decline_patience=1, ema_alpha=0.5, kl_hard_stop=0.0)
    fired = [s.fire for s in fold_all(guard, *((r, h, 9.0) for r, h in declining(12)))]
    assert fired.index(True) + 1 == min_steps


def test_one_rise_of_heldout_or_one_fall_of_the_reward_resets_the_streak() -> None:
    up = [0.8, 0.7, 0.6, 0.9, 0.5]
    assert [s.streak for s in fold_all(HeldOutGuard(ema_alpha=1.0), *((0.1 * t, h) for t, h in enumerate(up)))] == [
        0, 1, 2, 0, 1,
    ]  # fmt: skip
    rewards = [0.1, 0.2, 0.3, 0.3, 0.4]
    rows = [(r, 0.8 - 0.1 * t) for t, r in enumerate(rewards)]
    assert [s.streak for s in fold_all(HeldOutGuard(ema_alpha=1.0), *rows)] == [0, 1, 2, 0, 1]


@given(
    st.lists(st.floats(0, 1), min_size=5, max_size=60),
    st.lists(st.floats(0, 1), min_size=60, max_size=60),
    st.sampled_from([0.1, 0.5, 1.0]),
)
def test_a_rising_heldout_never_fires_the_decline_rule(
    heldout: list[float], rewards: list[float], alpha: float
) -> None:
    guard = HeldOutGuard(min_steps=1, decline_patience=1, ema_alpha=alpha)
    rows = zip(rewards, sorted(heldout), strict=False)
    assert not any(s.fire for s in fold_all(guard, *rows))


@given(st.floats(1e-3, 1.0), st.floats(-5, 5), st.floats(1e-3, 1.0))
def test_every_straight_decline_fires_whatever_its_slope(slope: float, start: float, gain: float) -> None:
    rows = [(gain * t, start - slope * t) for t in range(5)]
    assert fold_all(HeldOutGuard(**DOCUMENTED), *rows)[3].fire


# -- the gap --------------------------------------------------------------------


def test_the_gap_fires_on_its_limit_while_heldout_stands_still() -> None:
    guard = HeldOutGuard(min_steps=3, ema_alpha=1.0, max_proxy_real_gap=0.2)
    statuses = fold_all(guard, *((0.3 + 0.05 * t, 0.4) for t in range(8)))
    assert [round(s.proxy_real_gap, 2) for s in statuses[:6]] == [0.0, 0.05, 0.1, 0.15, 0.2, 0.25]
    assert next(s.step for s in statuses if s.fire) == 5
    assert statuses[-1].rule == "gap"
    assert "proxy_real_gap" in statuses[-1].reason


def test_without_a_limit_the_gap_is_reported_and_stops_nothing() -> None:
    statuses = fold_all(HeldOutGuard(min_steps=3, ema_alpha=1.0), *((0.3 + 0.05 * t, 0.4) for t in range(30)))
    assert statuses[-1].proxy_real_gap > 1.0
    assert not statuses[-1].fire


# -- KL -------------------------------------------------------------------------


def test_kl_is_none_until_given_and_then_starts_from_its_first_value() -> None:
    statuses = fold_all(HeldOutGuard(ema_alpha=0.5), (0.5, 0.5), (0.5, 0.5, None), (0.5, 0.5, 0.04), (0.5, 0.5, 0.08))
    assert [s.kl_ema for s in statuses] == [None, None, 0.04, pytest.approx(0.06)]
    assert "killswitch/kl_ema" not in statuses[1].as_metrics()
    assert statuses[2].as_metrics()["killswitch/kl_ema"] == 0.04


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_is_a_breach_and_not_a_gap_in_the_data(kl: float) -> None:
    guard = HeldOutGuard(min_steps=3, kl_hard_stop=0.2)
    statuses = fold_all(guard, (0.5, 0.5, 0.01), (0.5, 0.5, kl), (0.5, 0.5, 0.01))
    assert [s.fire for s in statuses] == [False, False, True]
    assert "kl_to_init" in statuses[-1].reason
    assert all(math.isfinite(v) for v in statuses[-1].as_metrics().values())


def test_a_rule_that_never_gets_its_number_is_named() -> None:
    guard = HeldOutGuard(min_steps=3, rules=("decline", "kl", "entropy_collapse"), kl_hard_stop=0.2)
    assert [s.unfed for s in fold_all(guard, *[(0.5, 0.5)] * 3)] == [(), (), ("kl", "entropy_collapse")]
    assert guard.update(3, 0.5, 0.5, 0.1, entropy=1.0).unfed == ()


# -- the latch ------------------------------------------------------------------


def test_a_guard_that_fired_stays_fired_and_keeps_its_first_reason() -> None:
    guard = HeldOutGuard(**DOCUMENTED)
    first = fold_all(guard, *declining(4))[-1]
    later = [guard.update(10 + t, 0.1, 0.9 + 0.01 * t) for t in range(50)]
    assert all(s.fire and s.reason == first.reason and s.fired_step == 3 for s in later)
    assert guard.should_halt()
    assert later[-1].folds == 54, "the curves go on"


def test_asking_changes_nothing() -> None:
    guard = HeldOutGuard(**DOCUMENTED)
    assert guard.last_status is None
    assert not guard.should_halt()
    fold_all(guard, *declining(3))
    before = guard.state_dict()
    for _ in range(100):
        assert not guard.should_halt()
        assert guard.last_status is not None
        assert guard.describe()
        assert guard.curves()
    assert guard.state_dict() == before


# -- bad input ------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "0.5", True, [0.5]])
@pytest.mark.parametrize("name", ["reward", "heldout"])
def test_a_number_that_is_none_is_refused_by_name_and_the_guard_is_as_it_was(name: str, value: Any) -> None:
    guard = HeldOutGuard(**DOCUMENTED)
    fold_all(guard, *declining(3))
    before, status = guard.state_dict(), guard.last_status
    with pytest.raises(ValueError, match=name) as caught:
        guard.update(step=3, **({"reward": 0.5, "heldout": 0.5} | {name: value}))
    assert isinstance(caught.value, SurefootError)
    assert guard.state_dict() == before
    assert guard.last_status is status


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1), ("step", 1.5), ("step", True), ("kl", "0.1"), ("heldout_se", -0.1), ("heldout_se", math.nan),
        ("entropy", math.inf), ("length", -1.0), ("reward_std", math.nan),
    ],
)  # fmt: skip
def test_every_other_number_is_checked_before_anything_is_folded(name: str, value: Any) -> None:
    guard = HeldOutGuard()
    with pytest.raises(InputError, match=name):
        guard.update(**({"step": 0, "reward": 0.5, "heldout": 0.5} | {name: value}))
    assert guard.last_status is None


def test_numbers_of_other_libraries_are_numbers() -> None:
    import numpy as np

    status = HeldOutGuard().update(0, np.float32(0.5), np.float64(0.25), np.float32(0.1))
    assert (type(status.reward), status.heldout) == (float, 0.25)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"ema_alpha": 0.0}, "ema_alpha"), ({"ema_alpha": 1.01}, "ema_alpha"), ({"ema_alpha": math.nan}, "ema_alpha"),
        ({"decline_patience": 0}, "decline_patience"), ({"decline_patience": 2.5}, "decline_patience"),
        ({"min_steps": 0}, "min_steps"), ({"min_steps": True}, "min_steps"), ({"kl_hard_stop": -0.1}, "kl_hard_stop"),
        ({"kl_hard_stop": math.inf}, "kl_hard_stop"), ({"max_proxy_real_gap": -1e-9}, "max_proxy_real_gap"),
        ({"margin_se": -1}, "margin_se"), ({"margin_se": 21}, "margin_se"), ({"min_drop": -0.1}, "min_drop"),
        ({"max_length_ratio": 1.0}, "max_length_ratio"), ({"min_entropy_ratio": 0}, "min_entropy_ratio"),
        ({"saturation_patience": 0}, "saturation_patience"), ({"rules": ()}, "rules"), ({"rules": "decline"}, "rules"),
        ({"rules": ("declin",)}, "known: decline, gap, kl"), ({"rules": ("decline", "decline")}, "twice"),
        ({"rules": ("kl",)}, "needs kl_hard_stop"), ({"rules": ("decline",), "kl_hard_stop": 0.1}, "does not name kl"),
    ],
)  # fmt: skip
def test_a_setting_outside_its_range_is_refused_by_name(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word) as caught:
        HeldOutGuard(**settings)
    assert isinstance(caught.value, ConfigError)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        HeldOutGuard(ema_alpha=2, min_steps=0, rules=("nonsense",))
    assert all(word in str(caught.value) for word in ("ema_alpha", "min_steps", "nonsense"))


def test_the_ends_of_every_range_are_accepted() -> None:
    low = HeldOutGuard(
        ema_alpha=1.0, decline_patience=1, min_steps=1, kl_hard_stop=0.0, max_proxy_real_gap=0.0, margin_se=0
    ).limits
    assert (low.ema_alpha, low.decline_patience, low.min_steps, low.margin_se) == (1.0, 1, 1, 0)
    assert (low.kl_hard_stop, low.max_proxy_real_gap) == (0.0, 0.0), "a limit of 0 is a limit, not an absent one"
    high = HeldOutGuard(ema_alpha=1e-6, min_entropy_ratio=1.0, saturation_patience=1, margin_se=20).limits
    assert (high.ema_alpha, high.min_entropy_ratio, high.saturation_patience, high.margin_se) == (1e-6, 1.0, 1, 20)


# -- what others see of it ------------------------------------------------------


def test_metrics_have_the_names_that_others_read() -> None:
    status = fold_all(HeldOutGuard(**DOCUMENTED), *((r, h, 0.1) for r, h in declining(4)))[-1]
    assert set(status.as_metrics()) == {
        f"killswitch/{name}"
        for name in ("fire", "heldout", "heldout_ema", "reward_ema", "proxy_real_gap", "kl_ema", "streak")
    }
    assert status.as_metrics()["killswitch/fire"] == 1.0
    assert json.loads(json.dumps(status.as_metrics())) == status.as_metrics()


def test_the_error_names_step_and_reason_and_survives_pickling_with_its_status() -> None:
    status = fold_all(HeldOutGuard(**DOCUMENTED), *declining(4))[-1]
    error = status.as_error()
    assert (error.exit_code, error.status) == (79, status)
    assert str(error).startswith("step 3: held-out fell")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is CollapseStopError
    assert again.status == status
    assert str(again) == str(error)


def test_the_two_curves_show_the_whole_run_in_the_width_asked_for() -> None:
    guard = HeldOutGuard()
    for t in range(5000):  # far more than is kept
        guard.update(t, 0.2 + t / 10_000, 0.9 - t / 10_000)
    reward, heldout = guard.curves(30).splitlines()
    assert (reward[:9].strip(), heldout[:9].strip()) == ("reward", "held-out")
    assert sum(c in "▁▂▃▄▅▆▇█" for c in reward) == 30
    bars = [c for c in heldout if c in "▁▂▃▄▅▆▇█"]
    assert bars == sorted(bars, reverse=True)
    assert (bars[0], bars[-1]) == ("█", "▁")
    assert "0.900 " in heldout
    assert "0.400" in heldout
    assert len(json.dumps(guard.state_dict())) < 40_000, "memory is bounded"


@pytest.mark.parametrize("count", [0, 1, 2])
def test_curves_of_hardly_any_folds_can_be_drawn(count: int) -> None:
    guard = HeldOutGuard()
    fold_all(guard, *[(0.5, 0.5)] * count)
    assert len(guard.curves(5).splitlines()) == 2
    with pytest.raises(ValueError, match="width"):
        guard.curves(0)


def test_the_package_exports_the_three_names_without_torch() -> None:
    code = (
        "import sys; from surefoot.guards import CollapseStopError, GuardStatus, HeldOutGuard; "
        "HeldOutGuard().update(0, 0.5, 0.5); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(SRC)}
    )
    assert done.stdout.split() == ["False", "False"]
    with pytest.raises(AttributeError, match="no attribute"):
        surefoot.guards.Nothing  # noqa: B018
