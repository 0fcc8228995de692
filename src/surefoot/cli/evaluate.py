"""`surefoot eval`: answer tasks with weights that are there, and say how many were right."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from surefoot.cli import commands
from surefoot.cli.exits import guarded

if TYPE_CHECKING:
    from surefoot.assemble.evaluate import Evaluation

_Text = Optional[str]  # noqa: UP045 - typer resolves annotations at run time
_Texts = Optional[list[str]]  # noqa: UP045
_File = Optional[Path]  # noqa: UP045
_Target = Annotated[str, typer.Argument(metavar="RUN | MODEL", help="A run folder, a model folder or a model's name.")]


def add_to(app: typer.Typer) -> None:
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
        from surefoot.store.durable import write_json, write_lines
        from surefoot.tracking.text import printable

        if self.save is not None:
            write_lines(self.save, (json.dumps(row, ensure_ascii=False) for row in found.answers))
        if self.out is not None:
            write_json(self.out, found.as_json())
        lines = [json.dumps(found.as_json(), indent=2)] if self.as_json else list(_lines(found))
        for line in lines:
            print(line if self.as_json else printable(line))


def _lines(found: Evaluation) -> Iterator[str]:
    """`add: 41 of 100 answers right, 25 tasks` for each set, then every number as NAME VALUE."""
    from surefoot.tracking.text import counted

    for name, tasks in found.tasks.items():
        right = found.right(name)
        told = "" if right is None else f"{right[0]} of {right[1]} answers right, "
        yield f"{name}: {told}{counted(tasks, 'task')}"
    yield from (f"{name:<32} {value}" for name, value in found.metrics.items())
