"""What people bring to `surefoot.train` from other trainers: one function for a list, a dataset, a trainer's arguments.

Owns       which shapes are taken as they are, and what is said to the others.
Promises   whatever is not taken is refused by name with why and fix, and before anything is written; nothing that was
           given is dropped, unless it is empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.assemble.given import EVAL_SET, ROWS, Rows
from surefoot.config_load.keys import SETS, all_keys
from surefoot.errors import ConfigError, ModelError, RewardError, TaskError, ToolError

SAVE_BOTH = "model.save_pretrained(folder); tokenizer.save_pretrained(folder); then give model=folder"
_SHOWN = 12
_NOT_TAKEN = {
    "callbacks": (
        "nothing is called back from the loop: what happens in it is what is checked",
        "give view=, an object that is told of every step, or report_to=[...]; a guard ([guard]) ends a run early",
    ),
    "peft_config": ("every weight is trained, there are no adapters", "leave it out"),
    "quantization_config": ("weights are trained in full precision", 'leave it out; dtype="bfloat16" saves memory'),
    "optimizers": (
        "the learner has an AdamW of its own, whose state is in every checkpoint",
        "leave it out, and give learning_rate, weight_decay, adam_beta1, adam_beta2, lr_scheduler_type or warmup_steps",
    ),
    "reward_processing_classes": (
        "rewards are functions of texts; a model that judges is called inside of one",
        "tokenise inside the function, and leave it out",
    ),
    "rollout_func": ("rollouts are made by the engine that is synced", "give tools= or environment_factory= instead"),
}
"""Arguments of TRL's trainer: why there is no such thing here, and what there is."""


def callables(given: Any, name: str) -> list[Any]:
    """A list of functions, or of `file.py:function`, from a list or from one alone."""
    if given is None:
        return []
    found = [given] if isinstance(given, str) or callable(given) else list(given) if _is_list(given) else [given]
    for each in found:
        if isinstance(each, str) or (callable(each) and not hasattr(each, "save_pretrained")):
            continue
        if name == "tools":
            raise ToolError(f"{name} holds {_kind(each)}", "a tool is a function", "give tools=[f], or 'file.py:f'")
        if hasattr(each, "save_pretrained"):
            fix = "write a function f(completions, **columns) that calls it and returns one number per completion"
        else:
            fix = f"give {name}=[f], with f(completions, **columns) or 'file.py:f'"
        raise RewardError(f"{name} holds {_kind(each)}", "it is not a function of texts", fix)
    return found


def task_source(given: Any, name: str = "tasks") -> str | Rows:
    """The name of a file or generator as text, or rows as a list."""
    if isinstance(given, str | Path):
        return str(given)
    if isinstance(given, Mapping):
        names = ", ".join(map(str, list(given)[:5]))
        raise TaskError(
            f"{name} is one mapping with the keys {names}", "tasks are a list of rows, each a mapping with a prompt",
            f"give one part of it, such as {name}=dataset[{next(iter(given), 'train')!r}]",
        )  # fmt: skip
    if hasattr(given, "to_dict") and hasattr(given, "columns"):
        raise TaskError(
            f"{name} is {_kind(given)}", "tasks are a list of rows, each a mapping with a prompt",
            f'give {name}=table.to_dict("records")',
        )  # fmt: skip
    if not isinstance(given, Iterable):
        raise TaskError(
            f"{name} is {_kind(given)}", "tasks are the name of a file, or a list of rows",
            f'give {name}=[{{"prompt": ..., "answer": ...}}, ...]',
        )  # fmt: skip
    return list(given)


def training_tasks(tasks: Any, train_dataset: Any) -> str | Rows | None:
    """`tasks`, or what TRL calls `train_dataset`; None when neither was given."""
    if tasks is not None and train_dataset is not None:
        raise ConfigError(
            "tasks and train_dataset are both given", "they are two names for what is trained on", "keep one"
        )
    if train_dataset is not None:
        return task_source(train_dataset, "train_dataset")
    return None if tasks is None else task_source(tasks)


