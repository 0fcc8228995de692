"""What the caller changes for one call: `--set`, `--relax`, `--drop-check`. Recorded in every verdict."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import ConfigError
from surefoot.harness.suites.manifest import Recipe
from surefoot.harness.suites.reading import TableReader

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
