"""What a terminal shows of a run, drawn with rich: the live view in the words of `view.py`, the table of its status.

Promises   nothing that a model wrote is read as markup or moves the cursor; NO_COLOR is respected; the cursor comes
           back however the run ends; a terminal that goes away does not end the run; any number of replicas fits on
           a screen.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.protocols import count_text
from surefoot.records import Verdict
from surefoot.report.plan import batch_arithmetic
from surefoot.report.view import SHOWN, Finished, History, PlainView, Screen, View, verdict_lines
from surefoot.system.text import duration, number, printable, shown_path, sparkline
from surefoot.tracking.live import RunCondition, Status
from surefoot.tracking.metrics import headlines

__all__ = [
    "QUIET_S",
    "ROWS",
    "PlainView",
    "RichView",
    "View",
    "batch_arithmetic",
    "draw",
    "open_view",
    "show",
]


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


# -- A run's status as a small table that fits 80 columns; `tracking/live.py` has the facts --------


ROWS = 12
QUIET_S = 30.0
"""From here on it is said that nothing has moved; the watchdog acts much later."""
_CONDITION_COLOURS = {
    RunCondition.RUNNING: "green",
    RunCondition.STALE: "yellow",
    RunCondition.STOPPED: "yellow",
    RunCondition.FINISHED: "cyan",
}
_BAD = {"FAIL": "red", "ERROR": "red", "PASS": "green"}
_LINES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("learning", (("version", "version"), ("reward", "reward"), ("eval_accuracy", "held-out accuracy"),
                  ("eval_reward", "held-out reward"))),
    ("rollouts", (("queue", "waiting"), ("in_flight", "in flight"), ("wasted", "wasted"))),
    ("staleness", (("staleness_mean", "mean"), ("staleness_max", "max"))),
    ("pace", (("groups_per_s", "groups/s"), ("tokens_per_s", "tokens/s"), ("steps_per_s", "steps/s"))),
)  # fmt: skip
_LABELS = {"replicas": "engine", "workers": "worker"}
_COLUMNS = ("name", "state", "version", "load", "restarts")


def show(status: Status, run: Path, *, clear: bool = False) -> None:
    """Print it; with `clear`, in the place of what was there, where there is a terminal."""
    console = Console(highlight=False, markup=False, emoji=False)
    if clear and console.is_terminal:
        console.clear()
    console.print(draw(status, run))
    console.file.flush()


def draw(status: Status, run: Path) -> RenderableType:
    """The whole block."""
    head = Text.assemble((str(status.state), f"bold {_CONDITION_COLOURS[status.state]}"), "  ", _safe(shown_path(run)))
    told = Text(_safe(status.detail), style=_BAD.get(str(status.verdict.get("status")), ""))
    parts: list[RenderableType] = [head, told, *_progress(status)]
    facts = Table.grid(padding=(0, 2))
    for name, words in _lines(status.facts):
        facts.add_row(Text(name, style="dim"), Text(words))
    if facts.row_count:
        parts.append(facts)
    parts += [table for name in ("replicas", "workers") for table in _members(name, status.facts.get(name))]
    if "problem" in status.facts:
        parts.append(Text(f"problem: {_safe(status.facts['problem'])}", style="yellow"))
    return Group(*parts)


def _progress(status: Status) -> Iterator[RenderableType]:
    facts = status.facts
    step, planned = _figure(facts.get("step")), _figure(facts.get("max_steps"))
    if step is None or not planned:
        return
    row = Table.grid(padding=(0, 2))
    cells: list[RenderableType] = [
        Text(f"step {step:.0f}/{planned:.0f}", style="bold"),
        ProgressBar(total=planned, completed=min(step, planned), width=24),
    ]
    started, updated, quiet = (_figure(facts.get(name)) for name in ("started", "updated", "quiet_s"))
    took = _figure(status.verdict.get("seconds"))
    if took is not None and status.state is RunCondition.FINISHED:
        cells.append(Text(f"took {duration(took)}"))
    elif started is not None and updated is not None:
        cells.append(Text(f"up {duration((_figure(facts.get('seconds_before')) or 0.0) + updated - started)}"))
    if quiet is not None and quiet >= QUIET_S and status.state is RunCondition.RUNNING:
        cells.append(Text(f"nothing moved for {duration(quiet)}", style="yellow"))
    row.add_row(*cells)
    yield row


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, fields in _LINES:
        known = [(label, _figure(facts.get(field))) for field, label in fields if field != _second(facts)]
        words = [f"{label} {number(value)}" for label, value in known if value is not None]
        if name == "learning" and (count := _count(facts)):
            words = [f"held-out accuracy {count}" if word.startswith("held-out accuracy") else word for word in words]
        if words:
            yield name, "   ".join(words)
        if name == "learning" and (sets := headlines(map(str, facts))):
            yield (
                "sets",
                "   ".join(
                    f"{each.removeprefix('eval/').replace('/', ' ')} {number(value)}"
                    for each in sets
                    if (value := _figure(facts.get(each))) is not None
                ),
            )


def _members(kind: str, members: object) -> Iterator[RenderableType]:
    """Engines or workers: a row each, the troubled ones first; a number alone is one line."""
    if (count := _figure(members)) is not None:
        yield Text(f"{kind} {number(count)}")
    rows = [each for each in members if isinstance(each, Mapping)] if isinstance(members, Sequence) else []
    if not rows:
        return
    usual = Counter(str(each.get("state")) for each in rows).most_common(1)[0][0]
    shown = sorted(rows, key=lambda each: str(each.get("state")) == usual)[:ROWS]
    columns = [name for name in _COLUMNS if any(name in each for each in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        label = _LABELS.get(kind, kind) if name == "name" else name
        table.add_column(label, max_width=28, no_wrap=True, justify="left" if name in ("name", "state") else "right")
    for each in shown:
        table.add_row(*(Text(_cell(each.get(name))) for name in columns))
    yield Text()
    yield table
    if len(rows) > len(shown):
        states = Counter(_safe(each.get("state")) for each in rows)
        yield Text(f"{len(rows)} in all: " + ", ".join(f"{count} {state}" for state, count in states.most_common(6)))


def _second(facts: Mapping[str, Any]) -> str:
    """The held-out number that there is no room for beside the better one."""
    return "eval_reward" if "eval_accuracy" in facts else ""


def _count(facts: Mapping[str, Any]) -> str | None:
    """The accuracy of few held-out answers, as a count."""
    figures = {name: _figure(facts.get(name)) for name in ("eval_right", "eval_n")}
    return count_text({name: figure for name, figure in figures.items() if figure is not None})


def _cell(value: object) -> str:
    figure = _figure(value)
    return number(figure) if figure is not None else "-" if value is None else _safe(value)


def _figure(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def _safe(value: object) -> str:
    return printable(str(value)).replace("\n", " ").replace("\t", " ")[:300]
