"""What a suite will do: trials (one recipe, one seed), their commands and folders, and what they cost.

Owns       placeholders in commands: `{python} {config} {run} {seed} {max_steps} {steps} {resume} {snapshot} {commit}`.
Promises   each trial is built from its own recipe only, so nothing leaks into the next; planning writes nothing.

Read next: `run.py`, which carries a plan out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.harness.suites.manifest import DEFAULT_COMMAND, Recipe, Suite
from surefoot.harness.suites.snapshot import Code

NAMES = ("python", "config", "run", "seed", "max_steps", "steps", "resume", "snapshot", "commit")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(NAMES) + r")\}")


@dataclass(frozen=True, slots=True)
class Trial:
    """One recipe with one seed, in its own folder.

    FOLDER/provenance.json   what code and settings are about to run
           run.log           what the trainer said
           run/              the trainer's own folder: `{run}`
           metrics.json      its numbers, metric -> step -> value
           verdict.json      the verdict
    """

    suite: str
    recipe: Recipe
    seed: int | None
    root: Path
    """The top of the repository that the suite belongs to."""
    folder: Path
    extra_args: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    """What the caller changed for this call only, as typed."""

    @property
    def label(self) -> str:
        """Recipe and seed, for people and for part names."""
        return self.recipe.name if self.seed is None else f"{self.recipe.name}/seed_{self.seed}"

    @property
    def run(self) -> Path:
        """The trainer's own folder."""
        return self.folder / "run"

    @property
    def log(self) -> Path:
        """What the trainer said, both streams in order."""
        return self.folder / "run.log"

    @property
    def verdict(self) -> Path:
        """How it ended."""
        return self.folder / "verdict.json"

    def exit_file(self, number: int) -> Path:
        """The trainer's exit status of one run, counted from 1."""
        return self.folder / f"exit_{number}"


def trials_of(
    suite: Suite, recipes: Iterable[Recipe], out: Path, extra_args: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[Trial]:
    """Every recipe with every seed, in the order of the manifest."""
    found = []
    for recipe in recipes:
        for seed in recipe.trials:
            folder = out / suite.name / recipe.name
            folder = folder if seed is None else folder / f"seed_{seed}"
            found.append(Trial(suite.name, recipe, seed, suite.root, folder, tuple(extra_args), tuple(overrides)))
    return found


def gpu_hours(recipe: Recipe) -> float:
    """GPUs times the longest time that all runs of all seeds may take.

    Example: 2 runs of 30 minutes on 4 nodes of 8 GPUs, one seed: 32 GPU-hours.
    """
    return recipe.nodes * recipe.gpus_per_node * recipe.minutes / 60 * recipe.num_runs * len(recipe.trials)


def command_of(trial: Trial, number: int, code: Code, snapshot: Path, python: str) -> tuple[str, ...]:
    """The words of run `number` (from 1): placeholders filled in, words with `{resume}` left out of the first run."""
    words = [word for word in _with_defaults(trial.recipe) if number > 1 or "{resume}" not in word]
    values = _values(trial, number, code, snapshot, python)
    return (*(_fill(word, values) for word in words), *trial.extra_args)


def env_of(trial: Trial, number: int, code: Code, snapshot: Path, python: str) -> dict[str, str]:
    """The recipe's own variables, placeholders filled in."""
    values = _values(trial, number, code, snapshot, python)
    return {name: _fill(text, values) for name, text in trial.recipe.env.items()}


def steps_until(recipe: Recipe, number: int) -> int:
    """The step that run `number` (from 1) should reach."""
    return min(number * recipe.steps_per_run, recipe.max_steps)


def config_hash(trial: Trial) -> str:
    """16 hex digits of everything that shapes the training beside the code: settings, config file, extra words."""
    recipe = trial.recipe
    facts: dict[str, Any] = {
        name: getattr(recipe, name)
        for name in ("name", "command", "nodes", "gpus_per_node", "max_steps", "steps_per_run", "container", "metrics",
                     "progress", "first_step", "auto_resume", "release")
    }  # fmt: skip
    facts |= {"env": dict(recipe.env), "seed": trial.seed, "extra_args": trial.extra_args}
    if recipe.config is not None:
        facts["config"] = hashlib.sha256(_read(trial.root / recipe.config)).hexdigest()
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _with_defaults(recipe: Recipe) -> tuple[str, ...]:
    """Our own trainer gets its usual words; any other command is taken as written."""
    release = recipe.release_args if recipe.release else ()
    if recipe.command != DEFAULT_COMMAND:
        return (*recipe.command, *release)
    config = ("{config}",) if recipe.config is not None else ()
    seed = ("seed={seed}",) if recipe.seeds else ()
    return (*recipe.command, *config, "output_dir={run}", "max_steps={max_steps}", *seed, *release)


def _values(trial: Trial, number: int, code: Code, snapshot: Path, python: str) -> dict[str, str]:
    recipe = trial.recipe
    return {
        "python": python,
        "config": "" if recipe.config is None else str(snapshot / recipe.config),
        "run": str(trial.run),
        "seed": "" if trial.seed is None else str(trial.seed),
        "max_steps": str(recipe.max_steps),
        "steps": str(steps_until(recipe, number)),
        "resume": str(trial.run),
        "snapshot": str(snapshot),
        "commit": code.commit,
    }


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Known placeholders only, in one pass: braces of JSON arguments and of filled-in values stay as they are."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], word)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}",
            "the recipe trains by this config",
            "correct config in the manifest",
        ) from error
