"""When held-out tasks are answered: `eval_steps` resolved, a number or "auto".

Owns       the steps of a run at which it is evaluated, and what that costs.
Promises   the same config and the same number of held-out tasks give the same steps, so that a resumed run goes on as
           it began; "auto" never costs more than `MOST_SHARE` of the sampled tokens, but for the two evaluations at
           start and end, which every run makes; every evaluation falls on a step whose weights are published.
Never      looks at a run: everything is known before it starts.

Tokens are counted as answers times `max_completion_length`, which is the same number for training and evaluation, so
that the share of tokens is the share of answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from surefoot.config import Config

MOST_SHARE = 0.10
"""Share of all sampled tokens that evaluations may cost under "auto"."""
MOST_EVALUATIONS = 20
"""Evaluations after the first one under "auto": with one every 5 % of the run the guard loses no time that matters."""
FEWEST_EVALUATIONS = 6
"""Under "auto" an evaluation asks no more tasks than leave the run so many: with five the guard is hardly armed."""
LEAST_TASKS, MOST_TASKS = 20, 200
"""... but never fewer than the first, and never more than the second."""


class Answered(NamedTuple):
    """Tasks of one evaluation."""

    watched: int
    """Those whose number the guard watches."""
    beside: int = 0
    """The others: they cost as much, and say nothing to the guard."""


def answered_tasks(metric: str, heldout: int, sets: Mapping[str, int]) -> Answered:
    """What an evaluation asks, by whether the watched metric speaks of it.

    Args:
        metric: "eval_accuracy", or of an evaluation set "eval/NAME/accuracy".
        sets: tasks of each evaluation set.

    Example:
        >>> answered_tasks("eval/gsm8k/accuracy", 80, {"gsm8k": 200, "math": 100})
        Answered(watched=200, beside=180)
    """
    name = metric.split("/")[1] if metric.startswith("eval/") else None
    watched = heldout if name is None else sets.get(name, 0)
    return Answered(watched, heldout + sum(sets.values()) - watched)


@dataclass(frozen=True)
class Cadence:
    """The evaluations of one run.

    Example:
        >>> cadence = Cadence(every=20, max_steps=45, on_start=True, answers=8, rollouts=1600, auto=True)
        >>> cadence.steps()
        (0, 20, 45)
    """

    every: int
    """Steps from one evaluation to the next; `max_steps` or more means only at the end."""
    max_steps: int
    on_start: bool
    answers: int
    """Answers of one evaluation, whether the guard watches them or not."""
    rollouts: int
    """Training rollouts of the whole run."""
    auto: bool

    def due(self, step: int) -> bool:
        """Whether the weights after this step are evaluated."""
        if step == 0:
            return self.on_start
        if step == self.max_steps:
            return True
        # Evenly spread: under "auto" no evaluation stands right before the one at the end.
        return step % self.every == 0 and (not self.auto or 2 * (self.max_steps - step) >= self.every)

    @property
    def count(self) -> int:
        """How many evaluations a run that goes to its end makes."""
        if not self.answers:
            return 0
        before_the_end = (self.max_steps - 1) // self.every
        if self.auto and before_the_end and not self.due(before_the_end * self.every):
            before_the_end -= 1
        return before_the_end + 1 + self.on_start

    def steps(self) -> tuple[int, ...]:
        """The steps of all evaluations."""
        if not self.answers:
            return ()
        inner = range(self.every, self.max_steps, self.every)
        return (*([0] if self.on_start else []), *(s for s in inner if self.due(s)), self.max_steps)

    @property
    def share(self) -> float:
        """Share of all sampled tokens that goes into evaluations."""
        return self.count * self.answers / max(1, self.count * self.answers + self.rollouts)


def most_tasks(config: Config) -> int:
    """`eval_tasks` resolved: how many held-out tasks an evaluation asks at most."""
    if config.eval_tasks != "auto":
        return config.eval_tasks
    if config.eval_steps != "auto":
        return MOST_TASKS
    answers = _rollouts(config) * MOST_SHARE / (1 - MOST_SHARE) / FEWEST_EVALUATIONS
    return max(LEAST_TASKS, min(MOST_TASKS, math.floor(answers / config.num_generations_eval + 1e-9)))


def _rollouts(config: Config) -> int:
    return config.max_steps // max(1, config.num_iterations) * config.rollouts_per_step


def cadence_of(config: Config, asked: Answered) -> Cadence:
    """When a run with this config evaluates.

    Args:
        asked: how many tasks an evaluation asks.
    """
    answers = sum(asked) * config.num_generations_eval if config.holds_out else 0
    rollouts = _rollouts(config)
    unit = math.lcm(max(1, config.num_iterations), max(1, config.weight_sync_steps))
    return _cadence(config.eval_steps, config.max_steps, config.eval_on_start, answers, rollouts, unit)


@lru_cache(maxsize=256)
def _cadence(
    eval_steps: int | str, max_steps: int, on_start: bool, answers: int, rollouts: int, unit: int
) -> Cadence:  # fmt: skip
    if isinstance(eval_steps, int):
        return Cadence(eval_steps or max_steps, max_steps, on_start, answers, rollouts, auto=False)
    allowed = math.floor(rollouts * MOST_SHARE / (1 - MOST_SHARE) / max(1, answers) + 1e-9)
    most = max(1, min(MOST_EVALUATIONS, allowed - on_start))  # after the first one
    even = max_steps / (unit * most)
    for times in (max(1, round(even)), math.ceil(even)):  # the second one always fits
        found = Cadence(min(unit * times, max_steps), max_steps, on_start, answers, rollouts, auto=True)
        if found.count <= most + on_start:
            break
    return found
