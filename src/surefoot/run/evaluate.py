"""Answer tasks with weights that are there: a run's checkpoint, or any model, on held-out tasks or on others.

Owns       what `surefoot eval` and `surefoot.evaluate` do.
Promises   a run's own held-out tasks and evaluation sets are answered as the run answered them: the same streams, the
           same metric; where these are the run's own tasks under another name, only the held-out ones are answered.
Never      trains, or writes into the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.config import Config, EngineConfig, EvalSetConfig, GuardConfig, RuntimeConfig
from surefoot.config.files import parse_overrides
from surefoot.config.load import LoadedConfig, config_from_values
from surefoot.config.rules import BUILTIN_MODELS, HELDOUT
from surefoot.data.files import tasks_from_rows
from surefoot.data.heldout import repeated_prompts, split_heldout
from surefoot.data.sources import load_tasks, scorer_of
from surefoot.data.tasks import TaskSet
from surefoot.errors import ConfigError, RewardError, StateError, TaskError
from surefoot.records import Task
from surefoot.report.console import View
from surefoot.rewards.functions import is_builtin
from surefoot.rewards.pool import RewardPool
from surefoot.run.arguments import ROWS, Rows, arguments, environment_of_run, recorded, refuse_unanswerable
from surefoot.run.inputs import FromPython, Inputs, chosen, inputs_to_answer, read_inputs
from surefoot.run.store import answer_rows, is_as_told, read_run_config, refuse_code
from surefoot.storage.files import verify_folder
from surefoot.storage.run_folder import RunFolder
from surefoot.system.memory import importing
from surefoot.system.text import counted, python_call

GENERATED = 200
"""How many tasks a generator makes for an evaluation when nobody says."""
ANSWERING = frozenset(
    """chat_template device dtype engine.rows eval_temperature max_completion_length max_prompt_length
    max_reward_failures max_turns num_generations_eval pass_env reward_memory_mb reward_timeout_s reward_workers seed
    system_prompt temperature threads tools.allow_unsafe tools.call_timeout_s tools.environment tools.functions
    tools.format tools.in_prompt tools.max_calls tools.max_result_tokens tools.servers
    tools.turns_by_complexity""".split()
)
"""Keys that change how tasks are answered; all others are about training."""
TRAINING_ONLY = "training/"
"""Files of a checkpoint that only a resume reads, and that are several times as large as the weights."""


@dataclass(frozen=True)
class EvaluationRequest:
    """What to answer, and who judges; nothing of it means a run's own."""

    tasks: str | Sequence[Mapping[str, Any]] | None = None
    """What the key `tasks` takes, or rows."""
    metric: str = "auto"
    """What the key `eval_metric` takes."""
    reward_funcs: Sequence[str | Callable[..., Any]] = ()
    num_tasks: int | None = None
    """At most so many tasks, chosen by hash; how many a generator makes."""
    words: Sequence[str] = ()
    """Config keys as KEY=VALUE."""
    tools: Sequence[Callable[..., Any]] = ()
    environment: Any = None
    eval_rows: Mapping[str, Rows] = field(default_factory=dict)
    """Rows of a run's own evaluation sets, by name."""
    allow_code: bool = False
    """Code that lies in the run folder itself may be run."""

    def from_python(self, rows: Sequence[Mapping[str, Any]] | None = None) -> FromPython:
        """The part of it that is objects."""
        functions = [function for function in self.reward_funcs if not isinstance(function, str)]
        return FromPython(rows, functions, self.tools, self.environment, self.eval_rows)

    @property
    def named(self) -> set[str]:
        """Which arguments are given, in one form or another."""
        found = {argument.partition("=")[0] for argument in arguments(self.from_python())}
        keys = {key for key, _ in parse_overrides(self.words)[0]}
        found |= {"tools"} if "tools.functions" in keys else set()
        found |= {"environment_factory"} if "tools.environment" in keys else set()
        return found | ({"tasks"} if self.tasks is not None else set())


