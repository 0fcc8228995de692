"""Noise is told from movement: a trend is none, few values are worth little, and the widening is Student's."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.guards.noise import (
    FORGET,
    WIDEST,
    DifferenceNoise,
    Level,
    lengthened,
    proportion_se,
    widened,
)


def estimate(values: list[float]) -> DifferenceNoise:
    noise = DifferenceNoise()
    for value in values:
        noise.fold(value)
    return noise


def normal(count: int, sd: float, seed: int, slope: float = 0.0) -> list[float]:
    dice = random.Random(seed)
    return [slope * t + dice.gauss(0.0, sd) for t in range(count)]


@pytest.mark.parametrize("slope", [0.0, 0.01, -3.0])
@pytest.mark.parametrize("sd", [0.005, 0.05, 7.0])
def test_the_deviation_is_found_whatever_the_trend(sd: float, slope: float) -> None:
    found = [estimate(normal(300, sd, seed, slope)).sd for seed in range(20)]
    assert statistics.mean(found) == pytest.approx(sd, rel=0.05)
    assert all(abs(each / sd - 1) < 0.35 for each in found)


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_a_straight_line_has_no_noise(start: float, slope: float) -> None:
    assert estimate([start + slope * t for t in range(50)]).sd < 1e-11


def test_nothing_is_known_before_the_third_value() -> None:
    level = Level(alpha=0.5, margin_se=4.2)
    for value, known in ((0.9, False), (0.1, False), (0.5, True)):
        level.fold(value)
        assert math.isfinite(level.margin()) is known
        assert (level.dof > 0) is known


def test_old_noise_is_forgotten() -> None:
    noise = estimate(normal(200, 0.05, 1) + normal(400, 0.005, 2))
    assert noise.sd == pytest.approx(0.005, rel=0.4)
    assert noise.dof < 1 / FORGET


def test_one_wild_value_does_not_double_the_estimate() -> None:
    values = normal(100, 0.02, 3)
    before = estimate(values).sd
    values[50] += 0.4  # twenty deviations
    assert before < estimate(values).sd < 2.0 * before


@pytest.mark.parametrize(
    ("z", "dof", "student"),
    [(2.326, 5, 3.365), (2.326, 30, 2.457), (3.090, 10, 4.144), (3.719, 20, 4.539), (4.265, 60, 4.599)],
)
def test_the_widening_is_students_quantile(z: float, dof: float, student: float) -> None:
    """From a table of Student's distribution at the same tail as the normal z."""
    assert widened(z, dof) == pytest.approx(student, rel=0.03)


def test_the_widening_ends_at_the_widest_and_never_narrows() -> None:
    assert widened(4.2, 0.5) == WIDEST
    assert widened(20.0, 0.5) == WIDEST
    assert widened(4.2, 1e12) == pytest.approx(4.2)
    assert widened(0.0, 3.0) == 0.0


def test_a_longer_run_asks_for_a_wider_margin() -> None:
    assert lengthened(4.2, 200) == pytest.approx(4.2)
    assert 4.8 < lengthened(4.2, 1000) < lengthened(4.2, 10_000) < 5.8
    assert lengthened(0.0, 10_000) == 0.0


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1.0])
def test_the_spread_is_that_of_a_moving_average(alpha: float) -> None:
    last = []
    for seed in range(1500):
        level = Level(alpha, 4.2)
        for value in normal(6, 1.0, seed):
            level.fold(value)
        last.append(level.ema)
    assert statistics.pstdev(last) == pytest.approx(level.spread, rel=0.08)


def test_a_given_standard_error_counts_where_it_is_larger() -> None:
    quiet, told = Level(0.1, 4.2), Level(0.1, 4.2)
    for value in normal(50, 0.01, 4):
        quiet.fold(value)
        told.fold(value, 0.05)
    assert told.sd == pytest.approx(0.05)
    assert told.margin() > 3 * quiet.margin()
    smaller = Level(0.1, 4.2)
    for value in normal(50, 0.01, 4):
        smaller.fold(value, 0.0001)
    assert smaller.sd == quiet.sd


def test_an_accuracy_of_one_still_has_an_error() -> None:
    assert proportion_se(1.0, 400) > 0.002
    assert proportion_se(0.0, 400) == pytest.approx(proportion_se(1.0, 400))
    assert proportion_se(0.5, 10_000) == pytest.approx(0.005, rel=1e-3)


def test_a_lucky_first_value_is_not_the_best_for_good() -> None:
    """A young average is one value; taken at its word, it would make everything after it look like a decline."""
    values = [0.5 + 0.06, *(0.5 + v for v in normal(60, 0.02, 5))]  # first value three deviations too high
    level = Level(0.1, 4.2)
    for value in values:
        level.fold(value)
        assert level.drop <= level.margin()
    assert level.best < 0.53


def test_a_fall_right_after_the_first_evaluation_does_not_make_the_best_forgotten() -> None:
    """The fall itself looks like noise for one evaluation; with a standard error at hand the best is not given up."""
    level = Level(alpha=0.4, margin_se=2.9)
    for value in (0.28, 0.02, 0.02, 0.0, 0.0, 0.0):
        level.fold(value, proportion_se(value, 60))
    assert level.best == 0.28
    assert level.drop > level.margin()


def test_planted_best_by_the_estimated_noise_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Level, "given_variance", property(lambda self: None, lambda self, value: None), raising=False)
    with pytest.raises(AssertionError):
        test_a_fall_right_after_the_first_evaluation_does_not_make_the_best_forgotten()
