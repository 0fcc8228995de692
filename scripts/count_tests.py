"""How many tests ran, from the runner's machine output, and equal to what the runner printed.

For each JUnit file `name.xml` the printed output is expected beside it as `name.txt`. A number that is told but not
found in the file, or the other way round, is an error: counts are checked, not narrated.

    python scripts/count_tests.py [--results results.jsonl] .reports/unit.xml ...

`--results` writes one JSON object per test: test, success, outcome, timestamp, duration.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

OUTCOMES = ("passed", "failed", "errors", "skipped")
_PRINTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)\b")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class CountError(Exception):
    """The evidence is missing, unreadable, or contradicts itself."""


def read_junit(path: Path) -> list[dict[str, Any]]:
    """Every test of one JUnit file as test, success, outcome, timestamp and duration (seconds)."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (OSError, ElementTree.ParseError) as error:
        raise CountError(f"{path}: no usable JUnit file ({error})") from error
    records = []
    for suite in suites:
        cases = list(suite.iter("testcase"))
        _check_own_sums(path, suite, cases)
        for case in cases:
            outcome = _outcome(case)
            records.append(
                {
                    "test": f"{case.get('classname')}::{case.get('name')}",
                    "success": outcome == "passed",
                    "outcome": outcome,
                    "timestamp": suite.get("timestamp"),
                    "duration": float(case.get("time", "nan")),
                    "passed_then_broke": _broke_in_teardown(case),
                }
            )
    if not records:
        raise CountError(f"{path}: not one test; nothing run is not a pass")
    return records


def read_printed(path: Path) -> Counter[str]:
    """The last summary line of a pytest output, as outcome -> count; xfailed counts as skipped, as in JUnit."""
    try:
        lines = _COLOUR.sub("", path.read_text(encoding="utf-8")).splitlines()
    except OSError as error:
        raise CountError(f"{path}: the printed output is missing ({error})") from error
    for line in reversed(lines):
        found = _PRINTED.findall(line)
        if found and re.search(r" in [\d.]+s", line):
            names = {"error": "errors", "xfailed": "skipped", "xpassed": "passed"}
            counts: Counter[str] = Counter()
            for number, word in found:
                counts[names.get(word, word)] += int(number)
            return counts
    raise CountError(f"{path}: no summary line; did the runner end early?")


def count(path: Path) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Counts and records of one JUnit file, after checking them against what was printed."""
    records = read_junit(path)
    counts = Counter(record["outcome"] for record in records)
    counts["passed"] += sum(record.pop("passed_then_broke") for record in records)
    printed = read_printed(path.with_suffix(".txt"))
    if +counts != +printed:
        raise CountError(f"{path}: JUnit says {dict(counts)}, the printed summary says {dict(printed)}")
    return counts, records


def _outcome(case: ElementTree.Element) -> str:
    for tag, outcome in (("failure", "failed"), ("error", "errors"), ("skipped", "skipped")):
        if case.find(tag) is not None:
            return outcome
    return "passed"


def _broke_in_teardown(case: ElementTree.Element) -> bool:
    """A test that passed and whose clean-up failed is one element, but two in every count: passed, and an error."""
    error = case.find("error")
    return error is not None and error.get("message", "").startswith("failed on teardown") and len(_bad(case)) == 1


def _bad(case: ElementTree.Element) -> list[ElementTree.Element]:
    return [child for child in case if child.tag in ("failure", "error", "skipped")]


def _check_own_sums(path: Path, suite: ElementTree.Element, cases: Sequence[ElementTree.Element]) -> None:
    found = Counter(_outcome(case) for case in cases)
    found["tests"] = len(cases)
    for attribute, name in (("tests", "tests"), ("failures", "failed"), ("errors", "errors"), ("skipped", "skipped")):
        told = int(suite.get(attribute, "0"))
        if told != found[name]:
            raise CountError(f"{path}: the header says {attribute}={told}, the tests add up to {found[name]}")


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per file and a total; 1 when something failed, 3 when the evidence does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("junit", nargs="+", type=Path)
    parser.add_argument("--results", type=Path, help="write one JSON object per test here")
    args = parser.parse_args(argv)
    total: Counter[str] = Counter()
    records: list[dict[str, Any]] = []
    try:
        for path in args.junit:
            counts, of_file = count(path)
            print(f"{path.stem:>12}: " + _line(counts))
            total += counts
            records += of_file
    except CountError as error:
        print(f"counts do not hold: {error}", file=sys.stderr)
        return 3
    print(f"{'all':>12}: " + _line(total))
    if args.results:
        args.results.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return 1 if total["failed"] or total["errors"] else 0


def _line(counts: Counter[str]) -> str:
    return f"{sum(counts.values())} tests = " + " + ".join(f"{counts[name]} {name}" for name in OUTCOMES)


if __name__ == "__main__":
    sys.exit(main())
