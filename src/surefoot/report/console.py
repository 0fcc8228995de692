"""The live view on a terminal. `view.py` has the words; this file draws them with rich.

Promises   nothing that a model wrote is read as markup; NO_COLOR is respected; the cursor comes back however
           the run ends; a terminal that goes away does not end the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import IO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.records import Verdict
from surefoot.report.plan import batch_arithmetic
from surefoot.report.view import SHOWN, Finished, History, PlainView, Screen, View, verdict_lines
from surefoot.system.text import duration, number, printable, sparkline

__all__ = ["PlainView", "RichView", "View", "batch_arithmetic", "open_view"]

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCOMPLETE: "yellow", Verdict.ERROR: "red"}


def open_view(max_steps: int) -> View:
    """The live view on a terminal, plain lines everywhere else."""
    dumb = os.environ.get("TERM", "") in ("", "dumb")
    watched = sys.stdout is not None and sys.stdout.isatty()  # started without one, there is none
    return RichView(max_steps) if watched and not dumb else PlainView(max_steps)


class RichView:
    """Progress, the numbers of the last step, and two sparklines, redrawn in place."""

    def __init__(self, max_steps: int, console: Console | None = None) -> None:
        self.history = History(max_steps)
        self.console = console or Console(file=cast(IO[str], Screen(sys.stdout)), highlight=False)
        self._live: Live | None = None

    def start(self, plan_lines: Sequence[str]) -> None:
        """Print the plan, then begin to draw."""
        for line in plan_lines:
            self._print(line)
        self._live = Live(self._frame(), console=self.console, refresh_per_second=4, transient=True)
        self._live.start()

    def resumed(self, line: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Print from where, and begin with the curves so far."""
        self.history.resumed(rows)
        self._print(line)
        self._redraw()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw with the step's numbers."""
        self.history.step(step, metrics)
        self._redraw()

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Redraw with the held-out numbers."""
        self.history.evaluated(step, metrics)
        self._redraw()

    def warn(self, text: str, remedy: str) -> None:
        """Print above the live part."""
        self._print(f"warning: {text}", "yellow")
        self._print(f"  remedy: {remedy}")

    def note(self, lines: Sequence[str]) -> None:
        """Keep for the last block."""
        self.history.notes += lines

    def finish(self, outcome: Finished) -> None:
        """Stop drawing and print the last block."""
        self.close()
        colour = _COLOURS.get(outcome.verdict, "")
        for line in verdict_lines(outcome, self.history):
            self._print(line, f"bold {colour}" if line.startswith(str(outcome.verdict)) else "")

    def close(self) -> None:
        """Give the cursor back; safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str, style: str = "") -> None:
        self.console.print(Text(printable(line), style=style), soft_wrap=True)

    def _redraw(self) -> None:
        if self._live is not None:
            self._live.update(self._frame())

    def _frame(self) -> Group:
        history = self.history
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {history.done}/{history.max_steps}", style="bold"),
            ProgressBar(total=history.max_steps, completed=history.done, width=32),
            Text(f"{duration(history.seconds)} gone, {history.left} left"),
        )
        return Group(head, self._curves(), self._numbers())

    def _curves(self) -> Table:
        table = Table.grid(padding=(0, 2))
        history = self.history
        rewards, heldout = [number(value) for value in history.rewards[-1:]], [text for _, text in history.heldout[-1:]]
        for name, last, values in (
            ("reward", rewards, history.rewards), ("held-out accuracy", heldout, history.accuracies),
        ):  # fmt: skip
            shown = Text(last[0] if last else "-", style="bold")
            table.add_row(Text(name), shown, Text(sparkline(values, 24), style="cyan"))
        return table

    def _numbers(self) -> Table:
        table = Table.grid(padding=(0, 3))
        cells = [
            Text.assemble((f"{short} ", "dim"), number(self.history.last[name]))
            for name, short in SHOWN.items()
            if name in self.history.last and name != "reward"
        ]
        for begin in range(0, len(cells), 4):
            table.add_row(*cells[begin : begin + 4])
        return table
