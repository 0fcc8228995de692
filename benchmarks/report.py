"""Rows of the one table, printed for a terminal and for the documentation.

A row says what was compared, both figures, the ratio with its interval or the reason why there is none, the goal and
whether it was reached, the limit that arithmetic allows, and what a reader must know to believe it. Losing rows are
rows like the others.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from method import NoRatio, Ratio

HEAD = ("benchmark", "cell", "ours", "peer", "peer / ours", "goal", "reached", "limit")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


@dataclass(frozen=True)
class Row:
    """One line of the table, already in words."""

    benchmark: str
    cell: str
    ours: str
    peer: str = "-"
    ratio: str = "-"
    goal: str = "-"
    met: bool | None = None
    """None where no goal was set."""
    limit: str = "-"
    note: str = ""

    def cells(self) -> tuple[str, ...]:
        """In the order of `HEAD`."""
        reached = {True: "yes", False: "NO", None: "-"}[self.met]
        return (self.benchmark, self.cell, self.ours, self.peer, self.ratio, self.goal, reached, self.limit)


def goal_met(ratio: Ratio | NoRatio, goal: float) -> bool:
    """A ratio that was refused reaches nothing."""
    return isinstance(ratio, Ratio) and ratio.median >= goal


def as_text(rows: Sequence[Row]) -> str:
    """A table in columns, notes below it."""
    table = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, *_notes(rows)])


def as_markdown(rows: Sequence[Row]) -> str:
    """The same as a Markdown table."""
    lines = [_markdown_line(HEAD), _markdown_line(["---"] * len(HEAD)), *(_markdown_line(row.cells()) for row in rows)]
    return "\n".join([*lines, "", *(f"- {line}" for line in _distinct_notes(rows))])


def write_between_marks(document: Path, text: str) -> None:
    """Replace what stands between the result marks of a document."""
    old = document.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{document} needs {BEGIN} and {END} once each, in this order")
    before, rest = old.split(BEGIN)
    after = rest.split(END)[1]
    document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def common_arguments(description: str | None, *, pairs: int) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, help=f"pairs per cell; without it {pairs}, fewer for slow cells")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allow-dirty", action="store_true", help="use pairs measured on a busy machine, and say so")
    parser.add_argument("--rows", type=Path, help="also append the table's rows to this file, as JSON lines")
    return parser


def measured(names: str, measure: Callable[[str], Row]) -> list[Row]:
    """A row for each of these cells, comma-separated; printed as soon as it is there."""
    rows = []
    for name in names.split(","):
        rows.append(measure(name))
        print(*rows[-1].cells(), sep="  ", flush=True)
    return rows


def publish(rows: Sequence[Row], target: Path | None) -> int:
    """Print the table, hand the rows on; exit status 0 when no goal was missed."""
    print("\n" + as_text(rows), flush=True)
    if target is not None:
        with target.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return 0 if all(row.met is not False for row in rows) else 1


def read_rows(path: Path) -> list[Row]:
    """What `publish` handed on."""
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _distinct_notes(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(f"{row.benchmark}: {row.note}" for row in rows if row.note))


def _notes(rows: Sequence[Row]) -> list[str]:
    notes = _distinct_notes(rows)
    return ["", *(textwrap.fill(note, 118, subsequent_indent="    ") for note in notes)] if notes else []


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
