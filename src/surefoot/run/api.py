"""The same run, started from Python: keys as arguments, tasks as rows, rewards as functions.

import surefoot

def score(completions, answer, **_):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
outcome = surefoot.train(model="pebble", tasks=rows, reward_funcs=score, max_steps=20)
print(outcome.verdict, outcome.metrics["eval_accuracy"], outcome.run_dir)

Read next: `arguments.py`, what is taken from scripts that were written for another trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.config.keys import SETS, toml_value
from surefoot.config.load import LoadedConfig, config_from_values
from surefoot.errors import ConfigError
from surefoot.report.console import View, open_view
from surefoot.run.arguments import (
    ROWS,
    Rows,
    callables,
    evaluation_sets,
    model_of,
    peft_table,
    plain_keys,
    refuse_more,
    refuse_object,
    rows_again,
    task_source,
    training_tasks,
)
from surefoot.run.evaluate import Evaluation, EvaluationRequest
from surefoot.run.evaluate import evaluate as evaluate_target
from surefoot.run.inputs import FromPython, RewardFunction
from surefoot.run.session import Outcome, resume_steps, train_steps
from surefoot.run.session import resume as resume_session
from surefoot.run.session import train as run_session
from surefoot.run.stepping import Callback, TrainingRun
from surefoot.run.store import load_run_config
from surefoot.storage.run_folder import RunFolder

__all__ = ["Callback", "Evaluation", "Outcome", "TrainingRun", "evaluate", "prepare", "resume", "train"]

Rewards = Sequence[str | RewardFunction] | str | RewardFunction | None
Tools = Sequence[Callable[..., Any]] | Callable[..., Any] | None
Sets = str | Path | Rows | Mapping[str, str | Path | Rows] | None


def train(
    model: Any = None, reward_funcs: Rewards = (), *rest: Any, tasks: str | Path | Rows | None = None,
    train_dataset: str | Path | Rows | None = None, eval_dataset: Sets = None, processing_class: Any = None,
    tools: Tools | Mapping[str, Any] = (), environment_factory: Any = None, view: View | None = None,
    peft_config: Any = None, **keys: Any,
) -> Outcome:  # fmt: skip
    """Train with GRPO; the arguments are the keys of a config file.

    Args:
        model: what the config key `model` takes, or a model of transformers that is in memory. That one is saved in the
            run folder and trained from there; the object itself stays as it is.
        reward_funcs: functions `f(prompts, completions, **columns)`, or `file.py:function`; one, or several in a list.
        tasks: what the config key `tasks` takes, or rows: mappings with `prompt` and any other columns.
        train_dataset: another name for `tasks`.
        eval_dataset: tasks that are never trained on, as a file or rows, or several by name: entries of `eval_sets`.
            One without a name is called "eval_dataset".
        processing_class: the tokenizer of a model that is in memory.
        tools: functions that the policy may call, or the config table `tools`, whose `functions` may be functions.
        environment_factory: a class with reset(**row), tools as public methods and get_reward(), or several by name.
        view: where progress is shown; the terminal when left out.
        peft_config: PEFT's LoraConfig: the config table `lora` in its words.
        keys: any other key of a config file.

    Raises:
        SurefootError: with what, why and fix; `exit_code` says which kind.
    """
    refuse_more(rest)
    asked = _asked(
        model, reward_funcs, tasks, train_dataset, eval_dataset, processing_class, tools, environment_factory,
        peft_config, keys,
    )  # fmt: skip
    return run_session(asked.loaded, view=view or open_view(asked.loaded.config.max_steps), given=asked.given)


class _Asked(NamedTuple):
    """What somebody wants to train, as a session takes it."""

    loaded: LoadedConfig
    given: FromPython


def _asked(
    model: Any, reward_funcs: Rewards, tasks: str | Path | Rows | None, train_dataset: str | Path | Rows | None,
    eval_dataset: Sets, processing_class: Any, tools: Tools | Mapping[str, Any], environment_factory: Any,
    peft_config: Any, keys: dict[str, Any],
) -> _Asked:  # fmt: skip
    keys = plain_keys(keys | peft_table(peft_config, keys))
    source = training_tasks(tasks, train_dataset)
    rows = None if source is None or isinstance(source, str) else source
    found = callables(reward_funcs, "reward_funcs")
    weights = keys.pop("reward_weights", None)
    table, functions = _tools(tools)
    sets, eval_rows = evaluation_sets(eval_dataset, keys)
    name, in_memory = model_of(model, processing_class)
    values = {
        "model": name, "tasks": ROWS if rows is not None else source, "tools": table, **keys,
        "reward_funcs": [f for f in found if isinstance(f, str)],
    }  # fmt: skip
    values |= {SETS: {**(keys.get(SETS) or {}), **sets}} if sets else {}
    loaded = config_from_values(
        {key: value for key, value in values.items() if value is not None or key in keys},
        source="surefoot.train(...)", base=Path.cwd(),
    )  # fmt: skip
    if weights is not None:  # counted against functions and files together, where both are known
        loaded = loaded.with_config(loaded.config.model_copy(update={"reward_weights": _numbers(weights)}))
    return _Asked(loaded, FromPython(rows, _objects(found), functions, environment_factory, eval_rows, in_memory))


def prepare(
    model: Any = None, reward_funcs: Rewards = (), *rest: Any, callbacks: Sequence[Callback] = (),
    resume: str | Path | None = None, tasks: str | Path | Rows | None = None,
    train_dataset: str | Path | Rows | None = None, eval_dataset: Sets = None, processing_class: Any = None,
    tools: Tools | Mapping[str, Any] = (), environment_factory: Any = None, view: View | None = None,
    peft_config: Any = None, **keys: Any,
) -> TrainingRun:  # fmt: skip
    """The run that `train` makes, up to its first step; you step it. Use it in a `with` block, or close it.

    Args:
        callbacks: instances of `surefoot.Callback`, told of every step, evaluation and save, and of the end.
        resume: a run folder to go on from, in place of a model and keys; rows, functions and tools are given again,
            as to `surefoot.resume`, whose `max_steps` and `allow_code` may follow.

    The other arguments are those of `train`.

    Example:
        with surefoot.prepare("pebble", score, tasks=rows, max_steps=20) as run:
            for metrics in run:
                if run.steps_done % 5 == 0:
                    print(run.evaluate()["eval_accuracy"])
        print(run.outcome)
    """
    refuse_more(rest)
    if resume is not None:
        if model is not None or processing_class is not None or peft_config is not None:
            raise ConfigError(
                "resume= together with a model", "a resumed run trains the model that it began with",
                "leave model, processing_class and peft_config out",
            )  # fmt: skip
        length, allow_code = keys.pop("max_steps", None), keys.pop("allow_code", False)
        if keys:
            raise ConfigError(
                f"resume= together with {', '.join(sorted(keys))}", "a resumed run is the same run",
                "leave these out; max_steps=N makes a run longer",
            )  # fmt: skip
        root = Path(resume)
        loaded, given = _asked_again(root, tasks, train_dataset, reward_funcs, tools, environment_factory, eval_dataset)
        shown = view or open_view(length or loaded.config.max_steps)
        steps = resume_steps(root, view=shown, given=given, max_steps=length, allow_code=allow_code)
    else:
        loaded, given = _asked(
            model, reward_funcs, tasks, train_dataset, eval_dataset, processing_class, tools, environment_factory,
            peft_config, keys,
        )  # fmt: skip
        shown = view or open_view(loaded.config.max_steps)
        steps = train_steps(loaded, view=shown, given=given)
    return TrainingRun(steps, shown, callbacks)


def _objects(found: Sequence[Any]) -> list[RewardFunction]:
    return [function for function in found if not isinstance(function, str)]


def _numbers(weights: Any) -> tuple[float, ...]:
    try:
        return tuple(map(float, weights))
    except (TypeError, ValueError):
        raise ConfigError(
            f"reward_weights = {weights!r}"[:200], "there is one weight for each reward function",
            "give a list of numbers, such as reward_weights=[1.0, 0.5]",
        ) from None  # fmt: skip


def _tools(given: Tools | Mapping[str, Any]) -> tuple[dict[str, Any], list[Callable[..., Any]]]:
    """The config table, and the functions that no file names."""
    table = dict(given) if isinstance(given, Mapping) else {"functions": given}
    functions = callables(table.pop("functions", ()), "tools")
    named = [function for function in functions if isinstance(function, str)]
    return table | ({"functions": named} if named else {}), _objects(functions)


def resume(
    run_dir: str | Path, *, tasks: Rows | None = None, reward_funcs: Rewards = (), tools: Tools = (),
    environment_factory: Any = None, view: View | None = None, max_steps: int | None = None,
    train_dataset: Rows | None = None, eval_dataset: Sets = None, allow_code: bool = False,
) -> Outcome:  # fmt: skip
    """Go on with an interrupted run; bit for bit as if it had not been interrupted.

    A run that is over is shown once more, and nothing in its folder changes.

    Args:
        max_steps: the run's new length; a run that is over goes on from its last checkpoint.
        tasks: the same rows again, if the run was started with rows; other ones are refused.
        reward_funcs: the same functions again, if it was started with functions. What they scored before is kept.
        tools: the same functions again; ones with other arguments or descriptions are refused.
        environment_factory: the same class again.
        train_dataset: another name for `tasks`.
        eval_dataset: the same rows again, if the run was started with rows there; other ones are refused.
        allow_code: code that lies in the run folder itself may be run; without it such a folder is refused.
    """
    root = Path(run_dir)
    loaded, given = _asked_again(root, tasks, train_dataset, reward_funcs, tools, environment_factory, eval_dataset)
    shown = view or open_view(max_steps or loaded.config.max_steps)
    return resume_session(root, view=shown, given=given, max_steps=max_steps, allow_code=allow_code)


def _asked_again(
    root: Path, tasks: str | Path | Rows | None, train_dataset: str | Path | Rows | None, reward_funcs: Rewards,
    tools: Tools | Mapping[str, Any], environment_factory: Any, eval_dataset: Sets,
) -> _Asked:  # fmt: skip
    """The run's own config, and what it was given in Python, given again."""
    loaded = load_run_config(RunFolder.open(root))
    source = training_tasks(tasks, train_dataset)
    if isinstance(source, str) and source != loaded.config.tasks:
        raise ConfigError(
            f"tasks={source!r} for a run of {loaded.config.tasks!r}", "a resumed run trains on what it began with",
            "give the rows that it was started with, or leave tasks out",
        )  # fmt: skip
    rows = None if source is None or isinstance(source, str) else source
    given = FromPython(
        rows, _objects(callables(reward_funcs, "reward_funcs")), callables(tools, "tools"), environment_factory,
        rows_again(eval_dataset),
    )  # fmt: skip
    return _Asked(loaded, given)


