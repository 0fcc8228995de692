"""What the user brought, read and checked before anything heavy is imported: tasks and rewards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.assemble.large import Large, open_large
from surefoot.assemble.tooling import tool_recipe
from surefoot.config import Config
from surefoot.data.files import tasks_from_rows
from surefoot.data.heldout import HeldoutSplit, repeated_prompts, split_heldout
from surefoot.data.sources import load_tasks, scorer_of
from surefoot.data.tasks import Border, TaskSet
from surefoot.envs.grading import builtin_scorer, load_reward
from surefoot.envs.toolkits import ToolRecipe
from surefoot.errors import ConfigError, RewardError, SecurityError, TaskError
from surefoot.records import Task

RewardFunction = Callable[..., Any]
NOBODY = "nobody"
SOLVED = "solved"
"""Name of the task metric in the reward pool when it is not one of the rewards."""


@dataclass(frozen=True)
class Inputs:
    """Tasks and graders of one run."""

    task_set: TaskSet
    train: Sequence[Task]
    """In memory, or on the disk (`stream_tasks`)."""
    heldout: tuple[Task, ...]
    """The held-out tasks that are evaluated: at most `eval_tasks`, chosen by hash."""
    functions: Mapping[str, RewardFunction]
    weights: Mapping[str, float]
    metric: str | None
    border: Border | None = None
    """All held-out tasks, for the task stream to refuse; None when nothing is held out."""
    heldout_metric: str = "eval_accuracy"
    """What the guard watches: `guard.metric`, resolved."""
    tools: ToolRecipe | None = None
    """What rollouts may call; None when they may call nothing."""
    unsafe: bool = False
    """Model-written code runs without a sandbox, because that was spelled out."""


@dataclass(frozen=True)
class FromPython:
    """What a caller brings as objects instead of naming it in a config."""

    rows: Sequence[Mapping[str, Any]] | None = None
    """Tasks, instead of `config.tasks`."""
    functions: Sequence[RewardFunction] = ()
    """Reward functions, in front of `config.reward_funcs`."""
    tools: Sequence[Callable[..., Any]] = ()
    """Tools, in front of `config.tools.functions`."""
    environment: Any = None
    """An environment class, or several by name, instead of `config.tools.environment`."""


NOTHING = FromPython()


def read_inputs(config: Config, base: Path, given: FromPython = NOTHING) -> Inputs:
    """Load tasks, reward functions, and what there is to know of tools before they are started."""
    rows = given.rows
    if config.stream_tasks:
        large = _open_large(config, base, rows)
        return _with_graders(config, base, given, large.looked_at, large.train, large.heldout, large.border)
    if rows is None:
        task_set = load_tasks(config.tasks, base=base, num_tasks=config.num_tasks, seed=config.seed)
    else:
        given_tasks = tasks_from_rows(rows)
        task_set = TaskSet.of("python", given_tasks, scorer_of(given_tasks))
    return _with_graders(config, base, given, task_set, *_split(config, task_set))


def _open_large(config: Config, base: Path, rows: object) -> Large:
    if rows is not None:
        raise ConfigError(
            "stream_tasks = true with tasks given as rows", "rows are in memory already", "name a file instead"
        )
    return open_large(config, base)


def _with_graders(
    config: Config, base: Path, given: FromPython, task_set: TaskSet, train: Sequence[Task],
    heldout: tuple[Task, ...], border: Border | None,
) -> Inputs:  # fmt: skip
    functions = given.functions
    unsafe = refuse_uncontained_code(config, runs_code=runs_code(task_set))
    tools = tool_recipe(config, base, functions=given.tools, environment=given.environment)
    judged_elsewhere = tools is not None and tools.environment is not None
    graders, weights = _rewards(config, base, task_set, functions, optional=judged_elsewhere)
    metric = _metric(config, base, task_set, graders)
    if not graders:
        graders[NOBODY] = _abstain  # the pool has a function; nobody asks it
    return Inputs(
        task_set, train, heldout, graders, weights, metric, border, _heldout_metric(config, metric), tools, unsafe
    )


def _abstain(completions: Sequence[Any], **columns: Any) -> list[None]:
    return [None] * len(completions)


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
    config: Config, base: Path, task_set: TaskSet, functions: Sequence[RewardFunction], *, optional: bool
) -> tuple[dict[str, RewardFunction], dict[str, float]]:
    loaded: list[RewardFunction] = [*functions, *(load_reward(spec, base) for spec in config.reward_funcs)]
    if not loaded:
        if task_set.scorer is None and optional:
            return {}, {}
        if task_set.scorer is None:
            raise RewardError(
                f"tasks {task_set.name!r} bring no scorer and reward_funcs is empty",
                "without a reward there is nothing to learn",
                'set reward_funcs = ["my_rewards.py:score"]',
            )
        loaded = [_own_scorer(task_set)]
    names = _distinct_names(loaded)
    weights = config.reward_weights or (1.0,) * len(loaded)
    if len(weights) != len(loaded):
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for {len(loaded)} reward functions",
            "a function without a weight would count for nothing",
            "give one weight per function",
        )
    return dict(zip(names, loaded, strict=True)), dict(zip(names, weights, strict=True))


def _own_scorer(task_set: TaskSet) -> RewardFunction:
    """The scorer that the tasks themselves ask for; tasks that it could not judge are refused here."""
    assert task_set.scorer is not None, "asked only where there is one"
    if task_set.scorer != "verifier":
        return builtin_scorer(task_set.scorer)
    from surefoot.envs.verifiers import verifier_scorer

    return verifier_scorer(task_set.tasks)


def runs_code(task_set: TaskSet) -> bool:
    """Whether judging these tasks means running what the model wrote."""
    from surefoot.envs.verify.verifier_kinds import problem_of

    return task_set.scorer == "verifier" and any(
        problem_of(t.columns).get("verifier_type") == "code" for t in task_set.tasks
    )


def refuse_uncontained_code(config: Config, *, runs_code: bool) -> bool:
    """Whether model-written code will run without walls, as was spelled out; a `SecurityError` when it was not."""
    if not runs_code:
        return False
    from surefoot.envs import sandbox
    from surefoot.envs.verify.verify_code import permit_unsafe

    report = sandbox.available()
    if report.usable:
        return False
    if not config.tools.allow_unsafe:
        raise SecurityError(
            f"these tasks run model-written code, and this host has no sandbox: {'; '.join(report.missing)}",
            "it would run with your rights, your files and your network",
            "use a host that has one (docs/sandbox.md), or set tools.allow_unsafe = true, which is stamped on the run",
        )
    permit_unsafe()
    return True


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
    if spec == task_set.scorer:
        function = _own_scorer(task_set)
    else:
        function = builtin_scorer(spec) if spec in ("exact", "reasoning_gym", "verifier") else load_reward(spec, base)
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
