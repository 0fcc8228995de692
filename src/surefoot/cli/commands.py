"""What each command does: load, call one function, print. Returns the exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from surefoot.cli.exits import guarded
from surefoot.cli.overview import WholeLines
from surefoot.errors import ConfigError

if TYPE_CHECKING:
    from surefoot.cli.runs import EvalOutput
    from surefoot.config.load import LoadedConfig
    from surefoot.run.launcher import Launch, LaunchedRanks

RANKS = "runtime.learner_ranks"


def train(words: Sequence[str]) -> int:
    """Run a training run and return its verdict's exit code; under a launcher, this process's part of it."""
    if "LOCAL_RANK" not in os.environ:
        return _train(_load(words))
    from surefoot.run.launcher import launch_of

    launch = launch_of(os.environ)
    return _train(_load(words)) if launch is None else _train_launched(words, launch)


def _train(loaded: LoadedConfig, launched: LaunchedRanks | None = None) -> int:
    from surefoot import run as assemble
    from surefoot.report.console import open_view
    from surefoot.system.memory import own_this_process

    own_this_process()
    view = open_view(loaded.config.max_steps)
    try:
        outcome = assemble.train(loaded, view=view, launched=launched)
    finally:
        view.close()
    return outcome.exit_code


def _train_launched(words: Sequence[str], launch: Launch) -> int:
    from surefoot.run.launcher import asked_of, part_of, refuse_other_size, refuse_unlaunchable, run_to_go_on_with

    loaded = _load(words)
    if RANKS in loaded.explicit:
        refuse_other_size(launch, loaded.config.runtime.learner_ranks, "in the config")
    else:
        loaded = _load([*words, f"{RANKS}={launch.size}"])
    refuse_unlaunchable(loaded, launch)
    if (run := run_to_go_on_with(loaded, launch)) is not None:
        return resume(run, [])
    asked = asked_of(loaded.resolved)
    return part_of(launch, asked, loaded.config.runtime.start_timeout_s, partial(_train, loaded))


def resume(run: Path, words: Sequence[str], *, allow_code: bool = False) -> int:
    """Go on with an interrupted run, or make one longer; the verdict's exit code. Under a launcher, as `train`."""
    max_steps = _new_length(words) if words else None
    from surefoot.run.launcher import asked_of, launch_of, part_of, refuse_other_size
    from surefoot.run.store import load_run_config
    from surefoot.storage.run_folder import RunFolder

    config = load_run_config(RunFolder.open(run)).config
    go_on = partial(_resume, run, max_steps or config.max_steps, max_steps, allow_code)
    if (launch := launch_of(os.environ)) is None:
        return go_on()
    refuse_other_size(launch, config.runtime.learner_ranks, f"the run in {run}")
    asked = asked_of(config, run=str(run.resolve()), to_step=max_steps, allow_code=allow_code)
    return part_of(launch, asked, config.runtime.start_timeout_s, go_on)


def _resume(
    run: Path, length: int, max_steps: int | None, allow_code: bool, launched: LaunchedRanks | None = None
) -> int:
    from surefoot import run as assemble
    from surefoot.report.console import open_view
    from surefoot.system.memory import own_this_process

    own_this_process()
    view = open_view(length)
    try:
        outcome = assemble.resume(run, view=view, max_steps=max_steps, allow_code=allow_code, launched=launched)
    finally:
        view.close()
    return outcome.exit_code


def _new_length(words: Sequence[str]) -> int:
    """The one thing that may be said of a run that goes on."""
    from surefoot.config.files import parse_overrides

    found, problems = parse_overrides(words)
    values = [value for key, value in found if key == "max_steps"]
    if problems or len(found) != 1 or len(values) != 1 or type(values[0]) is not int or values[0] < 1:
        raise ConfigError(
            f"--resume takes max_steps=N and nothing else, and got {' '.join(words)!r}",
            "a resumed run is the same run: other settings would make it another one that bears its name",
            "leave them out, or start a new run from a checkpoint of this one: model=RUN/checkpoints/step_N",
        )
    return int(values[0])


def refuse_launched(command: str) -> int:
    """What is no part of a launcher's work: everything but `train`; 0 where there is no launcher."""
    from surefoot.run.launcher import refuse_launcher

    refuse_launcher(os.environ, f"`surefoot {command}` was started")
    return 0


def plan(words: Sequence[str], *, start_tools: bool = False) -> int:
    """`train --dry-run`."""
    refuse_launched("train --dry-run")
    loaded = _load(words)
    from surefoot.run.dry_run import dry_run

    _print(dry_run(loaded, start_tools=start_tools, tell=partial(print, file=sys.stderr, flush=True)))
    return 0


