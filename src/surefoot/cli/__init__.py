"""The command line: parse, call one function, print, exit. No logic lives here.

Heavy imports happen inside the commands, so `surefoot --help` answers at once.

Read next: `exits.py`, how an error becomes a message and an exit code.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from surefoot.cli import bisect, check, commands, demo, ledger, probe_reward, report, runner, status, suite, trend
from surefoot.cli.exits import guarded

app = typer.Typer(
    name="surefoot",
    help="GRPO you can trust: train language models, and know that the training did what it said.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}
# typer resolves annotations at run time and knows this spelling of "may be left out" in every version we allow.
_Words = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(
        metavar="CONFIG | KEY=VALUE | --KEY VALUE",
        help="A .toml or .yaml file, then overrides of its keys.",
        show_default=False,
    ),
]


@app.command(context_settings=_PASS_ON)
def train(
    words: _Words = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, check, estimate, write nothing.")] = False,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--resume", metavar="RUN", help="Go on with an interrupted run.", show_default=False),
    ] = None,
) -> None:
    """Train a model by CONFIG; without it, the built-in run: sums on two cores, about a minute.

    CONFIG is a .toml or .yaml file; every key can be set after it, as max_steps=5 or --max-steps 5.
    A run that was stopped or killed goes on with --resume RUN, bit for bit as if nothing had happened.
    """
    if resume is not None:
        sys.exit(guarded(partial(commands.resume, resume, [*(words or []), *(["--dry-run"] if dry_run else [])])))
    sys.exit(guarded(partial(commands.plan if dry_run else commands.train, words or [])))


@app.command("eval")
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/20260101-120000-run.")],
    checkpoint: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Which checkpoint: step_50, or best; the last one when left out.", show_default=False),
    ] = None,
    url: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="An OpenAI-compatible server that answers instead, in RUN's token ids.", show_default=False),
    ] = None,
) -> None:
    """Answer the held-out tasks of RUN again, with the weights it saved, or with what a server at --url serves."""
    sys.exit(guarded(partial(commands.evaluate, run, checkpoint, url)))


@app.command(context_settings=_PASS_ON)
def config(
    words: _Words = None,
    toml: Annotated[bool, typer.Option("--toml", help="As a TOML file that can be edited and trained.")] = False,
) -> None:
    """Print every key with its default and what it does; with CONFIG or KEY=VALUE, the resolved values."""
    sys.exit(guarded(partial(commands.show_config, words or [], toml=toml)))


@app.command()
def version() -> None:
    """Print the version."""
    sys.exit(guarded(commands.version))


for _part in (status, report, ledger, probe_reward, check, trend, bisect, suite, runner, demo):
    _part.add_to(app)


def main() -> None:
    """Entry point of the `surefoot` command."""
    # Looking for pydantic plugins reads the metadata of every installed package: a tenth of a config error's time.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    app()
