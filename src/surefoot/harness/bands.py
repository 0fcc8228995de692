"""Bands from a few runs: where the next run should lie, wrong with a stated probability.

A prediction interval for one more run, from n summaries that scatter normally: mean ± t · s · sqrt(1 + 1/n), with
Student's t for n - 1 degrees of freedom. With few runs t is large, so a thin baseline gives a wide band, not a
confident one.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.errors import ConfigError

MIN_RUNS = 3
"""Fewer runs say next to nothing about how much runs scatter."""
SIDES = ("both", "low", "high")
_ROUNDING = 1e-9
"""Runs that agree bit for bit leave a band of width 0; the last digits of a sum may still differ."""


@dataclass(frozen=True, slots=True)
class Band:
    """Where the next run should lie."""

    low: float
    high: float
    runs: int
    alpha: float
    side: str

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside, on the sides that are looked at."""
        slack = _ROUNDING * max(abs(self.low), abs(self.high), abs(value))
        inside_low = self.side == "high" or value >= self.low - slack
        inside_high = self.side == "low" or value <= self.high + slack
        return inside_low and inside_high

    def __str__(self) -> str:
        low = "anything" if self.side == "high" else f"{self.low:.6g}"
        high = "anything" if self.side == "low" else f"{self.high:.6g}"
        return f"{low} to {high} ({self.runs} runs, false alarm rate {self.alpha:g})"


def prediction_band(values: Sequence[float], alpha: float = 0.01, side: str = "both", factor: float = 1.0) -> Band:
    """The band for one more run.

    Args:
        values: one summary for each stored run, at least `MIN_RUNS`.
        alpha: the probability that a run like the stored ones falls outside.
        side: `both`, or only `low` (too small is bad) or `high`.
        factor: widens the band; 1 keeps the stated rate.

    Example:
        >>> band = prediction_band([0.50, 0.52, 0.54], alpha=0.05)
        >>> round(band.low, 3), round(band.high, 3)
        (0.421, 0.619)
    """
    if len(values) < MIN_RUNS or not all(math.isfinite(value) for value in values):
        raise ConfigError(
            f"a band from {len(values)} values", f"it needs at least {MIN_RUNS}, all finite", "store more runs"
        )
    if side not in SIDES or not 0 < alpha < 1:
        raise ConfigError(f"side {side!r}, alpha {alpha}", f"sides are {SIDES}, alpha is between 0 and 1", "correct it")
    count = len(values)
    tail = alpha / 2 if side == "both" else alpha
    width = t_quantile(tail, count - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / count) * factor
    middle = statistics.fmean(values)
    return Band(middle - width, middle + width, count, alpha, side)


@functools.lru_cache(maxsize=256)  # a report asks for the same one again and again
def t_quantile(tail: float, freedom: int) -> float:
    """The t that Student's distribution exceeds with probability `tail`.

    Example:
        >>> round(t_quantile(0.025, 10), 4)
        2.2281
    """
    if not 0 < tail < 1 or freedom < 1:
        raise ConfigError(
            f"tail {tail}, {freedom} degrees of freedom", "no such quantile", "0 < tail < 1, freedom >= 1"
        )
    if tail > 0.5:
        return -t_quantile(1 - tail, freedom)
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > tail:
        low, high = high, high * 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_tail(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def t_tail(t: float, freedom: int) -> float:
    """The probability that Student's t exceeds `t` (t >= 0)."""
    return 0.5 * _beta_ratio(freedom / (freedom + t * t), freedom / 2, 0.5)


def _beta_ratio(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction on the side where that converges."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d, tiny)
            c = _away_from_zero(1 + term / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value