@dataclass(frozen=True)
class Evaluation:
    """What was found.

    Example:
        >>> Evaluation("pebble", {"eval_accuracy": 0.5}, {"heldout": 2})["eval_accuracy"]
        0.5
    """

    model: str
    """Whose weights answered."""
    metrics: Mapping[str, float]
    tasks: Mapping[str, int]
    """How many tasks were answered, by set."""
    answers: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """Every answer, in the form of `rollouts/eval_*.jsonl`."""

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def right(self, name: str) -> tuple[int, int] | None:
        """(right, judged) answers of a set; None where its metric knows more than right and wrong, or is not there."""
        said = [row["correct"] for row in self.answers if row["set"] == name and row["reward"] is not None]
        judged = [value for value in said if value is not None]
        if not judged or any(value not in (0.0, 1.0) for value in judged):
            return None
        return int(sum(judged)), len(judged)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"model": self.model, "tasks": dict(self.tasks), "metrics": dict(self.metrics)}


@dataclass(frozen=True)
class _Subject:
    """Who answers, and what."""

    name: str
    config: Config
    base: Path
    inputs: Inputs
    notes: tuple[str, ...] = ()
    tasks: str = HELDOUT
    """What its tasks are called, those of evaluation sets aside."""
    adapter: Path | None = None
    """The checkpoint that an adapter comes from, where the model is its base."""


def evaluate(
    target: str | Path,
    checkpoint: str | None,
    view: View,
    *,
    url: str | None = None,
    asked: EvaluationRequest | None = None,
) -> Evaluation:
    """Answer tasks and judge the answers.

    Args:
        target: a run folder, or a model: a folder, a hub name or a built-in one.
        checkpoint: of a run: folder name under `checkpoints/`, such as "step_150"; "best" is the one that the verdict
            names, and None the newest.
        url: an OpenAI-compatible server that answers instead, with whatever model it serves; it is asked in the token
            ids of the target's own tokenizer.
        asked: other tasks than a run's own, and other judges; a model has no tasks of its own.
    """
    asked = asked or EvaluationRequest()
    _refuse_training_keys(asked.words)
    if (Path(target) / "config.toml").is_file():
        subject = _of_run(RunFolder.open(Path(target)), checkpoint, asked)
    else:
        subject = _of_model(str(target), checkpoint, asked)
    engine = EngineConfig(rows=subject.config.engine.rows) if url is None else EngineConfig(kind="openai", url=url)
    config = subject.config.model_copy(update={"engine": engine})
    who = subject.name if url is None else f"what {url} serves"
    with RewardPool(
        subject.inputs.functions, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
        memory_mb=config.reward_memory_mb, forked=subject.inputs.forked, pass_env=config.pass_env, warn=view.warn,
    ) as pool:  # fmt: skip
        free = subject.inputs.tools and subject.inputs.tools.uncontained
        view.start([f"evaluating {who}", *subject.notes, *([f"warning: {free}"] if free else [])])
        return _answer(who, config, subject, pool, served=url is not None)


def _answer(who: str, config: Config, subject: _Subject, pool: RewardPool, *, served: bool) -> Evaluation:
    with importing():
        from surefoot.evaluation import answer, eval_metrics
        from surefoot.run.build import build  # torch: after the reward workers are forked

    parts = build(config, subject.base, subject.inputs, pool, answer_only=True, adapter=subject.adapter)
    try:
        if not served:
            parts.runtime.publish(*parts.learner.published())
        results = answer(parts.runtime, parts.heldout, parts.eval_sets, 0)
    finally:
        parts.runtime.close()
    called = {subject.tasks if name == HELDOUT else name: result for name, result in results.items()}
    counts = {name: len(result.groups) for name, result in called.items()}
    return Evaluation(who, eval_metrics(results), counts, tuple(answer_rows(called)))


# -- who answers ----------------------------------------------------------------


