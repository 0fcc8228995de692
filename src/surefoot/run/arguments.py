"""What a run was given in Python, and what to say to whoever looks for it from the command line.

Owns       the list `from_python` of a run's environment.json: arguments as they would be written again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.keys import SETS, all_keys
from surefoot.config.load import LoadedConfig
from surefoot.errors import ConfigError, ModelError, RewardError, StateError, TaskError, ToolError
from surefoot.storage.files import commit_folder
from surefoot.storage.run_folder import START_MODEL, RunFolder
from surefoot.system.files import storage_error
from surefoot.system.text import python_call

if TYPE_CHECKING:
    from surefoot.run.inputs import FromPython


ROWS = "python"
"""What the key `tasks` of such a run says, and of an evaluation set of it."""
EVAL_SET = "eval_dataset"
"""What an evaluation set is called that was given without a name."""
Rows = Sequence[Mapping[str, Any]]


def arguments(given: FromPython) -> tuple[str, ...]:
    """What was given, as keyword arguments; a row list has no name of its own, so it is called `rows`."""
    found = [] if given.rows is None else ["tasks=rows"]
    found += [f"reward_funcs=[{_names(given.functions)}]"] if given.functions else []
    found += [f"tools=[{_names(given.tools)}]"] if given.tools else []
    found += [f"environment_factory={_names([given.environment])}"] if given.environment is not None else []
    found += [_eval_dataset(given.eval_rows)] if given.eval_rows else []
    return tuple(found)


def way_on(run: Path, wanted: Sequence[str]) -> str:
    """How an interrupted run goes on: a command, or a call where it was given things in Python."""
    return python_call("resume", run, wanted) if wanted else f"surefoot train --resume {run}"


def way_to_evaluate(run: Path, wanted: Sequence[str], *, judged: bool) -> str:
    """How a run's checkpoint is looked at again.

    Args:
        judged: it has a metric of its own: then nobody needs its reward functions for that.
    """
    needed = [argument for argument in wanted if not (judged and _name(argument) == "reward_funcs")]
    return python_call("evaluate", run, wanted) if needed else f"surefoot eval {run}"


def recorded(folder: RunFolder, config: Config) -> list[str]:
    """What the run was given; a run that was killed before it wrote that down is known by its tasks alone."""
    found = environment_of_run(folder).get("from_python")
    if isinstance(found, list):
        return [str(argument) for argument in found]
    return ["tasks=rows", "reward_funcs=[...]"] if config.tasks == ROWS else []


def environment_of_run(folder: RunFolder) -> dict[str, Any]:
    """environment.json; empty when there is none yet."""
    return folder.read_environment()


def refuse_missing(folder: RunFolder, config: Config, given: FromPython, max_steps: int | None = None) -> None:
    """Raise if the run was given something in Python that is not given now: it would go on as another run."""
    wanted = recorded(folder, config)
    there = set(map(_name, arguments(given)))
    missing = [argument for argument in wanted if _name(argument) not in there]
    if missing:
        longer = [] if max_steps is None else [f"max_steps={max_steps}"]
        raise StateError(
            f"{folder.root} was given {_words(missing)} in Python, and they are not in its config",
            "without them it would not be the same run",
            f"use {python_call('resume', folder.root, [*wanted, *longer])} in Python",
        )


def refuse_unanswerable(folder: RunFolder, config: Config, there: Collection[str], *, own: bool) -> None:
    """Raise if the run's weights cannot be asked as the run asked them, for want of what it was given in Python.

    Args:
        there: names of the arguments that are given now.
        own: its own held-out tasks and evaluation sets are asked, not others.
    """
    wanted = recorded(folder, config)
    needed = {"tasks", EVAL_SET, "tools", "environment_factory"} if own else {"tools", "environment_factory"}
    missing = [argument for argument in wanted if _name(argument) in needed - set(there)]
    again = python_call("evaluate", folder.root, wanted)
    if "tasks" in map(_name, missing):
        raise StateError(
            f"{folder.root} was given its tasks as rows in Python, and they are in no file",
            "there are no held-out tasks to answer",
            f"use surefoot eval {folder.root} --tasks FILE, or in Python {again}",
        )
    if missing:
        raise StateError(
            f"{folder.root} was given {_words(missing)} in Python, and they are not in its config",
            "without them its answers would not be those of the run",
            f"use {again} in Python",
        )


def _words(missing: Sequence[str]) -> str:
    words = {"tasks": "rows", "reward_funcs": "reward functions", "tools": "tools", EVAL_SET: "an evaluation set"}
    return " and ".join(words.get(_name(argument), "an environment") for argument in missing)


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def _names(objects: Sequence[Any]) -> str:
    return ", ".join(str(getattr(each, "__name__", type(each).__name__)).replace("<lambda>", "...") for each in objects)


def _eval_dataset(sets: Mapping[str, Any]) -> str:
    if list(sets) == [EVAL_SET]:
        return f"{EVAL_SET}=eval_rows"
    named = ", ".join(f"{json.dumps(name)}: {name.replace('-', '_')}_rows" for name in sets)
    return f"{EVAL_SET}={{{named}}}"


# -- What people bring to `surefoot.train` from other trainers: one function for a list, a dataset, a trainer's argumen
# Owns       which shapes are taken as they are, and what is said to the others.
# Promises   whatever is not taken is refused by name with why and fix, and before anything is written; nothing that was
# given is dropped, unless it is empty.


SAVE_BOTH = "model.save_pretrained(folder); tokenizer.save_pretrained(folder); then give model=folder"
_SHOWN = 12
_NOT_TAKEN = {
    "callbacks": (
        "a callback of TRL may change the trainer under way; ours are told, and change nothing",
        "surefoot.prepare(..., callbacks=[...]) takes surefoot.Callback; a guard ([guard]) ends a run early",
    ),
    "quantization_config": (
        "weights that are trained are held in full; only the base of an adapter may be in four bits",
        'lora={"rank": 16}, quantization="nf4" packs the base, with blocks of 64 and float32 scales',
    ),
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


_OURS = {"r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
_SAID = frozenset({*_OURS, "target_modules", "modules_to_save"})
_NO_MATTER = {"task_type": (None, "CAUSAL_LM"), "inference_mode": (False,), "megatron_core": ("megatron.core",)}
"""Fields that say nothing of the adapter with one of these values."""
_UNSAID = frozenset({"peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"})
DEFAULT_TARGETS = ("q_proj", "v_proj")
"""What PEFT takes for each architecture that is trained here when a LoraConfig names none."""


def peft_table(given: Any, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The config table `lora` that says what a LoraConfig says; whatever is not taken is refused by name."""
    if _is_nothing(given):
        return {}
    kind: Any = type(given)
    if kind.__name__ != "LoraConfig" or not hasattr(kind, "__dataclass_fields__"):
        raise ConfigError(
            f"peft_config is {_kind(given)}",
            "an adapter here is LoRA",
            "give a LoraConfig of PEFT, or lora={'rank': 16}",
        )
    if "lora" in keys:
        raise ConfigError("peft_config and lora are both given", "they are two names for one adapter", "keep one")
    usual = kind()
    for field in dataclasses.fields(kind):
        value = getattr(given, field.name)
        if field.name in _SAID | _UNSAID or value == getattr(usual, field.name):
            continue
        if str(getattr(value, "value", value)) not in map(str, _NO_MATTER.get(field.name, ())):
            raise ConfigError(
                f"peft_config has {field.name} = {str(value)[:80]}", "an adapter is plain LoRA on linear layers",
                f"leave {field.name} out",
            )  # fmt: skip
    table = {name: getattr(given, field) for field, name in _OURS.items()}
    targets = given.target_modules
    table["target_modules"] = targets if isinstance(targets, str) else sorted(targets or DEFAULT_TARGETS)
    return {"lora": table | {"modules_to_save": list(given.modules_to_save or ())}}


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


