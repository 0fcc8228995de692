"""The command `surefoot-harness`: what judges runs from outside, without the trainer. `surefoot` has the same commands.

Heavy imports happen inside the commands, so `--help` answers at once.

Read next: `exits.py`, how an error becomes a message and an exit code.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

import surefoot_harness
from surefoot_harness import __version__
from surefoot_harness.cli import bisect, check, testing
from surefoot_harness.cli.exits import guarded
from surefoot_harness.cli.overview import Overview
from surefoot_harness.errors import ConfigError

COMMANDS = (check.add_to, testing.add_trend, bisect.add_to, testing.add_suite, testing.add_runner)
"""Each registers some commands with an app."""

app = typer.Typer(
    name="surefoot-harness",
    cls=Overview,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        sys.exit(guarded(_version))


def _version() -> int:
    print(f"surefoot-harness {__version__}")
    return 0


@app.callback()
def harness(
    version: Annotated[
        bool, typer.Option("--version", "-V", is_eager=True, callback=_say_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Judge training runs from their logs and tests: ours, TRL's, verl's or anybody's."""


for _add in COMMANDS:
    _add(app)


def main() -> None:
    """Entry point of the `surefoot-harness` command."""
    refused = guarded(_refuse_a_mixture)
    if refused:
        sys.exit(refused)
    app()


def _refuse_a_mixture() -> int:
    """The trainer's wheel has our files too: of another version, they would now answer for this distribution."""
    try:
        installed = metadata.distribution("surefoot-harness")
    except metadata.PackageNotFoundError:
        return 0
    ours = Path(str(installed.locate_file("surefoot_harness/__init__.py"))).resolve()
    if ours == Path(surefoot_harness.__file__).resolve() and installed.version != __version__:
        raise ConfigError(
            f"surefoot-harness {installed.version} is installed, and its files are those of {__version__}",
            "the wheel of surefoot has the same files, and was installed over them",
            f"pip install surefoot-harness=={__version__}",
        )
    return 0
