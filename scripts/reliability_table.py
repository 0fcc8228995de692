"""The figures of docs/reliability.md, made from what the test runs recorded, never typed.

A test notes a figure with `record_property("figure", ...)`: a JSON object with `figure`, `what`, `n`, `bad` and `note`,
or plain text. This reads every JUnit file in the folder of reports and rewrites the table between the two marks.

    python scripts/reliability_table.py                 rewrite the table
    python scripts/reliability_table.py --check         exit 1 unless the table is what the reports say

Missing reports, reports without a figure, and a page without marks are errors: no evidence is not good news. A test
that failed is counted in its row, or in a row of its own when it had not come to noting its figure, and the exit code
is 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
KINDS = {"side": "every day", "unit": "every day", "runs": "every day", "nightly": "nightly", "faults": "make faults"}
"""What a report's name says about the run, by its beginning."""
HEAD = ("figure", "what was tried", "times", "failures", "run", "on", "notes")
UNNOTED = "tests of these runs that failed before they noted a figure"
_COMMIT = re.compile(r"^Commit ([^,\n]+), ", re.MULTILINE)


class FiguresError(Exception):
    """The evidence or the page is missing or unusable."""


@dataclass
class Row:
    """One line of the table: everything that was tried under one name in one kind of run."""

    figure: str
    what: str
    kind: str
    times: int = 0
    bad: int = 0
    counted: bool = True
    dates: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)

    def cells(self) -> list[str]:
        """As text, in the order of `HEAD`."""
        times = f"{self.times:,}" if self.counted else ""
        notes = list(self.notes)
        shown = "; ".join(notes[:3]) + (f"; and {len(notes) - 3} more" if len(notes) > 3 else "")
        return [self.figure, self.what, times, f"{self.bad:,}", self.kind, max(self.dates, default=""), shown]


def read_rows(reports: Path) -> list[Row]:
    """Every figure in the JUnit files of a folder, added up by name and kind of run."""
    files = [path for path in sorted(reports.glob("*.xml")) if kind_of(path)]
    if not files:
        raise FiguresError(f"{reports} holds no report of a run ({', '.join(KINDS)})")
    rows: dict[tuple[str, str, str], Row] = {}
    for path in files:
        for case, date in _cases(path):
            _add(rows, case, kind_of(path), date)
    if not any(row.what != UNNOTED for row in rows.values()):
        raise FiguresError(f"not one test in {', '.join(p.name for p in files)} recorded a figure")
    return sorted(rows.values(), key=lambda row: (_number(row.figure), row.figure, row.what, row.kind))


def kind_of(path: Path) -> str:
    """What kind of run a report is of; empty for a file that is none of ours."""
    return next((kind for name, kind in KINDS.items() if path.stem.startswith(name)), "")


def _cases(path: Path) -> Iterator[tuple[ElementTree.Element, str]]:
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        raise FiguresError(f"{path}: no usable JUnit file ({error})") from error
    for suite in suites:
        for case in suite.iter("testcase"):
            yield case, (suite.get("timestamp") or "")[:10]


def _add(rows: dict[tuple[str, str, str], Row], case: ElementTree.Element, kind: str, date: str) -> None:
    failed = case.find("failure") is not None or case.find("error") is not None
    values = [p.get("value") or "" for p in case.iter("property") if p.get("name") == "figure"]
    noted = [parse(value) for value in values]
    if failed and not noted:
        noted = [{"what": UNNOTED, "n": 1, "bad": 1, "note": f"{case.get('classname')}::{case.get('name')}"}]
    for one in noted:
        key = (str(one.get("figure", "")), str(one["what"]), kind)
        row = rows.setdefault(key, Row(*key, counted="n" in one))
        row.times += one.get("n", 0)
        row.bad += max(one.get("bad", 0), int(failed))
        row.dates.add(date)
        if one.get("note"):
            row.notes[str(one["note"])] = None


def parse(text: str) -> dict[str, Any]:
    """A figure as a test noted it; text that is no such object stands for itself."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and isinstance(found.get("what"), str):
        numbers = [found.get(name, 0) for name in ("n", "bad")]
        if all(type(number) is int and number >= 0 for number in numbers):
            return found
    return {"what": text}


def _number(figure: str) -> int:
    digits = re.sub(r"\D", "", figure)
    return int(digits) if digits else 1 << 30


def table(rows: Iterable[Row], commit: str) -> str:
    """The text between the marks."""
    lines = [HEAD, tuple("---" for _ in HEAD), *(row.cells() for row in rows)]
    body = "\n".join("| " + " | ".join(_cell(text) for text in line) + " |" for line in lines)
    return f"Commit {commit}, from the test runs' own reports by `scripts/reliability_table.py`.\n\n{body}"


def _cell(text: str) -> str:
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def split_page(page: Path) -> tuple[str, str, str]:
    """What stands before, between and after the marks."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FiguresError(f"{page} cannot be read: {error}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise FiguresError(f"{page} needs {BEGIN} and, after it, {END}, once each")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    return before, old.strip(), after


def current_commit() -> str:
    """The commit that is checked out, marked when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=, with changes", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise FiguresError(f"git does not say which commit this is: {error}") from error
    return found.replace(", ", " ")


def main(argv: Sequence[str] | None = None) -> int:
    """0: written, or as the reports say; 1: not so, failures among the figures, or no evidence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 unless the table is up to date")
    parser.add_argument("--reports", type=Path, default=ROOT / ".reports")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reliability.md")
    args = parser.parse_args(argv)
    try:
        rows = read_rows(args.reports)
        before, old, after = split_page(args.page)
        told = _COMMIT.search(old)
        new = table(rows, told[1] if args.check and told else current_commit())
        if args.check and new != old:
            raise FiguresError(f"the table in {args.page.name} is not what the reports say; run this without --check")
        if not args.check:
            args.page.write_text(f"{before}{BEGIN}\n{new}\n{END}{after}", encoding="utf-8")
    except FiguresError as error:
        print(f"reliability_table: {error}", file=sys.stderr)
        return 1
    bad = sum(row.bad for row in rows)
    print(f"{len(rows)} figures, {sum(row.times for row in rows):,} trials, {bad} failures")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
