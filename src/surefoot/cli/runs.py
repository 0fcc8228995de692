"""`surefoot eval`: answer tasks with weights that are there, and say how many were right."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from surefoot.cli import commands
from surefoot.cli.exits import guarded

if TYPE_CHECKING:
    from surefoot.run.evaluate import Evaluation
    from surefoot.tracking.live import Status


_Text = Optional[str]  # noqa: UP045 - typer resolves annotations at run time
_Texts = Optional[list[str]]  # noqa: UP045
_File = Optional[Path]  # noqa: UP045
_AnyRun = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, finished or not.")]
_Target = Annotated[str, typer.Argument(metavar="RUN | MODEL", help="A run folder, a model folder or a model's name.")]


def add_eval(app: typer.Typer) -> None:
    """Register the command."""
    app.command("eval")(evaluate)


def evaluate(
    target: _Target,
    words: Annotated[
        _Texts,
        typer.Argument(metavar="KEY=VALUE", help="Config keys, such as num_generations_eval=4.", show_default=False),
    ] = None,
    tasks: Annotated[
        _Text, typer.Option(metavar="FILE", help="Tasks instead of RUN's own, as the key tasks.", show_default=False)
    ] = None,
    metric: Annotated[str, typer.Option(help="What counts as solved: exact, file.py:function, auto or none.")] = "auto",
    reward: Annotated[
        _Texts,
        typer.Option(metavar="FILE.PY:FN", help="Reward function instead of RUN's; repeatable.", show_default=False),
    ] = None,
    num_tasks: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="At most so many tasks, chosen by hash.", show_default=False),
    ] = None,
    checkpoint: Annotated[
        _Text, typer.Option(help="Which checkpoint: step_50, or best; the last one when left out.", show_default=False)
    ] = None,
    url: Annotated[
        _Text,
        typer.Option(help="An OpenAI-compatible server that answers instead, in RUN's token ids.", show_default=False),
    ] = None,
    save: Annotated[
        _File, typer.Option(metavar="FILE", help="Keep every answer, one JSON object per line.", show_default=False)
    ] = None,
    out: Annotated[
        _File, typer.Option(metavar="FILE", help="Write the numbers as JSON, too.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help="Code that lies in RUN itself may be run.")] = False,
) -> None:
    """Answer tasks with the weights that RUN saved, or with MODEL's, and print accuracy, reward and pass@k.

    \b
    surefoot eval RUN                   its own held-out tasks and sets, again
    surefoot eval RUN --tasks FILE      other tasks, by its rewards and --metric
    surefoot eval MODEL --tasks FILE    a model without a run: pebble, a folder
                                        with config.json, or a hub name
    """
    wanted = (tasks, metric, tuple(reward or ()), num_tasks, tuple(words or ()))
    output = EvalOutput(save, out, as_json)
    how = partial(commands.evaluate, checkpoint=checkpoint, url=url, output=output, allow_code=allow_code)
    sys.exit(guarded(partial(how, target, wanted)))


@dataclass(frozen=True)
class EvalOutput:
    """Where the numbers and the answers go."""

    save: Path | None = None
    out: Path | None = None
    as_json: bool = False

    def show(self, found: Evaluation) -> None:
        """Files first: what is printed is there."""
        from surefoot.storage.files import write_json, write_lines
        from surefoot.system.text import printable

        if self.save is not None:
            write_lines(self.save, (json.dumps(row, ensure_ascii=False) for row in found.answers))
        if self.out is not None:
            write_json(self.out, found.as_json())
        lines = [json.dumps(found.as_json(), indent=2)] if self.as_json else list(_lines(found))
        for line in lines:
            print(line if self.as_json else printable(line))


def _lines(found: Evaluation) -> Iterator[str]:
    """`add: 41 of 100 answers right, 25 tasks` for each set, then every number as NAME VALUE."""
    from surefoot.system.text import counted

    for name, tasks in found.tasks.items():
        right = found.right(name)
        told = "" if right is None else f"{right[0]} of {right[1]} answers right, "
        yield f"{name}: {told}{counted(tasks, 'task')}"
    yield from (f"{name:<32} {value}" for name, value in found.metrics.items())


# -- `surefoot export`: a run's adapter, or the model with it merged in ----------------------------


def add_export(app: typer.Typer) -> None:
    """Register the command."""
    app.command("export")(export)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run with [lora].")],
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where to; a folder that is not there yet.")],
    merged: Annotated[
        bool, typer.Option("--merged", help="The whole model, with the adapter merged into its weights.")
    ] = False,
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=0, help="Of which step; the last checkpoint when left out.", show_default=False),
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of the best checkpoint, as the verdict names it.")] = False,
) -> None:
    """Write the adapter that RUN trained to FOLDER: as PEFT reads it, or with --merged as a model of its own.

    A run without [lora] needs no export: its checkpoints are plain Hugging Face folders.
    """
    sys.exit(guarded(partial(_export, run, out, merged, step, best)))


def _export(run: Path, out: Path, merged: bool, step: int | None, best: bool) -> int:
    from surefoot.errors import ConfigError
    from surefoot.run.export import export as write
    from surefoot.system.text import printable

    if best and step is not None:
        raise ConfigError("--step and --best are both given", "they name two checkpoints", "keep one")
    name = "best" if best else None if step is None else f"step_{step}"
    for line in write(run, out, checkpoint=name, merged=merged).lines():
        print(printable(line))
    return 0


# -- `surefoot status`: what a run is doing right now ---------------------------------------------


EVERY_S = 1.0


def add_status(app: typer.Typer) -> None:
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
    sys.exit(guarded(partial(_watch if watch else _show_status, run, as_json)))


def look(run: Path) -> Status:
    """One look: the lock says who lives, status.json the rest."""
    from surefoot.tracking.live import read_status

    return read_status(run, alive=_alive(run))


def _alive(run: Path) -> bool | None:
    """Whether the holder of the run's lock lives; None for one on another machine."""
    import os

    from surefoot.storage.lock import LOCK, MAX_RECORD, Owner
    from surefoot.system.files import open_plain

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


