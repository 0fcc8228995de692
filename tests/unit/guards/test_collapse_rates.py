"""The guard is as often wrong, and as quick, as it says: a small seeded version of `benchmarks/guard_rates.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from benchmark_scripts import benchmark

from surefoot.guards import collapse_rules
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.collapse_rules import expected_rates

shapes: Any = benchmark("guard_shapes")
bench: Any = benchmark("guard_rates")
peers: Any = benchmark("guard_peers")

RUNS = 50  # of each kind


def most(share: float, runs: int, certainty: float = 1e-3) -> int:
    """The count that runs with this true share exceed with a chance of at most `certainty`."""
    left, count = 1.0, 0
    while left > certainty:
        left -= math.comb(runs, count) * share**count * (1 - share) ** (runs - count)
        count += 1
    return count - 1


def healthy_stops(**settings: Any) -> int:
    dice = (np.random.default_rng(i) for i in range(9))
    runs = [bench.without_extras(shapes.healthy(shape, RUNS, next(dice))) for shape in shapes.HEALTHY]
    return sum(int((bench.stops(each, **settings)[0] < bench.NEVER).sum()) for each in runs)


def bad_stops(shape: str, count: int = RUNS, **settings: Any) -> tuple[float, float]:
    """Share seen and median delay."""
    runs = shapes.bad(shape, count, np.random.default_rng(5))
    stop, _ = bench.stops(runs, **settings)
    late = stop >= runs.onset
    return float((stop[late] < bench.NEVER).mean()), float(np.median((stop - runs.onset)[late]))


def test_the_bound_is_binomial() -> None:
    assert (most(0.01, 240), most(0.5, 10), most(0.01, 400)) == (8, 9, 11)


def test_at_most_one_healthy_run_in_a_hundred_is_stopped() -> None:
    assert healthy_stops() <= most(0.01, 4 * RUNS)


def test_the_plain_patience_rule_stops_most_healthy_runs() -> None:
    runs = shapes.healthy("noisy-saturated", 300, np.random.default_rng(0))
    share = (peers.patience_stops(runs, alpha=0.5, patience=3) < peers.NEVER).mean()
    assert 0.6 < share < 0.8


@pytest.mark.parametrize("shape", shapes.BAD)
def test_ninety_nine_of_a_hundred_bad_runs_are_seen(shape: str) -> None:
    seen, delay = bad_stops(shape, 30, rules=(shapes.BAD[shape],))
    assert seen == 1.0
    assert delay < 45


def test_the_delay_is_at_most_half_as_much_again_as_that_of_the_best_fixed_threshold() -> None:
    calm = [shapes.healthy(shape, 250, np.random.default_rng(i)) for i, shape in enumerate(shapes.HEALTHY)]
    runs = shapes.bad("decline", RUNS, np.random.default_rng(5))
    _, delay = bad_stops("decline")
    for known in (False, True):
        peer = peers.best_fixed(peers.tune("decline", calm, 0.01, known_noise=known), runs)
        assert delay <= 1.5 * peer.median_delay, peer


@pytest.mark.parametrize(
    "settings",
    [
        {"margin_se": 2.5}, {"margin_se": 3.0, "ema_alpha": 0.5}, {"margin_se": 2.5, "decline_patience": 6},
        {"margin_se": 2.7, "ema_alpha": 0.3, "decline_patience": 2},
    ],
    ids=str,
)  # fmt: skip
def test_false_alarms_are_as_many_as_the_guard_says(settings: dict[str, Any]) -> None:
    """Narrow margins, so that a hundred runs are enough to see the rate."""
    count = 80
    runs = bench.without_extras(shapes.healthy("flat", count, np.random.default_rng(11)))
    told = expected_rates(HeldOutGuard(**settings).limits).false_alarms
    share = 1.0 - math.exp(-told * shapes.FOLDS / 100)
    found = int((bench.stops(runs, **settings)[0] < bench.NEVER).sum())
    assert count - most(1 - 0.75 * share, count) <= found <= most(min(1.25 * share, 1.0), count)


@pytest.mark.parametrize(
    "settings", [{}, {"ema_alpha": 0.5}, {"decline_patience": 8}, {"margin_se": 6, "ema_alpha": 0.07}], ids=str
)
def test_the_delay_is_what_the_guard_says(settings: dict[str, Any]) -> None:
    told = expected_rates(HeldOutGuard(**settings).limits).delay
    _, delay = bad_stops("decline", 40, **settings)
    assert delay == pytest.approx(told, rel=0.2, abs=2)


def test_describe_says_rates_rules_and_limits() -> None:
    text = HeldOutGuard(kl_hard_stop=0.25, max_proxy_real_gap=0.3).describe()
    assert "decline:" in text
    assert "above 0.25" in text
    assert "more than 0.3" in text
    assert "expected false alarms: 0.00" in text
    assert "per 100 evaluations" in text
    assert "expected detection delay: 17 evaluations" in text


def test_describe_does_not_hide_settings_that_cannot_work() -> None:
    assert "noise alone will stop" in HeldOutGuard(margin_se=0).describe()
    assert "noise alone will stop" in HeldOutGuard(margin_se=1.5).describe()
    assert "never seen" in HeldOutGuard(margin_se=10, ema_alpha=1.0).describe()
    assert "delay" not in HeldOutGuard(rules=("gap",)).describe()


@pytest.mark.parametrize("name", collapse_rules.RULES)
def test_every_rule_is_described(name: str) -> None:
    guard = HeldOutGuard(rules=(name,), kl_hard_stop=0.1 if name == "kl" else None)
    assert f"\n  {name}: " in guard.describe()


def test_wider_margins_mean_fewer_alarms_and_longer_delays_everywhere() -> None:
    for alpha in (0.01, 0.03, 0.1, 0.4, 1.0):
        for patience in (1, 2, 5, 10, 40):
            rates = [
                expected_rates(HeldOutGuard(ema_alpha=alpha, decline_patience=patience, margin_se=z).limits)
                for z in (2.0, 3.0, 4.0)
            ]
            alarms = [r.false_alarms for r in rates]
            delays = [r.delay or 0.0 for r in rates]
            assert alarms == sorted(alarms, reverse=True)
            assert delays == sorted(delays)
            assert all(d >= patience for d in delays)


def test_planted_guard_without_a_margin_stops_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse_rules.Level, "margin", lambda self, share=1.0: 0.0)
    with pytest.raises(AssertionError):
        test_at_most_one_healthy_run_in_a_hundred_is_stopped()