def _of_run(folder: RunFolder, checkpoint: str | None, asked: EvaluationRequest) -> _Subject:
    weights = find_checkpoint(folder, checkpoint)
    verify_folder(weights, unread=TRAINING_ONLY)
    data = folder.read_config()
    known = is_as_told(folder, data)  # before anything that it names is looked at
    loaded = read_run_config(folder, asked.words, data=data)
    has_adapter = loaded.config.lora.rank is not None
    model = loaded.config.model if has_adapter else str(weights.absolute())
    adapter = weights if has_adapter else None
    own = _answering(loaded.config, model, own_tasks=True, asked=asked)
    as_kept = read_run_config(folder, data=data).config
    refuse_code(folder, as_kept, used=own, allow_code=asked.allow_code, known=known)
    notes: tuple[str, ...] = ()
    if not asked.reward_funcs and any(word.startswith("reward_funcs=") for word in recorded(folder, own)):
        notes = ("its reward functions were given in Python and are not asked: the metric judges",)
    refuse_unanswerable(folder, own, asked.named, own=asked.tasks is None)
    if asked.tasks is None:
        inputs = _own_inputs(own, loaded, asked, folder)
        return _Subject(str(weights), own, loaded.base, inputs, notes, adapter=adapter)
    config = _answering(loaded.config, model, own_tasks=False, asked=asked)
    task_set, tasks, line = _tasks(config, asked, Path.cwd())
    if task_set.fingerprint == environment_of_run(folder).get("tasks_sha256") and own.holds_out:
        line = "these are the run's own tasks: what it held out of them is answered"
        inputs = _own_inputs(own, loaded, asked, folder)
        return _Subject(str(weights), own, loaded.base, inputs, (line, *notes), adapter=adapter)
    _refuse_sets(asked)
    inputs = inputs_to_answer(config, loaded.base, asked.from_python(), task_set, tasks)
    notes = (line, *notes, *_trained_on(own, loaded.base, tasks))
    return _Subject(str(weights), config, loaded.base, inputs, notes, task_set.name, adapter)


def _trained_on(own: Config, base: Path, tasks: Sequence[Task]) -> list[str]:
    """A line when the run trained on some of these tasks, or when nobody can say."""
    if own.tasks == ROWS or own.stream_tasks:
        return ["whether the run trained on some of these was not looked at"]
    try:
        known = load_tasks(own.tasks, base=base, num_tasks=own.num_tasks, seed=own.seed)
    except TaskError as error:
        return [f"whether the run trained on some of these is not known: {error.what}"]
    twins = repeated_prompts(split_heldout(known.tasks, own.heldout_fraction)[0], tasks)
    return [f"warning: {len(twins)} of these are training tasks of the run, first {twins[0][1]}"] if twins else []


def _own_inputs(config: Config, loaded: LoadedConfig, asked: EvaluationRequest, folder: RunFolder) -> Inputs:
    """The run's held-out tasks and evaluation sets."""
    refuse_unanswerable(folder, config, asked.named, own=True)
    if asked.num_tasks is not None:
        raise ConfigError(
            "num_tasks with the run's own tasks", "which of them a run answers is part of the run",
            "name other tasks, or leave num_tasks out",
        )  # fmt: skip
    if isinstance(asked.tasks, str):
        config = config.model_copy(update={"tasks": str(Path.cwd() / asked.tasks)})
    rows = None if isinstance(asked.tasks, str) else asked.tasks
    try:
        inputs = read_inputs(config, loaded.base, asked.from_python(rows), answer_only=True)
    except RewardError as error:
        wanted = recorded(folder, config)
        if asked.reward_funcs or not any(word.startswith("reward_funcs=") for word in wanted):
            raise
        call = python_call("evaluate", folder.root, wanted)
        raise RewardError(
            f"{folder.root} was given its reward functions in Python: {error.what}", error.why, f"use {call} in Python"
        ) from error
    if not inputs.heldout and not inputs.eval_sets:
        raise StateError(
            "the run held no tasks out", "heldout_fraction is 0 and eval_sets is empty",
            "name tasks: surefoot eval RUN --tasks FILE",
        )  # fmt: skip
    return inputs


