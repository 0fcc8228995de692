"""Suite manifests: one TOML file per suite, typed, every problem reported at once.

    description = "Every night, on two cores"
    [[recipe]]
    name = "grpo-pebble-1n0g-local"
    max_steps = 200
    minutes = 10
    checks = ['last("eval/accuracy") > 0.85']

Promises   a manifest with any problem is refused whole, with all problems by key name.
Never      evaluates text: a manifest is data.

Read next: `rules.py`, what has to fit together beyond the types.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.own_command import own_name

# -- Reads one TOML table key by key: typed, every problem noted, unknown keys with the nearest known one


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


# -- Suite manifests: one TOML file per suite, typed, every problem reported at once --------------


DEFAULT_COMMAND = ("{python}", "-m", "surefoot", "train")
"""The trainer when a recipe names none; config, folder, steps and seed are put behind it."""
DENY = (
    r"import\w* (?:\S+ )?failed|failed to import|could not import",
    r"registration (?:\S+ )?failed|failed to register",
    r"fallback used|falling back|using (?:the )?fallback",
)
"""Warnings that turn a part of a result folder red, as case-blind patterns."""
_SLUG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_RESUME = "{resume}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One training that a suite runs and judges."""

    name: str
    """`algo-model-NnMg-strategy[-modifiers][-long][.vN]`, and the name of its folder."""
    max_steps: int
    """Steps of the whole training; a shorter one is INCOMPLETE."""
    minutes: float
    """Longest that one run may take."""
    checks: tuple[str, ...]
    """Expressions of `surefoot check`; all must pass."""
    config: str | None = None
    """File with the trainer's settings, relative to the top of the repository."""
    command: tuple[str, ...] = DEFAULT_COMMAND
    """The trainer as a list of words, with placeholders such as `{run}`."""
    nodes: int = 1
    gpus_per_node: int = 0
    """0 is a CPU recipe."""
    steps_per_run: int = 0
    """Steps that fit into one run; `max_steps` when left out."""
    segment_size: int | None = None
    """Nodes that must lie together; divides `nodes`."""
    metrics: str = "."
    """Where the trainer leaves its numbers, relative to `{run}`."""
    progress: str | None = None
    """The metric whose last step says how far the training got; `train/loss` or `loss` when left out."""
    first_step: int = 1
    """The number of the first step: 1, or 0 for trainers that count from 0."""
    seeds: tuple[int, ...] = ()
    """One training per seed; every one must pass."""
    env: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    auto_resume: bool = False
    """The trainer finds its own last checkpoint in `{run}`; otherwise a chain needs `{resume}` in the command."""
    early_checks: bool = False
    """Also run the checks on a short training, for information: it stays INCOMPLETE."""
    required: bool = True
    """Whether the suite's verdict depends on it."""
    disabled: str | None = None
    """Why it is not run at present."""
    release_args: tuple[str, ...] = ()
    """Words added to the command when IS_RELEASE is set."""
    release: bool = False
    """Whether it is one; not a key of the manifest."""

    @property
    def num_runs(self) -> int:
        """How many runs make up the training, rounded up."""
        return -(-self.max_steps // self.steps_per_run)

    @property
    def trials(self) -> tuple[int | None, ...]:
        """The seeds, or one None."""
        return self.seeds or (None,)

    def problems(self) -> list[str]:
        """What does not fit together within one recipe."""
        found = []
        if not _SLUG.fullmatch(self.name) or ".." in self.name:
            found.append("name must be letters, digits, dots, dashes: it becomes a folder")
        if self.segment_size is not None and self.nodes % self.segment_size:
            found.append(f"segment_size {self.segment_size} does not divide nodes {self.nodes}")
        if self.num_runs > 1 and not self.auto_resume and not any(_RESUME in word for word in self.command):
            found.append(
                f"{self.num_runs} runs (max_steps {self.max_steps} / steps_per_run {self.steps_per_run}) "
                "but the command has no {resume}, and auto_resume is not set"
            )
        if Path(self.metrics).is_absolute() or ".." in Path(self.metrics).parts:
            found.append(f"metrics {self.metrics!r} must lie inside the run's folder, or old numbers could be judged")
        if len(set(self.checks)) != len(self.checks):
            found.append("a check is there twice")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """A named list of recipes, and the hardware and budget that they share."""

    name: str
    path: Path
    root: Path
    """The top of the repository: configs are relative to it."""
    recipes: tuple[Recipe, ...]
    description: str = ""
    gpus_per_node: int = 0
    """GPUs in each machine that the suite runs on; every recipe uses whole machines."""
    max_nodes: int = 10**9
    gpu_hours: float = 0.0
    """Budget for one pass over the suite."""
    algorithms: tuple[str, ...] = ()
    """First parts of recipe names beyond the known ones."""
    free_names: bool = False
    """Recipe names need not follow the pattern: for functional scripts."""
    config_folder: str | None = None
    """Every config in this folder must belong to a recipe of some suite."""
    deny: tuple[str, ...] = DENY

    def recipe(self, name: str) -> Recipe:
        """The recipe of that name."""
        for recipe in self.recipes:
            if recipe.name == name:
                return recipe
        known = ", ".join(recipe.name for recipe in self.recipes)
        raise ConfigError(f"suite {self.name} has no recipe {name!r}", f"it has {known}", "choose one of these")


def load_suite(path: Path, root: Path) -> Suite:
    """The suite in a manifest file; missing is a `StateError`, wrong in any way a `ConfigError` with every problem."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}", "a suite is a file", f"see {own_name()} suite list"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error.reason}", "TOML is UTF-8", "save it as UTF-8") from error
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", "a suite is a TOML file", "correct that line") from error
    return read_suite(table, path, root)


def read_suite(table: Mapping[str, Any], path: Path, root: Path) -> Suite:
    """A suite from a parsed table."""
    problems: list[str] = []
    reader = TableReader(table, "suite", problems)
    if not _SLUG.fullmatch(path.stem):
        problems.append(f"the file's name {path.stem!r} must be letters, digits, dots, dashes")
    gpus = reader.whole("gpus_per_node", 0, low=0, high=1024)
    shared_env, container = reader.settings("env"), reader.text("container")
    command = reader.words("command", DEFAULT_COMMAND)
    suite = Suite(
        name=path.stem, path=path, root=root, gpus_per_node=gpus,
        description=reader.text("description") or "",
        max_nodes=reader.whole("max_nodes", 10**9, low=1),
        gpu_hours=reader.number("gpu_hours", 0.0, low=0.0),
        algorithms=reader.words("algorithms"),
        free_names=reader.flag("free_names", False),
        config_folder=reader.text("config_folder"),
        deny=_patterns(reader.words("deny", DENY), problems),
        recipes=tuple(
            _recipe(item, i, gpus, command, shared_env, container, problems)
            for i, item in enumerate(reader.tables("recipe"), 1)
        ),
    )  # fmt: skip
    reader.finish()
    names = [recipe.name for recipe in suite.recipes]
    problems += [
        f"recipe {name} is there {names.count(name)} times" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    refuse(path, problems)
    return suite


def refuse(path: Path, problems: list[str]) -> None:
    """Raise one `ConfigError` with every problem; nothing when there is none."""
    if problems:
        lines = "".join(f"\n    - {problem}" for problem in problems)
        raise ConfigError(
            f"{path} has {len(problems)} problem(s):{lines}",
            "a suite that is not the one you meant would judge something else",
            "correct the lines above; docs/suites.md lists every key",
        )


def _recipe(
    item: Mapping[str, Any], number: int, gpus: int, command: tuple[str, ...], env: Mapping[str, str],
    container: str | None, problems: list[str],
) -> Recipe:  # fmt: skip
    shown = item.get("name")
    where = f"recipe {shown}" if isinstance(shown, str) and shown else f"recipe number {number}"
    reader = TableReader(item, where, problems)
    max_steps = reader.whole("max_steps", 1, low=1, required=True)
    recipe = Recipe(
        name=reader.text("name", required=True) or f"number-{number}",
        max_steps=max_steps,
        minutes=reader.number("minutes", 1.0, low=0.0, above=True, required=True),
        checks=reader.words("checks", required=True),
        config=reader.text("config"),
        command=reader.words("command", command),
        nodes=reader.whole("nodes", 1, low=1, high=10**6),
        gpus_per_node=reader.whole("gpus_per_node", gpus, low=0, high=1024),
        steps_per_run=reader.whole("steps_per_run", max_steps, low=1),
        segment_size=reader.whole_or_none("segment_size", low=1),
        metrics=reader.text("metrics") or ".",
        progress=reader.text("progress"),
        first_step=reader.whole("first_step", 1, low=0, high=1),
        seeds=reader.wholes("seeds"),
        env={**env, **reader.settings("env")},
        container=reader.text("container", container),
        auto_resume=reader.flag("auto_resume", False),
        early_checks=reader.flag("early_checks", False),
        required=reader.flag("required", True),
        disabled=reader.text("disabled"),
        release_args=reader.words("release_args"),
    )  # fmt: skip
    reader.finish()
    problems += [f"{where}: {problem}" for problem in recipe.problems()]
    return recipe


def _patterns(patterns: tuple[str, ...], problems: list[str]) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            problems.append(f"suite: deny: {pattern!r} is not a pattern: {error}")
    return patterns


def find_suites(folder: Path) -> list[Path]:
    """Manifest files of a folder, by name."""
    if not folder.is_dir():
        raise StateError(
            f"{folder} is not a folder",
            "suites are looked for there",
            "make suites/NAME.toml at the top, or use --suites DIR",
        )
    return sorted(path for path in folder.glob("*.toml") if path.is_file())


# -- What the caller changes for one call: `--set`, `--relax`, `--drop-check`. Recorded in every verdict


SETTABLE = ("max_steps", "steps_per_run", "minutes", "nodes", "gpus_per_node", "segment_size", "container", "seeds")
"""Keys that `--set` may change."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Changes as typed, with the reason that was given."""

    set: tuple[str, ...] = ()
    """`key=value`, the value in TOML or as plain text."""
    relax: tuple[str, ...] = ()
    """`OLD CHECK=>NEW CHECK`."""
    drop: tuple[str, ...] = ()
    """Checks to leave out."""
    reason: str | None = None

    def recorded(self) -> tuple[str, ...]:
        """As they go into the verdict."""
        words = [f"set {item}" for item in self.set]
        words += [f"relax {item}" for item in self.relax] + [f"drop-check {item}" for item in self.drop]
        return (*words, f"reason {self.reason}") if words and self.reason else tuple(words)


def apply(overrides: Overrides, recipes: Sequence[Recipe]) -> list[Recipe]:
    """The changed recipes; a change that changes nothing is refused, so that nobody believes in it."""
    if overrides.drop and not (overrides.reason and overrides.reason.strip()):
        raise ConfigError(
            "--drop-check needs --reason", "a check that went missing without a word is never found again", "say why"
        )
    changed = [_set(recipe, overrides.set) for recipe in recipes]
    used: set[str] = set()
    changed = [_change_checks(recipe, overrides, used) for recipe in changed]
    for item in (*overrides.relax, *overrides.drop):
        if item not in used:
            known = "; ".join(dict.fromkeys(check for recipe in recipes for check in recipe.checks))
            raise ConfigError(
                f"no check is changed by {item!r}", f"the checks are: {known}", "copy one of them as it stands"
            )
    return changed


def _set(recipe: Recipe, items: Sequence[str]) -> Recipe:
    table: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or key not in SETTABLE:
            raise ConfigError(
                f"--set {item!r} is not understood", f"it takes key=value with one of {', '.join(SETTABLE)}",
                "words for the trainer go behind --",
            )  # fmt: skip
        if key in table:
            raise ConfigError(f"--set {key} is there twice", "only one can hold", "keep one")
        table[key] = _value(text.strip())
    if not table:
        return recipe
    # A shorter training that was one run stays one run.
    if "max_steps" in table and "steps_per_run" not in table and recipe.num_runs == 1:
        table["steps_per_run"] = table["max_steps"]
    return _checked(recipe, table)


def _checked(recipe: Recipe, table: dict[str, Any]) -> Recipe:
    """Through the same typed reader as the manifest."""
    problems: list[str] = []
    reader = TableReader(table, "--set", problems)
    changed = dataclasses.replace(
        recipe,
        max_steps=reader.whole("max_steps", recipe.max_steps, low=1),
        steps_per_run=reader.whole("steps_per_run", recipe.steps_per_run, low=1),
        minutes=reader.number("minutes", recipe.minutes, low=0.0, above=True),
        nodes=reader.whole("nodes", recipe.nodes, low=1),
        gpus_per_node=reader.whole("gpus_per_node", recipe.gpus_per_node, low=0),
        segment_size=reader.whole("segment_size", recipe.segment_size or 1, low=1)
        if "segment_size" in table
        else recipe.segment_size,
        container=reader.text("container", recipe.container),
        seeds=reader.wholes("seeds") if "seeds" in table else recipe.seeds,
    )
    problems += [f"{recipe.name}: {problem}" for problem in changed.problems()]
    if problems:
        raise ConfigError("; ".join(problems), "an override follows the rules of the manifest", "correct it")
    return changed


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a plain word, such as the name of a container


def _change_checks(recipe: Recipe, overrides: Overrides, used: set[str]) -> Recipe:
    checks = list(recipe.checks)
    for item in overrides.relax:
        old, arrow, new = (part.strip() for part in item.partition("=>"))
        if not arrow or not old or not new:
            raise ConfigError(f"--relax {item!r} is not understood", "it takes 'OLD=>NEW'", "write both checks")
        positions = [i for i, check in enumerate(checks) if same_check(check, old)]
        for i in positions:
            checks[i] = new
            used.add(item)
    for item in overrides.drop:
        left = [check for check in checks if not same_check(check, item)]
        if len(left) < len(checks):
            used.add(item)
        checks = left
    if not checks:
        raise ConfigError(
            f"no check of {recipe.name} is left",
            "a training that nothing judges cannot pass",
            "keep one, or --relax it",
        )
    return dataclasses.replace(recipe, checks=tuple(checks))


def same_check(one: str, other: str) -> bool:
    """Whether two checks are the same but for spaces."""
    return one.split() == other.split() or one.replace(" ", "") == other.replace(" ", "")
