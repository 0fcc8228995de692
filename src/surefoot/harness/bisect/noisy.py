"""Search by samples: ask the posterior where to look, run the command there, stop when one commit stands out.

Owns       the samples of a noise-aware bisect, and the check that GOOD and BAD can be told apart at all.
Promises   the confidence that is reported is the posterior's, and a poor fit of its model is said aloud.
Never      calls a run that crashed a measurement.

The line that is searched is the first-parent history: a culprit that came in by a merge is reported as that merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from surefoot.errors import ConfigError
from surefoot.harness.bisect.logs import Replay
from surefoot.harness.bisect.options import Options
from surefoot.harness.bisect.outcome import Outcome
from surefoot.harness.bisect.posterior import Bernoulli, Block, ChangeSearch, Gaussian, Model, Stats
from surefoot.harness.bisect.session import BAD, GOOD, SKIP
from surefoot.harness.bisect.tester import SkipError, Tester

LEARN, GIVEN = 4, 3
"""Samples of GOOD and of BAD before the search: when levels are learnt, when they are given."""
CLEAR = 3.0
"""Standard errors between two levels (or a level and the limit) that count as seen."""


@dataclass
class NoisySearch:
    """One noise-aware bisect."""

    tester: Tester
    options: Options
    say: Callable[[str], None]
    samples: list[dict[str, object]] = field(default_factory=list)
    """Every sample so far, for the log."""

    def run(self, good: str, bad: str, replay: Replay | None) -> Outcome:
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

    def _replay(self, replay: Replay) -> None:
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

    def _outcome(self, block: Block) -> Outcome:
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
        return Outcome(candidates, sure and len(candidates) == 1, block.mass, self.taken, tuple(notes))


def model_of(options: Options) -> Model:
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
