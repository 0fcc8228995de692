"""What is known about each key: its path, its kind in words, its neighbours, its names elsewhere.

Owns       the list of dotted keys with their topics, the nearest-name hint, and aliases.
Promises   a key with one wrong character is answered with the right key.
Never      validates a value.

Read next: `foreign.py`, what other trainers call things.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from surefoot.config import Config, OwnCode

ALIASES = {
    "group_size": "num_generations",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "vllm_importance_sampling_correction": "importance_sampling_correction",
    "vllm_importance_sampling_mode": "importance_sampling_mode",
    "vllm_importance_sampling_clip_max": "importance_sampling_clip_max",
    "vllm_importance_sampling_cap": "importance_sampling_clip_max",
}
"""Accepted under this name, and said so in the notes."""

GROUPS = {
    "model": "what to train, on what",
    "output_dir": "length of the run",
    "tasks_per_step": "one step",
    "optim": "optimiser",
    "loss_type": "the loss",
    "alpha_sdpo": "losses beside it",
    "eval_steps": "evaluation and what is held out",
    "preflight_tasks": "checks and the target",
    "logging_steps": "logs, checkpoints, waiting",
}
"""The first key of each topic -> its heading, as in config.py; a table is a topic of its own."""

SETS = "eval_sets"
"""The key whose entries the user names: `eval_sets.NAME` and `eval_sets.NAME.metric` are said of one of them."""


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key: dotted path, annotation and the docstring that stands under it."""

    path: str
    field: FieldInfo

    @property
    def annotation(self) -> Any:
        """The declared type, constraints stripped."""
        return self.field.annotation

    @property
    def doc(self) -> str:
        """The docstring under the key."""
        return self.field.description or ""

    def takes(self, kind: type) -> bool:
        """Whether a value of exactly this Python type can be meant (`str` for free text, not for choices)."""
        return kind in _members(self.annotation)


@cache
def all_keys() -> dict[str, ConfigKey]:
    """Every dotted key in the order of `config.py`; tables are not keys."""
    found: dict[str, ConfigKey] = {}
    for name, field in Config.model_fields.items():
        if table := _table_of(field):
            found |= {f"{name}.{inner}": ConfigKey(f"{name}.{inner}", f) for inner, f in table.model_fields.items()}
        else:
            found[name] = ConfigKey(name, field)
    return found


@cache
def tables() -> tuple[str, ...]:
    """Names of the tables, such as `engine`."""
    return tuple(name for name, field in Config.model_fields.items() if _table_of(field))


@cache
def topics() -> dict[str, tuple[ConfigKey, ...]]:
    """Heading -> its keys, in the order of `config.py`: the topics of the keys outside tables, then each table."""
    found: dict[str, list[ConfigKey]] = {}
    heading = ""
    for path, key in all_keys().items():
        table = path.rpartition(".")[0]
        if table:
            doc = (Config.model_fields[table].annotation.__doc__ or "").splitlines()[0]
            heading = f"[{table}] {doc.partition(': ')[2].rstrip('.')}"
        heading = GROUPS.get(path, heading)
        found.setdefault(heading, []).append(key)
    return {heading: tuple(keys) for heading, keys in found.items()}


