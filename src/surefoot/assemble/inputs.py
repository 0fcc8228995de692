"""What the user brought, read and checked before anything heavy is imported: tasks and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.assemble.border import near_mode, refuse_too_few
from surefoot.assemble.eval_sets import OwnSet, chosen, heldout_all, judged_by, read_sets, set_lines
from surefoot.assemble.given import ROWS, Rows, arguments
from surefoot.assemble.large import Large, open_large, streamed_border
from surefoot.assemble.tooling import refuse_strange_complexity, tool_recipe
from surefoot.child_environment import check_named
from surefoot.config import Config
from surefoot.data.files import tasks_from_rows
from surefoot.data.heldout import HeldoutSplit, split_heldout
from surefoot.data.mixture import refuse_unknown
from surefoot.data.sources import load_tasks, scorer_of
from surefoot.data.tasks import Border, TaskSet
from surefoot.data.twins import Twins, keep_apart
from surefoot.envs.grading import builtin_scorer, is_builtin, load_reward
from surefoot.envs.judges import EvalSet, GradingRules, Judges
from surefoot.envs.rewards.arguments import refuse_unusable
from surefoot.envs.rewards.call_frames import Forked, by_fork
from surefoot.envs.toolkits import ToolRecipe
from surefoot.errors import ConfigError, RewardError, SecurityError
from surefoot.eval_cadence import Answered, answered_tasks, most_tasks
from surefoot.records import Task

if TYPE_CHECKING:
    from surefoot.assemble.model_object import ModelObject

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
    twins: Twins | None = None
    """What was found when both sides were compared; None when nothing is held out."""
    eval_sets: tuple[EvalSet, ...] = ()
    """Sets of the user's own, beside or instead of `heldout`."""
    set_lines: tuple[str, ...] = ()
    """The same in words, for the plan."""
    from_python: tuple[str, ...] = ()
    """What was given as objects, as the arguments that would give it again."""
    forked: Forked = field(default_factory=dict)
    """What tasks hold that has no form as data: reward workers have it by fork."""
    rules: GradingRules = field(default_factory=GradingRules)
    """What becomes of loops, and how long the run is."""

    @property
    def answered(self) -> Answered:
        """Tasks of one evaluation."""
        return answered_tasks(
            self.heldout_metric, len(self.heldout), {each.name: len(each.tasks) for each in self.eval_sets}
        )

    @property
    def set_tasks(self) -> int:
        """Tasks of evaluation sets that one evaluation asks."""
        return sum(len(each.tasks) for each in self.eval_sets)

    @property
    def sources(self) -> dict[str, str]:
        """What the tasks are, as digests, for a resume to compare."""
        sets = {f"eval_sets.{each.name}": each.fingerprint for each in self.eval_sets}
        return {"tasks_sha256": self.task_set.fingerprint, **sets}


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
    eval_rows: Mapping[str, Rows] = field(default_factory=dict)
    """Tasks of evaluation sets, by name, where `config.eval_sets` says that they are rows."""
    model: ModelObject | None = None
    """A model in memory, instead of `config.model`."""


NOTHING = FromPython()


def read_inputs(config: Config, base: Path, given: FromPython = NOTHING, *, answer_only: bool = False) -> Inputs:
    """Load tasks, reward functions, and what there is to know of tools before they are started.

    Args:
        answer_only: nothing will be trained, so that the metric may judge where nobody gives a reward.
    """
    check_named(config.pass_env)
    rows = given.rows
    sets = read_sets(config, base, given.eval_rows)
    if config.stream_tasks:
        never_trained = heldout_all((), sets)
        large = _open_large(config, base, rows, never_trained)
        border = streamed_border(large.border, large.train, never_trained)
        divided = (large.looked_at, large.train, large.heldout, border, large.twins)
        return _with_graders(config, base, given, *divided, sets, answer_only=answer_only)
    if rows is None:
        task_set = load_tasks(config.tasks, base=base, num_tasks=config.num_tasks, seed=config.seed)
    else:
        given_tasks = tasks_from_rows(rows)
        task_set = TaskSet.of(ROWS, given_tasks, scorer_of(given_tasks))
    sides = split_tasks(config, task_set, sets)
    return _with_graders(config, base, given, task_set, *sides, sets, answer_only=answer_only)


