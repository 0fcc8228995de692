"""How much of a curve's movement is noise: a smoothed series that knows its own standard error.

Owns       the noise of one series, its moving average, and how far that average lies below its best.
Promises   a straight line, however steep, has no noise; few evaluations give a wide margin, as they should; whole
           state is a handful of numbers, so that one fold costs the same at any length.
Never      decides: it says how far and how sure, `collapse_rules.py` says what that means.

The noise is read off second differences, x[t] - 2 x[t-1] + x[t-2]: their variance is six times that of one value, and
a trend cancels in them. The mean of their absolute values is taken, which one wild evaluation moves less than a mean of
squares, and which, unlike a median, is not zero for a curve that stands still most of the time.

Read next: `collapse_rules.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

FORGET = 1.0 / 64.0
"""Weight that an old difference loses per fold: noise is that of the last hundred evaluations or so."""
DOF_PER_DIFFERENCE = 0.5
"""Neighbouring second differences overlap; about half of them are news."""
GIVEN_DOF = 10.0
"""What a standard error that comes with the value adds to that."""
WIDEST = 60.0
"""No margin is wider than this many standard errors, however few values there are."""
LONG = 200
"""Evaluations up to which `margin_se` is used as it is."""
ROUNDING = 1e-9
"""A fall smaller than this share of the level is arithmetic."""
_MEAN_ABS = math.sqrt(6.0 * 2.0 / math.pi)  # E|second difference| of a normal series with deviation 1


@lru_cache(maxsize=4096)
def widened(margin_se: float, dof: float) -> float:
    """Standard errors that are as rare with an estimated deviation as `margin_se` is with a known one.

    Wallace's approximation to Student's quantile, read backwards.

    Example:
        >>> round(widened(4.0, 1e9), 3), round(widened(4.0, 10), 1)
        (4.0, 6.6)
    """
    normal = margin_se * (8.0 * dof + 3.0) / (8.0 * dof + 1.0)
    power = min(normal * normal / dof, 700.0)  # beyond it exp overflows; WIDEST is reached long before
    return max(margin_se, min(math.sqrt(dof * math.expm1(power)), WIDEST))


def lengthened(margin_se: float, count: int) -> float:
    """The margin for a run of `count` evaluations: the best and the worst of many are further apart than those of few.

    The extremes of n values lie about sqrt(2 log n) deviations out. A fall from one to the other is twice that, and is
    measured against a deviation sqrt(2) times as large.

    Example:
        >>> round(lengthened(4.2, 200), 2), round(lengthened(4.2, 2000), 2)
        (4.2, 5.18)
    """
    return math.sqrt(margin_se * margin_se + 4.0 * math.log(max(1.0, count / LONG))) if margin_se else 0.0


def proportion_se(share: float, count: int) -> float:
    """Standard error of an accuracy over `count` answers, with one right and one wrong answer added.

    Without the two, 400 right answers of 400 would have no error at all, and the first wrong one would look certain.

    Example:
        >>> round(proportion_se(0.5, 400), 4), round(proportion_se(1.0, 400), 4)
        (0.0249, 0.0025)
    """
    shifted = (share * count + 1.0) / (count + 2.0)
    return math.sqrt(shifted * (1.0 - shifted) / (count + 2.0))


@dataclass
class DifferenceNoise:
    """Deviation of a series around its trend, estimated as it comes in."""

    weight: float = 0.0
    weight_of_squares: float = 0.0
    total: float = 0.0
    last: float | None = None
    before: float | None = None

    def fold(self, value: float) -> None:
        """Take in the next value."""
        if self.last is not None and self.before is not None:
            keep = 1.0 - FORGET
            self.total = self.total * keep + abs(value - 2.0 * self.last + self.before)
            self.weight = self.weight * keep + 1.0
            self.weight_of_squares = self.weight_of_squares * keep * keep + 1.0
        self.before, self.last = self.last, value

    @property
    def sd(self) -> float:
        """The deviation of one value; 0 before the third, where `dof` is 0 too."""
        return self.total / self.weight / _MEAN_ABS if self.weight else 0.0

    @property
    def dof(self) -> float:
        """How many independent values the estimate is worth."""
        return DOF_PER_DIFFERENCE * self.weight * self.weight / self.weight_of_squares if self.weight else 0.0


@dataclass
class Level:
    """A smoothed series, its best, and the margin that a fall below the best has to leave behind.

    Example:
        >>> level = Level(alpha=0.5, margin_se=4.2)
        >>> for value in (0.28, 0.23, 0.18, 0.13):
        ...     level.fold(value)
        >>> round(level.drop, 3), level.margin() < 1e-6  # a straight fall: all of it is real
        (0.106, True)
    """

    alpha: float
    margin_se: float
    count: int = 0
    ema: float = 0.0
    previous: float = 0.0
    memory: float = 1.0
    """Squared share of the first value that is still in the average."""
    spread: float = 1.0
    """Deviation of the average when that of one value is 1: 1 at first, then sqrt(alpha / (2 - alpha))."""
    unit: float = 0.0
    """`margin_se` deviations of one value, widened while their estimate is young."""
    best: float = 0.0
    best_spread: float = 1.0
    best_count: int = 0
    given_variance: float | None = None
    noise: DifferenceNoise = field(default_factory=DifferenceNoise)

    def fold(self, value: float, se: float | None = None) -> None:
        """Take in the next value, with its own standard error where it is known."""
        self.count += 1
        if self.count == 1:
            self.ema = self.previous = value
        else:
            self.previous = self.ema
            self.ema += self.alpha * (value - self.ema)  # this form keeps a constant series exactly constant
            self.memory *= (1.0 - self.alpha) ** 2
            self.spread = math.sqrt(self.memory + self.alpha / (2.0 - self.alpha) * (1.0 - self.memory))
        if se is not None:
            old = self.given_variance
            self.given_variance = se * se if old is None else old + FORGET * (se * se - old)
        self.noise.fold(value)
        self._keep_best()

    def _keep_best(self) -> None:
        dof = self.dof
        margin_se = self.margin_se if self.count <= LONG else lengthened(self.margin_se, self.count)
        times = widened(margin_se, dof) if dof else 0.0
        self.unit = times * self.sd
        # A young average is mostly one value. It is the best only by what is left when its own noise is taken off: the
        # noise that it came with where that is known. A sudden fall looks like noise at first, and a best that is given
        # up for it does not come back.
        unit = self.unit if self.given_variance is None else times * math.sqrt(self.given_variance)
        if self.count == 1 or self.ema - unit * self.spread >= self.best - unit * self.best_spread:
            self.best, self.best_spread, self.best_count = self.ema, self.spread, self.count

    @property
    def sd(self) -> float:
        """Deviation of one value: the larger of what the series shows and what its caller says."""
        given = self.given_variance
        return self.noise.sd if given is None else max(self.noise.sd, math.sqrt(given))

    @property
    def dof(self) -> float:
        """What `sd` is worth in independent values; 0 while nothing is known about it."""
        return self.noise.dof + (GIVEN_DOF if self.given_variance is not None else 0.0)

    @property
    def fell(self) -> bool:
        """Whether the last fold lowered the average."""
        return self.ema < self.previous

    @property
    def rose(self) -> bool:
        """Whether the last fold raised it."""
        return self.ema > self.previous

    @property
    def drop(self) -> float:
        """How far the average lies below its best; never negative but for the start-up's allowance."""
        return self.best - self.ema

    def margin(self, share: float = 1.0) -> float:
        """What `drop` has to exceed to be more than noise; infinite while the noise is unknown."""
        if self.dof == 0.0:
            return math.inf
        floor = ROUNDING * max(abs(self.best), abs(self.ema))
        return max(floor, share * self.unit * math.hypot(self.best_spread, self.spread))
