"""What the user brought, read and checked before anything heavy is imported: tasks and rewards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from surefoot.config import Config, EvalSetConfig
from surefoot.config.choices import named_environment
from surefoot.config.own_code import own_digests
from surefoot.config.schedule import MOST_TASKS, Answered, answered_tasks, most_tasks
from surefoot.data.files import tasks_from_rows
from surefoot.data.heldout import HeldoutSplit, Twins, keep_apart, split_heldout
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.sources import load_tasks, scorer_of
from surefoot.data.tasks import HeldoutGate, TaskSet, refuse_unknown
from surefoot.errors import ConfigError, RewardError, SecurityError, TaskError
from surefoot.records import Task
from surefoot.rewards.functions import BUILTIN_REWARDS, builtin_scorer, is_builtin, refuse_unusable
from surefoot.rewards.grading import EvalSet, GradingRules, Judges
from surefoot.rewards.workers import Forked, by_fork
from surefoot.run.arguments import ROWS, Rows, arguments
from surefoot.run.tasks import Large, near_mode, open_large, refuse_too_few, streamed_border
from surefoot.system.environment import check_named
from surefoot.system.files import sha256_bytes
from surefoot.system.text import counted
from surefoot.system.user_code import load_function
from surefoot.tools.mcp.servers import read_servers
from surefoot.tools.session import ToolLimits, turns_of
from surefoot.tools.toolkits import ToolkitSpec

if TYPE_CHECKING:
    from surefoot.run.arguments import ModelObject


# -- What keeps model-written code in, on this host and in this run: for the plan, the run's records and the report


def sandbox_facts() -> dict[str, Any] | None:
    """Which walls stand here; None while nothing in this process has anything to do with a sandbox.

    Asking builds a sandbox, so a run that never uses one is not made to.
    """
    if "surefoot.sandbox.sandbox" not in sys.modules:
        return None
    from surefoot.sandbox.sandbox import available

    report = available()
    return {"usable": report.usable, "missing": list(report.missing), "weaker": list(report.weaker)}


def weaker_words() -> str | None:
    """What is absent behind the other walls, in one line; None where nothing is."""
    facts = sandbox_facts()
    return "; ".join(facts["weaker"]) if facts and facts["weaker"] else None


# -- `eval_sets`: tasks of the user's own that a run is measured on and never trains on -----------
# Owns       what is read for each set, how its tasks are named, and who judges them.
# Promises   ids are `eval/NAME/id`, so that two files may use the same ids for different tasks; which tasks are
# answered
# is a function of their ids alone; every task of a set is kept out of training, answered or not.


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
    return tuple(sorted(tasks, key=lambda task: sha256_bytes(task.id))[:most])


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


# -- What `[tools]` asks for, as a recipe, and whether the tasks fit it; no server is started here


def toolkit_spec(
    config: Config, base: Path, *, functions: Sequence[Callable[..., Any]] = (), environment: Any = None
) -> ToolkitSpec | None:
    """The run's tools; None when it has none.

    Args:
        functions: tools given from Python, in front of `tools.functions`.
        environment: an environment class given from Python instead of `tools.environment`.
    """
    keys = config.tools
    if not keys.on and not functions and environment is None:
        return None
    servers, pins = read_servers(base / keys.servers) if keys.servers else ((), {})
    if environment is None and keys.environment is not None:
        named = named_environment(keys.environment)
        environment = keys.environment if named else str((base / keys.environment).absolute())
    return ToolkitSpec(
        servers, (*functions, *(str((base / each).absolute()) for each in keys.functions)), environment,
        ToolLimits(
            max_turns=config.max_turns, max_calls=keys.max_calls, call_timeout_s=keys.call_timeout_s,
            rollout_timeout_s=config.rollout_timeout_s, turns_by_complexity=keys.turns_by_complexity,
            stop_loops=config.repetition != "off",
        ),
        concurrency=keys.concurrency, max_result_tokens=keys.max_result_tokens, in_prompt=keys.in_prompt,
        mode=keys.mode, cassette=None if keys.cassette is None else (base / keys.cassette).absolute(),
        on_miss=keys.on_miss, pins=pins, call_format=keys.format,
    )  # fmt: skip


def refuse_strange_complexity(config: Config, *tasks: Iterable[Task]) -> None:
    """Where complexity decides about turns, a task with another one is refused before anything is started."""
    if not config.tools.turns_by_complexity:
        return
    for each in tasks:
        levels = each.statistics().complexity if isinstance(each, StreamingDataset) else None
        for task in each if levels is None else ():
            turns_of(task.columns, task.id, config.max_turns)
        for level in levels or ():
            turns_of({"complexity": level}, f"of {config.tasks}", config.max_turns)


# -- What the user brought, read and checked before anything heavy is imported: tasks and rewards -


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
    border: HeldoutGate | None = None
    """All held-out tasks, for the task stream to refuse; None when nothing is held out."""
    heldout_metric: str = "eval_accuracy"
    """What the guard watches: `guard.metric`, resolved."""
    tools: ToolkitSpec | None = None
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
    own_code: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of files with a loss, an estimator, an engine or a guard rule of the user's own, by key and name."""

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
        """What the tasks and the user's own code are, as digests, for a resume to compare."""
        sets = {f"eval_sets.{each.name}": each.fingerprint for each in self.eval_sets}
        return {"tasks_sha256": self.task_set.fingerprint, **sets, **self.own_code}


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
        divided = (large.preview, large.train, large.heldout, border, large.twins)
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
    heldout: tuple[Task, ...], border: HeldoutGate | None, twins: Twins | None = None, sets: Sequence[OwnSet] = (),
    *, answer_only: bool = False,
) -> Inputs:  # fmt: skip
    if not answer_only:
        refuse_unknown(config.preflight_allow, train)
    functions = given.functions
    read = [task_set, *(own.task_set for own in sets)]
    unsafe = refuse_uncontained_code(config, runs_code=any(map(runs_code, read)))
    tools = toolkit_spec(config, base, functions=given.tools, environment=given.environment)
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
        {} if answer_only else own_digests(config),
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
        return load_function(spec, base)

    def solved() -> RewardFunction:
        return _solved(spec, config, base, task_set)

    weights = {str(name): weight for name, weight in config.component_weights.items()}
    return BUILTIN_REWARDS[spec](solved, weights)