def evaluate(
    target: str | Path, *, tasks: str | Path | Rows | None = None, reward_funcs: Rewards = (), metric: str = "auto",
    checkpoint: str | None = None, num_tasks: int | None = None, tools: Tools = (), environment_factory: Any = None,
    view: View | None = None, eval_dataset: Sets = None, allow_code: bool = False, **keys: Any,
) -> Evaluation:  # fmt: skip
    """Answer tasks with a run's checkpoint, or with any model, and judge the answers: `surefoot eval` from Python.

    Args:
        target: a run folder, a model folder, a hub name, or a built-in model such as "pebble".
        tasks: what the config key `tasks` takes, or rows; left out, the run's own held-out tasks and evaluation sets.
            The run's own rows again give those of them that it held out.
        reward_funcs: functions `f(prompts, completions, **columns)`, or `file.py:function`; where there are none, the
            metric alone judges.
        metric: what counts as solved, as the config key `eval_metric`.
        checkpoint: of a run: "step_150", or "best"; the newest when left out.
        num_tasks: at most so many, chosen by hash.
        eval_dataset: the rows of the run's own evaluation sets again, if it was started with rows there.
        allow_code: code that lies in the run folder itself may be run; without it such a folder is refused.
        keys: config keys that change how tasks are answered, such as `num_generations_eval=4`.

    Example:
        surefoot.evaluate("pebble", tasks=[{"prompt": "17+25=", "answer": "42"}])["eval_accuracy"]
    """
    refuse_object(target)
    data = plain_keys(keys).items()
    words = [f"{name}={toml_value(tuple(v) if isinstance(v, list) else v)}" for name, v in data]
    functions = tuple(callables(reward_funcs, "reward_funcs"))
    asked = EvaluationRequest(
        None if tasks is None else task_source(tasks), metric, functions, num_tasks, words, callables(tools, "tools"),
        environment_factory, rows_again(eval_dataset), allow_code,
    )  # fmt: skip
    shown = view or open_view(0)
    try:
        return evaluate_target(target, checkpoint, shown, asked=asked)
    finally:
        shown.close()
