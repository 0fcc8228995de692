"""Which tests take long: `tests/times.json`, from which `make test` decides what comes every day and what in turns.

    python scripts/slow_tests.py .reports/test.xml ...    what ran gets its new time, the rest keeps its own
    python scripts/slow_tests.py --days                   what each day of a cycle adds up to

Only a run on a quiet machine is worth writing down: the numbers decide for months. What comes every day, and what is
marked `turns`, is not listed by name; it is added up as `short`, so that a check can say how long a day is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TIMES = ROOT / "tests" / "times.json"
LONG_S = 0.5


class Measured(NamedTuple):
    """One test of a report."""

    seconds: float
    marked: bool  # `turns` or `every_day` decides when it comes, not its time


def measured(reports: Iterable[Path]) -> dict[str, Measured]:
    """Every test that ran and passed, by its file below tests/ and its name."""
    found = {}
    for report in reports:
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if not any(child.tag in ("failure", "error", "skipped") for child in case):
                marked = any(each.get("name") == "tier" for each in case.iter("property"))
                file = str(case.get("file")).removeprefix("tests/")
                found[f"{file}::{case.get('name')}"] = Measured(float(case.get("time", "nan")), marked)
    return found


def merged(old: dict[str, Any], new: dict[str, Measured]) -> dict[str, Any]:
    """The table with what was measured now; tests whose file is gone leave it."""
    rotate = {test: ran.seconds for test, ran in new.items() if ran.seconds >= LONG_S and not ran.marked}
    rest = {test: ran.seconds for test, ran in new.items() if test not in rotate}
    long = {test: seconds for test, seconds in old["long"].items() if test not in rest} | rotate
    kept = {test: round(long[test], 1) for test in sorted(long) if (TIMES.parent / test.partition("::")[0]).exists()}
    return {"short": round(sum(rest.values()), 1), "long": kept}


def main(words: Sequence[str] | None = None) -> int:
    """Write the table, or tell the days."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="*", type=Path, help="JUnit files of runs on a quiet machine")
    parser.add_argument("--days", action="store_true", help="only say how long each day is")
    asked = parser.parse_args(words)
    table = json.loads(TIMES.read_text(encoding="utf-8")) if TIMES.exists() else {"short": 0.0, "long": {}}
    if asked.reports:
        table = merged(table, measured(asked.reports))
        TIMES.write_text(json.dumps(table, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
    elif not asked.days:
        parser.error("name the JUnit files of a run, or ask for --days")
    for day, seconds in enumerate(day_lengths(table)):
        print(f"day {day}: {seconds:.0f} s of tests")
    return 0


def day_lengths(table: dict[str, Any]) -> list[float]:
    """Seconds of tests on each day of a cycle, one core."""
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest

    days = conftest.days_of(table["long"])
    return [
        table["short"] + sum(seconds for test, seconds in table["long"].items() if day in days[test])
        for day in range(conftest.CYCLE)
    ]


if __name__ == "__main__":
    sys.exit(main())
