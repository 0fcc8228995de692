"""What the user brought, read and checked before anything heavy is imported: tasks and rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config import Config
from surefoot.data.files import tasks_from_rows
from surefoot.data.heldout import HeldoutSplit, repeated_prompts, split_heldout
from surefoot.data.sources import load_tasks
from surefoot.data.tasks import TaskSet
from surefoot.envs.grading import builtin_scorer, load_reward
from surefoot.errors import ConfigError, RewardError, TaskError
from surefoot.records import Task

RewardFunction = Callable[..., Any]
SOLVED = "solved"
"""Name of the task metric in the reward pool when it is not one of the rewards."""


@dataclass(frozen=True)
class Inputs:
    """Tasks and graders of one run."""

    task_set: TaskSet
    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    """The held-out tasks that are evaluated: at most `eval_tasks`, chosen by hash."""
    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float]
    metric: str | None
    border: HeldoutSplit[Task] | None = None
    """All held-out tasks, for the task stream to refuse; None when nothing is held out."""
    heldout_metric: str = "eval_accuracy"
    """What the guard watches: `guard.metric`, resolved."""


def read_inputs(
    config: Config, base: Path, *, rows: Sequence[Mapping[str, Any]] | None = None,
    functions: Sequence[RewardFunction] = (),
) -> Inputs:  # fmt: skip
    """Load tasks and reward functions.

    Args:
        rows: tasks given from Python instead of `config.tasks`.
        functions: reward functions given from Python, in front of `config.reward_funcs`.
    """
    if rows is None:
        task_set = load_tasks(config.tasks, base=base, num_tasks=config.num_tasks, seed=config.seed)
    else:
        task_set = TaskSet.of("python", tasks_from_rows(rows), None)
    train, heldout, border = _split(config, task_set)
    graders, weights = _rewards(config, base, task_set, functions)
    metric = _metric(config, base, task_set, graders)
    return Inputs(task_set, train, heldout, graders, weights, metric, border, _heldout_metric(config, metric))


def _split(config: Config, task_set: TaskSet) -> tuple[tuple[Task, ...], tuple[Task, ...], HeldoutSplit[Task] | None]:
    train, heldout = split_heldout(task_set.tasks, config.heldout_fraction)
    if len(train) < config.tasks_per_step:
        raise TaskError(
            f"{len(train)} tasks are left to train on, tasks_per_step is {config.tasks_per_step}",
            "a step would hold the same task twice",
            "bring more tasks, or lower tasks_per_step or heldout_fraction",
        )
    twins = repeated_prompts(train, heldout)
    if twins:
        raise TaskError(
            f"{len(twins)} held-out prompts are also training prompts, first {twins[0][0]} = {twins[0][1]}",
            "held-out accuracy would measure memory",
            "remove the repeated rows",
        )
    chosen = sorted(heldout, key=lambda task: hashlib.sha256(task.id.encode()).digest())[: config.eval_tasks]
    border = HeldoutSplit(train, heldout, near=None) if heldout else None  # two sums are alike and not the same
    return train, tuple(chosen), border


def _rewards(
    config: Config, base: Path, task_set: TaskSet, functions: Sequence[RewardFunction]
) -> tuple[dict[str, RewardFunction], dict[str, float]]:
    loaded: list[RewardFunction] = [*functions, *(load_reward(spec, base) for spec in config.reward_funcs)]
    if not loaded:
        if task_set.scorer is None:
            raise RewardError(
                f"tasks {task_set.name!r} bring no scorer and reward_funcs is empty",
                "without a reward there is nothing to learn",
                'set reward_funcs = ["my_rewards.py:score"]',
            )
        loaded = [builtin_scorer(task_set.scorer)]
    names = _distinct_names(loaded)
    weights = config.reward_weights or (1.0,) * len(loaded)
    if len(weights) != len(loaded):
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for {len(loaded)} reward functions",
            "a function without a weight would count for nothing",
            "give one weight per function",
        )
    return dict(zip(names, loaded, strict=True)), dict(zip(names, weights, strict=True))


def _distinct_names(functions: Sequence[RewardFunction]) -> list[str]:
    names: list[str] = []
    for function in functions:
        name = getattr(function, "__name__", type(function).__name__).replace("<lambda>", "reward")
        names.append(name if name not in names else f"{name}_{len(names)}")
    return names


def _metric(config: Config, base: Path, task_set: TaskSet, graders: dict[str, RewardFunction]) -> str | None:
    """Name of the task metric in the pool; adds it there when it is not one of the rewards."""
    spec = config.eval_metric
    if spec == "none":
        return None
    if spec == "auto":
        answered = all("answer" in task.columns for task in task_set.tasks)
        spec = task_set.scorer or ("exact" if answered else "")
        if not spec:
            return None
    function = builtin_scorer(spec) if spec in ("exact", "reasoning_gym") else load_reward(spec, base)
    for name, existing in graders.items():
        if existing is function:
            return name
    graders[SOLVED] = function
    return SOLVED


def _heldout_metric(config: Config, metric: str | None) -> str:
    """`guard.metric` resolved: accuracy where there is a task metric, else the reward on held-out tasks."""
    wanted = config.guard.metric
    if wanted == "eval_accuracy" and metric is None and config.guard.mode != "off":
        raise ConfigError(
            "guard.metric = eval_accuracy, and these tasks have no metric of their own",
            "the guard would watch a number that nobody measures",
            'give eval_metric ("exact", or file.py:function), or set guard.metric = "eval_reward"',
        )
    if wanted == "auto":
        return "eval_reward" if metric is None else "eval_accuracy"
    return wanted