def _open_large(config: Config, base: Path, rows: object, never_trained: Sequence[Task]) -> Large:
    if rows is not None:
        raise ConfigError(
            "stream_tasks = true with tasks given as rows", "rows are in memory already", "name a file instead"
        )
    return open_large(config, base, never_trained=never_trained)


def inputs_to_answer(config: Config, base: Path, given: FromPython, task_set: TaskSet, tasks: Sequence[Task]) -> Inputs:
    """These tasks to be answered and nothing to be trained on; where nobody gives a reward, the metric alone judges."""
    return _with_graders(config, base, given, task_set, (), tuple(tasks), None, answer_only=True)


def _with_graders(
    config: Config, base: Path, given: FromPython, task_set: TaskSet, train: Sequence[Task],
    heldout: tuple[Task, ...], border: Border | None, twins: Twins | None = None, sets: Sequence[OwnSet] = (),
    *, answer_only: bool = False,
) -> Inputs:  # fmt: skip
    if not answer_only:
        refuse_unknown(config.preflight_allow, train)
    functions = given.functions
    read = [task_set, *(own.task_set for own in sets)]
    unsafe = refuse_uncontained_code(config, runs_code=any(map(runs_code, read)))
    tools = tool_recipe(config, base, functions=given.tools, environment=given.environment)
    refuse_strange_complexity(config, train, heldout, *(own.task_set.tasks for own in sets))
    judged_elsewhere = tools is not None and tools.environment is not None
    graders, weights = _rewards(config, base, task_set, functions, optional=answer_only or judged_elsewhere)
    metric = _metric(config.eval_metric, base, task_set, graders)
    if answer_only and not graders.keys() & weights.keys() and not judged_elsewhere:
        weights = _by_metric(metric, task_set)
    own_functions = bool(functions or config.reward_funcs) or judged_elsewhere
    judged = tuple(_judged(own, base, graders, Judges(weights, metric), own_functions) for own in sets)
    if not graders:
        graders[NOBODY] = _abstain  # the pool has a function; nobody asks it
    return Inputs(
        task_set, train, heldout, graders, weights, metric, border, watched_metric(config, metric, judged), tools,
        unsafe, twins, judged, set_lines(sets), arguments(given),
        {} if config.stream_tasks else _forked(task for each in read for task in each.tasks),
        GradingRules(0 if answer_only else config.max_steps, config.repetition, config.repetition_cost),
    )  # fmt: skip


def _forked(tasks: Iterable[Task]) -> Forked:
    """Columns and prompts that no message can carry, by task: rows from Python may hold them, and generators'."""
    found = {task.id: by_fork({**task.columns, "prompts": _bare_prompt(task)}) for task in tasks}
    return {task: columns for task, columns in found.items() if columns}


def _bare_prompt(task: Task) -> Any:
    return task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]


def _by_metric(metric: str | None, task_set: TaskSet) -> dict[str, float]:
    """The metric in the place of a reward that nobody gives."""
    if metric is None:
        raise RewardError(
            f"nobody can judge answers to {task_set.name!r}: no metric, no scorer, no reward function",
            "its tasks have no column answer, and none was named",
            "give --metric exact or --metric file.py:function, or --reward file.py:function",
        )
    return {metric: 1.0}


def _judged(own: OwnSet, base: Path, graders: dict[str, RewardFunction], run: Judges, functions_given: bool) -> EvalSet:
    """The set with its judges; those that the pool lacks are added to it."""
    spec, scorer = own.keys.metric, own.task_set.scorer
    metric = _metric(spec, base, own.task_set, graders, f"{SOLVED}_{own.name}")
    if functions_given or scorer is None or spec in ("auto", scorer):
        return judged_by(own, metric, run, metric, functions_given=functions_given)
    by_scorer = _metric(scorer, base, own.task_set, graders, f"scorer_{own.name}")
    return judged_by(own, metric, run, by_scorer, functions_given=functions_given)


def _abstain(completions: Sequence[Any], **columns: Any) -> list[None]:
    return [None] * len(completions)


def split_tasks(
    config: Config, task_set: TaskSet, sets: Sequence[OwnSet] = ()
) -> tuple[tuple[Task, ...], tuple[Task, ...], HeldoutSplit[Task] | None, Twins | None]:
    """Training tasks, held-out tasks to evaluate, all that is never trained on as a border, and what crossed it."""
    train, heldout = split_heldout(
        task_set.tasks, config.heldout_fraction, seed=config.heldout_seed, group=config.heldout_group
    )
    never_trained = heldout_all(heldout, sets)
    train, twins = keep_apart(train, never_trained, near_mode(config)) if never_trained else (train, None)
    refuse_too_few(config, len(train), twins)
    border = HeldoutSplit(train, never_trained, near=None) if never_trained else None  # likeness was looked for above
    return train, chosen(heldout, most_tasks(config)), border, twins


