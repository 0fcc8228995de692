"""What each command does: load, call one function, print. Returns the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.config_load import LoadedConfig


def train(words: Sequence[str]) -> int:
    """Run a training run and return its verdict's exit code."""
    loaded = _load(words)
    from surefoot import assemble
    from surefoot.tracking.console import open_view

    view = open_view(loaded.config.max_steps)
    try:
        outcome = assemble.train(loaded, view=view)
    finally:
        view.close()
    return outcome.exit_code


def resume(run: Path, words: Sequence[str]) -> int:
    """Go on with an interrupted run; the verdict's exit code."""
    if words:
        raise ConfigError(
            f"--resume takes no config and no overrides, and got {' '.join(words)!r}",
            "a resumed run is the same run: other settings would make it another one that bears its name",
            "leave them out, or start a new run from a checkpoint of this one: model=RUN/checkpoints/step_N",
        )
    from surefoot import assemble
    from surefoot.assemble.resume import load_run_config
    from surefoot.store.run_folder import RunFolder
    from surefoot.tracking.console import open_view

    view = open_view(load_run_config(RunFolder.open(run)).config.max_steps)
    try:
        outcome = assemble.resume(run, view=view)
    finally:
        view.close()
    return outcome.exit_code


def plan(words: Sequence[str]) -> int:
    """`train --dry-run`."""
    loaded = _load(words)
    from surefoot.dry_run import dry_run

    _print(dry_run(loaded))
    return 0


def evaluate(run: Path, checkpoint: str | None, url: str | None) -> int:
    """Evaluate a finished run's weights on its held-out tasks."""
    from surefoot.store.run_folder import RunFolder

    RunFolder.open(run)
    from surefoot.assemble.evaluate import evaluate as evaluate_run
    from surefoot.tracking.console import open_view

    view = open_view(0)
    try:
        metrics = evaluate_run(run, checkpoint, view, url=url)
    finally:
        view.close()
    _print(f"{name:<32} {value}" for name, value in metrics.items())
    return 0


def show_config(words: Sequence[str], *, toml: bool) -> int:
    """Print every key; resolved values when a config or overrides are given, defaults otherwise."""
    from surefoot.config_load import describe_keys, dump_toml

    if toml or words:
        loaded = _load(words)
        _print([f"# {note}" for note in loaded.notes])
        _print([dump_toml(loaded.config, docs=True).rstrip("\n")])
    else:
        _print(describe_keys())
    return 0


def version() -> int:
    """Print the version."""
    from surefoot import __version__

    _print([f"surefoot {__version__}"])
    return 0


def _load(words: Sequence[str]) -> LoadedConfig:
    """The first word is a config file unless it is an override."""
    from surefoot.config_load import load_config

    if words and "=" not in words[0] and not words[0].startswith("-"):
        return load_config(Path(words[0]), words[1:])
    return load_config(None, words)


def _print(lines: Iterable[str]) -> None:
    from surefoot.tracking.text import printable

    for line in lines:
        print(printable(line))
