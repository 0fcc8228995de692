"""docs/figures.json: what the test runs measured, a row for each thing tried, each with its own commit, seed and date.

A test notes a figure with `record_property("figure", ...)`, see `tests/support/figures.py`: a JSON object with
`figure`, `what`, `n` and `bad`, and where it applies `note`, `seconds`, `limit_s` and `seeds`. Beside each JUnit file
`name.xml` lies `name.json`, written when the run began: commit, cores and load (`reliability_table.py --surroundings`).

    rows_of(reports, ["faults"])   what these runs noted, added up by name
    merged(old, new)               rows that were measured again are replaced, all others stay as they are
    stale(rows, ages)              rows whose commit is too old to speak for this tree

Read next: `reliability_table.py`, the command and the page.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from surefoot.system.git import GitError, git_call

ROOT = Path(__file__).parents[1]
SCHEMA = 1
MAX_AGE = 60
"""Commits of the main line after which a figure says nothing of the tree any more."""
RUNS = {
    "test": "make test",
    "faults": "make faults",
    "nightly": "make nightly",
}
"""What a report's name says about the run, by its beginning."""
UNNOTED = "tests that failed before they noted a figure, in"
LIMITS_S = {"make test": 600.0, "make nightly": 7200.0}
"""How long a whole run of a target may take (P24); more is a failure of the figure."""
FIELDS = {"figure": str, "what": str, "times": int | None, "bad": int, "run": str, "tests": list, "commit": str,
          "changed": bool, "date": str, "cores": int | None, "load": int | float | None, "seeds": list | None,
          "seconds": dict | None, "notes": list}  # fmt: skip
Row = dict[str, Any]
Key = tuple[str, str]


class FiguresError(Exception):
    """The evidence, the file or the page is missing or unusable."""


# -- what a run noted -------------------------------------------------------------------------------


def rows_of(reports: Path, names: Sequence[str]) -> list[Row]:
    """Every figure in the JUnit files of a folder whose names begin with one of these, added up by name."""
    files = [path for path in sorted(reports.glob("*.xml")) if path.stem.startswith(tuple(names))]
    if not files:
        raise FiguresError(f"{reports} holds no report of a run called {' or '.join(names)}")
    rows: dict[Key, Row] = {}
    for path in files:
        around = surroundings_of(path)
        for case, date in _cases(path):
            for one in _noted(case):
                _add(rows, one, around | {"run": run_of(path), "date": date}, test_file(case))
    if not any(not row["what"].startswith(UNNOTED) for row in rows.values()):
        raise FiguresError(f"not one test in {', '.join(p.name for p in files)} recorded a figure")
    return [_summed(row) for row in rows.values()]


def run_of(path: Path) -> str:
    """The command that a report is of."""
    return next((run for name, run in RUNS.items() if path.stem.startswith(name)), path.stem)


def surroundings_of(path: Path) -> Row:
    """Commit, cores and load of a run, from the file beside its report."""
    beside = path.with_suffix(".json")
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
        return {"commit": str(found["commit"]), "changed": bool(found["changed"]), "cores": int(found["cores"]),
                "load": float(found["load"])}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FiguresError(f"{beside.name} does not say on which commit {path.name} was made: {error!r}") from error


def suite_times(path: Path) -> tuple[float, int, int, str]:
    """Seconds from the first test to the last, tests, failures, and the day, of one report."""
    suites = list(_suites(path))
    seconds = sum(float(suite.get("time", "nan")) for suite in suites)
    counts = [sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors")]
    return seconds, counts[0], counts[1] + counts[2], max((suite.get("timestamp") or "")[:10] for suite in suites)


def time_row(reports: Path, run: str, names: Sequence[str]) -> Row | None:
    """P24: how long a whole run took; None where not all of its reports are there."""
    files = [reports / f"{name}.xml" for name in names]
    if not all(path.exists() and path.with_suffix(".json").exists() for path in files):
        return None
    found = [suite_times(path) for path in files]
    seconds = sum(one[0] for one in found)
    parts = ", ".join(f"{path.stem} {one[0] / 60:.1f} min" for path, one in zip(files, found, strict=True))
    row = {"figure": "P24", "what": f"`{run}`: time of all its tests", "times": 1, "run": run, "tests": [],
           "bad": sum(one[2] for one in found), "date": max(one[3] for one in found), "seeds": None,
           "notes": [f"{sum(one[1] for one in found):,} tests; {parts}"], "took": [seconds],
           "limit": LIMITS_S.get(run)}  # fmt: skip
    return _summed(row | surroundings_of(files[0]))


def _suites(path: Path) -> Iterator[ElementTree.Element]:
    try:
        yield from ElementTree.parse(path).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError) as error:
        raise FiguresError(f"{path}: no usable JUnit file ({error})") from error


