"""Simulated runs for a real guard: how many collapses of this run would it stop, and how many healthy runs.

Owns       the two curves that "armed" is about, and their noise.
Promises   every simulated run is folded by a `HeldOutGuard` with the settings of the real run; the same question gets
           the same answer (seeded); no torch, no numpy: the answer is needed before anything heavy is loaded.
Never      decides what is enough: `arming.py` does.

    fall    held-out stays at the first value for a third of the run, goes down to 0 over the second, and stays there;
            the reward, which began at the same value, gains what held-out loses: the policy is paid for something else
    level   held-out and reward stay at the first value
    both    are shares of right answers, so their noise is binomial: over the answers of one evaluation, and over the
            rollouts since the one before
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.collapse_rates import expected_rates
from surefoot.guards.noise import proportion_se

RUNS = 1000
MOST_FOLDS = 60
"""Evaluations that are simulated. Of a longer run every so-manieth is, which makes a fall harder to see, and its false
alarms are those of the measured table in `collapse_rates.py`."""
_FAR = 12.0
"""Standard deviations beyond which a count of right answers does not happen."""


@dataclass(frozen=True)
class Question:
    """What is asked: a run, as far as its guard is concerned."""

    settings: tuple[tuple[str, Any], ...]
    """Arguments of `HeldOutGuard`, sorted by name."""
    where: tuple[float, ...]
    """For each evaluation, the share of the run that is over."""
    answers: int
    """Held-out answers of one evaluation."""
    rollouts: tuple[int, ...]
    """For each evaluation, the training rollouts whose mean reward it is told."""
    first: float
    """The first held-out value, between 0 and 1."""
    told_se: bool
    """Whether the guard is told the standard error: it is for an accuracy, not for a reward."""

    def guard(self) -> HeldOutGuard:
        """A guard as the run has it, that has seen nothing."""
        return HeldOutGuard(**dict(self.settings))


@lru_cache(maxsize=1024)
def falls_stopped(question: Question, runs: int = RUNS, least: float = 0.0) -> float:
    """Share of collapses that are stopped; no further run is simulated once `least` is out of reach."""
    asked, found, missed = thinned(question), 0, 0
    for stopped in _stopped(asked, falling(asked), runs, seed=1):
        found, missed = found + stopped, missed + (not stopped)
        if missed > runs * (1.0 - least) + 1e-9:
            break
    return found / runs


@lru_cache(maxsize=256)
def false_alarms(question: Question, runs: int = RUNS) -> float:
    """Share of healthy runs that are stopped."""
    if len(question.where) > MOST_FOLDS:
        per_hundred = expected_rates(question.guard().limits).false_alarms
        return min(1.0, per_hundred * len(question.where) / 100)
    return sum(_stopped(question, level(question), runs, seed=2)) / runs


def thinned(question: Question) -> Question:
    """The same run with at most `MOST_FOLDS` evaluations, the first and the last among them."""
    count = len(question.where)
    if count <= MOST_FOLDS:
        return question
    kept = [round(i * (count - 1) / (MOST_FOLDS - 1)) for i in range(MOST_FOLDS)]
    return Question(
        question.settings, tuple(question.where[i] for i in kept), question.answers,
        tuple(question.rollouts[i] for i in kept), question.first, question.told_se,
    )  # fmt: skip


def falling(question: Question) -> list[float]:
    """The true held-out value at each evaluation of a run that collapses over its middle third."""
    return [question.first * min(1.0, max(0.0, 2.0 - 3.0 * x)) for x in question.where]


def level(question: Question) -> list[float]:
    """The same for a run in which nothing happens."""
    return [question.first] * len(question.where)


def _rewards(question: Question, curve: Sequence[float]) -> list[tuple[float, float]]:
    """Mean and deviation of the reward at each evaluation: it has gained what held-out has lost."""
    means = [min(1.0, 2.0 * question.first - value) for value in curve]
    return [(m, math.sqrt(m * (1.0 - m) / max(1, n))) for m, n in zip(means, question.rollouts, strict=True)]


def _stopped(question: Question, curve: Sequence[float], runs: int, seed: int) -> Iterator[bool]:
    """Run after run, whether the guard stopped it."""
    dice, n = random.Random(seed), question.answers
    if len(curve) < dict(question.settings)["min_steps"]:
        yield from itertools.repeat(False, runs)
        return
    tables = {p: _cumulative(n, p) for p in set(curve)}
    rewards = _rewards(question, curve)
    errors = [proportion_se(right / n, n) for right in range(n + 1)] if question.told_se else [None] * (n + 1)
    for _ in range(runs):
        guard, fired = question.guard(), False
        for p, (mean, spread) in zip(curve, rewards, strict=True):
            lowest, table = tables[p]
            right = lowest + bisect.bisect(table, dice.random())
            fired = guard.fires(mean + spread * dice.gauss(0.0, 1.0), right / n, errors[right])
            if fired:
                break
        yield fired


def _cumulative(n: int, p: float) -> tuple[int, list[float]]:
    """(k, chances of at most k, k + 1, ... right answers of n), without the last, which is 1."""
    if p <= 0.0 or p >= 1.0:
        return (0 if p <= 0.0 else n), []
    reach = _FAR * math.sqrt(n * p * (1.0 - p)) + 1.0
    low, high = max(0, math.floor(n * p - reach)), min(n, math.ceil(n * p + reach))
    chances = [
        math.exp(
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(p)
            + (n - k) * math.log1p(-p)
        )
        for k in range(low, high)
    ]
    return low, list(itertools.accumulate(chances))
