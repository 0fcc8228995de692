"""What a project says about its tests: the `[tool.surefoot]` table of its `pyproject.toml`.

Owns       finding that file, reading the parts that belong to test selection and assets, refusing what is malformed.
Promises   a misspelled key is an error with the nearest right one; a file without the table costs one read.
Never      imports pytest: the same declarations serve the pytest plugin and the command line.

Read next: `selection.py` for marker groups, `selection.py` for shards, `assets.py` for assets.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError

FILE = "pyproject.toml"


@dataclass(frozen=True, slots=True)
class Project:
    """A folder and what its `[tool.surefoot]` table holds, still as plain TOML values.

    Example:
        `Project(Path("."), Path("pyproject.toml"), {"slow_tests": ["tests/test_big.py::test_all"]})`
    """

    root: Path
    file: Path
    table: Mapping[str, Any] = field(default_factory=dict)

    def part(self, name: str) -> dict[str, Any]:
        """The sub-table `[tool.surefoot.NAME]`; empty when it is not there, refused when it is no table."""
        value = self.table.get(name, {})
        if not isinstance(value, dict):
            raise refused(f"tool.surefoot.{name} is {_kind(value)}, expected a table", self.file)
        return value

    def words(self, name: str) -> tuple[str, ...]:
        """The list of strings `tool.surefoot.NAME`; empty when it is not there."""
        return words_of(self.table.get(name, []), f"tool.surefoot.{name}", self.file)


def find_project(start: Path) -> Project | None:
    """The nearest `pyproject.toml` at `start` or above that has a `[tool.surefoot]` table."""
    for folder in (start, *start.parents):
        project = read_project(folder / FILE)
        if project is not None:
            return project
    return None


def read_project(file: Path) -> Project | None:
    """The `[tool.surefoot]` table of one TOML file; None when the file or the table is not there."""
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
        return None  # looking upwards passes folders that are none of our business
    if b"surefoot" not in data:
        return None
    import tomllib

    try:
        table = tomllib.loads(data.decode()).get("tool", {}).get("surefoot")
    except (ValueError, RecursionError, AttributeError) as error:
        raise refused(f"it is not valid TOML: {error}", file) from error
    if table is None:
        return None
    if not isinstance(table, dict):
        raise refused(f"tool.surefoot is {_kind(table)}, expected a table", file)
    return Project(file.parent, file, table)


def known_keys(table: Any, allowed: Iterable[str], where: str, file: Path) -> dict[str, Any]:
    """`table` itself, if it is a table with no key outside `allowed`."""
    if not isinstance(table, dict):
        raise refused(f"{where} is {_kind(table)}, expected a table", file)
    names = sorted(allowed)
    for key in table:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(names)}"
            raise refused(f"unknown key {where}.{key}; {hint}", file)
    return table


def words_of(value: Any, where: str, file: Path) -> tuple[str, ...]:
    """A string or a list of strings as a tuple; anything else, or an empty string, is refused."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(word, str) and word for word in found):
        raise refused(f"{where} must be a list of strings, each with at least one character", file)
    return tuple(found)


def text_of(value: Any, where: str, file: Path) -> str:
    """A string, or a refusal that names the key."""
    if not isinstance(value, str):
        raise refused(f"{where} is {_kind(value)}, expected text", file)
    return value


def refused(what: str, file: Path) -> ConfigError:
    """The error for a declaration that cannot be used."""
    return ConfigError(
        f"{file}: {what}", "a declaration that is half understood selects the wrong tests", f"correct it in {file.name}"
    )


def _kind(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)
