"""`surefoot ledger`: where every planned task of a run is."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from surefoot.cli.exits import guarded


class Kind(StrEnum):
    """What an item of the ledger can be."""

    pending = "pending"
    leased = "leased"
    trained = "trained"
    dropped = "dropped"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("ledger")(ledger)


def ledger(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")],
    items: Annotated[
        Optional[Kind],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Option("--items", help="List the items of one kind, with step or reason.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the account of RUN: every planned task is pending, leased, trained or dropped, exactly one of them.

    A task comes once per epoch: sums/1+1#2 is the third visit to sums/1+1. Exits with 1 when it does not add up.
    """
    sys.exit(guarded(partial(_show, run, items, as_json)))


def _show(run: Path, items: Kind | None, as_json: bool) -> int:
    from surefoot.store.account import read_account
    from surefoot.tracking.text import printable

    account = read_account(run)
    if as_json:
        listed = {} if items is None else {"items": account.named(items)}
        print(json.dumps(account.facts() | listed, indent=2))
        return 0
    for line in account.lines() if items is None else account.named(items):
        print(printable(line))
    return 0