def _cases(path: Path) -> Iterator[tuple[ElementTree.Element, str]]:
    for suite in _suites(path):
        for case in suite.iter("testcase"):
            yield case, (suite.get("timestamp") or "")[:10]


def test_file(case: ElementTree.Element) -> str:
    """The file that a test is in."""
    words = (case.get("classname") or "").split(".")
    last = max((i for i, word in enumerate(words) if word.startswith("test_")), default=len(words) - 1)
    return "/".join(words[: last + 1]) + ".py"


def _noted(case: ElementTree.Element) -> list[Row]:
    """The figures of one test; a test that failed without one is a figure too."""
    failed = case.find("failure") is not None or case.find("error") is not None
    found = [parse(p.get("value") or "") for p in case.iter("property") if p.get("name") == "figure"]
    if failed and not found:
        note = f"{case.get('classname')}::{case.get('name')}"
        found = [{"what": f"{UNNOTED} {test_file(case)}", "n": 1, "bad": 1, "note": note}]
    return [one | {"bad": max(one.get("bad", 0), int(failed))} for one in found]


def parse(text: str) -> dict[str, Any]:
    """A figure as a test noted it; text that is no such object stands for itself."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict) and isinstance(found.get("what"), str):
        numbers = [found.get(name, 0) for name in ("n", "bad")]
        numbers += found.get("seeds", [])
        if all(type(number) is int and number >= 0 for number in numbers) and _are_seconds(found.get("seconds", [])):
            return found
    return {"what": text}


def _are_seconds(took: object) -> bool:
    return isinstance(took, list) and all(type(one) in (int, float) and math.isfinite(one) and one >= 0 for one in took)


def _add(rows: dict[Key, Row], one: Row, around: Row, test: str) -> None:
    key = (str(one.get("figure", "")), str(one["what"]))
    empty = {"figure": key[0], "what": key[1], "times": 0 if "n" in one else None, "bad": 0, "seeds": None,
             "tests": [], "notes": [], "took": [], "limit": None}  # fmt: skip
    row = rows.setdefault(key, empty | around)
    row["times"] = None if row["times"] is None else row["times"] + one.get("n", 0)
    row["bad"] += one["bad"]
    row["took"] += one.get("seconds", [])
    row["limit"] = one.get("limit_s", row["limit"])
    row["date"], row["load"] = max(row["date"], around["date"]), max(row["load"], around["load"])
    if seeds := [*(row["seeds"] or []), *one.get("seeds", [])]:
        row["seeds"] = [min(seeds), max(seeds)]
    for kept, new in (("tests", test), ("notes", str(one.get("note", "")))):
        if new and new not in row[kept]:
            row[kept].append(new)


def _summed(row: Row) -> Row:
    """As it is kept: times as three numbers, and more than the limit as a failure."""
    took, limit = sorted(row.pop("took")), row.pop("limit")
    if took:
        row["seconds"] = {name: _short(took[max(0, math.ceil(share * len(took)) - 1)]) for name, share in
                          (("p50", 0.5), ("p99", 0.99), ("max", 1.0))} | {"n": len(took), "limit": limit}  # fmt: skip
        row["bad"] = max(row["bad"], sum(limit is not None and one > limit for one in took))
    else:
        row["seconds"] = None
    row["notes"] = row["notes"][:3] + ([f"and {len(row['notes']) - 3} more"] if len(row["notes"]) > 3 else [])
    return checked(row)


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")


# -- the file -----------------------------------------------------------------------------------------


def checked(row: object) -> Row:
    """A row of the file, or the reason why it is none."""
    if not isinstance(row, dict) or row.keys() != FIELDS.keys():
        raise FiguresError(f"a row has other fields than {', '.join(FIELDS)}: {str(row)[:200]}")
    for name, kind in FIELDS.items():
        if not isinstance(row[name], kind) or (isinstance(row[name], bool) and kind is not bool):
            raise FiguresError(f"{row['what']!r}: {name} = {row[name]!r} is not {kind}")
    return row


def read_file(path: Path) -> list[Row]:
    """The rows of docs/figures.json."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FiguresError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA or not isinstance(found.get("rows"), list):
        raise FiguresError(f"{path.name} is no file of figures with schema {SCHEMA}")
    rows = [checked(row) for row in found["rows"]]
    if len({key_of(row) for row in rows}) != len(rows):
        raise FiguresError(f"{path.name} holds a figure twice")
    return rows