def refuse_start_tools() -> int:
    """`train --start-tools` without `--dry-run`."""
    raise ConfigError(
        "--start-tools goes with --dry-run", "a run starts its tools anyway",
        "add --dry-run to check them only, or leave it out",
    )  # fmt: skip


def refuse_allow_code() -> int:
    """`train --allow-code` without `--resume`."""
    raise ConfigError(
        "--allow-code goes with --resume", "it is about code that lies in a run folder", "leave it out"
    )  # fmt: skip


def evaluate(
    target: str, wanted: tuple[Any, ...], *, checkpoint: str | None, url: str | None, output: EvalOutput,
    allow_code: bool = False,
) -> int:  # fmt: skip
    """Answer tasks with a run's weights or a model's, and print what was found; `wanted` makes an `Asked`."""
    from surefoot.report.console import PlainView, open_view
    from surefoot.run.evaluate import EvaluationRequest
    from surefoot.run.evaluate import evaluate as evaluate_target

    view = PlainView(0, sys.stderr) if output.as_json else open_view(0)
    try:
        found = evaluate_target(
            target, checkpoint, view, url=url, asked=replace(EvaluationRequest(*wanted), allow_code=allow_code)
        )
    finally:
        view.close()
    output.show(found)
    return 0


def memory(words: Sequence[str], asked: Mapping[str, str | None], *, measures: bool, as_json: bool) -> int:
    """The table of `surefoot memory`; 1 when every row that was to be measured failed."""
    numbers = {name: _whole_numbers(name, text) for name, text in asked.items()}
    loaded = load_named(words)
    from surefoot.run.memory_profile import table_of_config

    table = table_of_config(loaded, measures=measures, tell=partial(print, file=sys.stderr, flush=True), **numbers)
    _print([json.dumps(table.record())] if as_json else table.lines())
    return table.exit_code


def _whole_numbers(name: str, text: str | None) -> list[int]:
    parts = [] if text is None else text.split(",")
    if any(not part.strip().isdigit() or int(part) < 1 for part in parts):
        raise ConfigError(
            f"--{name} {text}", "each is a whole number of 1 or more", f"write them like --{name} 64,128"
        )  # fmt: skip
    return [int(part) for part in parts]


def show_config(words: Sequence[str], *, toml: bool) -> int:
    """Print every key, or those about a word; resolved values when a config or overrides are given."""
    from surefoot.config.foreign import is_search, search
    from surefoot.config.keys import describe_keys, dump_toml

    if words and not toml and is_search(words[0]):
        _print(search(words))
    elif toml or words:
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


def load_named(words: Sequence[str]) -> LoadedConfig:
    """The same where the first word may also be a model, for the built-in run with that model."""
    from surefoot.config.files import SUFFIXES

    if words and "=" not in words[0] and not words[0].startswith("-") and Path(words[0]).suffix not in SUFFIXES:
        words = [f"model={words[0]}", *words[1:]]
    return _load(words)


def _load(words: Sequence[str]) -> LoadedConfig:
    """The first word is a config file unless it is an override."""
    from surefoot.config.load import load_config

    if words and "=" not in words[0] and not words[0].startswith("-"):
        return load_config(Path(words[0]), words[1:])
    return load_config(None, words)


def _print(lines: Iterable[str]) -> None:
    from surefoot.system.text import printable

    for line in lines:
        print(printable(line))


# -- `surefoot demo`: failures, caught on stage ---------------------------------------------------


_Out = Annotated[
    Optional[Path],  # noqa: UP045 - typer resolves this spelling in every version we allow
    typer.Option(
        "--out", metavar="DIR", help="Where both run folders go; under runs/ when left out.", show_default=False
    ),
]


def add_demo(app: typer.Typer) -> None:
    """Register the commands."""
    about = "Small runs in which something goes wrong, and what stops it."
    demo = typer.Typer(cls=WholeLines, no_args_is_help=True, help=about)
    demo.callback()(_demo)
    demo.command("hack")(hack)
    app.add_typer(demo, name="demo")


def _demo() -> None:
    """Small runs in which something goes wrong, and what stops it."""


def hack(
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The seed of both runs.")] = 1,
    out: _Out = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Larger steps and fewer of them: less time, less to lose.")
    ] = False,
) -> None:
    """Train with a reward that can be gamed, without and with the guard: about two minutes on two cores.

    Exit code 0 when both runs went as described, 1 when not.
    """
    sys.exit(guarded(partial(_hack, seed, out, quick)))


def _hack(seed: int, out: Path | None, quick: bool) -> int:
    from surefoot.demo.hack import hack as play_hack
    from surefoot.system.text import printable

    def say(text: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"  # curves are drawn with bars that not every terminal has
        print(printable(text).encode(encoding, errors="backslashreplace").decode(encoding), flush=True)

    return play_hack(seed=seed, out=out, quick=quick, say=say)
