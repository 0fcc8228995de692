"""The long tests in parts, each with a record of its own: `docs/night.json` says what ran when, of which commit.

    python scripts/night.py                  every part that this commit has not run yet (make nightly)
    python scripts/night.py --minutes 30     as many of them as fit, longest untouched first (make nightly MINUTES=30)
    python scripts/night.py --parts kills    only parts whose names contain one of these words, run or not
    python scripts/night.py --list           every part, what is known of it, and how long it takes
    python scripts/night.py --check          exit 1 unless the last full night is young enough and all of it passed

A part is a test file that has more than a day runs of it: tests marked `nightly`, families that take turns, tests that
`tests/times.json` makes rare. All tests of the file run, those of the day too. A file in `SLICES` is cut into several
parts by the names of its tests. What needs a GPU has its own suite (`gpu_suite.py`), what needs vLLM `make test-vllm`.

A record is written when its part has ended, so a night that is stopped goes on where it was. No record is written of
a tree with changes, or of one that changed meanwhile: it would name a commit that was not run. Figures that the tests
note go to docs/figures.json and its page as after `make faults`.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import figure_rows as figures
import gpu_suite
import reliability_table
from figure_rows import MAX_AGE, ROOT, FiguresError, Row

from surefoot.system.files import atomic_write
from surefoot.system.git import GitError, git_call
from surefoot.system.process import Child

FILE = Path("docs/night.json")
WRITTEN = (FILE, Path("docs/figures.json"), Path("docs/reliability.md"))
"""What a night itself changes in the tree."""
REPORTS = Path(".reports/night")
SLICES = {
    "tests/faults/test_disk_faults.py": 4,
    "tests/faults/test_every_failpoint.py": 12,
    "tests/repo/test_docs.py": 4,
}
ALONE = ("tests/faults/test_ray_chaos.py",)
"""What promises a time that other tests would spoil."""
NOTING = "tests/faults/"
"""Whose tests note figures: each such file has a call of pytest, and a report, to itself."""
PART_S, UNKNOWN_S, START_S = 15 * 60.0, 300.0, 6.0
SHORT_S, TOGETHER_S = 20.0, 120.0
"""Parts up to so long share one call of pytest, up to so much of them."""
RARE = {"nightly", "turns"}


class Part(NamedTuple):
    """One test file, or a slice of one."""

    file: str
    slice: str = ""
    required: bool = True
    """Whether a night without it is no full night: tests that no day runs, or a day runs only a share of."""

    @property
    def name(self) -> str:
        """As in the file of records: `tests/faults/test_kills.py`, `tests/faults/test_every_failpoint.py 3/12`."""
        return f"{self.file} {self.slice}".strip()


class Night(NamedTuple):
    """What docs/night.json holds."""

    records: dict[str, Row]
    """Part -> commit, date, outcome, counts, seconds of the wall clock, and the names of what failed."""
    not_yet: list[str]
    """Required parts that never ran whole, since there are records: this list only gets shorter."""


# -- which parts there are ----------------------------------------------------------------------------


def parts(root: Path = ROOT) -> list[Part]:
    """Every part of the night, by the sources of the tests: nothing is imported."""
    long = _long_files(root)
    on_gpu = {test.node for test in gpu_suite.marked_tests(root)}
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        name, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))
        if name.startswith("tests/vllm/") or _all_on_gpu(name, tree, on_gpu):
            continue
        if marked := is_rare(tree):
            n = SLICES.get(name, 1)
            found += [Part(name, f"{k}/{n}" if n > 1 else "") for k in range(1, n + 1)]
        if not marked and name in long:
            found.append(Part(name, required=False))
    return found


def is_rare(tree: ast.Module) -> bool:
    """Whether a mark of this file keeps tests out of some days."""
    return any(
        isinstance(node, ast.Attribute)
        and node.attr in RARE
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "mark"
        for node in ast.walk(tree)
    )


def _all_on_gpu(name: str, tree: ast.Module, on_gpu: set[str]) -> bool:
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return bool(tests) and all(f"{name}::{test}" in on_gpu for test in tests)


def _long_files(root: Path) -> dict[str, float]:
    """Seconds of the long tests of each file."""
    path = root / "tests" / "times.json"
    table = json.loads(path.read_text(encoding="utf-8"))["long"] if path.exists() else {}
    found: dict[str, float] = {}
    for test, seconds in table.items():
        file = f"tests/{test.partition('::')[0]}"
        found[file] = found.get(file, 0.0) + seconds
    return found


# -- the records --------------------------------------------------------------------------------------


def read(root: Path = ROOT) -> Night:
    """What is recorded."""
    try:
        found = json.loads((root / FILE).read_text(encoding="utf-8"))
        return Night(dict(found["records"]), list(found["not_yet"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FiguresError(f"{FILE} cannot be read: {error!r}") from error


def write(night: Night, root: Path = ROOT) -> None:
    """One record in a line, in order, so that a new one is a small change."""
    lines = [f"{json.dumps(name)}: {json.dumps(one, sort_keys=True)}" for name, one in sorted(night.records.items())]
    left = [json.dumps(name) for name in sorted(night.not_yet)]
    text = '{"records": {\n' + ",\n".join(lines) + '\n},\n"not_yet": [\n' + ",\n".join(left) + "\n]}\n"
    atomic_write(root / FILE, text.encode())


def with_records(night: Night, new: Mapping[str, Row], known: Iterable[Part]) -> Night:
    """The same with these; parts that are gone leave it, and what has a record is no longer `not yet`."""
    names = {part.name for part in known}
    records = {name: one for name, one in {**night.records, **new}.items() if name in names}
    return Night(records, [name for name in night.not_yet if name in names and name not in records])


def problems(night: Night, known: Sequence[Part], age: Mapping[str, int] | None) -> list[str]:
    """Why this is no full night of a young commit; `age` of each commit, None where git does not tell."""
    required = [part.name for part in known if part.required]
    found = []
    for name in required:
        one = night.records.get(name)
        if one is None:
            found += [] if name in night.not_yet else [f"{name}: never run whole; make nightly PARTS='{name}'"]
        elif one["outcome"] != "passed":
            found.append(f"{name}: {one['outcome']} at {one['commit']}: {', '.join(one['failed'][:3])}")
        elif age is not None and age[one["commit"]] > MAX_AGE:
            old = age[one["commit"]]
            found.append(f"{name}: last run {old} commits ago, at most {MAX_AGE}; make nightly PARTS='{name}'")
    idle = [name for name in night.not_yet if name in night.records or name not in required]
    return found + [f"{name}: take it off the list `not_yet`" for name in idle]


def ages(night: Night, root: Path = ROOT) -> dict[str, int] | None:
    """How many commits ago each recorded commit was; None without a history."""
    if figures.why_no_history(root):
        return None
    return {commit: figures.age_of(root, commit) for commit in {one["commit"] for one in night.records.values()}}


# -- what to run next ---------------------------------------------------------------------------------


def in_turn(known: Sequence[Part], night: Night, age: Mapping[str, int] | None, head: str, long: Row) -> list[Part]:
    """Parts without a record of this commit: those never run first, then the longest untouched; short before long."""

    def key(part: Part) -> tuple[bool, bool, int, float, str]:
        one = night.records.get(part.name)
        old = 0 if one is None or age is None else age[one["commit"]]
        return one is not None, not part.required, -old, estimate(part, night, long), part.name

    done = {name for name, one in night.records.items() if one["commit"] == head and one["outcome"] == "passed"}
    return sorted((part for part in known if part.name not in done), key=key)


def estimate(part: Part, night: Night, long: Mapping[str, float]) -> float:
    """Seconds that a part takes: as last time; else by its long tests, or, with tests nobody timed, a guess."""
    if (one := night.records.get(part.name)) is not None:
        return float(one["seconds"]) + START_S
    return UNKNOWN_S if part.required else long.get(part.file, 0.0) + START_S


def together(queue: Sequence[Part], left: float, night: Night, long: Mapping[str, float]) -> list[Part]:
    """The first part that fits into the time left, with the short ones after it that share a call with it."""
    fits = [part for part in queue if estimate(part, night, long) <= left]
    if not fits:
        return []
    chosen, took = fits[:1], estimate(fits[0], night, long)
    for part in fits:
        seconds = estimate(part, night, long)
        alike = not any(p.slice or p.file.startswith(NOTING) for p in (*chosen, part))
        if part not in chosen and alike and max(took / len(chosen), seconds) <= SHORT_S:
            if took + seconds > min(left, TOGETHER_S):
                break
            chosen.append(part)
            took += seconds
    return chosen


# -- running ------------------------------------------------------------------------------------------


def run(chosen: Sequence[Part], seconds: float, root: Path = ROOT) -> dict[str, Row] | None:
    """Outcome, counts and seconds of each part; None where time was over before they ended."""
    report = root / REPORTS / chosen[0].file.replace("/", ".") / f"nightly_{chosen[0].slice.replace('/', '_') or 0}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    around = figures.surroundings(root) | {"changed": False}
    words = ["-m", "pytest", "-q", f"--junitxml={report}", *[part.file for part in chosen]]
    words += [f"--slice={chosen[0].slice}"] if chosen[0].slice else []
    words += [] if chosen[0].file in ALONE else ["-n", "2", *(["--dist=loadfile"] if chosen[1:] else [])]
    began = time.monotonic()
    with Child.start([sys.executable, *words], cwd=root, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as child:
        code = child.wait(min(seconds, PART_S))
    took = time.monotonic() - began
    if code is None and seconds < PART_S:
        return None
    report.with_suffix(".json").write_text(json.dumps(around) + "\n", encoding="utf-8")
    said = f"no answer within {PART_S:.0f} s" if code is None else f"pytest ended with {code}"
    if code not in (0, 1):
        report.unlink(missing_ok=True)  # neither passed nor failed: what it says is not all
    return {part.name: one for part, one in zip(chosen, counted(report, chosen, took, said), strict=True)}


def counted(report: Path, chosen: Sequence[Part], took: float, said: str) -> Iterator[Row]:
    """What the report says of each file; a file without a test that ran has failed, with what pytest said."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    whole = sum(float(case.get("time", "0")) for case in cases) or 1.0
    for part in chosen:
        mine = [case for case in cases if figures.test_file(case) == part.file]
        outcome = [_outcome(case) for case in mine]
        failed = [str(case.get("name")) for case, how in zip(mine, outcome, strict=True) if how == "failed"]
        if "passed" not in outcome and not failed:
            failed = [said if not mine else "every test was skipped"]
        share = sum(float(case.get("time", "0")) for case in mine) / whole
        yield {
            "outcome": "failed" if failed else "passed", "failed": failed, "passed": outcome.count("passed"),
            "skipped": outcome.count("skipped"), "seconds": round(took * (share if len(chosen) > 1 else 1.0), 1),
        }  # fmt: skip


