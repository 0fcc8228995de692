"""`surefoot report`: one static page about a run."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from surefoot.cli.exits import guarded


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("report")(report)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Option("--output", "-o", metavar="FILE", help="Where to; RUN/report.html when left out."),
    ] = None,
) -> None:
    """Write RUN/report.html: verdict, curves, weight syncs, a step on the clock, rollouts. One file, no network."""
    sys.exit(guarded(partial(_write, run, output)))


def _write(run: Path, output: Path | None) -> int:
    from surefoot.tracking.report import write_report
    from surefoot.tracking.text import printable, shown_path

    print(printable(shown_path(write_report(run, output))))
    return 0
