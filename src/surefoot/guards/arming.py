"""Armed or not: whether the guard of this very run would stop a collapse, and what would arm it.

Owns       the definition, the words for it in plan and verdict, and the search for what would do.
Promises   the answer comes from simulated runs that the real guard folds (`arming.py`); a number that is said to
           do was tried the same way; the same run gets the same answer in its plan, its verdict and after a resume.

Armed: of 1,000 simulated runs with this run's evaluations, answers and noise in which held-out falls from its first
value to 0 over the middle third, the guard stops at least 800; and of 1,000 in which it stays level, at most 10.

The first held-out value is not known before the run. The plan assumes `ASSUMED` and says so; after the first evaluation
the run is judged by the real one.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefoot.config import Config
from surefoot.config.schedule import MOST_EVALUATIONS, Answered, Cadence, cadence_of
from surefoot.errors import ConfigError
from surefoot.guards.auto_settings import AUTO, guard_settings, tells_se, written
from surefoot.guards.collapse import TIGHTENED, HeldOutGuard, arguments_of
from surefoot.guards.collapse_rules import CollapseLimits, expected_rates
from surefoot.guards.noise import proportion_se

# -- Simulated runs for a real guard: how many collapses of this run would it stop, and how many healthy runs
# Owns       the two curves that "armed" is about, and their noise.
# Promises   every simulated run is folded by a `HeldOutGuard` with the settings of the real run; the same question gets
# the same answer (seeded); no torch, no numpy: the answer is needed before anything heavy is loaded.
# Never      decides what is enough: `arming.py` does.
#
# fall    held-out stays at the first value for a third of the run, goes down to 0 over the second, and stays there;
# the reward, which began at the same value, gains what held-out loses: the policy is paid for something else
# level   held-out and reward stay at the first value
# both    are shares of right answers, so their noise is binomial: over the answers of one evaluation, and over the
# rollouts since the one before


RUNS = 1000
MOST_FOLDS = 60
"""Evaluations that are simulated. Of a longer run every so-manieth is, which makes a fall harder to see, and its false
alarms are those of the measured table in `collapse_rules.py`."""
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


# -- What would arm a guard that is not: fewer settings, other evaluations, more held-out tasks, more steps
# Owns       the question whether a changed config is armed, and the order in which changes are tried.
# Promises   a change that is offered was simulated like the run itself, and small numbers before large ones; only false
# alarms are looked for in fewer runs while there is none (none in 300: at most 1 %, with 95 % certainty).


LEAST_SEEN, MOST_FALSE = 0.8, 0.01
"""Of simulated collapses and of simulated healthy runs, the shares that an armed guard stops at least and at most."""
_ROUGHLY = 200
"""Simulated runs that decide where to look; what is found is simulated in full."""
_CALM = 300
_MOST_EXPLICIT = 30
"""Evaluations that are tried where `eval_steps` is a number."""
_MOST_TASKS, _MOST_STEPS = 10_000, 10_000_000


@dataclass(frozen=True)
class ArmingInputs:
    """What stays the same while keys are tried."""

    metric: str
    first: float
    tightened: tuple[tuple[str, float], ...] = ()
    """Limits that a calibration made tighter than the config has them."""
    beside: int = 0
    """Tasks of each evaluation that the guard does not watch."""

    @property
    def tasks_key(self) -> str:
        """What decides how many tasks are watched at most."""
        return f"eval_sets.{self.metric.split('/')[1]}.num_tasks" if "/" in self.metric else "eval_tasks"

    def cadence(self, config: Config, heldout: int) -> Cadence:
        """When such a run evaluates."""
        return cadence_of(config, Answered(heldout, self.beside))

    def count(self, config: Config, heldout: int) -> int:
        """How often, under these keys, with so many tasks to watch."""
        return self.cadence(_with_tasks(config, heldout), heldout).count

    def question(self, config: Config, heldout: int, limits: CollapseLimits | None = None) -> Question:
        """The run with these keys, for the simulation; with `limits`, its guard as it is."""
        cadence = self.cadence(config, heldout)
        settings = guard_settings(config, cadence.count, self.metric) | dict(self.tightened)
        settings, steps = settings if limits is None else arguments_of(limits), cadence.steps()
        batches = [max(1, (b - a) // config.num_iterations) for a, b in zip((0, *steps), steps, strict=False)]
        return Question(
            tuple(sorted(settings.items())), tuple(step / config.max_steps for step in steps),
            max(1, heldout * config.num_generations_eval),
            tuple(n * config.rollouts_per_step for n in batches), self.first, tells_se(self.metric),
        )  # fmt: skip

    @classmethod
    def of(
        cls, config: Config, metric: str, first: float, limits: CollapseLimits | None, beside: int = 0
    ) -> ArmingInputs:
        """With what a calibration changed: the limits that are not those of the config."""
        return cls(metric, first, tuple(tightened_in(config, limits).items()), beside)

    def roughly(self, config: Config, heldout: int) -> bool:
        """Whether it seems to be armed, by few simulated runs."""
        return falls_stopped(self.question(config, heldout), _ROUGHLY, LEAST_SEEN) >= LEAST_SEEN

    def armed(self, config: Config, heldout: int) -> bool:
        """The definition."""
        question = self.question(config, heldout)
        if not self.roughly(config, heldout) or falls_stopped(question, RUNS, LEAST_SEEN) < LEAST_SEEN:
            return False
        return false_alarms(question, _CALM) == 0.0 or false_alarms(question) <= MOST_FALSE


def tightened_in(config: Config, limits: CollapseLimits | None) -> dict[str, float]:
    """What a calibration changed: limits that are not those of the config."""
    found = {name: getattr(limits, name) for name in TIGHTENED if limits is not None}
    return {name: value for name, value in found.items() if value != getattr(config.guard, name)}


def would_do(config: Config, heldout: int, asked: ArmingInputs, *, sizes: bool = True) -> Iterator[str]:
    """Changes, each of which alone arms the guard: settings that stand in the way first, else tasks and steps.

    Args:
        sizes: whether tasks and steps can help at all; too many false alarms are a matter of settings.
    """
    freed = config.model_copy(update={"guard": config.guard.model_copy(update=dict.fromkeys(AUTO, "auto"))})
    by_hand = written(config)
    if config.eval_steps != "auto" and asked.armed(_often(config), heldout):
        yield 'eval_steps = "auto"'
    elif by_hand and asked.armed(freed, heldout):
        yield f"leaving out {', '.join(by_hand)}"
    elif sizes:
        found = list(_sizes(config, heldout, asked))
        yield from found
        if not found and (by_hand or config.eval_steps != "auto"):
            aside = ' with eval_steps = "auto"' if config.eval_steps != "auto" else ""
            aside += f" leaving out {', '.join(by_hand)}" if by_hand else ""
            yield from (f"{size}{aside}" for size in _sizes(_often(freed), heldout, asked))


def _often(config: Config) -> Config:
    return config.model_copy(update={"eval_steps": "auto"})


def _sizes(config: Config, heldout: int, asked: ArmingInputs) -> Iterator[str]:
    """Numbers of tasks or of steps that do; both together only where neither does alone."""
    found = [*_fewer_per_evaluation(config, heldout, asked), *_steps(config, heldout, asked)]
    if not any(size.startswith(asked.tasks_key) for size in found):
        found = [*_more_tasks(config, heldout, asked), *found]
    yield from found or _both(config, heldout, asked)


def _fewer_per_evaluation(config: Config, heldout: int, asked: ArmingInputs) -> Iterator[str]:
    """Under "auto" fewer tasks per evaluation buy more evaluations."""
    if config.eval_steps != "auto":
        return
    for wanted in range(asked.cadence(config, heldout).count + 1, MOST_EVALUATIONS + 2):
        tasks = _largest(lambda n, w=wanted: asked.count(config, n) >= w, heldout - 1)  # type: ignore[misc]
        if tasks and asked.armed(_with_tasks(config, tasks), tasks):
            yield f"{asked.tasks_key} = {tasks} ({asked.count(config, tasks)} evaluations)"
            return


def _more_tasks(config: Config, heldout: int, asked: ArmingInputs) -> Iterator[str]:
    tasks = _confirmed(
        _smallest(lambda n: asked.roughly(_with_tasks(config, n), n), heldout, _MOST_TASKS),
        lambda n: asked.armed(_with_tasks(config, n), n),
    )
    if tasks is not None:
        yield f"{tasks} held-out tasks (there are {heldout})"


def _steps(config: Config, heldout: int, asked: ArmingInputs) -> Iterator[str]:
    """The fewest steps with so many evaluations that it is armed."""

    def is_enough(evaluations: int) -> bool:
        longer = _with_evaluations(config, heldout, evaluations, asked)
        return longer is not None and asked.roughly(longer, heldout)

    def is_armed(evaluations: int) -> bool:
        longer = _with_evaluations(config, heldout, evaluations, asked)
        return longer is not None and asked.armed(longer, heldout)

    now = asked.cadence(config, heldout).count
    wanted = _confirmed(_smallest(is_enough, now, _most_evaluations(config)), is_armed)
    longer = None if wanted is None else _with_evaluations(config, heldout, wanted, asked)
    if longer is not None:
        yield f"max_steps = {longer.max_steps} ({asked.cadence(longer, heldout).count} evaluations)"


def _both(config: Config, heldout: int, asked: ArmingInputs) -> Iterator[str]:
    """As many evaluations as there may be, and the fewest tasks that are enough then."""

    def larger(tasks: int) -> Config | None:
        return _with_evaluations(_with_tasks(config, tasks), tasks, _most_evaluations(config), asked)

    def is_enough(tasks: int) -> bool:
        return (changed := larger(tasks)) is not None and asked.roughly(changed, tasks)

    def is_armed(tasks: int) -> bool:
        return (changed := larger(tasks)) is not None and asked.armed(changed, tasks)

    tasks = _confirmed(_smallest(is_enough, heldout, _MOST_TASKS), is_armed)
    if tasks is not None and (found := larger(tasks)) is not None:
        times = asked.cadence(found, tasks).count
        yield f"{tasks} held-out tasks and max_steps = {found.max_steps} ({times} evaluations)"


def _with_tasks(config: Config, tasks: int) -> Config:
    return config.model_copy(update={"eval_tasks": tasks})


def _with_evaluations(config: Config, heldout: int, evaluations: int, asked: ArmingInputs) -> Config | None:
    """The config with just so many steps that there are so many evaluations."""
    unit = math.lcm(config.num_iterations, config.weight_sync_steps)

    def longer(units: int) -> Config:
        return config.model_copy(update={"max_steps": units * unit})

    units = _smallest(
        lambda n: asked.cadence(longer(n), heldout).count >= evaluations, config.max_steps // unit, _MOST_STEPS // unit
    )
    return None if units is None else longer(units)


def _most_evaluations(config: Config) -> int:
    return MOST_EVALUATIONS + config.eval_on_start if config.eval_steps == "auto" else _MOST_EXPLICIT


def _confirmed(rough: int | None, holds: Callable[[int], bool]) -> int | None:
    """The first number from a rough answer on that is confirmed; None when none of the next few is."""
    number = rough
    for _ in range(8):
        if number is None or holds(number):
            return number
        number += max(1, number // 20)
    return None


def _smallest(holds: Callable[[int], bool], above: int, most: int) -> int | None:
    """The smallest number above `above`, up to `most`, for which it holds, if it holds for all larger ones."""
    low, high, step = above, above + 1, 1
    while high < most and not holds(high):
        low, step = high, 2 * step
        high = min(most, above + step)
    if high > most or not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which it holds, if it holds for all smaller ones; 0 if for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


# -- Armed or not: whether the guard of this very run would stop a collapse, and what would arm it


ASSUMED = 0.25
"""The first held-out value that a plan assumes: one right answer in four."""


@dataclass(frozen=True)
class Arming:
    """Whether a guard is armed, what that rests on, and what would do if it is not."""

    armed: bool
    first: float
    """The first held-out value, measured or assumed."""
    measured: bool
    evaluations: int
    answers: int
    """Of one evaluation."""
    seen: float
    """Share of simulated collapses that it stops."""
    false_alarms: float
    """Share of simulated healthy runs that it stops."""
    why: str
    """Why it is not armed; empty when it is."""
    would_do: tuple[str, ...] = ()
    """Each of these alone would arm it."""

    def facts(self) -> dict[str, Any]:
        """For verdict.json."""
        return {
            "armed": self.armed, "why_not_armed": self.why or None, "would_do": list(self.would_do),
            "planned_evaluations": self.evaluations, "answers": self.answers, "first_heldout": self.first,
            "first_heldout_measured": self.measured, "simulated_falls_stopped": self.seen,
            "expected_false_alarms": self.false_alarms,
        }  # fmt: skip

    def words(self) -> str:
        """One line: armed, or not and why, and what would do."""
        if self.armed:
            return (
                f"armed: stops {self.seen:.0%} of {RUNS:,} simulated falls from {self._from()} to 0, and "
                f"{_percent(self.false_alarms)} of healthy runs (expected false alarms)"
            )
        alarms = (
            f"; expected false alarms {_percent(self.false_alarms)}"
            if self.seen and self.false_alarms <= MOST_FALSE
            else ""
        )
        return f"not armed: {self.why}{alarms}" + (
            f"; would do: {', or '.join(self.would_do)}" if self.would_do else ""
        )

    def _from(self) -> str:
        return f"{self.first:.3g}" if self.measured else f"{self.first:.3g} (assumed)"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def judge_arming(
    config: Config, *, heldout: Answered, metric: str, first: float | None = None, limits: CollapseLimits | None = None
) -> Arming | None:  # fmt: skip
    """Whether the guard of this run is armed; None when it is off or nothing is held out.

    Args:
        heldout: tasks that one evaluation asks, watched or not.
        metric: the held-out curve that it watches, such as "eval_accuracy".
        first: the first held-out value; None before it was measured.
        limits: those of the run's guard, where there is one already; those that the config gives otherwise.
    """
    if config.guard.mode == "off" or not heldout.watched or not config.holds_out:
        return None
    asked = ArmingInputs.of(config, metric, ASSUMED if first is None else first, limits, heldout.beside)
    question = asked.question(config, heldout.watched, limits)
    told: dict[str, Any] = {"first": asked.first, "measured": first is not None, "evaluations": len(question.where),
            "answers": question.answers}  # fmt: skip
    if not 0.0 < asked.first <= 1.0:
        return Arming(armed=False, seen=0.0, false_alarms=0.0, why=_no_height(asked.first), **told)
    seen, alarms = falls_stopped(question), false_alarms(question)
    why = _why_not(question, seen, alarms, measured=first is not None)
    remedies = tuple(would_do(config, heldout.watched, asked, sizes=seen < LEAST_SEEN)) if why else ()
    return Arming(armed=not why, seen=seen, false_alarms=alarms, why=why, would_do=remedies, **told)


def guard_lines(config: Config, *, heldout: Answered, metric: str, limits: CollapseLimits | None = None) -> list[str]:
    """The guard's part of the plan: what it does, and whether it is armed; arguments as for `judge_arming`."""
    keys = config.guard
    if keys.mode == "off":
        return ['guard     off (guard.mode = "off"): nobody stops a run that is hurting the model']
    found = judge_arming(config, heldout=heldout, metric=metric, limits=limits)
    if found is None:
        return [f"guard     inactive: nothing is held out (heldout_fraction = {config.heldout_fraction:g})"]
    least = limits.min_steps if limits is not None else guard_settings(config, found.evaluations, metric)["min_steps"]
    if found.evaluations < least:
        return [f"guard     {keys.mode}, but {found.words()}"]
    ends = "stops with exit code 79" if keys.mode == "strict" else "ends with verdict FAIL"
    what = f"a run that hurts the model {ends}, from evaluation {least} of {found.evaluations} on"
    return [f"guard     {keys.mode}: {what}", " " * 10 + found.words()]


