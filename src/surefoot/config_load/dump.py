"""A `Config` back into text: TOML that reads in again, and the list of keys for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from surefoot.config import Config
from surefoot.config_load.keys import Key, all_keys, allowed, topics


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


def describe_key(key: Key) -> Iterator[str]:
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


def shown_default(key: Key) -> str:
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
