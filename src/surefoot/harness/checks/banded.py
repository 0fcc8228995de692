"""`within_baseline(...)`: this run against the band of the stored ones."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.harness.bands import MIN_RUNS, prediction_band
from surefoot.harness.baseline import Baseline, Baselines
from surefoot.harness.checks.points import Points, Range, select, usable
from surefoot.harness.checks.problems import CheckFailedError
from surefoot.harness.series import Series

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
            f"not enough runs: no baseline{name} is stored, {MIN_RUNS} runs are needed (surefoot baseline add RUN)"
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
