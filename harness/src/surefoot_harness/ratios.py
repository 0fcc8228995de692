"""A file of measured ratios, one line per cell and commit, and whether the newest of a cell is worse than before.

Format     JSON lines of `RATIO_FIELDS`. `ratio` has an interval from `low` to `high`; `better` says which way is
           better; what was not measured is null.
Rule       a cell is one subject, one peer and one machine. Its newest ratio is a regression when its whole interval
           lies on the worse side of the whole interval of the best of the (up to) K before it. So a decline in many
           small steps is seen, and noise within the intervals is not.
Promises   a line that cannot be read, or whose numbers cannot be, is refused by its number; a cell with one value, or
           with one that has no interval, is never "no change".
Never      writes but by `append_ratios`, which refuses the same things.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from pathlib import Path
from typing import Any

from surefoot_harness.errors import StateError
from surefoot_harness.files import LONGEST
from surefoot_harness.system.files import read_plain
from surefoot_harness.system.json import parse
from surefoot_harness.system.text import sparkline
from surefoot_harness.tables import table
from surefoot_harness.verdict import Verdict

SUFFIX = ".jsonl"
WORDS = ("date", "commit", "cell", "against", "machine")
HIGHER, LOWER = "higher", "lower"


@dataclass(frozen=True, slots=True)
class RatioRow:
    """One line of the file."""

    date: str
    commit: str
    cell: str
    """What was measured."""
    against: str
    """The peer."""
    machine: str
    """In words that name no host."""
    ratio: float
    low: float | None
    high: float | None
    """The 95 % interval; null for both where none was published."""
    better: str
    """`higher` or `lower`."""
    limit_share: float | None = None
    """Of what this machine could do at most, 0 to 1."""
    load: float | None = None
    """Share of the machine that others used meanwhile."""

    @property
    def series(self) -> tuple[str, str, str]:
        """Rows that may be compared."""
        return self.cell, self.against, self.machine

    def worse_than(self, other: RatioRow) -> bool:
        """Beyond both intervals."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.high < other.low if self.better == HIGHER else self.low > other.high

    @property
    def shown(self) -> str:
        """`2.43x [2.1, 2.93]`."""
        between = "" if self.low is None else f" [{self.low:g}, {self.high:g}]"
        return f"{self.ratio:g}x{between}"


RATIO_FIELDS = tuple(field.name for field in fields(RatioRow))


def checked_ratio(value: Any) -> RatioRow:
    """A row of plain values; a ValueError says what is wrong with it."""
    if not isinstance(value, Mapping) or set(value) != set(RATIO_FIELDS):
        raise ValueError(f"its fields are not {', '.join(RATIO_FIELDS)}")
    wrong = [name for name in WORDS if not isinstance(value[name], str) or not value[name].strip()]
    wrong += [name for name in ("ratio",) if not _is_positive(value[name])]
    wrong += [name for name in ("low", "high") if value[name] is not None and not _is_positive(value[name])]
    wrong += [name for name in ("limit_share", "load") if value[name] is not None and not _is_share(value[name])]
    wrong += [] if value["better"] in (HIGHER, LOWER) else ["better"]
    wrong += [] if "commit" in wrong or re.fullmatch(r"[0-9a-f]{7,40}", value["commit"]) else ["commit"]
    if wrong:
        raise ValueError(", ".join(f"{name} is {value[name]!r}" for name in dict.fromkeys(wrong)))
    date.fromisoformat(value["date"])
    low, high = value["low"], value["high"]
    if (low is None) != (high is None) or (low is not None and not low <= value["ratio"] <= high):
        raise ValueError(f"the ratio {value['ratio']} does not lie in its interval from {low} to {high}")
    return RatioRow(**value)


def read_ratios(path: Path) -> list[RatioRow]:
    """Every line of the file, in order; a `StateError` names the one that cannot be read."""
    rows = []
    try:
        lines = read_plain(path, LONGEST).decode("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{path} cannot be read: {error}", "it holds the ratios", "check the path") from error
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(checked_ratio(parse(line)))
        except ValueError as error:
            raise StateError(
                f"{path}, line {number} is no measured ratio: {error}",
                "a trend over lines that were left out would be one of another history",
                "restore the line, or take it out and say so in the commit",
            ) from error
    return rows


def append_ratios(path: Path, rows: Iterable[RatioRow]) -> int:
    """Write these at the end, each checked as it is on reading; how many."""
    new = [checked_ratio(asdict(row)) for row in rows]
    if path.exists():
        read_ratios(path)  # nothing is added to a file that nobody can read
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row), ensure_ascii=False, allow_nan=False) + "\n" for row in new)
    return len(new)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_share(value: Any) -> bool:
    return value == 0 or _is_positive(value)


# -- The trend of a cell --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RatioTrend:
    """One cell through time, oldest first."""

    rows: tuple[RatioRow, ...]
    status: Verdict
    """FAIL: the newest is a regression. INCOMPLETE: there is nothing to judge by."""
    message: str

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        cell, against, machine = self.rows[-1].series
        return {
            "cell": cell, "against": against, "machine": machine, "status": str(self.status), "message": self.message,
            "rows": [asdict(row) for row in self.rows],
        }  # fmt: skip

    def as_text(self, width: int | None = None) -> str:
        """A table, a sparkline where there are several, and the verdict."""
        cell, against, machine = self.rows[-1].series
        shown = [
            [row.date, row.commit[:10], row.shown, _percent(row.limit_share), _percent(row.load), ""]
            for row in self.rows
        ]
        shown[-1][-1] = "REGRESSION" if self.status is Verdict.FAIL else ""
        columns = ["Date", "Commit", "Ratio", "Of limit", "Others", "Mark"]
        body = table(f"{cell}, against {against}, on {machine}", columns, shown, width)
        bars = f"\n{sparkline([row.ratio for row in self.rows], 60)}" if len(self.rows) > 1 else ""
        return f"{body}{bars}\n{self.status}  {self.message}"


def ratio_trends(rows: Sequence[RatioRow], cell: str | None = None, last: int = 20) -> list[RatioTrend]:
    """The trend of every cell, or of those whose name holds these words; in the order of their first lines."""
    found: dict[tuple[str, str, str], list[RatioRow]] = {}
    for row in rows:
        if cell is None or cell in row.cell:
            found.setdefault(row.series, []).append(row)
    if not found:
        names = ", ".join(dict.fromkeys(row.cell for row in rows)) or "none"
        raise StateError(f"no cell is called {cell!r}", "there is nothing to show", f"measured are: {names}")
    return [_trend(history, last) for history in found.values()]


def _trend(history: Sequence[RatioRow], last: int) -> RatioTrend:
    ordered = sorted(history, key=lambda row: row.date)  # stable: lines of one day stay in the file's order
    newest, before = ordered[-1], [row for row in ordered[:-1] if row.low is not None][-last:]
    if not before:
        status, message = Verdict.INCOMPLETE, "no earlier ratio with an interval to compare with"
    elif newest.low is None:
        status, message = Verdict.INCOMPLETE, "the newest ratio has no interval"
    else:
        best = max(before, key=lambda row: row.ratio if newest.better == HIGHER else -row.ratio)
        status = Verdict.FAIL if newest.worse_than(best) else Verdict.PASS
        words = "worse than" if status is Verdict.FAIL else "not beyond"
        message = (
            f"{newest.shown} is {words} {best.shown} of {best.date}, {best.commit[:10]} ({newest.better} is better)"
        )
    return RatioTrend(tuple(ordered), status, message)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