def _show_status(run: Path, as_json: bool) -> int:
    _print_status(look(run), run, as_json)
    return 0


def _watch(run: Path, as_json: bool) -> int:
    """On a terminal the table is redrawn in place; elsewhere each look is printed."""
    from surefoot.tracking.live import RunCondition

    try:
        while True:
            found = look(run)
            _print_status(found, run, as_json, again=True)
            if found.state in (RunCondition.FINISHED, RunCondition.STOPPED):
                return 0
            time.sleep(EVERY_S)
    except KeyboardInterrupt:  # the way to end it
        return 0


def _print_status(found: Status, run: Path, as_json: bool, *, again: bool = False) -> None:
    from surefoot.report.console import show

    if as_json:
        print(json.dumps(found.as_json(), indent=None if again else 2), flush=True)
    else:
        show(found, run, clear=again)


# -- `surefoot report`: one static page about a run -----------------------------------------------


def add_report(app: typer.Typer) -> None:
    """Register the command."""
    app.command("report")(report)


def report(
    run: _AnyRun,
    output: Annotated[
        Optional[Path],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Option("--output", "-o", metavar="FILE", help="Where to; RUN/report.html when left out."),
    ] = None,
) -> None:
    """Write RUN/report.html: verdict, curves, weight syncs, a step on the clock, rollouts. One file, no network."""
    sys.exit(guarded(partial(_write_report, run, output)))


def _write_report(run: Path, output: Path | None) -> int:
    from surefoot.report.page import write_report
    from surefoot.system.text import printable, shown_path

    print(printable(shown_path(write_report(run, output))))
    return 0


# -- `surefoot ledger`: where every planned task of a run is --------------------------------------


class LedgerFilter(StrEnum):
    """What an item of the ledger can be."""

    pending = "pending"
    leased = "leased"
    trained = "trained"
    dropped = "dropped"


def add_ledger(app: typer.Typer) -> None:
    """Register the command."""
    app.command("ledger")(ledger)


def ledger(
    run: _AnyRun,
    items: Annotated[
        Optional[LedgerFilter],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Option("--items", help="List the items of one kind, with step or reason.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the account of RUN: every planned task is pending, leased, trained or dropped, exactly one of them.

    A task comes once per epoch: sums/1+1#2 is the third visit to sums/1+1. Exits with 1 when it does not add up.
    """
    sys.exit(guarded(partial(_show_ledger, run, items, as_json)))


def _show_ledger(run: Path, items: LedgerFilter | None, as_json: bool) -> int:
    from surefoot.storage.run_journal import read_accounting
    from surefoot.system.text import printable

    account = read_accounting(run)
    if as_json:
        listed = {} if items is None else {"items": account.named(items)}
        print(json.dumps(account.facts() | listed, indent=2))
        return 0
    for line in account.lines() if items is None else account.named(items):
        print(printable(line))
    return 0
