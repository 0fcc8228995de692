"""What the guard is compared with in `guard_rates.py`: fixed thresholds, and the plain patience rule.

A fixed threshold watches how far a moving average lies below its best, or below the mean of the first ten values, and
stops at the first evaluation beyond a constant. Every average, start and reference point below is tried; the constant
is the smallest that keeps the allowed share of false alarms on the very healthy runs that the guard is judged by. It
is tried in two forms: one constant for all runs, which is what a person can configure, and a constant in units of each
run's true noise, which nobody knows outside a simulation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from guard_shapes import FOLDS, Array, Runs

ALPHAS = (0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
STARTS = (0, 10, 20)
REFERENCES = ("best", "first ten")
NEVER = 10 * FOLDS


def smoothed(series: Array, alpha: float) -> Array:
    """The moving average of each row, begun at its first value."""
    out = np.empty_like(series)
    out[:, 0] = series[:, 0]
    for t in range(1, series.shape[1]):
        out[:, t] = out[:, t - 1] + alpha * (series[:, t] - out[:, t - 1])
    return out


def drops(series: Array, alpha: float, start: int, reference: str) -> Array:
    """How far below its reference the average lies, from evaluation `start` on; minus infinity before."""
    average = smoothed(series, alpha)
    out = np.full_like(average, -np.inf)
    if reference == "best":
        out[:, start:] = np.maximum.accumulate(average[:, start:], axis=1) - average[:, start:]
    else:
        begin = max(start, 10)
        out[:, begin:] = series[:, :10].mean(axis=1, keepdims=True) - average[:, begin:]
    return out


def watched(runs: Runs, rule: str) -> Array:
    """The series whose fall the rule looks for."""
    return runs.heldout - runs.reward if rule == "gap" else runs.heldout


@dataclass(frozen=True)
class Tuned:
    """A fixed-threshold rule whose constant was set on healthy runs."""

    rule: str
    alpha: float
    start: int
    reference: str
    known_noise: bool
    threshold: float

    def __str__(self) -> str:
        return f"ema {self.alpha:g} below {self.reference}, {self.threshold:.3g}"

    def drops(self, runs: Runs) -> Array:
        """What is compared with the threshold."""
        return _scaled(runs, self.rule, self.alpha, self.start, self.reference, self.known_noise)


@dataclass(frozen=True)
class Fixed:
    """A fixed threshold, and how it did."""

    tuned: Tuned
    median_delay: float
    detected: float


def tune(rule: str, calm: Sequence[Runs], allowed: float, *, known_noise: bool) -> list[Tuned]:
    """Every rule of the family, each with the smallest constant that has at most `allowed` false alarms."""
    found = []
    for alpha, start, reference in itertools.product(ALPHAS, STARTS, REFERENCES):
        worst = np.concatenate([_scaled(c, rule, alpha, start, reference, known_noise).max(axis=1) for c in calm])
        found.append(Tuned(rule, alpha, start, reference, known_noise, float(np.quantile(worst, 1.0 - allowed))))
    return found


def best_fixed(family: Sequence[Tuned], runs: Runs) -> Fixed:
    """The quickest of the family that sees at least 99 % of the bad runs, or the quickest of all if none does."""
    tried = [_tried(tuned, runs) for tuned in family]
    able = [fixed for fixed in tried if fixed.detected >= 0.99] or tried
    return min(able, key=lambda fixed: (fixed.median_delay, -fixed.detected))


def _tried(tuned: Tuned, runs: Runs) -> Fixed:
    assert runs.onset is not None, "a bad run has an onset"
    beyond = tuned.drops(runs) > tuned.threshold
    stop = np.where(beyond.any(axis=1), beyond.argmax(axis=1), NEVER)
    late = stop >= runs.onset
    return Fixed(tuned, float(np.median((stop - runs.onset)[late])), float((stop[late] < NEVER).mean()))


def _scaled(runs: Runs, rule: str, alpha: float, start: int, reference: str, known_noise: bool) -> Array:
    unit = runs.noise[:, None] if known_noise else 1.0
    return np.asarray(drops(watched(runs, rule), alpha, start, reference) / unit)


def patience_stops(runs: Runs, *, alpha: float, patience: int) -> Array:
    """First evaluation at which held-out fell and the reward rose `patience` times in a row; NEVER if none."""
    fell = np.diff(smoothed(runs.heldout, alpha)) < 0
    rose = np.diff(smoothed(runs.reward, alpha)) > 0
    streak = np.zeros(len(runs.reward), dtype=int)
    stop = np.full(len(runs.reward), NEVER)
    for t in range(FOLDS - 1):
        streak = np.where(fell[:, t] & rose[:, t], streak + 1, 0)
        stop = np.where((streak >= patience) & (stop == NEVER), t + 1, stop)
    return stop
