"""A config file becomes a plain table, with the line of every key.

Owns       TOML and YAML on disk: size, encoding, duplicates, documents, aliases, tags.
Promises   what comes back is data only, every key is text and occurred once; whatever is refused is
           named with file and line.
Never      knows which keys exist, or turns a surprising literal into something else.

Read next: `keys.py`, which knows the keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

from surefoot.config.keys import ALIASES, SETS, ConfigKey, all_keys
from surefoot.errors import ConfigError

SUFFIXES = (".toml", ".yaml", ".yml")
MAX_BYTES = 1_000_000
MAX_ALIASES = 20
MAX_NODES = 10_000
MAX_DEPTH = 20
WHY = "a run that is not the one you asked for is worse than no run"

_TABLE = re.compile(r"^\s*\[([A-Za-z0-9_.\-\s]+)\]\s*(?:#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_-]+(?:\s*\.\s*[A-Za-z0-9_-]+)*)\s*=")
_SURPRISING_INT = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*:.*)")


@dataclass(frozen=True, slots=True)
class ParsedFile:
    """A file as data: `table` nests like the file, `lines` maps dotted keys to 1-based lines."""

    table: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)


def read_config_file(path: Path, data: bytes | None = None) -> ParsedFile:
    """Read one TOML or YAML file; anything that is not plainly one table is a `ConfigError`.

    Args:
        data: its bytes, where somebody has read it already.
    """
    text = _read_text(path, data)
    try:
        return _parse_toml(path, text) if path.suffix == ".toml" else _parse_yaml(path, text)
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply", WHY, "a config has at most two levels") from None


def parse_toml(text: str, name: str) -> ParsedFile:
    """Parse TOML text that did not come from the user's disk (the built-in config)."""
    return _parse_toml(Path(name), text)


def _read_text(path: Path, data: bytes | None) -> str:
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"{path} does not end in {', '.join(SUFFIXES)}",
            "the ending says how a config is read",
            f"rename it, or write overrides as KEY=VALUE ({path.name} has no =)",
        )
    try:
        data = path.read_bytes() if data is None else data
    except FileNotFoundError:
        raise ConfigError(f"config file {path} does not exist", WHY, _nearby(path)) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config file {path} cannot be read: {error}", WHY, "check the path and its rights"
        ) from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes", "a config is a page of keys", f"stay below {MAX_BYTES}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", WHY, "save the file as UTF-8") from error


def _nearby(path: Path) -> str:
    import difflib

    parent = path.parent
    try:
        names = [p.name for p in parent.iterdir() if p.suffix in SUFFIXES]
    except OSError:
        return f"the folder {parent} does not exist either; check the path"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5) or sorted(names)[:3]
    if not close:
        return (
            f"there is no .toml or .yaml file in {parent.resolve()}; `surefoot config --toml` writes one to start from"
        )
    return f"nearest in that folder: {', '.join(close)}"


def _parse_toml(path: Path, text: str) -> ParsedFile:
    try:
        table = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, and integers with thousands of digits
        place = re.search(r"\(at line (\d+)", str(error))
        where = f"{path.name}:{place.group(1)}" if place else path.name
        line = text.splitlines()[int(place.group(1)) - 1].strip()[:60] if place else ""
        what = f"{where}: not valid TOML: {error}" + (f": {line}" if line else "")
        raise ConfigError(what, WHY, "correct that line; a key may occur once") from error
    return ParsedFile(table, _toml_lines(text))


def _toml_lines(text: str) -> dict[str, int]:
    """Lines of bare `key =` and `[table]`; keys written otherwise are simply not in the map."""
    lines: dict[str, int] = {}
    prefix, inside = "", False
    for number, line in enumerate(text.splitlines(), 1):
        fences = line.count('"""') + line.count("'''")
        if not inside:
            if header := _TABLE.match(line):
                prefix = re.sub(r"\s", "", header.group(1)) + "."
                lines.setdefault(prefix[:-1], number)
            elif key := _KEY.match(line):
                lines.setdefault(prefix + re.sub(r"\s", "", key.group(1)), number)
        inside ^= fences % 2 == 1
    return lines


def _parse_yaml(path: Path, text: str) -> ParsedFile:
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        _refuse_depth(path.name, text)
        node = loader.get_node() if loader.check_node() else None
        if node is not None and loader.check_node():
            raise ConfigError(
                f"{path.name}: more than one YAML document", "only one can be meant", "remove the lines with ---"
            )
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path.name} is not a table of keys", WHY, "write `key: value` lines")
        walk = _YamlWalk(path.name)
        walk.visit(node, "")
        if walk.problems:
            lines = "".join(f"\n    - {problem}" for problem in walk.problems)
            raise ConfigError(f"{path.name} has {len(walk.problems)} problem(s):{lines}", WHY, "correct these lines")
        return ParsedFile(loader.construct_document(node), walk.lines)
    except (yaml.YAMLError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}:{mark.line + 1}" if mark else path.name
        what = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            f"{where}: not valid YAML: {what}", WHY, "correct that line; only plain data is read"
        ) from error
    finally:
        loader.dispose()


def _refuse_depth(name: str, text: str) -> None:
    """Stop reading at the first value that is nested too deeply: the parser's time grows with the square."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise ConfigError(f"{name}:{line} is nested too deeply", WHY, "a config has at most two levels")


class _YamlWalk:
    """Looks at every node before anything is constructed: duplicates, aliases, literals that read as something else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lines: dict[str, int] = {}
        self.problems: list[str] = []
        self._seen: set[int] = set()
        self._visits = 0
        self._aliases = 0

    def visit(self, node: Any, path: str) -> None:
        """Depth first; an alias is a node met again, and is walked again: that is what makes a bomb expensive."""
        self._visits += 1
        self._aliases += id(node) in self._seen
        self._seen.add(id(node))
        if self._visits > MAX_NODES or self._aliases > MAX_ALIASES:
            raise ConfigError(
                f"{self.name} expands to too much: {self._visits} values, {self._aliases} aliases",
                "a few lines of aliases can fill any memory",
                f"write the values out; at most {MAX_ALIASES} aliases and {MAX_NODES} values",
            )
        if node.id == "mapping":
            self._mapping(node, path)
        elif node.id == "sequence":
            for item in node.value:
                self.visit(item, path)
        elif node.tag == "tag:yaml.org,2002:int" and _SURPRISING_INT.fullmatch(node.value):
            self._problem(node, f"{path} = {node.value}: YAML reads this as octal or base 60; write a plain number")

    def _mapping(self, node: Any, path: str) -> None:
        own: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.tag != "tag:yaml.org,2002:str":
                self._problem(key, f"key {getattr(key, 'value', '?')!s} is not text; put it in quotes")
                continue
            dotted = f"{path}.{key.value}" if path else key.value
            if key.value in own:
                self._problem(key, f"key {dotted} occurs twice, first in line {own[key.value]}")
            own[key.value] = line
            self.lines[dotted] = line
            self.visit(value, dotted)

    def _problem(self, node: Any, text: str) -> None:
        self.problems.append(f"{self.name}:{node.start_mark.line + 1}: {text}")


# -- Words after the command become keys and values: `a.b=value`, `--a.b value`, `--a-b=value` ----
# Owns       the grammar of overrides.
# Promises   a value is a TOML literal where it reads as one, else text; a key that takes text gets the
# text as typed; `none` leaves an optional key out; nothing is guessed.


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
    known: ConfigKey | None = all_keys().get(ALIASES.get(key, key))
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