def _outcome(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def state(root: Path = ROOT) -> tuple[str, bool]:
    """This commit, and whether the tree has changes that a night did not make itself."""
    words = ("status", "--porcelain", "--", ".", *[f":!{path}" for path in WRITTEN])
    try:
        command, env = git_call(root, *words)
        changed = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError, GitError) as error:
        raise FiguresError(f"git does not say what this tree is: {error}") from error
    return str(figures.surroundings(root)["commit"]), bool(changed.strip())


def publish(part: Part, known: Sequence[Part], night: Night, root: Path = ROOT) -> None:
    """The figures that a file's tests noted, once all of its slices have a report here; and how long a night took."""
    folder = root / REPORTS / part.file.replace("/", ".")
    slices = [one for one in known if one.file == part.file]
    if len(list(folder.glob("nightly_*.xml"))) < len(slices) or any(s.name not in night.records for s in slices):
        return
    page, file = root / "docs" / "reliability.md", root / "docs" / "figures.json"
    args = argparse.Namespace(page=page, file=file)
    rows = figures.read_file(file)
    try:
        new = figures.rows_of(folder, ["nightly"])
    except FiguresError:
        new = []  # most files note none
    whole = whole_night(known, night, root)
    rows = figures.merged(rows, [*new, *([] if whole is None else [whole])], {part.file} if new else ())
    reliability_table.write(rows, args)