def _rewards(
    config: Config, base: Path, task_set: TaskSet, functions: Sequence[RewardFunction], *, optional: bool
) -> tuple[dict[str, RewardFunction], dict[str, float]]:
    loaded: list[RewardFunction] = [*functions, *(_named(spec, config, base, task_set) for spec in config.reward_funcs)]
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
    for function in loaded:
        refuse_unusable(function)
    names = _distinct_names(loaded)
    weights = config.reward_weights or (1.0,) * len(loaded)
    if len(weights) != len(loaded):
        raise ConfigError(
            f"reward_weights has {len(weights)} entries for {len(loaded)} reward functions",
            "a function without a weight would count for nothing",
            "give one weight per function",
        )
    return dict(zip(names, loaded, strict=True)), dict(zip(names, weights, strict=True))


def _named(spec: str, config: Config, base: Path, task_set: TaskSet) -> RewardFunction:
    """The function that an entry of `reward_funcs` names; the built-in one asks the task metric what is solved."""
    if not is_builtin(spec):
        return load_reward(spec, base)
    metric = metric_spec(config.eval_metric, task_set) or task_set.scorer
    if metric is None:
        raise RewardError(
            f"{spec} has nobody to say whether a task of {task_set.name!r} is solved",
            "its tasks have no column answer and no scorer, and eval_metric names none",
            'set eval_metric = "file.py:function"',
        )
    from surefoot.envs.components import WEIGHTS, component_reward

    weights = {str(name): weight for name, weight in config.component_weights.items()}
    return component_reward(_scorer(metric, base, task_set), weights or WEIGHTS)


def _scorer(spec: str, base: Path, task_set: TaskSet) -> RewardFunction:
    """The function that a metric's name stands for."""
    if spec == task_set.scorer:
        return _own_scorer(task_set)
    return builtin_scorer(spec) if spec in ("exact", "reasoning_gym", "verifier") else load_reward(spec, base)


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


def metric_spec(spec: str, task_set: TaskSet) -> str:
    """A metric's name with `auto` resolved: who says what counts as solved; empty when nobody does."""
    if spec == "auto":
        answered = all("answer" in task.columns for task in task_set.tasks)
        spec = task_set.scorer or ("exact" if answered else "none")
    return "" if spec == "none" else spec


def _metric(
    spec: str, base: Path, task_set: TaskSet, graders: dict[str, RewardFunction], called: str = SOLVED
) -> str | None:
    """Name of the task metric in the pool; adds it there, as `called`, when it is not one of the functions there."""
    spec = metric_spec(spec, task_set)
    if not spec:
        return None
    function = _scorer(spec, base, task_set)
    for name, existing in graders.items():
        if existing is function:
            return name
    graders[called] = function
    return called


def watched_metric(config: Config, metric: str | None, sets: Sequence[EvalSet] = ()) -> str:
    """`guard.metric` resolved: accuracy where there is a task metric, else the reward on held-out tasks."""
    wanted = config.guard.metric
    by_name = {f"eval/{each.name}/accuracy": each for each in sets}
    if wanted in by_name and by_name[wanted].judges.metric is None:
        name = by_name[wanted].name
        raise ConfigError(
            f"guard.metric = {wanted}, and the tasks of that set have no metric of their own",
            "the guard would watch a number that nobody measures",
            f'set eval_sets.{name}.metric = "exact" or "file.py:function", or guard.metric = "eval/{name}/reward"',
        )
    if wanted == "auto" and config.heldout_fraction == 0 and sets:
        return f"eval/{sets[0].name}/{'reward' if sets[0].judges.metric is None else 'accuracy'}"
    if wanted == "eval_accuracy" and metric is None and config.guard.mode != "off":
        raise ConfigError(
            "guard.metric = eval_accuracy, and these tasks have no metric of their own",
            "the guard would watch a number that nobody measures",
            'give eval_metric ("exact", or file.py:function), or set guard.metric = "eval_reward"',
        )
    if wanted == "auto":
        return "eval_reward" if metric is None else "eval_accuracy"
    return wanted
