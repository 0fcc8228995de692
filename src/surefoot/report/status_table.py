"""A run's status as a small table that fits 80 columns. `tracking/live.py` has the facts; this file draws them.

Promises   nothing from the file is read as markup or moves the cursor; any number of replicas fits on a screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.protocols import count_text
from surefoot.system.text import duration, number, printable, shown_path
from surefoot.tracking.live import RunCondition, Status
from surefoot.tracking.metrics import headlines

ROWS = 12
QUIET_S = 30.0
"""From here on it is said that nothing has moved; the watchdog acts much later."""
_COLOURS = {
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
    head = Text.assemble((str(status.state), f"bold {_COLOURS[status.state]}"), "  ", _safe(shown_path(run)))
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
