"""The command line: parse, call one function, print, exit. No logic lives here.

Heavy imports happen inside the commands, so `surefoot --help` answers at once.

What judges from outside is `surefoot_harness.cli`, the same commands as `surefoot-harness`.
Read next: its `exits.py`, how an error becomes a message and an exit code.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from surefoot.cli import bench, commands, memory, preflight, runs
from surefoot.cli.exits import guarded
from surefoot.cli.overview import TrainerOverview
from surefoot.system.signals import COMMAND
from surefoot_harness.cli import COMMANDS

app = typer.Typer(
    name="surefoot",
    cls=TrainerOverview,
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


def _say_version(wanted: bool) -> None:
    if wanted:
        sys.exit(guarded(commands.version))


@app.callback()
def surefoot(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_say_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """GRPO you can trust: train language models, and know that the training did what it said."""
    command = context.invoked_subcommand
    if "LOCAL_RANK" in os.environ and command != "train":
        refused = guarded(partial(commands.refuse_launched, str(command)))
        if refused:
            sys.exit(refused)


@app.command(context_settings=_PASS_ON)
def train(
    words: _Words = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Resolve, check, estimate, write nothing.")] = False,
    resume: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--resume", metavar="RUN", help="Go on with an interrupted run.", show_default=False),
    ] = None,
    start_tools: Annotated[
        bool, typer.Option("--start-tools", help="With --dry-run: start the tool servers too and check their tools.")
    ] = False,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="With --resume: code that lies in RUN itself may be run.")
    ] = False,
) -> None:
    """Train a model by CONFIG; without it, the built-in run: sums on two cores, about a minute.

    CONFIG is a .toml or .yaml file; every key can be set after it, as max_steps=5 or --max-steps 5.
    A run that was stopped or killed goes on with --resume RUN, bit for bit as if nothing had happened. One that is over
    is made longer with --resume RUN max_steps=N.
    """
    if resume is not None:
        told = [*(words or []), *(["--dry-run"] if dry_run else [])]
        sys.exit(guarded(partial(commands.resume, resume, told, allow_code=allow_code)))
    if (start_tools and not dry_run) or allow_code:
        sys.exit(guarded(commands.refuse_allow_code if allow_code else commands.refuse_start_tools))
    action = partial(commands.plan, start_tools=start_tools) if dry_run else commands.train
    sys.exit(guarded(partial(action, words or [])))


@app.command(context_settings=_PASS_ON)
def config(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(
            metavar="WORD | CONFIG | KEY=VALUE",
            help="A word to search for, or a .toml or .yaml file, or overrides.",
            show_default=False,
        ),
    ] = None,
    toml: Annotated[bool, typer.Option("--toml", help="As a TOML file that can be edited and trained.")] = False,
) -> None:
    """Print every key; with WORD those about it, with CONFIG or KEY=VALUE the resolved values.

    WORD is looked for in names, help, and what TRL, verl, NeMo RL, prime-rl, OpenRLHF and unsloth call things.
    """
    sys.exit(guarded(partial(commands.show_config, words or [], toml=toml)))


@app.command()
def version() -> None:
    """Print the version."""
    sys.exit(guarded(commands.version))


for _add in (
    runs.add_eval, runs.add_export, runs.add_status, runs.add_report, runs.add_ledger, preflight.add_probe_reward,
    preflight.add_tools, bench.add_bench, memory.add_memory, *COMMANDS, commands.add_demo,
):  # fmt: skip
    _add(app)


def main() -> None:
    """Entry point of the `surefoot` command."""
    # Looking for pydantic plugins reads the metadata of every installed package: a tenth of a config error's time.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    if sys.argv[1:2] == ["train"]:
        COMMAND.listen()
    app()
