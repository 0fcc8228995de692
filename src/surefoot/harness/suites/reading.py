"""Reads one TOML table key by key: typed, every problem noted, unknown keys with the nearest known one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from typing import Any

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names that every shell accepts for a variable."""


class TableReader:
    """Takes values out of a table; what is wrong goes to `problems`, and the caller reads on.

    Example:
        >>> reader = TableReader({"nodes": "two", "minuts": 5}, "recipe a", problems := [])
        >>> reader.whole("nodes", 1, low=1), reader.number("minutes", 1.0, low=0.0)
        (1, 1.0)
        >>> reader.finish()
        >>> problems
        ["recipe a: nodes is 'two', not a whole number", 'recipe a: unknown key minuts; did you mean minutes?']
    """

    def __init__(self, table: Mapping[str, Any], where: str, problems: list[str]) -> None:
        self._table, self._where, self._problems = table, where, problems
        self._asked: list[str] = []

    def text(self, key: str, default: str | None = None, *, required: bool = False) -> str | None:
        """A string that is not empty and holds no NUL."""
        value = self._get(key, required)
        if value is None:
            return default
        if not isinstance(value, str) or not value.strip() or "\0" in value:
            self._wrong(key, value, "a text with something in it")
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self._wrong(key, value, "true or false")
        return default

    def whole(self, key: str, default: int, *, low: int, high: int = 10**9, required: bool = False) -> int:
        """A whole number within bounds."""
        value = self._get(key, required)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            self._wrong(key, value, "a whole number")
            return default
        if not low <= value <= high:
            self._problems.append(f"{self._where}: {key} is {value}, allowed are {low} to {high}")
            return default
        return value

    def number(self, key: str, default: float, *, low: float, above: bool = False, required: bool = False) -> float:
        """A finite number, at least `low` (or above it)."""
        value = self._get(key, required)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._wrong(key, value, "a finite number")
            return default
        if value < low or (above and value == low):
            self._problems.append(
                f"{self._where}: {key} is {value}, it must be {'above' if above else 'at least'} {low:g}"
            )
            return default
        return float(value)

    def words(self, key: str, default: tuple[str, ...] = (), *, required: bool = False) -> tuple[str, ...]:
        """A list of texts without NUL, at least one; `default` when left out."""
        value = self._get(key, required)
        if value is None:
            return default
        if not isinstance(value, list) or not value or not all(isinstance(v, str) and "\0" not in v for v in value):
            self._wrong(key, value, "a list of texts with at least one")
            return default
        return tuple(value)

    def wholes(self, key: str) -> tuple[int, ...]:
        """A list of different whole numbers from 0."""
        value = self._get(key)
        if value is None:
            return ()
        good = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
        if not good or not value or len(set(value)) != len(value):
            self._wrong(key, value, "a list of different whole numbers from 0")
            return ()
        return tuple(value)

    def settings(self, key: str) -> dict[str, str]:
        """A table of environment variables."""
        value = self._get(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(v, str) and "\0" not in v for v in value.values()):
            self._wrong(key, value, 'a table of texts, such as {OMP_NUM_THREADS = "1"}')
            return {}
        odd = [name for name in value if not VARIABLE.fullmatch(name)]
        if odd:
            self._wrong(key, odd, "names that an environment variable can have")
        return {name: text for name, text in value.items() if name not in odd}

    def tables(self, key: str) -> list[Mapping[str, Any]]:
        """A list of tables, `[[key]]` in TOML, at least one."""
        value = self._get(key, required=True)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            if value is not None:
                self._wrong(key, value, f"one or more [[{key}]] tables")
            return []
        return value

    def whole_or_none(self, key: str, *, low: int) -> int | None:
        """A whole number, or None when left out."""
        if key in self._table:
            return self.whole(key, low, low=low)
        self._asked.append(key)
        return None

    def finish(self) -> None:
        """Complain about keys that nobody asked for."""
        for key in self._table:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, n=1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(self._asked)}"
                self._problems.append(f"{self._where}: unknown key {key}{hint}")

    def _get(self, key: str, required: bool = False) -> Any:
        self._asked.append(key)
        if required and key not in self._table:
            self._problems.append(f"{self._where}: {key} is missing")
        return self._table.get(key)

    def _wrong(self, key: str, value: object, wanted: str) -> None:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        self._problems.append(f"{self._where}: {key} is {shown}, not {wanted}")
