"""Words after the command become keys and values: `a.b=value`, `--a.b value`, `--a-b=value`.

Owns       the grammar of overrides.
Promises   a value is a TOML literal where it reads as one, else text; a key that takes text gets the
           text as typed; `none` leaves an optional key out; nothing is guessed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from types import NoneType
from typing import Any

from surefoot.config_load.keys import ALIASES, SETS, Key, all_keys

Override = tuple[str, Any]


def parse_overrides(words: Sequence[str]) -> tuple[list[Override], list[str]]:
    """Dotted keys with values in order, and the words that are neither."""
    found: list[Override] = []
    problems: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_utf8(word):
            problems.append(f"{word!r}: not UTF-8 text")
            continue
        name, equals, text = word.partition("=")
        dashed = name.startswith("--")
        key = _key(name.removeprefix("--"))
        if not key or (not dashed and (not equals or name.startswith("-"))):
            problems.append(f"{word!r}: neither KEY=VALUE nor --KEY VALUE")
            continue
        if not equals:
            value = _following(key, rest)
            if value is None:
                problems.append(f"--{key} has no value; write {key}=VALUE")
                continue
            text = value
        found.append((key, parse_value(key, text)))
    return found, problems


def _key(name: str) -> str:
    """Dashes are read as underscores, except in the name that a set of `eval_sets` was given."""
    table, dot, rest = name.partition(".")
    table = table.replace("-", "_")
    if table == SETS:
        return table + dot + rest
    return table + dot + rest.replace("-", "_")


def _following(key: str, rest: list[str]) -> str | None:
    """The value after `--key`; a switch may stand alone and then means true."""
    known = all_keys().get(ALIASES.get(key, key))
    switch = known is not None and known.takes(bool)
    if rest and not rest[0].startswith("--") and not (switch and "=" in rest[0]):
        return rest.pop(0)
    return "true" if switch else None


def parse_value(key: str, text: str) -> Any:
    """One override's value; None when an optional key is told to be `none`."""
    known: Key | None = all_keys().get(ALIASES.get(key, key))
    if known is not None and known.takes(NoneType) and text == "none":
        return None
    literal = _toml_literal(text)
    named = key.removeprefix(SETS + ".").partition(".") if key.startswith(SETS + ".") else None
    if named is not None and named[2] in ("", "tasks", "metric"):  # text, or for the whole set a table
        return literal if isinstance(literal, str) or (isinstance(literal, dict) and not named[2]) else text
    if known is not None and known.takes(str):
        return literal if isinstance(literal, str) else text
    return text if literal is None else literal


def _toml_literal(text: str) -> Any:
    """The TOML value that `text` spells, or None (TOML has no null, so None is free)."""
    if "\n" in text or "\r" in text:
        return None  # a second line would be a second key
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except (ValueError, RecursionError):
        return None


def _is_utf8(word: str) -> bool:
    try:
        word.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
