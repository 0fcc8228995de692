"""Armed or not: whether the guard of this very run would stop a collapse, and what would arm it.

Owns       the definition, the words for it in plan and verdict, and the search for what would do.
Promises   the answer comes from simulated runs that the real guard folds (`simulated.py`); a number that is said to
           do was tried the same way; the same run gets the same answer in its plan, its verdict and after a resume.

Armed: of 1,000 simulated runs with this run's evaluations, answers and noise in which held-out falls from its first
value to 0 over the middle third, the guard stops at least 800; and of 1,000 in which it stays level, at most 10.

The first held-out value is not known before the run. The plan assumes `ASSUMED` and says so; after the first evaluation
the run is judged by the real one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surefoot.config import Config
from surefoot.errors import ConfigError
from surefoot.eval_cadence import Answered
from surefoot.guards.arming_search import LEAST_SEEN, MOST_FALSE, Asked, would_do
from surefoot.guards.auto_settings import guard_settings
from surefoot.guards.collapse_rules import Limits
from surefoot.guards.simulated import RUNS, Question, falls_stopped, false_alarms

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
    config: Config, *, heldout: Answered, metric: str, first: float | None = None, limits: Limits | None = None
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
    asked = Asked.of(config, metric, ASSUMED if first is None else first, limits, heldout.beside)
    question = asked.question(config, heldout.watched, limits)
    told: dict[str, Any] = {"first": asked.first, "measured": first is not None, "evaluations": len(question.where),
            "answers": question.answers}  # fmt: skip
    if not 0.0 < asked.first <= 1.0:
        return Arming(armed=False, seen=0.0, false_alarms=0.0, why=_no_height(asked.first), **told)
    seen, alarms = falls_stopped(question), false_alarms(question)
    why = _why_not(question, seen, alarms, measured=first is not None)
    remedies = tuple(would_do(config, heldout.watched, asked, sizes=seen < LEAST_SEEN)) if why else ()
    return Arming(armed=not why, seen=seen, false_alarms=alarms, why=why, would_do=remedies, **told)


def guard_lines(config: Config, *, heldout: Answered, metric: str, limits: Limits | None = None) -> list[str]:
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
