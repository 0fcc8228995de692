"""The helpers: what `mean`, `ratio_above` and the others compute.

Promises   a helper that needs numbers fails on NaN, infinity, text or null, and names the step; none of them returns
           a default for points that are not there.

Read next: `points.py` (which points a range means), `signatures.py` (how calls are bound).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from surefoot.harness.checks.points import Points, usable
from surefoot.harness.checks.problems import CheckFailedError
from surefoot.harness.checks.signatures import (
    BOOL,
    NUMBER,
    RANGE,
    SERIES,
    STEPS,
    TEXT,
    Helper,
    Parameter,
    is_whole,
)
from surefoot.harness.series import is_number

_HUGE = 1e290
Arguments = Mapping[str, Any]
_POINTS = Parameter("series", (SERIES,))
_POINTS_OR_STEPS = Parameter("series", (SERIES, STEPS))
_VALUE = Parameter("value", (NUMBER,))


class Share(float):
    """A share of points of which some are NaN: between `low` and itself. Only a comparison may use it."""

    low: float
    reason: str

    def __new__(cls, high: float, low: float, reason: str) -> Share:
        """`high` counts every NaN as above, `low` counts none."""
        share = super().__new__(cls, high)
        share.low, share.reason = low, reason
        return share


def _numbers(given: Arguments) -> list[float]:
    series = given["series"]
    if isinstance(series, frozenset):
        if not series:
            raise CheckFailedError("there are no recorded steps")
        return sorted(series)
    return usable(series)


def _mean(given: Arguments) -> float:
    values = sorted(_numbers(given))
    share, count = given["ignore_top_p"], int(given["exclude_outliers"])
    if share:
        values = values[: max(1, int(len(values) * (1.0 - share)))]
    if count:
        if count >= len(values):
            raise CheckFailedError(f"exclude_outliers={count} leaves nothing of {len(values)} points")
        values = values[:-count]
    return _average(values)


def _average(values: list[float]) -> float:
    """The mean without overflow on the way: huge finite values have a finite mean."""
    if max(map(abs, values)) > _HUGE:
        return math.fsum(value / len(values) for value in values)
    return statistics.fmean(values)


def _percentile(given: Arguments) -> float:
    values = sorted(_numbers(given))
    place: float = (len(values) - 1) * given["p"] / 100.0
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def _ratio_above(given: Arguments) -> float:
    series: Points = given["series"]
    missing = [step for step, value in series.items if _is_nan(value)]
    rest = Points(series.name, [item for item in series.items if not _is_nan(item[1])], series.single)
    threshold: float = given["threshold"]
    above = sum(1 for value in usable(rest) if value >= threshold)
    total = len(series.items)
    if not missing:
        return above / total
    reason = f"{series.name} is NaN at step {missing[0]} ({len(missing)} of {total} points)"
    return Share((above + len(missing)) / total, above / total, reason)


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _last(given: Arguments) -> float:
    series: Points = given["series"]
    count = int(given["k"])
    if count > len(series.items):
        raise CheckFailedError(
            f"last {count} of {series.name}: only {len(series.items)} points are recorded ({series.spread()})"
        )
    return _average(usable(Points(series.name, series.items[-count:], series.single)))


def _slope(given: Arguments) -> float:
    series: Points = given["series"]
    values = usable(series)
    if len(values) < 2:
        raise CheckFailedError(f"a slope needs two points, {series.name} has {len(values)} here")
    return statistics.linear_regression([float(step) for step in series.steps], values).slope


def _count(given: Arguments) -> int:
    series = given["series"]
    return len(series) if isinstance(series, frozenset) else len(series.items)


def _steps(given: Arguments) -> frozenset[int]:
    series = given["series"]
    return series if isinstance(series, frozenset) else frozenset(series.steps)


def _finite(given: Arguments) -> bool:
    return all(is_number(value) for _, value in given["series"].items)


def _within(given: Arguments) -> bool:
    tolerance = given["tolerance"]
    allowed = tolerance if tolerance is not None else given["rel"] * abs(given["target"])
    return bool(abs(given["value"] - given["target"]) <= allowed)


def _whole_text(given: Arguments) -> int:
    if not is_whole(given["value"]):
        raise CheckFailedError(f"str({given['value']}) is not a step: steps are whole numbers")
    return int(given["value"])


def _share(value: Any) -> bool:
    return bool(0.0 <= value <= 1.0)


def _not_negative(value: Any) -> bool:
    return bool(value >= 0)


def _is_count(value: Any) -> bool:
    return is_whole(value) and bool(value >= 1)


def _is_trim(value: Any) -> bool:
    return is_whole(value) and bool(value >= 0)


_HELPERS = (
    Helper("min", NUMBER, (_POINTS_OR_STEPS, *RANGE), lambda g: min(_numbers(g)), "the smallest value", True),
    Helper("max", NUMBER, (_POINTS_OR_STEPS, *RANGE), lambda g: max(_numbers(g)), "the largest value", True),
    Helper(
        "mean",
        NUMBER,
        (
            _POINTS,
            *RANGE[:2],
            Parameter("ignore_top_p", (NUMBER,), 0.0, allowed=_share, meaning="a share from 0 to 1"),
            Parameter("exclude_outliers", (NUMBER,), 0, True, allowed=_is_trim, meaning="a count from 0"),
            *RANGE[2:],
        ),
        _mean,
        "the average; ignore_top_p leaves out the largest share, exclude_outliers the largest few",
        True,
    ),
    Helper("median", NUMBER, (_POINTS, *RANGE), lambda g: statistics.median(_numbers(g)), "the middle value", True),
    Helper(
        "percentile",
        NUMBER,
        (_POINTS, Parameter("p", (NUMBER,), allowed=lambda p: 0 <= p <= 100, meaning="a number from 0 to 100"), *RANGE),
        _percentile,
        "the value below which p percent lie, between two points on a line",
        True,
    ),
    Helper(
        "ratio_above",
        NUMBER,
        (_POINTS, Parameter("threshold", (NUMBER,)), *RANGE),
        _ratio_above,
        "the share of points at or above the threshold; a NaN counts as above",
        True,
    ),
    Helper(
        "last",
        NUMBER,
        (_POINTS, Parameter("k", (NUMBER,), 1, allowed=_is_count, meaning="a count from 1")),
        _last,
        "the last value, or the mean of the last k",
        True,
    ),
    Helper("slope", NUMBER, (_POINTS, *RANGE), _slope, "least-squares change per step", True),
    Helper("count", NUMBER, (_POINTS_OR_STEPS, *RANGE), _count, "how many points are recorded", True, False),
    Helper("len", NUMBER, (_POINTS_OR_STEPS,), _count, "the same as count"),
    Helper("finite", BOOL, (_POINTS, *RANGE), _finite, "whether every point is a finite number", True),
    Helper("all_finite", BOOL, (_POINTS, *RANGE), _finite, "the same as finite", True),
    Helper("steps", STEPS, (_POINTS_OR_STEPS,), _steps, "the recorded steps, to be compared or counted"),
    Helper("set", STEPS, (_POINTS_OR_STEPS,), _steps, "the same as steps; set(range(1, 21)) are steps 1 to 20"),
    Helper(
        "within",
        BOOL,
        (
            _VALUE,
            Parameter("target", (NUMBER,)),
            Parameter("tolerance", (NUMBER,), None, allowed=_not_negative, meaning="0 or more"),
            Parameter("rel", (NUMBER,), None, True, allowed=_not_negative, meaning="0 or more"),
        ),
        _within,
        "whether value lies within tolerance of target; rel=0.05 means 5 % of target",
    ),
    Helper("abs", NUMBER, (_VALUE,), lambda g: abs(g["value"]), "without its sign"),
    Helper("str", NUMBER, (_VALUE,), _whole_text, "a step as it is written in data"),
    Helper("int", NUMBER, (_VALUE,), lambda g: math.trunc(g["value"]), "without what follows the point"),
    Helper("float", NUMBER, (_VALUE,), lambda g: g["value"], "a number stays a number"),
    Helper(
        "within_baseline",
        BOOL,
        (
            Parameter("metric", (TEXT,)),
            *RANGE[:2],
            Parameter("stat", (TEXT,), "mean", True),
            Parameter("alpha", (NUMBER,), 0.01, True, allowed=lambda a: 0 < a < 1, meaning="between 0 and 1"),
            Parameter("side", (TEXT,), "both", True),
            Parameter("baseline", (TEXT,), None, True),
            *RANGE[2:],
        ),
        lambda g: None,  # judged by the evaluator, which knows the stored runs
        "whether this run lies in the band of the stored runs, wrong with probability alpha",
    ),
)

HELPERS: Mapping[str, Helper] = {helper.name: helper for helper in _HELPERS}
