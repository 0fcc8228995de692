"""Where is the change, given noisy measurements? The mathematics of the noise-aware bisect.

Commits stand in a line: position 0 is GOOD, position n is BAD, and one of 1..n is the culprit: every commit before it
behaves like GOOD, it and every one after it like BAD. All samples of both sides are pooled, so each run teaches the
level of its whole side, not only of its own commit. The levels and the spread are never plugged in as if they were
known: they are integrated out, so few samples give a wide posterior and not a false certainty.

Owns       the posterior over culprits, and the choice of the next commit to sample.
Promises   a stop means that one block of commits holds at least the asked share of the posterior.
Never      runs anything, or looks at a clock.

Left out: a separate sequential test at every step. It must be nearly certain at each of its log2(n) stops, and pays for
certainty that later samples would have given for nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

SURE = 0.1
"""A commit counts as a reference for one side when the other side has at most this share of the posterior."""
STAY = 0.9
"""Stay at the commit that is checked out while it is at least this informative, relative to the best one."""


@dataclass(frozen=True, slots=True)
class Stats:
    """What a set of samples comes to: count, sum, sum of squares. They add.

    Example:
        >>> Stats.of([1.0, 3.0]).mean
        2.0
    """

    n: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Stats:
        """The statistics of some values."""
        values = list(values)
        return cls(len(values), math.fsum(values), math.fsum(v * v for v in values))

    def __add__(self, other: Stats) -> Stats:
        return Stats(self.n + other.n, self.total + other.total, self.squares + other.squares)

    def __sub__(self, other: Stats) -> Stats:
        return Stats(self.n - other.n, self.total - other.total, self.squares - other.squares)

    @property
    def mean(self) -> float:
        """The average; there has to be a sample."""
        return self.total / self.n

    @property
    def spread(self) -> float:
        """Sum of squared distances from the mean, never below zero."""
        return max(self.squares - self.total * self.total / self.n, 0.0) if self.n else 0.0

    def around(self, level: float) -> float:
        """Sum of squared distances from `level`."""
        return self.spread + self.n * (self.mean - level) ** 2 if self.n else 0.0


class Model(Protocol):
    """What the samples of one side look like."""

    @property
    def learns(self) -> bool:
        """Whether levels are learnt, so that the ends of the line are needed as references."""
        ...

    def log_evidence(self, left: Stats, right: Stats) -> float:
        """Log-probability of all samples when `left` behaves like GOOD and `right` like BAD, up to a constant."""
        ...


@dataclass(frozen=True, slots=True)
class Gaussian:
    """A metric: two levels, one spread; each is learnt from the samples unless it is given."""

    levels: tuple[float, float] | None = None
    """(good, bad), where the user has said what counts; None learns both."""
    sd: float | None = None
    floor: float = 1e-18
    """Added to the spread: a metric that repeats itself exactly has a spread of zero, and no logarithm."""

    def log_evidence(self, left: Stats, right: Stats) -> float:
        """Flat priors on unknown levels and on the logarithm of an unknown spread, integrated out."""
        count = left.n + right.n
        if self.levels is not None:
            within, volume = left.around(self.levels[0]) + right.around(self.levels[1]), 0.0
        else:
            within, volume = left.spread + right.spread, -0.5 * math.log(left.n * right.n)
            count -= 2  # two degrees of freedom went into the levels
        if self.sd is not None:
            return volume - within / (2 * self.sd * self.sd)
        return volume - 0.5 * count * math.log(within + self.floor)

    @property
    def learns(self) -> bool:
        """Whether the ends of the line are needed as references."""
        return self.levels is None


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """A flaky test: fails (1.0) at one rate before the culprit and at another from it on."""

    rates: tuple[float, float] | None = None
    """(good, bad) shares of failing runs, strictly between 0 and 1; None learns both."""

    def log_evidence(self, left: Stats, right: Stats) -> float:
        """Known rates as they are; unknown ones under Jeffreys priors, integrated out."""
        if self.rates is None:
            return _log_beta(left) + _log_beta(right)
        sides = zip((left, right), self.rates, strict=True)
        return sum(s.total * math.log(rate) + (s.n - s.total) * math.log1p(-rate) for s, rate in sides)

    @property
    def learns(self) -> bool:
        """Whether the rates come from the samples."""
        return self.rates is None


def _log_beta(side: Stats) -> float:
    failed = side.total + 0.5
    passed = side.n - side.total + 0.5
    return math.lgamma(failed) + math.lgamma(passed) - math.lgamma(failed + passed)


@dataclass(frozen=True, slots=True)
class Block:
    """Culprits `first`..`last` that no testable commit can tell apart, and their share of the posterior."""

    first: int
    last: int
    mass: float


@dataclass(frozen=True, slots=True)
class _Segment:
    """Candidates `low + 1 .. high`, between two neighbouring sampled commits: equally likely, `mass` in all."""

    low: int
    high: int
    mass: float


class ChangeSearch:
    """The samples so far and what they say.

    Example:
        >>> search = ChangeSearch(4, Bernoulli())
        >>> for position, failed in [(0, 0), (0, 0), (4, 1), (4, 1)]:
        ...     search.add(position, failed)
        >>> search.next()
        2
    """

    def __init__(self, commits: int, model: Model) -> None:
        """`commits` is the number of candidates: those after GOOD, BAD included."""
        self.commits, self.model = commits, model
        self.samples: dict[int, Stats] = {}
        self._sampled: list[int] = []
        self._testable = list(range(commits + 1))
        self._segments: list[_Segment] | None = None
        self._here: int | None = None

    def add(self, position: int, value: float) -> None:
        """One more sample of one commit."""
        if position not in self.samples:
            insort(self._sampled, position)
            self.samples[position] = Stats()
        self.samples[position] += Stats(1, value, value * value)
        self._segments, self._here = None, position

    def skip(self, position: int) -> None:
        """This commit cannot be tested; what it did say so far is forgotten."""
        self._testable = [p for p in self._testable if p != position]
        if self.samples.pop(position, None) is not None:
            self._sampled.remove(position)
        self._segments = None

    def split(self, boundary: int) -> tuple[Stats, Stats]:
        """All samples before `boundary`, and all from it on."""
        left, right = Stats(), Stats()
        for position, stats in self.samples.items():
            if position < boundary:
                left += stats
            else:
                right += stats
        return left, right

    def segments(self) -> list[_Segment]:
        """The posterior, one entry per stretch between sampled commits. GOOD and BAD need a sample each."""
        if self._segments is None:
            self._segments = self._weigh()
        return self._segments

    def _weigh(self) -> list[_Segment]:
        everything, left = self._all(), Stats()
        spans, logs = [], []
        for low, high in pairwise(self._sampled):
            left += self.samples[low]
            spans.append((low, high))
            logs.append(self.model.log_evidence(left, everything - left) + math.log(high - low))
        top = max(logs)
        weights = [math.exp(value - top) for value in logs]
        whole = math.fsum(weights)
        return [_Segment(low, high, weight / whole) for (low, high), weight in zip(spans, weights, strict=True)]

    def _all(self) -> Stats:
        whole = Stats()
        for stats in self.samples.values():
            whole += stats
        return whole

    def best(self) -> Block:
        """The likeliest block of culprits; one commit wide unless its neighbours cannot be tested."""
        best = Block(1, self.commits, 0.0)
        for segment in self.segments():
            if segment.mass > best.mass:
                best = max(best, self._best_within(segment), key=lambda block: block.mass)
        return best

    def _best_within(self, segment: _Segment) -> Block:
        inner = self._testable[bisect_right(self._testable, segment.low) : bisect_left(self._testable, segment.high)]
        edges = [segment.low, *inner, segment.high]
        low, high = max(pairwise(edges), key=lambda pair: pair[1] - pair[0])
        return Block(low + 1, high, segment.mass * (high - low) / (segment.high - segment.low))

    def next(self) -> int:
        """The commit whose next sample says most: the one that splits the posterior most evenly."""
        below, gain, position, stay = 0.0, -1.0, 0, -1.0
        for segment in self.segments():
            if segment.low == self._here:
                stay = below * (1.0 - below)
            if below <= 0.5 <= below + segment.mass + 1e-9:  # the best commit lies around the median
                gain, position = max((gain, position), *self._choices(segment, below))
            below += segment.mass
        if self._here is not None and stay >= STAY * gain:
            position = self._here
        return self._reference(position) if self.model.learns else position

    def _reference(self, position: int) -> int:
        """`position`, or an end of the line whose level is known less well than it: a comparison needs both sides."""
        below, known = 0.0, {0: self.samples[0].n, self.commits: self.samples[self.commits].n}
        for segment in self.segments()[:-1]:
            below += segment.mass
            if below <= SURE:
                known[0] += self.samples[segment.high].n
            elif below >= 1.0 - SURE:
                known[self.commits] += self.samples[segment.high].n
        weaker = min(known, key=lambda end: known[end])
        return weaker if position in self.samples and known[weaker] < self.samples[position].n else position

    def _choices(self, segment: _Segment, below: float) -> list[tuple[float, int]]:
        """(how evenly it splits, position) for the ends of a segment and the testable commits around the median."""
        width = segment.high - segment.low
        middle = segment.low + min(max((0.5 - below) / segment.mass, 0.0), 1.0) * width if segment.mass else segment.low
        at = bisect_left(self._testable, middle)
        near = {self._testable[i] for i in (at - 1, at) if 0 <= i < len(self._testable)} | {segment.low, segment.high}
        found = []
        for position in near:
            if segment.low <= position <= segment.high:
                share = below + segment.mass * (position - segment.low) / width
                found.append((share * (1.0 - share), position))
        return found