def _solved(spec: str, config: Config, base: Path, task_set: TaskSet) -> RewardFunction:
    """What says whether a task is solved, for a reward function that builds on it."""
    metric = metric_spec(config.eval_metric, task_set) or task_set.scorer
    if metric is None:
        raise RewardError(
            f"{spec} has nobody to say whether a task of {task_set.name!r} is solved",
            "its tasks have no column answer and no scorer, and eval_metric names none",
            'set eval_metric = "file.py:function"',
        )
    return _scorer(metric, base, task_set)


def _scorer(spec: str, base: Path, task_set: TaskSet) -> RewardFunction:
    """The function that a metric's name stands for."""
    if spec == task_set.scorer:
        return _own_scorer(task_set)
    return builtin_scorer(spec) if spec in ("exact", "reasoning_gym", "verifier") else load_function(spec, base)


def _own_scorer(task_set: TaskSet) -> RewardFunction:
    """The scorer that the tasks themselves ask for; tasks that it could not judge are refused here."""
    assert task_set.scorer is not None, "asked only where there is one"
    if task_set.scorer != "verifier":
        return builtin_scorer(task_set.scorer)
    from surefoot.rewards.verifiers.multi import verifier_scorer

    return verifier_scorer(task_set.tasks)


def runs_code(task_set: TaskSet) -> bool:
    """Whether judging these tasks means running what the model wrote."""
    from surefoot.rewards.verifiers.multi import problem_of

    return task_set.scorer == "verifier" and any(
        problem_of(t.columns).get("verifier_type") == "code" for t in task_set.tasks
    )


def refuse_uncontained_code(config: Config, *, runs_code: bool) -> bool:
    """Whether model-written code will run without walls, as was spelled out; a `SecurityError` when it was not."""
    if not runs_code:
        return False
    from surefoot.rewards.verifiers.code import permit_unsafe
    from surefoot.sandbox import sandbox

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