def whole_night(known: Sequence[Part], night: Night, root: Path = ROOT) -> Row | None:
    """P24 once every part has passed: seconds of all of them, under the oldest commit among them."""
    records = [night.records.get(part.name) for part in known]
    done = [one for one in records if one is not None and one["outcome"] == "passed"]
    age = ages(night, root)
    if len(done) < len(records) or age is None:
        return None
    oldest = max(done, key=lambda one: age[one["commit"]])
    seconds, limit = sum(one["seconds"] for one in done), figures.LIMITS_S["make nightly"]
    noted = {"p50": round(seconds), "p99": round(seconds), "max": round(seconds), "n": 1, "limit": limit}
    tests = sum(one["passed"] for one in done)
    return figures.checked({
        "figure": "P24", "what": "`make nightly`: time of all its tests", "times": 1, "bad": int(seconds > limit),
        "run": "make nightly", "tests": [], "commit": oldest["commit"], "changed": False, "date": oldest["date"],
        "cores": figures.surroundings(root)["cores"], "load": None, "seeds": None, "seconds": noted,
        "notes": [f"{tests:,} tests in {len(done)} parts, each with its own commit, the oldest named here"],
    })  # fmt: skip


def run_parts(queue: list[Part], known: Sequence[Part], minutes: float, root: Path = ROOT) -> int:
    """Part after part until none is left or time is over; how many did not pass."""
    end, bad, long = time.monotonic() + minutes * 60, 0, _long_files(root)
    before = state(root)
    if before[1]:
        raise FiguresError("the tree has changes, and a record names a commit: commit them, or run the tests by pytest")
    while chosen := together(queue, end - time.monotonic(), read(root), long):
        queue = [part for part in queue if part not in chosen]
        print(f"== {', '.join(part.name for part in chosen)}", flush=True)
        found = run(chosen, end - time.monotonic(), root)
        if found is None:
            print("   time was over; no record")
            break
        if state(root) != before:
            raise FiguresError("the tree changed while its tests ran: no record of them")
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        new = {name: one | {"commit": before[0], "date": today} for name, one in found.items()}
        night = with_records(read(root), new, known)
        write(night, root)
        for part in chosen[:1] if len(chosen) == 1 else []:
            publish(part, known, night, root)
        bad += sum(one["outcome"] != "passed" for one in new.values())
        for name, one in new.items():
            print(f"   {name}: {one['outcome']}, {one['passed']} passed in {one['seconds']:g} s", flush=True)
    print(f"{len(queue)} parts are left")
    return bad


