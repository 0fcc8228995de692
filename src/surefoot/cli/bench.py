"""`surefoot bench`: how fast a config is on this machine, and what bounds it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Optional

import typer

from surefoot.cli.exits import guarded

ConfigOrModel = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer resolves this spelling in every version we allow
    typer.Argument(
        metavar="CONFIG | MODEL | KEY=VALUE",
        help="A config, or a model for the built-in run; then overrides of keys.",
        show_default=False,
    ),
]
"""What a command takes that measures: a model alone stands for the built-in run with it."""


def add_bench(app: typer.Typer) -> None:
    """Register the command."""
    app.command("bench", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(bench)


def bench(
    words: ConfigOrModel = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=1, max=3600, help="For all that is measured.")
    ] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure CONFIG on this machine: tokens a second, memory, the share of the limit, and which keys to change.

    Whole steps go through the run's own engine and learner, with made-up rewards and completions of full length; the
    limits of the device are measured beside them. Without an argument, the built-in run. Loading the model and starting
    tool servers come before --seconds. Nothing is written.
    """
    sys.exit(guarded(partial(_bench, words or [], seconds, as_json)))


def _bench(words: Sequence[str], seconds: float, as_json: bool) -> int:
    from surefoot.cli.commands import load_named
    from surefoot.system.text import printable

    loaded = load_named(words)
    from surefoot.run.bench import bench as measure

    def tell(line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    found = measure(loaded, seconds=seconds, tell=tell)
    if as_json:
        print(json.dumps(found.as_json(), indent=2, allow_nan=False))
    else:
        print("\n".join(printable(line) for line in found.lines()))
    return 0