def evaluation_sets(given: Any, keys: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Rows]]:
    """`eval_dataset` as entries of the key `eval_sets`, and the rows that no file holds, both by name.

    Args:
        given: rows, a file, or several of them by name.
        keys: what else was given; a set may be named once.
    """
    if given is None:
        return {}, {}
    by_name = {str(name): each for name, each in given.items()} if isinstance(given, Mapping) else {EVAL_SET: given}
    found = {name: task_source(each, f"eval_dataset[{name!r}]") for name, each in by_name.items()}
    named = keys.get(SETS) or {}
    if twice := [name for name in found if isinstance(named, Mapping) and name in named]:
        raise ConfigError(
            f"eval_dataset and eval_sets both have a set {twice[0]!r}", "one of them would be left out", "rename one"
        )
    rows = {name: each for name, each in found.items() if not isinstance(each, str)}
    return {name: each if isinstance(each, str) else ROWS for name, each in found.items()}, rows


def rows_again(given: Any) -> dict[str, Rows]:
    """`eval_dataset` for a run that has its sets: the rows of those that are in no file."""
    files, rows = evaluation_sets(given, {})
    if named := [name for name in files if name not in rows]:
        raise ConfigError(
            f"eval_dataset names a file for {named[0]!r}", "files are in the run's own config already",
            "give the sets that were rows, and leave the others out",
        )  # fmt: skip
    return rows


def plain_keys(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys as data: paths as text, and no object that could not be written into a config."""
    left = {name: value for name, value in keys.items() if not (name in {"args", *_NOT_TAKEN} and _is_nothing(value))}
    for name, value in left.items():
        if name == "args":
            raise _arguments_error(value)
        if name in _NOT_TAKEN:
            why, fix = _NOT_TAKEN[name]
            raise ConfigError(f"{name} is not taken", why, fix)
        if not _is_data(value):
            raise ConfigError(
                f"{name} is {_kind(value)}", "a key is data, so that the run's config.toml can say it again",
                "`surefoot config` prints every key with what it takes",
            )  # fmt: skip
    return {name: str(value) if isinstance(value, Path) else value for name, value in left.items()}


def refuse_more(rest: Sequence[Any]) -> None:
    """Raise for arguments without names beyond the first two."""
    if rest:
        raise ConfigError(
            f"{len(rest)} more argument{'s' * (len(rest) > 1)} without a name, first {_kind(rest[0])}",
            "only model and reward_funcs may stand without their names",
            "write surefoot.train(model, reward_funcs, tasks=rows, max_steps=20)",
        )


def refuse_object(target: Any) -> None:
    """Raise unless it is a name or a path: nothing else can be evaluated."""
    if not isinstance(target, str | Path):
        raise ModelError(
            f"the first argument is {_kind(target)}", "a run folder, a model folder or a name is evaluated", SAVE_BOTH
        )


def _arguments_error(args: Any) -> ConfigError:
    """For TRL's `args=GRPOConfig(...)`: the call that says the same here, as far as there is one."""
    if isinstance(args, Mapping):
        return ConfigError("args is a mapping", "keys are arguments of their own", "write surefoot.train(..., **args)")
    changed = dict(_changed_fields(args))
    known = [f"{name}={value!r}" for name, value in changed.items() if name in all_keys()]
    other = [name for name in changed if name not in all_keys()]
    fix = "give its fields as arguments" + (f": surefoot.train(..., {', '.join(known)})" if known else "")
    if other:
        more = f" and {len(other) - _SHOWN} more" if len(other) > _SHOWN else ""
        fix += f"; given as arguments, these are answered with what stands for them: {', '.join(other[:_SHOWN])}{more}"
    return ConfigError(f"args is {_kind(args)}", "its defaults are not those of this trainer", fix)


def _changed_fields(args: Any) -> Iterable[tuple[str, Any]]:
    """Fields of a dataclass whose plain values are not their defaults."""
    for field in dataclasses.fields(args) if dataclasses.is_dataclass(args) and not isinstance(args, type) else ():
        value = getattr(args, field.name, None)
        if value is not None and value != field.default and isinstance(value, bool | int | float | str):
            yield field.name, value


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, list | tuple | dict) and not any(each is not None for each in value))


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, Mapping)


def _is_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_data(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_is_data(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str | Path)


def _kind(value: Any) -> str:
    """`a GRPOConfig`, never the object's own text, which may be pages long."""
    name = type(value).__name__
    return f"a{'n' * (name[:1].lower() in 'aeiou')} {name}"