def _table_of(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, `Annotated` unwrapped: `Int | None` gives (int, NoneType)."""
    origin = typing.get_origin(annotation)
    if annotation == OwnCode:
        return (OwnCode,)
    if origin is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return tuple(member for part in typing.get_args(annotation) for member in _members(part))
    return (annotation,)


def allowed(annotation: Any) -> str:
    """What may be written, in words: "a whole number or one of "never""."""
    words = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false"}
    parts = []
    for member in _members(annotation):
        if typing.get_origin(member) is Literal:
            parts.append("one of " + ", ".join(f'"{choice}"' for choice in typing.get_args(member)))
        elif typing.get_origin(member) is tuple:
            inner = allowed(typing.get_args(member)[0]).replace("a finite number", "numbers")
            parts.append(f"a list of {inner}")
        elif typing.get_origin(member) is dict and allowed_names(member):
            parts.append(f"a table of numbers for {', '.join(allowed_names(member))}")
        elif typing.get_origin(member) is dict:
            parts.append(
                'a table of sets, NAME = "FILE" or NAME = { tasks = "FILE", metric = "exact", num_tasks = 200 }'
            )
        elif member == OwnCode:
            parts.append('your own as "file.py:name"')
        elif member is not types.NoneType:
            parts.append(words[member])
    return " or ".join(parts)


def allowed_names(member: Any) -> tuple[str, ...]:
    """The names that a table's entries may have; empty where the user names them."""
    names = typing.get_args(member)[0]
    return typing.get_args(names) if typing.get_origin(names) is Literal else ()


def hint(path: str, *, typed: bool = False) -> str:
    """What to say after `unknown key PATH`: the right name, what another trainer's name is here, or where to look."""
    from surefoot.config import foreign

    if row := foreign.find(path):
        return row.hint(typed=typed)
    if path.startswith("no_") and path[3:] in all_keys():
        return f"write {path[3:]}=false"
    names = nearest(path)
    if not names:
        return "nothing has a similar name"
    return f"did you mean {' or '.join(names)}?"


@cache
def nearest(path: str) -> tuple[str, ...]:
    """The keys with the fewest edits from `path` (all of them, if several), or none when nothing is close."""
    leaf = path.rsplit(".", 1)[-1]
    limit = max(1, len(leaf) // 3)
    scored: dict[str, int] = {}
    for name in [*all_keys(), *ALIASES]:
        target = ALIASES.get(name, name)
        forms = {name, name.rsplit(".", 1)[-1]}
        pairs = [(mine, form) for mine in {path, leaf} for form in forms if abs(len(mine) - len(form)) <= limit]
        best = min((_edits(mine, form, limit) for mine, form in pairs), default=limit + 1)
        if best <= limit:
            scored[target] = min(best, scored.get(target, best))
    low = min(scored.values(), default=0)
    return tuple(name for name, edits in scored.items() if edits == low)[:3]


def _edits(a: str, b: str, limit: int) -> int:
    """Insertions, deletions, substitutions and swaps of neighbours from `a` to `b`, up to `limit` + 1."""
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], before[j - 2] + 1)
        if min(min(row), min(last)) > limit:
            return limit + 1
        before, last = last, row
    return last[-1]


# -- A `Config` back into text: TOML that reads in again, and the list of keys for people ---------


def dump_toml(config: Config, *, docs: bool = False) -> str:
    """Every key of `config` as TOML; a key that is left out is a comment, since TOML has no null.

    Reading the text back gives an equal config. With `docs`, the docstring stands above each key.
    """
    import textwrap

    lines: list[str] = []
    table = ""
    for key in all_keys().values():
        home, _, leaf = key.path.rpartition(".")
        if home != table:
            table = home
            lines += ["", f"[{home}]"]
        if docs:
            lines += ["", *(f"# {line}" for line in textwrap.wrap(key.doc, 110))]
        value = _value(config, key.path)
        lines.append(f"# {leaf} is left out" if value is None else f"{leaf} = {toml_value(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def describe_keys() -> Iterator[str]:
    """For `surefoot config`: each key with its default, what it takes, and its docstring, under its topic."""
    for position, (heading, keys) in enumerate(topics().items()):
        yield from ([""] if position else []) + [f"== {heading} =="]
        for key in keys:
            yield from describe_key(key)
    yield from ("", "surefoot config WORD searches names, this help, and what other trainers call things")


def describe_key(key: ConfigKey) -> Iterator[str]:
    """One key for readers."""
    import textwrap

    yield f"{key.path} = {shown_default(key)}    ({allowed(key.annotation)})"
    yield from textwrap.wrap(key.doc, 100, initial_indent="    ", subsequent_indent="    ")


def toml_value(value: Any) -> str:
    """One value as a TOML literal; floats keep every digit."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also wants DEL escaped and knows no surrogates.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, BaseModel):
        return toml_value({name: each for name, each in value if each is not None})
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {toml_value(each)}" for name, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, tuple):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    return repr(value)


def shown_default(key: ConfigKey) -> str:
    """The default of a key, as it would be written."""
    if key.field.is_required():
        return "(required)"
    default = key.field.default
    return "(left out)" if default is None else toml_value(default)


def _value(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value