def refuse_unarmed(config: Config, found: Arming | None) -> None:
    """What `guard.require` is for: a run whose guard is not armed does not start.

    Raises:
        ConfigError: it is required to be armed, and is not.
    """
    if not config.guard.require or (found is not None and found.armed):
        return
    why = "nothing is held out" if found is None else found.why
    remedy = ", or ".join(found.would_do) if found is not None else "hold tasks out (heldout_fraction)"
    raise ConfigError(
        f"guard.require = true, and the guard is not armed: {why}",
        "a collapse of this run would probably go unnoticed",
        f"{f'would do: {remedy}' if remedy else 'no number of tasks or steps would do'}; or set guard.require = false",
    )


def _no_height(first: float) -> str:
    if first <= 0.0:
        return f"held-out begins at {first:.3g}, so there is nothing that could fall to 0"
    return f"held-out begins at {first:.3g}, and noise is known for values between 0 and 1 only"


def _why_not(question: Question, seen: float, alarms: float, *, measured: bool) -> str:
    count, least = len(question.where), dict(question.settings)["min_steps"]
    if count < least:
        return f"{count} evaluation{'s are' if count > 1 else ' is'} planned, and it says nothing before number {least}"
    if seen < LEAST_SEEN:
        start = f"{question.first:.3g}" + ("" if measured else " (assumed)")
        return (
            f"with {count} evaluations of {question.answers} answers it stops {seen:.0%} of {RUNS:,} simulated falls "
            f"from {start} to 0, {LEAST_SEEN:.0%} are wanted"
        )
    if alarms > MOST_FALSE:
        return f"it would stop {_percent(alarms)} of healthy runs, at most {_percent(MOST_FALSE)} are wanted"
    return ""