# -- the command --------------------------------------------------------------------------------------


def listed(known: Sequence[Part], night: Night, age: Mapping[str, int] | None, long: Row) -> Iterator[str]:
    """A line for each part."""
    for part in known:
        one = night.records.get(part.name)
        old = "?" if one is None or age is None else age[one["commit"]]
        told = "never run" if one is None else f"{one['outcome']}, {old} commits ago"
        yield f"{'' if part.required else 'also '}{part.name}: {told}, about {estimate(part, night, long):.0f} s"


def main(words: Sequence[str] | None = None) -> int:
    """0: what ran passed, or all is in order; 1: it did not, or is not; 2: nothing can be said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="no part begins that would not end in time")
    parser.add_argument("--parts", help="words, separated by commas: parts whose names contain one of them")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args(words)
    try:
        known, night = parts(), read()
        age, long = ages(night), _long_files(ROOT)
        if asked.check:
            found = problems(night, known, age)
            print("\n".join(found) or f"{len(night.records)} parts in order, {len(night.not_yet)} not run yet")
            return 1 if found else 0
        if asked.list:
            print("\n".join(listed(known, night, age, long)))
            return 0
        chosen = [part for part in known if any(word in part.name for word in (asked.parts or "").split(","))]
        if not chosen:
            raise FiguresError(f"no part is called like {asked.parts}; --list names them")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `run` ends what it started
        head = "" if asked.parts else state()[0]
        return 1 if run_parts(in_turn(chosen, night, age, head, long), known, asked.minutes) else 0
    except (FiguresError, OSError) as error:
        print(f"night: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
