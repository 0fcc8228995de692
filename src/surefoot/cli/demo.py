"""`surefoot demo`: failures, caught on stage."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from surefoot.cli.exits import guarded
from surefoot.cli.overview import WholeLines

_Out = Annotated[
    Optional[Path],  # noqa: UP045 - typer resolves this spelling in every version we allow
    typer.Option(
        "--out", metavar="DIR", help="Where both run folders go; under runs/ when left out.", show_default=False
    ),
]


def add_to(app: typer.Typer) -> None:
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
    from surefoot.tracking.text import printable

    def say(text: str) -> None:
        encoding = sys.stdout.encoding or "utf-8"  # curves are drawn with bars that not every terminal has
        print(printable(text).encode(encoding, errors="backslashreplace").decode(encoding), flush=True)

    return play_hack(seed=seed, out=out, quick=quick, say=say)
