"""What would arm a guard that is not: fewer settings, other evaluations, more held-out tasks, more steps.

Owns       the question whether a changed config is armed, and the order in which changes are tried.
Promises   a change that is offered was simulated like the run itself, and small numbers before large ones; only false
           alarms are looked for in fewer runs while there is none (none in 300: at most 1 %, with 95 % certainty).

Read next: `arming.py`, which asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from surefoot.config import Config
from surefoot.eval_cadence import MOST_EVALUATIONS, Answered, Cadence, cadence_of
from surefoot.guards.auto_settings import AUTO, guard_settings, tells_se, written
from surefoot.guards.collapse import arguments_of
from surefoot.guards.collapse_rules import Limits
from surefoot.guards.collapse_state import TIGHTENED
from surefoot.guards.simulated import RUNS, Question, falls_stopped, false_alarms

LEAST_SEEN, MOST_FALSE = 0.8, 0.01
"""Of simulated collapses and of simulated healthy runs, the shares that an armed guard stops at least and at most."""
_ROUGHLY = 200
"""Simulated runs that decide where to look; what is found is simulated in full."""
_CALM = 300
_MOST_EXPLICIT = 30
"""Evaluations that are tried where `eval_steps` is a number."""
_MOST_TASKS, _MOST_STEPS = 10_000, 10_000_000


@dataclass(frozen=True)
class Asked:
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

    def question(self, config: Config, heldout: int, limits: Limits | None = None) -> Question:
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
    def of(cls, config: Config, metric: str, first: float, limits: Limits | None, beside: int = 0) -> Asked:
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


def tightened_in(config: Config, limits: Limits | None) -> dict[str, float]:
    """What a calibration changed: limits that are not those of the config."""
    found = {name: getattr(limits, name) for name in TIGHTENED if limits is not None}
    return {name: value for name, value in found.items() if value != getattr(config.guard, name)}


def would_do(config: Config, heldout: int, asked: Asked, *, sizes: bool = True) -> Iterator[str]:
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


def _sizes(config: Config, heldout: int, asked: Asked) -> Iterator[str]:
    """Numbers of tasks or of steps that do; both together only where neither does alone."""
    found = [*_fewer_per_evaluation(config, heldout, asked), *_steps(config, heldout, asked)]
    if not any(size.startswith(asked.tasks_key) for size in found):
        found = [*_more_tasks(config, heldout, asked), *found]
    yield from found or _both(config, heldout, asked)


def _fewer_per_evaluation(config: Config, heldout: int, asked: Asked) -> Iterator[str]:
    """Under "auto" fewer tasks per evaluation buy more evaluations."""
    if config.eval_steps != "auto":
        return
    for wanted in range(asked.cadence(config, heldout).count + 1, MOST_EVALUATIONS + 2):
        tasks = _largest(lambda n, w=wanted: asked.count(config, n) >= w, heldout - 1)  # type: ignore[misc]
        if tasks and asked.armed(_with_tasks(config, tasks), tasks):
            yield f"{asked.tasks_key} = {tasks} ({asked.count(config, tasks)} evaluations)"
            return


def _more_tasks(config: Config, heldout: int, asked: Asked) -> Iterator[str]:
    tasks = _confirmed(
        _smallest(lambda n: asked.roughly(_with_tasks(config, n), n), heldout, _MOST_TASKS),
        lambda n: asked.armed(_with_tasks(config, n), n),
    )
    if tasks is not None:
        yield f"{tasks} held-out tasks (there are {heldout})"


def _steps(config: Config, heldout: int, asked: Asked) -> Iterator[str]:
    """The fewest steps with so many evaluations that it is armed."""

    def seems(evaluations: int) -> bool:
        longer = _with_evaluations(config, heldout, evaluations, asked)
        return longer is not None and asked.roughly(longer, heldout)

    def is_armed(evaluations: int) -> bool:
        longer = _with_evaluations(config, heldout, evaluations, asked)
        return longer is not None and asked.armed(longer, heldout)

    now = asked.cadence(config, heldout).count
    wanted = _confirmed(_smallest(seems, now, _most_evaluations(config)), is_armed)
    longer = None if wanted is None else _with_evaluations(config, heldout, wanted, asked)
    if longer is not None:
        yield f"max_steps = {longer.max_steps} ({asked.cadence(longer, heldout).count} evaluations)"


def _both(config: Config, heldout: int, asked: Asked) -> Iterator[str]:
    """As many evaluations as there may be, and the fewest tasks that are enough then."""

    def larger(tasks: int) -> Config | None:
        return _with_evaluations(_with_tasks(config, tasks), tasks, _most_evaluations(config), asked)

    def seems(tasks: int) -> bool:
        return (changed := larger(tasks)) is not None and asked.roughly(changed, tasks)

    def is_armed(tasks: int) -> bool:
        return (changed := larger(tasks)) is not None and asked.armed(changed, tasks)

    tasks = _confirmed(_smallest(seems, heldout, _MOST_TASKS), is_armed)
    if tasks is not None and (found := larger(tasks)) is not None:
        times = asked.cadence(found, tasks).count
        yield f"{tasks} held-out tasks and max_steps = {found.max_steps} ({times} evaluations)"


def _with_tasks(config: Config, tasks: int) -> Config:
    return config.model_copy(update={"eval_tasks": tasks})


def _with_evaluations(config: Config, heldout: int, evaluations: int, asked: Asked) -> Config | None:
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
