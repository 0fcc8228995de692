"""`surefoot memory`: what a config takes, by sequence length, batch and accumulation."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Optional

import typer

from surefoot.cli import commands
from surefoot.cli.bench import ConfigOrModel
from surefoot.cli.exits import guarded

_Numbers = Optional[str]  # noqa: UP045 - typer resolves annotations at run time


def add_memory(app: typer.Typer) -> None:
    """Register the command."""
    app.command("memory", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(memory)


def memory(
    words: ConfigOrModel = None,
    lengths: Annotated[
        _Numbers,
        typer.Option(metavar="N,N", help="Tokens of completions; half, once, twice the config's.", show_default=False),
    ] = None,
    batches: Annotated[
        _Numbers,
        typer.Option(metavar="N,N", help="Rollouts of a microbatch; one group and four groups.", show_default=False),
    ] = None,
    accumulations: Annotated[
        _Numbers, typer.Option(metavar="N,N", help="Microbatches of a step; 1 and 4.", show_default=False)
    ] = None,
    predict: Annotated[bool, typer.Option("--predict", help="Measure nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the peak of memory for each combination, and what goes on devices of 24, 80 and 141 GB.

    \b
    Predicted from the model's sizes, and measured with made-up weights, each row
    in a process of its own: on a GPU, and on a CPU for small models.
    Exit code 1 when rows were to be measured and every one of them failed.
    """
    asked = {"lengths": lengths, "batches": batches, "accumulations": accumulations}
    sys.exit(guarded(partial(commands.memory, words or [], asked, measures=not predict, as_json=as_json)))