def _of_model(target: str, checkpoint: str | None, asked: EvaluationRequest) -> _Subject:
    there = target in BUILTIN_MODELS or (Path(target) / "config.json").is_file()
    if asked.tasks is None and not there:
        RunFolder.open(Path(target))  # refuses it, and says what is there instead
    if asked.tasks is None or checkpoint is not None:
        what = "a model has no held-out tasks of its own" if asked.tasks is None else "a model has no checkpoints"
        raise ConfigError(
            f"{target} is a model, not a run: {what}", "tasks and checkpoints belong to runs",
            f"write surefoot eval {target} --tasks FILE, without --checkpoint",
        )  # fmt: skip
    _refuse_sets(asked)
    found, problems = parse_overrides(asked.words)
    if problems:
        raise ConfigError(problems[0], "keys are given as KEY=VALUE", "for example num_generations_eval=4")
    source = asked.tasks if isinstance(asked.tasks, str) else ROWS
    values = {"model": target, "tasks": source, "heldout_fraction": 0.0, **dict(found)}
    loaded = config_from_values(values, source=f"the evaluation of {target}", base=Path.cwd())
    config = _answering(loaded.config, target, own_tasks=False, asked=asked)
    task_set, tasks, line = _tasks(config, asked, loaded.base)
    inputs = inputs_to_answer(config, loaded.base, asked.from_python(), task_set, tasks)
    return _Subject(target, config, loaded.base, inputs, (line,), task_set.name)


def _answering(config: Config, model: str, *, own_tasks: bool, asked: EvaluationRequest) -> Config:
    """The same config, as far as answering needs it: no training channels nor the files they read, one process."""
    changed: dict[str, Any] = {
        "model": model, "alpha_sdpo": 0.0, "beta_replay": 0.0, "replay_pairs": None, "runtime": RuntimeConfig(),
        "max_staleness": 0, "weight_sync_steps": 1,
    }  # fmt: skip
    functions = [function for function in asked.reward_funcs if isinstance(function, str)]
    named = tuple(each if is_builtin(each) else str(Path.cwd() / each) for each in functions)
    if asked.reward_funcs:
        changed |= {"reward_funcs": named, "reward_weights": None}
    if asked.metric != "auto" or not own_tasks:
        is_file = ".py:" in asked.metric
        changed["eval_metric"] = str(Path.cwd() / asked.metric) if is_file else asked.metric
    if not own_tasks:
        changed |= {"eval_sets": {}, "stream_tasks": False, "guard": GuardConfig(mode="off")}
    return config.model_copy(update=changed)


def _tasks(config: Config, asked: EvaluationRequest, base: Path) -> tuple[TaskSet, tuple[Task, ...], str]:
    """What was asked for: all tasks, those that are answered, and a line for the screen."""
    if isinstance(asked.tasks, str):
        made = asked.num_tasks or GENERATED
        found = load_tasks(asked.tasks, base=base, num_tasks=made, seed=EvalSetConfig.model_fields["seed"].default)
    else:
        rows = tasks_from_rows(asked.tasks or ())
        found = TaskSet.of(ROWS, rows, scorer_of(rows))
    tasks = chosen(found.tasks, asked.num_tasks or len(found.tasks))
    part = (
        counted(len(tasks), "task") if len(tasks) == len(found.tasks) else f"{len(tasks)} of {len(found.tasks)} tasks"
    )
    return found, tasks, f"tasks     {found.name}: {part} x {counted(config.num_generations_eval, 'answer')}"


def _refuse_sets(asked: EvaluationRequest) -> None:
    """Other tasks than a run's own are answered alone."""
    if asked.eval_rows:
        raise ConfigError(
            "eval_dataset with tasks that are not a run's own", "only a run has evaluation sets of its own",
            "give them as tasks, in a call of their own",
        )  # fmt: skip


def _refuse_training_keys(words: Sequence[str]) -> None:
    found, _ = parse_overrides(words)
    other = [key for key, _ in found if key not in ANSWERING]
    if other:
        raise ConfigError(
            f"{', '.join(other)} changes nothing about an evaluation, or what it is of",
            "a number under settings that were not used would be believed",
            f"leave it out; an evaluation takes {', '.join(sorted(ANSWERING))}",
        )


def find_checkpoint(folder: RunFolder, name: str | None) -> Path:
    """The checkpoint of this name, the one that the verdict calls the best, or the newest."""
    if name == "best":
        return folder.best_checkpoint()
    found = [path for path in folder.checkpoints() if name in (None, path.name)]
    if not found:
        raise StateError(
            f"no checkpoint {name or ''} in {folder.root}",
            "there are no such weights to look at",
            f"there are: {', '.join(p.name for p in folder.checkpoints()) or 'none yet; train saves at the end'}",
        )
    return found[-1]
