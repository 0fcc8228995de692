"""The helpers: what `mean`, `ratio_above` and the others compute.

Promises   a helper that needs numbers fails on NaN, infinity, text or null, and names the step; none of them returns
           a default for points that are not there.

Read next: `functions.py` (which points a range means), `language.py` (how calls are bound).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot_harness.baseline import MIN_RUNS, Baseline, Baselines, prediction_band
from surefoot_harness.checks.language import (
    BOOL,
    NUMBER,
    RANGE,
    SERIES,
    STEPS,
    TEXT,
    CheckFailedError,
    Helper,
    Parameter,
    is_whole,
)
from surefoot_harness.own_command import own_name
from surefoot_harness.series import Series, describe, is_number

# -- Which recorded points a helper uses, and whether they are numbers ----------------------------
# A range counts recorded points, not steps: 1 is the first recorded point, -1 the last, the end is left out, and
# end 0 means "through the last". So a series that starts at step 0 or 101, or has one point in ten steps, loses
# nothing. A range that reaches outside of what was recorded fails: those points are not there to judge.


Item = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Points:
    """Some recorded points of one series, in order of step."""

    name: str
    items: list[Item]
    single: bool = False
    """The source gave one number without a step."""

    @classmethod
    def of(cls, series: Series) -> Points:
        """All points of `series`."""
        return cls(series.name, series.points(), series.single)

    @property
    def steps(self) -> list[int]:
        """The recorded steps."""
        return [step for step, _ in self.items]

    def spread(self) -> str:
        """The steps in words, for messages."""
        if not self.items:
            return "no steps"
        return f"steps {self.items[0][0]} to {self.items[-1][0]}, {len(self.items)} recorded"


@dataclass(frozen=True, slots=True)
class Range:
    """The points asked for: by position among the recorded points, or by step."""

    start: int = 1
    end: int = 0
    from_step: int | None = None
    to_step: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Range:
        """The range among a helper's arguments; what is left out keeps its default."""
        names = ("start", "end", "from_step", "to_step")
        return cls(**{name: int(given[name]) for name in names if given.get(name) is not None})

    @property
    def everything(self) -> bool:
        """Whether no range was asked for."""
        return self == Range()

    def __str__(self) -> str:
        if self.from_step is not None or self.to_step is not None:
            low = "the first" if self.from_step is None else self.from_step
            return f"from step {low} to {'the last' if self.to_step is None else self.to_step}"
        return f"({self.start}, {self.end})"


def select(points: Points, wanted: Range) -> Points:
    """The points inside `wanted`; an empty or overreaching range is a `CheckFailedError`.

    Example:
        >>> select(Points("loss", [(0, 9.0), (10, 7.0), (20, 5.0)]), Range(-2, 0)).items
        [(10, 7.0), (20, 5.0)]
    """
    if not points.items:
        raise CheckFailedError(f"{points.name} has no recorded points")
    if wanted.everything:
        return points
    if wanted.from_step is not None or wanted.to_step is not None:
        chosen = _by_step(points, wanted)
    else:
        chosen = _by_position(points, wanted)
    if not chosen:
        raise CheckFailedError(f"empty range: {wanted} of {points.name} holds no point ({points.spread()})")
    return Points(points.name, chosen, points.single)


def _by_position(points: Points, wanted: Range) -> list[Item]:
    total = len(points.items)
    first = wanted.start + total if wanted.start < 0 else max(wanted.start, 1) - 1
    stop = wanted.end + total if wanted.end <= 0 else wanted.end - 1
    chosen = points.items[max(first, 0) : max(stop, 0)]
    if chosen and (first < 0 or stop > total):
        raise CheckFailedError(
            f"the range {wanted} of {points.name} reaches outside of what was recorded ({points.spread()})"
        )
    return chosen


def _by_step(points: Points, wanted: Range) -> list[Item]:
    low = -math.inf if wanted.from_step is None else wanted.from_step
    high = math.inf if wanted.to_step is None else wanted.to_step
    return [item for item in points.items if low <= item[0] <= high]


def usable(points: Points) -> list[float]:
    """The values, or a `CheckFailedError` that names the first step whose value is not a finite number."""
    bad = [(step, value) for step, value in points.items if not is_number(value)]
    if bad:
        step, value = bad[0]
        more = f" (and {len(bad) - 1} more of {len(points.items)} points)" if len(bad) > 1 else ""
        where = "" if points.single else f" at step {step}"
        raise CheckFailedError(f"{points.name} is {describe(value)}{where}{more}")
    return [float(value) for _, value in points.items]


def one_number(points: Points) -> float:
    """The number of a source that gave one number; a series has to be asked for one of its points."""
    if points.single:
        return usable(points)[0]
    raise CheckFailedError(
        f'{points.name} is a series ({points.spread()}), not one number: use data["..."]["STEP"], last() or mean()'
    )


def joined(parts: Sequence[Points]) -> list[Item]:
    """All points in order of step; two values for one step fail, because either choice would hide the other."""
    merged: dict[int, Any] = {}
    for part in parts:
        for step, value in part.items:
            if step in merged and merged[step] != value:
                raise CheckFailedError(f"step {step} has two values, {merged[step]} and {value} ({part.name})")
            merged[step] = value
    return sorted(merged.items())


# -- The helpers: what `mean`, `ratio_above` and the others compute -------------------------------


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


# -- `within_baseline(...)`: this run against the band of the stored ones -------------------------


STATS: Mapping[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "last": lambda values: values[-1],
    "min": min,
    "max": max,
}


def judge(
    series: Series, given: Mapping[str, Any], wanted: Range, baselines: Baselines | None
) -> tuple[bool, float, str]:
    """Whether the summary of `series` lies in the band; the summary; the band in words."""
    baseline = baselines.get(given["baseline"]) if baselines is not None else None
    if baseline is None:
        name = f" {given['baseline']}" if given["baseline"] else ""
        raise CheckFailedError(
            f"not enough runs: no baseline{name} is stored, {MIN_RUNS} runs are needed ({own_name()} baseline add RUN)"
        )
    stat, metric = given["stat"], given["metric"]
    value = _summary(series, wanted, stat)
    values, remark = _stored_summaries(baseline, metric, wanted, stat)
    factor, reason = baseline.factor(series.name)
    band = prediction_band(values, given["alpha"], given["side"], factor)
    loosened = f", loosened {factor:g} times: {reason}" if factor != 1 else ""
    return band.holds(value), value, f"{stat} {value:.6g}, band {band}{loosened}{remark}"


def _stored_summaries(baseline: Baseline, metric: str, wanted: Range, stat: str) -> tuple[list[float], str]:
    values, reasons = [], []
    for run in baseline.runs:
        stored, _ = run.metrics.resolve(metric)
        try:
            if stored is None:
                raise CheckFailedError(run.left_out.get(metric, f"{metric} is not recorded"))
            values.append(_summary(stored, wanted, stat))
        except CheckFailedError as error:
            reasons.append(f"{run.source}: {error}")
    remark = f"; {len(reasons)} stored runs cannot be used, first {reasons[0]}" if reasons else ""
    if len(values) < MIN_RUNS:
        raise CheckFailedError(
            f"not enough runs: {len(values)} of at least {MIN_RUNS} in the baseline {baseline.name}{remark}"
        )
    return values, remark


def _summary(series: Series, wanted: Range, stat: str) -> float:
    return float(STATS[stat](usable(select(Points.of(series), wanted))))
