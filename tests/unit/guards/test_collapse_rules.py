"""Each way to collapse has a rule that sees it, with its own reason, and no rule stops a healthy run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from surefoot.guards import collapse_rules
from surefoot.guards.collapse import GuardStatus, HeldOutGuard
from surefoot.guards.collapse_rules import RULES

Row = dict[str, float]
NOISE = 0.01
ONSET = 30
EVERY = tuple(name for name in RULES if name != "kl")


def healthy(seed: int = 0, count: int = 150) -> Iterator[Row]:
    """Both curves rise together, entropy halves, lengths grow by half; all of it noisy."""
    dice = random.Random(seed)
    for t in range(count):
        quality = 0.3 + 0.4 * t / count
        yield {
            "reward": quality + dice.gauss(0, NOISE), "heldout": quality + dice.gauss(0, NOISE), "kl": 0.02,
            "entropy": 1.0 - 0.5 * t / count + dice.gauss(0, 0.05), "length": 200 + t + dice.gauss(0, 20),
            "reward_std": 0.2 + dice.gauss(0, 0.02),
        }  # fmt: skip


def flat(seed: int) -> list[Row]:
    dice = random.Random(seed)
    return [{"reward": dice.gauss(0.5, NOISE), "heldout": dice.gauss(0.5, NOISE)} for _ in range(150)]


def broken(change: Callable[[Row, float], Row]) -> list[Row]:
    """A flat healthy run until the onset; then `change` gets each row with the time since."""
    dice = random.Random(7)
    rows = []
    for t, row in enumerate(healthy(seed=3)):
        row |= {"reward": 0.6 + dice.gauss(0, NOISE), "heldout": 0.6 + dice.gauss(0, NOISE)}
        rows.append(change(row, float(t - ONSET)) if t >= ONSET else row)
    return rows


def moved(row: Row, **by: float) -> Row:
    return row | {name: row[name] + value for name, value in by.items()}


SHAPES: dict[str, tuple[Callable[[Row, float], Row], str]] = {
    "decline": (lambda row, t: moved(row, reward=0.004 * t, heldout=-0.004 * t), "held-out fell"),
    "gap": (lambda row, t: moved(row, reward=0.004 * t), "proxy_real_gap"),
    "kl": (lambda row, t: row | {"kl": 0.02 + 0.01 * t}, "kl_to_init"),
    "both_falling": (lambda row, t: moved(row, reward=-0.004 * t, heldout=-0.004 * t), "both are falling"),
    "entropy_collapse": (lambda row, t: row | {"entropy": 0.8 * math.exp(-t / 10)}, "entropy is"),
    "length_explosion": (lambda row, t: row | {"length": 200 * math.exp(t / 30)}, "completion length is"),
    "length_collapse": (lambda row, t: row | {"length": 200 * math.exp(-t / 10)}, "completion length is"),
    "reward_saturated": (lambda row, t: row | {"reward": 1.0, "reward_std": 0.0}, "the reward is saturated"),
}


def last(guard: HeldOutGuard, rows: list[Row]) -> GuardStatus:
    for step, row in enumerate(rows):
        status = guard.update(step, **row)
    return status


def alone(name: str, **settings: Any) -> HeldOutGuard:
    return HeldOutGuard(rules=(name,), kl_hard_stop=0.2 if name == "kl" else None, **settings)


def test_every_rule_has_a_shape_here() -> None:
    assert set(SHAPES) == set(RULES)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_sees_its_collapse_after_the_onset_and_says_why(name: str) -> None:
    change, words = SHAPES[name]
    status = last(alone(name), broken(change))
    assert status.fire
    assert status.rule == name
    assert words in status.reason
    assert status.fired_step is not None
    assert ONSET <= status.fired_step < ONSET + 60


@pytest.mark.parametrize("seed", range(10))
def test_all_rules_together_leave_a_healthy_run_alone(seed: int) -> None:
    guard = HeldOutGuard(rules=(*EVERY, "kl"), kl_hard_stop=0.2)
    status = last(guard, list(healthy(seed)))
    assert not status.fire, status.reason
    assert status.unfed == ()


def test_noise_on_flat_curves_stops_nothing() -> None:
    for seed in range(10):
        status = last(HeldOutGuard(), flat(seed))
        assert not status.fire, status.reason


@pytest.mark.parametrize("name", [n for n in RULES if n not in ("decline", "both_falling")])
def test_what_a_named_rule_sees_does_not_stop_the_default_guard(name: str) -> None:
    """The other rules are opt-in; a flat held-out is not a decline."""
    assert not last(HeldOutGuard(), broken(SHAPES[name][0])).fire


def test_a_fall_that_the_reward_shares_is_no_decline() -> None:
    """The reward says so itself: nobody is deceived, and the rule for it has another name."""
    rows = broken(lambda row, t: moved(row, reward=-0.02 * t, heldout=-0.004 * t))
    assert not last(HeldOutGuard(), rows).fire
    assert last(alone("both_falling"), rows).rule == "both_falling"


def test_a_decline_under_a_reward_that_stands_still_is_a_decline() -> None:
    """Reward at its maximum, held-out falling: the case that users report."""
    status = last(HeldOutGuard(), broken(lambda row, t: moved(row | {"reward": 1.0}, heldout=-0.004 * t)))
    assert status.rule == "decline"


def test_two_rules_that_fire_together_are_both_named() -> None:
    guard = HeldOutGuard(min_steps=3, decline_patience=3, ema_alpha=0.5, kl_hard_stop=0.1)
    for t in range(4):
        status = guard.update(t, 0.3 + 0.03 * t, 0.8 - 0.05 * t, 0.05 if t < 3 else 0.9)
    assert "held-out" in status.reason
    assert "kl_to_init" in status.reason
    assert status.rule == "decline"


def test_a_fall_below_min_drop_is_of_no_interest() -> None:
    rows = broken(lambda row, t: moved(row, heldout=-min(0.004 * t, 0.08)))
    assert last(HeldOutGuard(), rows).fire
    assert not last(HeldOutGuard(min_drop=0.1), rows).fire
    assert last(HeldOutGuard(min_drop=0.05), rows).fire


def test_a_given_standard_error_holds_back_a_fall_that_it_explains() -> None:
    rows = broken(lambda row, t: moved(row, heldout=-min(0.004 * t, 0.04)))
    assert last(HeldOutGuard(), rows).fire
    assert not last(HeldOutGuard(), [row | {"heldout_se": 0.05} for row in rows]).fire


def test_one_wrong_answer_after_a_long_perfect_stretch_is_no_collapse_when_the_error_is_known() -> None:
    from surefoot.guards.noise import proportion_se

    guard = HeldOutGuard()
    for t in range(120):
        accuracy = 1.0 if t < 60 else 399 / 400
        status = guard.update(t, min(1.0, 0.9 + 0.001 * t), accuracy, heldout_se=proportion_se(accuracy, 400))
    assert not status.fire, status.reason


def test_a_saturated_reward_without_its_spread_is_seen_from_the_reward_itself() -> None:
    rows = [{"reward": 1.0 if t > 20 else 0.5 + 0.01 * t, "heldout": 0.5} for t in range(60)]
    status = last(alone("reward_saturated", saturation_patience=15), rows)
    assert status.fired_step == 20 + 1 + 15
    assert not last(
        alone("reward_saturated"), [row | {"reward": 0.0} if t % 15 == 0 else row for t, row in enumerate(rows)]
    ).fire


def test_a_constant_reward_below_its_best_is_not_saturated() -> None:
    rows = [{"reward": 0.9 if t == 0 else 0.4, "heldout": 0.5} for t in range(60)]
    assert not last(alone("reward_saturated"), rows).fire


# -- planted: take a safeguard out, and a claim above falls ------------------------


def test_planted_decline_rule_that_never_holds_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    dead = collapse_rules.Rule(lambda curves, limits: False, lambda curves, limits: "", lambda limits: 1)
    monkeypatch.setitem(RULES, "decline", dead)
    with pytest.raises(AssertionError):
        test_a_rule_sees_its_collapse_after_the_onset_and_says_why("decline")


def test_planted_margin_of_nothing_cries_wolf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse_rules.Level, "margin", lambda self, share=1.0: 0.0)
    with pytest.raises(AssertionError, match="held-out"):
        test_noise_on_flat_curves_stops_nothing()


def test_planted_reward_condition_that_is_always_true_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse_rules, "REWARD_SLACK", 1e9)
    with pytest.raises(AssertionError):
        test_a_fall_that_the_reward_shares_is_no_decline()


def test_the_gap_has_to_be_beyond_its_limit_by_more_than_noise() -> None:
    """A true gap of half the limit, under noise that often lifts the gap since the first evaluation above it."""
    for seed in range(20):
        dice = random.Random(seed)
        guard = HeldOutGuard(rules=("gap",), max_proxy_real_gap=0.1)
        for t in range(100):
            status = guard.update(t, 0.5 + min(t, 50) / 1000 + dice.gauss(0, 0.05), 0.5 + dice.gauss(0, 0.05))
        assert not status.fire, status.reason


@pytest.mark.parametrize("missing", ["length", "entropy"])
def test_a_rule_whose_number_never_arrived_is_named_and_no_other(missing: str) -> None:
    """A trainer that hands on no lengths has no length rules, and is told so."""
    rows = [{name: value for name, value in row.items() if name != missing} for row in healthy(count=40)]
    status = last(HeldOutGuard(rules=EVERY), rows)
    assert set(status.unfed) == {name for name in EVERY if name.startswith(missing)}
