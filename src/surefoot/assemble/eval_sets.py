"""`eval_sets`: tasks of the user's own that a run is measured on and never trains on.

Owns       what is read for each set, how its tasks are named, and who judges them.
Promises   ids are `eval/NAME/id`, so that two files may use the same ids for different tasks; which tasks are answered
           is a function of their ids alone; every task of a set is kept out of training, answered or not.

Read next: `inputs.py`, which keeps training tasks and these apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from surefoot.assemble.given import ROWS, Rows
from surefoot.config import Config
from surefoot.config_tables import EvalSetConfig
from surefoot.data.files import tasks_from_rows
from surefoot.data.sources import load_tasks, scorer_of
from surefoot.data.tasks import TaskSet
from surefoot.envs.judges import EvalSet, Judges
from surefoot.errors import ConfigError, RewardError, TaskError
from surefoot.eval_cadence import MOST_TASKS
from surefoot.records import Task
from surefoot.tracking.text import counted


@dataclass(frozen=True)
class OwnSet:
    """One entry of `eval_sets`, read; nobody judges it yet."""

    name: str
    keys: EvalSetConfig
    task_set: TaskSet
    """All of its tasks, under the names that they have in this run."""
    answered: int
    """At most so many of them per evaluation."""

    @property
    def asked(self) -> tuple[Task, ...]:
        """Those that an evaluation asks."""
        return chosen(self.task_set.tasks, self.answered)


def read_sets(config: Config, base: Path, given: Mapping[str, Rows] = MappingProxyType({})) -> list[OwnSet]:
    """Every set's tasks; what cannot be read is refused, with the set's name in front.

    Args:
        given: rows from Python, by set.
    """
    found = []
    if unknown := [name for name in given if name not in config.eval_sets]:
        raise ConfigError(
            f"rows are given for the evaluation set {unknown[0]!r}, and this run has no such set",
            "they would be left out", f"it has: {', '.join(config.eval_sets) or 'none'}",
        )  # fmt: skip
    for name, keys in config.eval_sets.items():
        most = keys.num_tasks or (MOST_TASKS if config.eval_tasks == "auto" else config.eval_tasks)
        try:
            if keys.tasks == ROWS and name not in given:
                raise TaskError(
                    "its tasks were rows in Python, and are not given", "they are in no file",
                    f'give them: eval_dataset={{"{name}": rows}}',
                )  # fmt: skip
            if name in given:
                rows = tasks_from_rows(given[name])
                read = TaskSet.of(ROWS, rows, scorer_of(rows))
            else:
                read = load_tasks(keys.tasks, base=base, num_tasks=most, seed=keys.seed)
        except TaskError as error:
            raise TaskError(f"eval_sets.{name}: {error.what}", error.why, error.fix) from error
        renamed = tuple(replace(task, id=f"eval/{name}/{task.id}") for task in read.tasks)
        found.append(OwnSet(name, keys, replace(read, tasks=renamed), most))
    return found


def heldout_all(heldout: Sequence[Task], sets: Sequence[OwnSet]) -> tuple[Task, ...]:
    """Everything that must never be trained on: the held-out share of the tasks, and every task of every set."""
    return (*heldout, *(task for own in sets for task in own.task_set.tasks))


def chosen(tasks: Sequence[Task], most: int) -> tuple[Task, ...]:
    """At most so many tasks, by hash of their ids."""
    return tuple(sorted(tasks, key=lambda task: hashlib.sha256(task.id.encode()).digest())[:most])


def judged_by(own: OwnSet, metric: str | None, run: Judges, scorer: str | None, *, functions_given: bool) -> EvalSet:
    """The set with its judges.

    The run's reward functions judge it, as they judge every answer; where the run has none, because its tasks bring
    their own scorer, the set's own scorer does, or its metric.

    Args:
        metric: the set's metric, by its name in the pool.
        run: who judges training tasks.
        scorer: the set's own scorer, by its name in the pool.
        functions_given: the run's rewards are functions that the user named, not the scorer of its tasks.
    """
    weights: Mapping[str, float] = run.weights
    if not own.keys.reward or not functions_given:
        alone = (metric if not own.keys.reward else scorer or metric) or ""
        if not alone and run.weights:
            raise RewardError(
                f"eval_sets.{own.name}: its tasks bring no scorer and no answer column",
                "nobody could say what is right in it",
                f'set eval_sets.{own.name}.metric = "exact" or "file.py:function", or reward_funcs',
            )
        weights = {alone: 1.0} if alone else {}
    return EvalSet(own.name, own.asked, Judges(weights, metric), own.task_set.fingerprint)


def set_lines(sets: Sequence[OwnSet]) -> tuple[str, ...]:
    """For the plan: each set, how much of it is answered, and where it comes from."""
    lines = []
    for own in sets:
        total = len(own.task_set.tasks)
        part = counted(total, "task") if total <= own.answered else f"{own.answered} of {total} tasks"
        lines.append(f"{own.name}: {part} ({own.keys.tasks})")
    return tuple(lines)
