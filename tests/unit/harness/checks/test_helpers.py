"""Each helper against numpy, on series that hypothesis draws."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.harness.checks import run_checks
from surefoot.harness.series import Metrics, Series

VALUES = st.floats(-1e6, 1e6, allow_nan=False, allow_infinity=False, width=32)
SERIES = st.dictionaries(st.integers(0, 5000), VALUES, min_size=1, max_size=40)


def value_of(points: dict[int, float], expression: str) -> float:
    """What the value column says: the helper's own answer."""
    (row,) = run_checks(Metrics({"x": Series("x", points)}), [f"{expression} >= 0"]).rows
    assert isinstance(row.value, float | int), row.message
    return row.value


def array(points: dict[int, float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([points[step] for step in sorted(points)], dtype=np.float64)


ORACLES: dict[str, Callable[[np.ndarray], float]] = {  # type: ignore[type-arg]
    'min(data["x"])': np.min,
    'max(data["x"])': np.max,
    'mean(data["x"])': np.mean,
    'median(data["x"])': np.median,
    'percentile(data["x"], 0)': lambda a: np.percentile(a, 0),
    'percentile(data["x"], 37.5)': lambda a: np.percentile(a, 37.5),
    'percentile(data["x"], 100)': lambda a: np.percentile(a, 100),
    'ratio_above(data["x"], 0.5)': lambda a: np.mean(a >= 0.5),
    'last(data["x"])': lambda a: a[-1],
    'count(data["x"])': len,
    'len(data["x"])': len,
}


@pytest.mark.parametrize("expression", ORACLES)
@settings(max_examples=60, deadline=None)
@given(points=SERIES)
def test_a_helper_agrees_with_numpy(expression: str, points: dict[int, float]) -> None:
    assert value_of(points, expression) == pytest.approx(float(ORACLES[expression](array(points))), rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(points=SERIES, data=st.data())
def test_ranges_are_slices_of_the_recorded_points(points: dict[int, float], data: st.DataObject) -> None:
    """Position 1 is element 0, and the end is left out: (start, end) is [start - 1 : end - 1]."""
    values, total = array(points), len(points)
    first = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(first + 1, total))
    start = data.draw(st.sampled_from([first + 1, first - total]))
    end = data.draw(st.sampled_from([stop + 1, stop - total]))
    for name, oracle in (("mean", np.mean), ("median", np.median), ("min", np.min), ("count", len)):
        wanted = float(oracle(values[first:stop]))
        assert value_of(points, f'{name}(data["x"], {start}, {end})') == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(points=SERIES, k=st.integers(1, 40))
def test_last_k_is_the_mean_of_the_last_k(points: dict[int, float], k: int) -> None:
    if k <= len(points):
        wanted = float(np.mean(array(points)[-k:]))
        assert value_of(points, f'last(data["x"], {k})') == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(points=st.dictionaries(st.integers(0, 500), st.floats(-100, 100, width=32), min_size=2, max_size=30))
def test_slope_is_the_least_squares_line_over_steps(points: dict[int, float]) -> None:
    steps = np.array(sorted(points), dtype=np.float64)
    wanted = float(np.polyfit(steps, array(points), 1)[0])
    assert value_of(points, 'slope(data["x"])') == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(points=SERIES, percent=st.integers(0, 100))
def test_ignore_top_p_drops_the_largest_share_and_keeps_one(points: dict[int, float], percent: int) -> None:
    share = percent / 100
    kept = np.sort(array(points))[: max(1, int(len(points) * (1.0 - share)))]
    answer = value_of(points, f'mean(data["x"], ignore_top_p={share})')
    assert answer == pytest.approx(float(np.mean(kept)), rel=1e-9, abs=1e-9)


def test_exclude_outliers_drops_the_largest_few() -> None:
    points = {1: 1.0, 2: 90.0, 3: 2.0, 4: 80.0, 5: 3.0}
    assert value_of(points, 'mean(data["x"], exclude_outliers=2)') == 2.0


def test_one_huge_spike_moves_the_mean_and_not_the_median() -> None:
    points = dict.fromkeys(range(1, 10), 1.0) | {10: 1e9}
    assert value_of(points, 'median(data["x"])') == 1.0
    assert value_of(points, 'mean(data["x"])') > 1e7


def test_equality_at_the_threshold_counts_as_above() -> None:
    assert value_of({1: 1.05, 2: 1.04}, 'ratio_above(data["x"], 1.05)') == 0.5


def test_the_mean_of_huge_numbers_does_not_overflow() -> None:
    assert math.isclose(value_of({1: 1.7e308, 2: 1.7e308}, 'mean(data["x"])'), 1.7e308)


def test_within_is_absolute_or_relative() -> None:
    metrics = Metrics({"x": Series("x", {1: 1.1})})
    checks = ["0.11", "0.05", "rel=0.11", "rel=0.05"]
    rows = run_checks(metrics, [f'within(last(data["x"]), 1.0, {word})' for word in checks]).rows
    assert [str(row.status) for row in rows] == ["PASS", "FAIL", "PASS", "FAIL"]
    assert rows[0].value == 1.1
