"""Which plan a run's queue follows: `stream_tasks` and `[curriculum]` become one.

Owns       the check that a curriculum names every level that the tasks have, and only levels that they have.
Never      lets a task be left out because nobody named its level.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from surefoot.config import Config
from surefoot.data.curriculum import CurriculumSampler, SuccessCurriculum, no_tasks_of
from surefoot.data.files import complexity_of
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import TasksById
from surefoot.errors import TaskError
from surefoot.records import Task
from surefoot.run.inputs import Inputs
from surefoot.run.store import RunStore
from surefoot.runtime.task_queue import (
    DurableTaskQueue,
    EpochPlan,
    LevelPlan,
    SuccessPlan,
    TaskPlan,
    WindowPlan,
    refuse_small_levels,
)


def make_task_order(
    config: Config, keeper: RunStore, inputs: Inputs, train: Sequence[Task], successes: SuccessCurriculum | None
) -> DurableTaskQueue:
    """Which task is next in a run whose steps wait for their own rollouts, and what became of each."""
    large = isinstance(train, StreamingDataset)
    tasks = TasksById(train) if isinstance(train, StreamingDataset) else {task.id: task for task in train}
    plan: TaskPlan
    if config.curriculum.kind == "levels":
        plan = level_plan(config, train)
    elif successes is not None:
        metric = inputs.metric if inputs.metric in inputs.weights else None  # rollouts carry the rewards' scores only
        plan = SuccessPlan(tasks, successes, seed=config.seed, metric=metric)
    else:
        plan = WindowPlan(train, config.seed) if large else EpochPlan(tasks, config.seed)
    known: Sequence[Task] | Mapping[str, Task] = tasks if large else train
    return DurableTaskQueue(keeper.ledger, keeper.batches, known, seed=config.seed, border=inputs.border, plan=plan)


def level_plan(config: Config, train: Sequence[Task]) -> LevelPlan:
    """Shares that move over the levels of these tasks."""
    named = config.curriculum
    sampler = CurriculumSampler(
        dict(zip(named.levels, named.start, strict=True)), dict(zip(named.levels, named.end, strict=True)),
        named.steps or config.max_steps, config.seed,
    )  # fmt: skip
    _refuse_unnamed(_levels_of(train), named.levels)
    pools = {level: _of_level(train, level) for level in named.levels}
    for level, pool in pools.items():
        largest = max(sampler.start[level], sampler.end[level])
        if not len(pool) and largest > 0:
            raise no_tasks_of(level, largest)
    pools = {level: pool for level, pool in pools.items() if len(pool)}
    apart = config.tasks_per_step * max(1, config.dynamic_sampling_batches)
    refuse_small_levels(pools, apart)
    return LevelPlan(pools, sampler, seed=config.seed, tasks_per_step=config.tasks_per_step, apart=apart)


def _levels_of(train: Sequence[Task]) -> Mapping[str | None, int]:
    if isinstance(train, StreamingDataset):
        found = dict(train.statistics().complexity)
        without = len(train) - sum(found.values())
        return found | ({None: without} if without else {})
    return Counter(complexity_of(task.columns) for task in train)


def _refuse_unnamed(found: Mapping[str | None, int], named: Sequence[str]) -> None:
    unnamed = {level: n for level, n in found.items() if level not in named}
    if unnamed:
        told = ", ".join(f"{n} of no level" if level is None else f"{n} of {level!r}" for level, n in unnamed.items())
        raise TaskError(
            f"tasks that the curriculum never reaches: {told}",
            f"curriculum.levels names {', '.join(named)}",
            "write the level into each task's column complexity, or name it in curriculum.levels with a share",
        )


def _of_level(train: Sequence[Task], level: str) -> Sequence[Task]:
    if isinstance(train, StreamingDataset):
        return train.filter(complexity=level)
    return [task for task in train if complexity_of(task.columns) == level]
