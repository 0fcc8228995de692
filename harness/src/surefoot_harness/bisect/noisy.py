"""Search by samples: ask the posterior where to look, run the command there, stop when one commit stands out.

Owns       the samples of a noise-aware bisect, and the check that GOOD and BAD can be told apart at all.
Promises   the confidence that is reported is the posterior's, and a poor fit of its model is said aloud.
Never      calls a run that crashed a measurement.

The line that is searched is the first-parent history: a culprit that came in by a merge is reported as that merge.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from surefoot_harness.bisect.evidence import BisectOutcome, LogReplay
from surefoot_harness.bisect.options import BisectOptions
from surefoot_harness.bisect.repository import BAD, GOOD, SKIP
from surefoot_harness.bisect.tester import SkipError, Tester
from surefoot_harness.errors import ConfigError

# -- Where is the change, given noisy measurements? The mathematics of the noise-aware bisect -----
# Commits stand in a line: position 0 is GOOD, position n is BAD, and one of 1..n is the culprit: every commit before it
# behaves like GOOD, it and every one after it like BAD. All samples of both sides are pooled, so each run teaches the
# level of its whole side, not only of its own commit. The levels and the spread are never plugged in as if they were
# known: they are integrated out, so few samples give a wide posterior and not a false certainty.
#
# Owns       the posterior over culprits, and the choice of the next commit to sample.
# Promises   a stop means that one block of commits holds at least the asked share of the posterior.
# Never      runs anything, or looks at a clock.
#
# Left out: a separate sequential test at every step. It must be nearly certain at each of its log2(n) stops, and pays
# for
# certainty that later samples would have given for nothing.


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


# -- Search by samples: ask the posterior where to look, run the command there, stop when one commit stands out


LEARN, GIVEN = 4, 3
"""Samples of GOOD and of BAD before the search: when levels are learnt, when they are given."""
CLEAR = 3.0
"""Standard errors between two levels (or a level and the limit) that count as seen."""


@dataclass
class NoisySearch:
    """One noise-aware bisect."""

    tester: Tester
    options: BisectOptions
    say: Callable[[str], None]
    samples: list[dict[str, object]] = field(default_factory=list)
    """Every sample so far, for the log."""

    def run(self, good: str, bad: str, replay: LogReplay | None) -> BisectOutcome:
        """Find the culprit between `good` and `bad`."""
        between = self.tester.repository.git("rev-list", "--first-parent", "--reverse", f"{good}..{bad}").split()
        self.line = [good, *between]
        self.search = ChangeSearch(len(between), model_of(self.options))
        if replay is not None:
            self._replay(replay)
        self._ends()
        block = self._narrow()
        self._judge_commits()
        return self._outcome(block)

    @property
    def taken(self) -> int:
        """Runs of the command so far."""
        return len(self.samples)

    def _replay(self, replay: LogReplay) -> None:
        """Take over what a log knows; a commit called good or bad by hand stands for its end of the line."""
        at = {commit: position for position, commit in enumerate(self.line)}
        low = max((at.get(c, 0) for a, c in replay.marks if a == GOOD), default=0)
        high = min((at.get(c, len(self.line) - 1) for a, c in replay.marks if a == BAD), default=len(self.line) - 1)
        self.line = self.line[low : high + 1]
        self.search = ChangeSearch(high - low, self.search.model)
        skipped = {commit for answer, commit in replay.marks if answer == SKIP}
        for commit in skipped & set(self.line):
            self.search.skip(self.line.index(commit))
        for sample in replay.samples:
            commit = str(sample["commit"])
            if commit in at and commit not in skipped:
                self._note(min(max(at[commit] - low, 0), high - low), commit, float(sample["value"]))
                self.tester.earlier[commit] = self.tester.earlier.get(commit, 0) + 1

    def _note(self, position: int, commit: str, value: float) -> None:
        self.search.add(position, value)
        self.samples.append({"commit": commit, "value": value})

    def _sample(self, position: int) -> bool:
        """One run at a position; False when that commit cannot be tested."""
        commit = self.line[position]
        visit = self.tester.visit(commit)
        try:
            answer, reason = self.tester.sample(visit)
            if answer == SKIP:
                raise SkipError(reason)
        except SkipError as error:
            visit.answer, visit.reason = SKIP, str(error)
            self.tester.evidence.write(visit)
            self.search.skip(position)
            self.say(f"skip  {commit[:12]}  {error}")
            return False
        value = float(visit.samples[-1].get("value", answer == BAD))
        self._note(position, commit, value)
        self.tester.evidence.write(visit)
        self.say(f"run {self.taken}  {commit[:12]}  {'value' if self.options.metric else 'failed'} {value:g}")
        return True

    def _ends(self) -> None:
        """Sample GOOD and BAD until they can be told apart; refuse when they are not what was said."""
        wanted = LEARN if self.search.model.learns else GIVEN
        last = len(self.line) - 1
        while True:
            for position, role in ((0, "GOOD"), (last, "BAD")):
                while self._at(position).n < wanted:
                    self._within_budget()
                    if not self._sample(position):
                        reason = self.tester.visit(self.line[position]).reason
                        raise ConfigError(
                            f"{role} cannot be tested: {reason}", "it is a reference", f"choose another {role}"
                        )
            self._sides()
            if not self.search.model.learns or distance(self._at(0), self._at(last), self._worse()) >= CLEAR:
                return
            wanted += 2

    def _at(self, position: int) -> Stats:
        return self.search.samples.get(position, Stats())

    def _worse(self) -> float:
        """+1 when a higher value is worse (also a failure), -1 when a lower one is."""
        return 1.0 if self.options.metric is None or self.options.higher_is_worse else -1.0

    def _sides(self) -> None:
        """Refuse when GOOD is clearly worse than the limit, or BAD clearly better."""
        limit = self.options.worse_than
        if limit is None:
            return
        for position, role, sign in ((0, "GOOD", self._worse()), (len(self.line) - 1, "BAD", -self._worse())):
            stats = self._at(position)
            error = math.sqrt(stats.spread / max(stats.n - 1, 1) / stats.n)
            if sign * (stats.mean - limit) > 3 * error:
                what = "GOOD is already worse" if role == "GOOD" else "nothing to bisect: BAD is better"
                raise ConfigError(
                    f"{what} than {limit:g}: {self.options.metric} is {stats.mean:g} there ({stats.n} runs)",
                    "the change from one side of the limit to the other is searched",
                    "choose other ends, another limit, or --higher-is-worse",
                )

    def _within_budget(self) -> None:
        if self.taken >= self.options.max_samples:
            raise ConfigError(
                f"GOOD and BAD cannot be told apart in {self.taken} runs",
                "a search would be guessing",
                "raise --max-samples, or measure something that differs more",
            )

    def _narrow(self) -> Block:
        while True:
            block = self.search.best()
            if block.mass >= 1.0 - self.options.alpha / 2 or self.taken >= self.options.max_samples:
                return block
            self._sample(self.search.next())

    def _judge_commits(self) -> None:
        """Give every visited commit its verdict from the final posterior."""
        below, shares = 0.0, {0: 0.0}
        for segment in self.search.segments():
            below += segment.mass
            shares[segment.high] = below
        for position, share in shares.items():
            visit = self.tester.visit(self.line[position])
            sure = self.options.alpha
            visit.answer = BAD if share >= 1 - sure else GOOD if share <= sure else ""
            visit.reason = f"bad with probability {min(share, 1.0):.3f}, {self.search.samples[position].n} runs"
            self.tester.evidence.write(visit)

    def _outcome(self, block: Block) -> BisectOutcome:
        left, right = self.search.split(block.first)
        candidates = tuple(self.line[block.first : block.last + 1])
        notes = [f"level before {left.mean:.4g} ({left.n} runs), from there on {right.mean:.4g} ({right.n} runs)"]
        sure = block.mass >= 1.0 - self.options.alpha
        if misfit(self.search, block.first):
            notes.append(
                "the levels differ within one side: more than one change, or heavy tails; trust the confidence less"
            )
        limit = self.options.worse_than
        if limit is not None and not min(left.mean, right.mean) <= limit <= max(left.mean, right.mean):
            sure = False
            notes.append(
                f"this change does not cross {limit:g}; give --margin to judge each commit by the limit itself"
            )
        if not sure and block.mass < 1.0 - self.options.alpha:
            notes.append(f"{self.taken} runs were not enough; resume with a higher --max-samples")
        return BisectOutcome(candidates, sure and len(candidates) == 1, block.mass, self.taken, tuple(notes))


def model_of(options: BisectOptions) -> Model:
    """What the samples look like, from what the user said."""
    if options.metric is None:
        return Bernoulli(options.rates)
    if options.margin is None or options.worse_than is None:
        return Gaussian()
    half = options.margin / 2 * (-1.0 if options.higher_is_worse else 1.0)
    return Gaussian((options.worse_than + half, options.worse_than - half))


def distance(good: Stats, bad: Stats, worse: float) -> float:
    """How many standard errors BAD is worse than GOOD."""
    gap = worse * (bad.mean - good.mean)
    error = math.sqrt(sum((s.spread + 0.5) / (s.n + 1) / s.n for s in (good, bad))) if _binary(good, bad) else 0.0
    if not error:
        freedom = max(good.n + bad.n - 2, 1)
        error = math.sqrt((good.spread + bad.spread) / freedom * (1 / good.n + 1 / bad.n))
    return gap / error if error else math.copysign(math.inf, gap) if gap else 0.0


def _binary(*sides: Stats) -> bool:
    """Whether all samples are 0 or 1: then a side without any failure has a spread of zero and still a doubt."""
    return all(s.total == s.squares for s in sides)


def misfit(search: ChangeSearch, boundary: int) -> bool:
    """Whether commits of one side differ by more than the noise explains."""
    sides = search.split(boundary)
    freedom = sum(s.n for s in sides) - len(search.samples)
    if freedom <= 0 or len(search.samples) <= 2:
        return False
    inside = sum(stats.spread for stats in search.samples.values())
    between = sum(s.spread for s in sides) - inside
    count = len(search.samples) - 2
    return inside > 0 and between / (inside / freedom) > count + 4 * math.sqrt(2 * count)