# -- A model that is already in memory: it is written into the run folder, and the run starts from there
# Promises   the run does not depend on the object: it can be resumed, and its start be looked at, when the object is
# gone; an object that would not be written whole (adapters, quantised weights) is refused.
# Never      trains the object itself.


STANDS_IN = "object"
"""What the key `model` says until the object has a folder."""


@dataclass(frozen=True)
class ModelObject:
    """A causal language model and its tokenizer, as transformers makes them."""

    model: Any
    tokenizer: Any

    def save(self, loaded: LoadedConfig, folder: RunFolder) -> LoadedConfig:
        """Write both into the run folder; the config that names the place."""
        from surefoot.learner.model import save_object

        final = folder.root / START_MODEL
        temporary = folder.root / f".{START_MODEL}.tmp"
        try:
            temporary.mkdir(mode=0o700)
            save_object(self.model, self.tokenizer, temporary)
        except OSError as error:
            raise storage_error(final, error) from error
        commit_folder(
            temporary, final, {"given": type(self.model).__name__, "tokenizer": type(self.tokenizer).__name__}
        )
        config = loaded.config.model_copy(update={"model": str(final)})
        return loaded.with_config(config).with_note(
            f"the model object was saved in {START_MODEL}/ of the run folder and is trained from there; the object "
            "itself stays as it is"
        )


def model_of(model: Any, tokenizer: Any) -> tuple[str | None, ModelObject | None]:
    """What the key `model` says, and the object where one was given."""
    if model is None or isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"processing_class with model={str(model)!r}", "the tokenizer that lies beside the weights is used",
                f"leave it out, or put both into one folder: {SAVE_BOTH}",
            )  # fmt: skip
        return None if model is None else str(model), None
    kind = type(model).__name__
    if not callable(getattr(model, "save_pretrained", None)):
        raise ModelError(
            f"model is an object of type {kind}", "only models that transformers can save are known",
            "give a folder, a hub name, or a model of transformers with its tokenizer",
        )  # fmt: skip
    if getattr(model, "peft_config", None) or getattr(model, "_hf_peft_config_loaded", False):
        raise ModelError(
            f"model is a {kind} with adapters", "an adapter that is trained begins anew, beside plain weights",
            f"give peft_config= for a new one, or merge these first: model = model.merge_and_unload(); {SAVE_BOTH}",
        )  # fmt: skip
    if getattr(model, "is_quantized", False):
        raise ModelError(
            f"model is a {kind} with quantised weights", "what a model was before it was packed cannot be told from it",
            'load it without quantization_config; with lora={"rank": 16}, quantization="nf4" packs it here',
        )  # fmt: skip
    if not callable(getattr(tokenizer, "save_pretrained", None)):
        name = getattr(getattr(model, "config", None), "_name_or_path", "") or "NAME"
        missing = "no tokenizer with it" if tokenizer is None else f"a {type(tokenizer).__name__} as tokenizer"
        raise ModelError(
            f"model is a {kind}, and {missing}", "a model object does not know its tokenizer",
            f"give processing_class=AutoTokenizer.from_pretrained({name!r}), or model={name!r} alone",
        )  # fmt: skip
    return STANDS_IN, ModelObject(model, tokenizer)