def as_text(rows: Iterable[Row]) -> str:
    """The file: one row in a line, in a fixed order, so that a new measurement is a small change."""
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in in_order(rows)]
    return f'{{"schema": {SCHEMA}, "rows": [\n' + ",\n".join(lines) + "\n]}\n"


def in_order(rows: Iterable[Row]) -> list[Row]:
    """By number, then by name."""
    return sorted(rows, key=lambda row: (number_of(row["figure"]), row["figure"], row["what"]))


def number_of(figure: str) -> int:
    """24 for P24; figures without a number come last."""
    digits = re.sub(r"\D", "", figure)
    return int(digits) if digits else 1 << 30


def key_of(row: Row) -> Key:
    """What a row is known by."""
    return row["figure"], row["what"]


def merged(old: Iterable[Row], new: Sequence[Row], whole: Iterable[str] = ()) -> list[Row]:
    """`new` in the place of the same rows of `old`; everything else stays, with its own commit and date.

    Args:
        whole: test files that were run completely: what they noted once and do not note any more is gone.
    """
    files, keys = set(whole), {key_of(row) for row in new}
    kept = [row for row in old if key_of(row) not in keys and not (row["tests"] and set(row["tests"]) <= files)]
    return in_order([*kept, *new])


def files_run(reports: Path, names: Sequence[str]) -> set[str]:
    """Test files that occur in these reports."""
    files = [path for path in reports.glob("*.xml") if path.stem.startswith(tuple(names))]
    return {test_file(case) for path in files for case, _ in _cases(path)}


# -- age ----------------------------------------------------------------------------------------------


def stale(rows: Iterable[Row], age: Callable[[str], int]) -> list[tuple[Row, int]]:
    """Rows that are too old, with their ages."""
    ages = {commit: age(commit) for commit in {row["commit"] for row in rows}}
    return [(row, ages[row["commit"]]) for row in rows if ages[row["commit"]] > MAX_AGE]


def remedy(rows: Iterable[Mapping[str, Any]]) -> str:
    """The command that measures these rows again."""
    files = {test for row in rows for test in row["tests"]}
    kills = sorted(match[1] for test in files if (match := re.fullmatch(r"tests/faults/test_(\w+)\.py", test)))
    return f'make faults KILLS="{" ".join(kills)}"' if kills else "make faults"


def why_no_history(root: Path) -> str:
    """Why the age of a commit cannot be known here; empty where it can."""
    shallow = _git(root, "rev-parse", "--is-shallow-repository")
    if shallow is None:
        return "there is no git repository here"
    return "this is a shallow clone" if shallow == "true" else ""


def age_of(root: Path, commit: str) -> int:
    """Commits of the main line since then."""
    count = _git(root, "rev-list", "--count", "--first-parent", f"{commit}..HEAD")
    if count is None:
        raise FiguresError(f"a figure was made on commit {commit}, which this repository does not have")
    return int(count)


def spelled_commit(root: Path, name: str) -> str:
    """A commit as figures spell it."""
    commit = _git(root, "rev-parse", "--short=10", "--verify", f"{name}^{{commit}}")
    if commit is None:
        raise FiguresError(f"{name} is no commit of this repository")
    return commit


def surroundings(root: Path = ROOT) -> Row:
    """Where a run is about to be made: commit, cores, and the load of the last minute."""
    commit = _git(root, "rev-parse", "--short=10", "HEAD")
    if commit is None:
        raise FiguresError("git does not say which commit this is: figures without one are worth nothing")
    changed = bool(_git(root, "status", "--porcelain", "--untracked-files=no"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"commit": commit, "changed": changed, "cores": cores, "load": round(os.getloadavg()[0], 2)}


def _git(root: Path, *words: str) -> str | None:
    """What git says; None when it cannot."""
    try:
        command, env = git_call(root, *words)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError, GitError):
        return None
    return done.stdout.strip()
