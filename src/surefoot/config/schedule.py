"""When weights are published, from the sizes of a run: arithmetic on whole numbers, and the one rule that refuses.

Owns       the cadences of a run, and what staleness they need.
Promises   a cadence that cannot keep `max_staleness` is refused with all numbers, when the config is read; nothing is
           ever rounded: sizes that do not divide are refused with both.
Never      looks at a clock, or guesses how long anything takes.

Words, all counted in weight versions, of which an optimiser step makes one:

    passes     k = num_iterations: a batch makes k versions, and its groups' age is looked at before the first
    cadence    N: engines get new weights every N steps, between two batches, so k divides N

Read next: `rules.py`, which asks; `runtime/sampler.py`, how far sampling may run ahead under these cadences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.config import Config


@dataclass(frozen=True, slots=True)
class Schedule:
    """The cadences of a run, in optimiser steps."""

    accumulation_steps: int | None
    """Forward and backward passes of one step, at most; None when the learner decides by the tokens of each step."""
    sync_every: int
    """Steps between two weight syncs."""
    reference_every: int | None
    """Steps between two refreshes of the reference; None for never."""
    required_staleness: int
    """Versions that the last batch before a sync is old when it begins, even if nothing ever waits."""


def compute_schedule(
    *,
    tasks_per_sync: int,
    tasks_per_reference_sync: int | None,
    tasks_per_step: int,
    tasks_per_microbatch: int,
    max_staleness: int,
    num_iterations: int = 1,
) -> Schedule:
    """Cadences from numbers of tasks.

    Between two syncs lie `tasks_per_sync / tasks_per_step` batches. The last of them begins after all the others made
    their versions, on samples from the weights of the sync: with one pass per batch and a sync every N steps that is
    N - 1 versions, and no timing makes it less. A `max_staleness` below that is refused.

    Args:
        tasks_per_sync: tasks trained on between two weight syncs.
        tasks_per_reference_sync: the same for the reference; None for never.
        tasks_per_step: tasks of one batch.
        tasks_per_microbatch: tasks of one forward and backward.
        num_iterations: optimiser steps on each batch.

    Example:
        >>> compute_schedule(tasks_per_sync=32, tasks_per_reference_sync=None, tasks_per_step=8,
        ...                  tasks_per_microbatch=4, max_staleness=3)
        Schedule(accumulation_steps=2, sync_every=4, reference_every=None, required_staleness=3)
    """
    sizes = dict(
        tasks_per_sync=tasks_per_sync, tasks_per_step=tasks_per_step, tasks_per_microbatch=tasks_per_microbatch,
        num_iterations=num_iterations,
    )  # fmt: skip
    if tasks_per_reference_sync is not None:
        sizes["tasks_per_reference_sync"] = tasks_per_reference_sync
    for name, value in sizes.items():
        require_count(name, value, least=1)
    require_count("max_staleness", max_staleness, least=0)
    accumulation = _whole("tasks_per_step", tasks_per_step, "tasks_per_microbatch", tasks_per_microbatch)
    batches = _whole("tasks_per_sync", tasks_per_sync, "tasks_per_step", tasks_per_step)
    reference = None
    if tasks_per_reference_sync is not None:
        reference = _whole("tasks_per_reference_sync", tasks_per_reference_sync, "tasks_per_step", tasks_per_step)
    schedule = Schedule(
        accumulation_steps=accumulation,
        sync_every=batches * num_iterations,
        reference_every=None if reference is None else reference * num_iterations,
        required_staleness=(batches - 1) * num_iterations,
    )
    if schedule.required_staleness > max_staleness:
        raise _too_seldom(schedule, max_staleness, ", ".join(f"{name} = {value}" for name, value in sizes.items()))
    return schedule


def schedule_of(config: Config) -> Schedule:
    """The cadences that a config asks for; refused when they cannot keep its `max_staleness`. `config.rules` asks.

    The loop publishes between two batches, never between two passes over one. So `weight_sync_steps = 1` means after
    every batch, which is every `num_iterations` steps; anything above 1 has to be a multiple of `num_iterations`, for
    else engines would get new weights less often than it says. With N steps between syncs and k passes per batch, the
    last batch before a sync begins N - k versions after the weights that its samples come from. What further passes
    add to the age of a batch does not count: its samples are looked at before the first, and `epsilon` bounds the rest.
    """
    passes, sync = config.num_iterations, config.weight_sync_steps
    require_count("num_iterations", passes, least=1)
    require_count("weight_sync_steps", sync, least=1)
    batches = 1 if sync == 1 else _whole("weight_sync_steps", sync, "num_iterations", passes)
    tasks = config.tasks_per_step
    try:
        schedule = compute_schedule(
            tasks_per_sync=batches * tasks, tasks_per_reference_sync=None, tasks_per_step=tasks,
            tasks_per_microbatch=tasks, max_staleness=config.max_staleness, num_iterations=passes,
        )  # fmt: skip
    except ConfigError as error:  # the same numbers, by the names of the keys
        raise ConfigError(
            f"weight_sync_steps = {sync} with max_staleness = {config.max_staleness}, num_iterations = {passes} and "
            f"tasks_per_step = {tasks}: {error.what}",
            error.why,
            f"set max_staleness = {(batches - 1) * passes} or more, or weight_sync_steps = 1",
        ) from error
    reference, size = config.reference_sync_steps, config.microbatch_size
    cut = bool(size) and config.rollouts_per_step % size == 0  # one that does not divide is refused by its own rule
    return replace(
        schedule, accumulation_steps=config.rollouts_per_step // size if cut else None,
        reference_every=None if reference == "never" else reference,
    )  # fmt: skip


def _whole(name: str, value: int, by_name: str, by: int) -> int:
    """`value / by`, refused when there is a rest."""
    if value % by:
        raise ConfigError(
            f"{name} = {value} is not a multiple of {by_name} = {by}: {value % by} would be left over",
            "rounding would train on another schedule than the one that was asked for",
            f"use {name} = {(value // by + 1) * by}, or another {by_name}",
        )
    return value // by


def require_count(name: str, value: int, *, least: int) -> None:
    """Refuse what is no whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name} = {value!r}: must be a whole number of at least {least}",
            "sizes and cadences are counted in whole tasks and versions",
            f"give {name} a whole number of at least {least}",
        )


def _too_seldom(schedule: Schedule, max_staleness: int, sizes: str) -> ConfigError:
    return ConfigError(
        f"a sync every {schedule.sync_every} steps needs max_staleness of at least {schedule.required_staleness}, and "
        f"it is {max_staleness} ({sizes})",
        "the last batch before a sync is sampled from weights that are this many versions old, whatever the timing",
        f"set max_staleness = {schedule.required_staleness} or more, or sync more often",
    )


# -- When held-out tasks are answered: `eval_steps` resolved, a number or "auto" ------------------
# Owns       the steps of a run at which it is evaluated, and what that costs.
# Promises   the same config and the same number of held-out tasks give the same steps, so that a resumed run goes on as
# it began; "auto" never costs more than `MOST_SHARE` of the sampled tokens, but for the two evaluations at
# start and end, which every run makes; every evaluation falls on a step whose weights are published.
# Never      looks at a run: everything is known before it starts.
#
# Tokens are counted as answers times `max_completion_length`, which is the same number for training and evaluation, so
# that the share of tokens is the share of answers.


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
