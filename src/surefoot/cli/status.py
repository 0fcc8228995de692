"""`surefoot status`: what a run is doing right now."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surefoot.cli.exits import guarded

if TYPE_CHECKING:
    from surefoot.tracking.status import Status

EVERY_S = 1.0


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("status")(status)


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, running or not.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every second until the run is over.")] = False,
) -> None:
    """Say how RUN stands: RUNNING, STALE (alive but silent), STOPPED (can be resumed) or FINISHED, and its numbers.

    The run writes RUN/status.json once a second; whether its process is alive is asked of the run's lock.
    """
    sys.exit(guarded(partial(_watch if watch else _show, run, as_json)))


def look(run: Path) -> Status:
    """One look: the lock says who lives, status.json the rest."""
    from surefoot.tracking.status import read_status

    return read_status(run, alive=_alive(run))


def _alive(run: Path) -> bool | None:
    """Whether the holder of the run's lock lives; None for one on another machine."""
    import os

    from surefoot.plain_file import open_plain
    from surefoot.store.lock import LOCK, MAX_RECORD, Owner

    try:
        with open_plain(run / LOCK) as file:
            owner, inode = Owner.read(file.read(MAX_RECORD)), os.fstat(file.fileno()).st_ino
    except OSError:  # no lock: nobody holds it
        return False
    if owner is None:  # taken a moment ago, and not signed yet
        return True
    if owner.host != os.uname().nodename:
        return None
    return owner.gone(inode) is None


def _show(run: Path, as_json: bool) -> int:
    _print(look(run), run, as_json)
    return 0


def _watch(run: Path, as_json: bool) -> int:
    """On a terminal the table is redrawn in place; elsewhere each look is printed."""
    from surefoot.tracking.status import State

    try:
        while True:
            found = look(run)
            _print(found, run, as_json, again=True)
            if found.state in (State.FINISHED, State.STOPPED):
                return 0
            time.sleep(EVERY_S)
    except KeyboardInterrupt:  # the way to end it
        return 0


def _print(found: Status, run: Path, as_json: bool, *, again: bool = False) -> None:
    from surefoot.tracking.status_table import show

    if as_json:
        print(json.dumps(found.as_json(), indent=None if again else 2), flush=True)
    else:
        show(found, run, clear=again)
