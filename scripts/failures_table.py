"""What a run notices of each silent failure: the column of docs/failures.md, from what the planted bugs really meet.

    python scripts/failures_table.py          plant every bug, trace a healthy run, rewrite the column and the counts
    python scripts/failures_table.py --check  compare the page with what the tests say, without running them

A planted bug is noticed *by a run* when the product raises one of its own errors out of a function that a healthy run
enters, when the verdict is FAIL, or when a warning or a metric says so. Where only the test's own comparison sees it, a
run of yours would not.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src" / "surefoot", ROOT / "harness" / "src" / "surefoot_harness")
SILENT, PAGE = ROOT / "tests" / "silent", ROOT / "docs" / "failures.md"
HEADER = "| NN | failure | test | planted bug | a run notices |"
TESTS_ONLY = "only our tests"
COUNTS = re.compile(r"<!-- counts -->.*?<!-- /counts -->", re.DOTALL)


# -- what the tests assert, read from their text ----------------------------------------------------------------------


@lru_cache(maxsize=1)
def error_names() -> set[str]:
    """The errors that the product raises on purpose."""
    texts = (path.read_text(encoding="utf-8") for package in PACKAGES for path in package.rglob("*.py"))
    return {name for text in texts for name in re.findall(r"^class (\w+Error)\(", text, flags=re.MULTILINE)}


@lru_cache(maxsize=1)
def kinds_of_error() -> dict[str, set[str]]:
    """For each error its own name and those that it is a kind of: who expects a TaskError is content with its kinds."""
    texts = [path.read_text(encoding="utf-8") for package in PACKAGES for path in package.rglob("*.py")]
    parents = {name: re.findall(r"\w+Error", bases) for text in texts
               for name, bases in re.findall(r"^class (\w+Error)\(([^)]*)\)", text, flags=re.MULTILINE)}  # fmt: skip

    def kinds(name: str) -> set[str]:
        return {name}.union(*(kinds(parent) for parent in parents.get(name, ())))

    return {name: kinds(name) for name in parents}


def insisted(name: str, errors: set[str]) -> bool:
    """Whether a test that insists on these errors has seen what it wanted in an error of this name."""
    return bool(kinds_of_error().get(name, {name}) & errors)


def planted_tests(path: Path) -> list[ast.FunctionDef]:
    """The planted bugs of one file; none where there is no such file."""
    if not path.is_file():
        return []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [f for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_planted")]


def expected_errors(test: ast.FunctionDef) -> set[str]:
    """Product errors that a test insists on; a tuple that admits AssertionError insists on nothing."""
    known, found = error_names(), set()
    for call in ast.walk(test):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.raises" and call.args:
            kinds = call.args[0].elts if isinstance(call.args[0], ast.Tuple) else [call.args[0]]
            names = {ast.unparse(kind).split(".")[-1] for kind in kinds}
            found |= names if names <= known else set()
    return found


def said_otherwise(test: ast.FunctionDef, *, probed: bool) -> str | None:
    """A verdict, a warning or a metric that the test asserts; `probed`: of the command that looks at a grader."""
    text = " ".join(ast.unparse(node.test) for node in ast.walk(test) if isinstance(node, ast.Assert))
    if "Verdict.FAIL" in text or "'FAIL'" in text:
        return "`surefoot probe-reward`" if probed else "verdict FAIL"
    if "warning" in text or "warned" in text:
        return "warning"
    if ".failure" in text:
        return "metric"
    return None


def claims(path: Path) -> tuple[set[str], set[str]]:
    """Product errors, and other words, that the planted bugs of a file assert."""
    tests, probed = planted_tests(path), path.is_file() and "rewards.probe" in path.read_text(encoding="utf-8")
    errors = {name for test in tests for name in expected_errors(test)}
    return errors, {word for test in tests if (word := said_otherwise(test, probed=probed))}


# -- what really happens ---------------------------------------------------------------------------------------------


TRACER = """
import sys, threading
seen = set()
def look(frame, event, arg):
    if event == "call" and "/surefoot/" in frame.f_code.co_filename:
        seen.add(frame.f_code.co_filename.split("/surefoot/")[-1] + ":" + frame.f_code.co_qualname)
threading.setprofile(look); sys.setprofile(look)
from surefoot.cli import main
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
sys.setprofile(None)
open(TRACE, "w").write("\\n".join(sorted(seen)))
sys.exit(code)
"""
RUNS = (
    ["train", "max_steps=2", "tasks_per_step=2", "num_generations=4", "beta=0.01", "save_steps=1", "eval_tasks=4"],
    ["train", "max_steps=2", "tasks_per_step=2", "num_generations=4", "max_staleness=1", "eval_tasks=4",
     "importance_sampling_correction=true"],
)  # fmt: skip


def entered_by_runs() -> set[str]:
    """`module/file.py:function` of the product that healthy runs enter."""
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for number, words in enumerate(RUNS):
            trace = Path(folder) / f"{number}.txt"
            done = subprocess.run(
                [sys.executable, "-c", TRACER.replace("TRACE", repr(str(trace))), *words,
                 f"output_dir={folder}/run{number}"],
                capture_output=True, text=True, cwd=folder, check=False,
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(
                    f"a healthy run failed with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
                )
            found |= set(trace.read_text(encoding="utf-8").splitlines())
    return found


class Recorder:
    """A pytest plugin: which product errors were made while a planted bug was in place, and out of which functions."""

    def __init__(self) -> None:
        self.made: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        self.failed: list[str] = []
        self.now = ""

    def pytest_configure(self, config: Any) -> None:
        """Not before: pytest wants to be the first to import what it rewrites."""
        self.watch()

    def pytest_runtest_call(self, item: Any) -> None:
        """The errors made from here on belong to this test."""
        self.now = item.nodeid.split("/")[-1] if "test_planted" in item.nodeid else ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A planted bug that is not caught says nothing."""
        if report.failed:
            self.failed.append(report.nodeid)

    def watch(self) -> None:
        """Have every product error say where it was made."""
        from surefoot.errors import SurefootError

        make = SurefootError.__init__

        def noted(error: SurefootError, *words: Any, **more: Any) -> None:
            if self.now:
                self.made[self.now].append((type(error).__name__, tuple(_stack())))
            make(error, *words, **more)

        SurefootError.__init__ = noted  # type: ignore[method-assign]


def _stack() -> list[str]:
    frame, found = sys._getframe(2), []
    while frame is not None:
        if "/surefoot/" in frame.f_code.co_filename:
            found.append(frame.f_code.co_filename.split("/surefoot/")[-1] + ":" + frame.f_code.co_qualname)
        frame = frame.f_back  # type: ignore[assignment]
    return found


def noticed(path: Path, made: dict[str, list[tuple[str, tuple[str, ...]]]], entered: set[str]) -> str:
    """The cell of one entry."""
    errors, words = claims(path)
    places: dict[str, set[str]] = defaultdict(set)
    for test, found in made.items():
        if test.startswith(path.name):
            for name, stack in found:
                if insisted(name, errors) and (place := next((where for where in stack if where in entered), None)):
                    places[name].add(place.removesuffix(".<locals>").split(":")[1].split(".")[-1])
    cells = [f"{name} ({', '.join(f'`{p}`' for p in sorted(places[name]))})" for name in sorted(places)]
    return "; ".join([*cells, *sorted(words)]) or TESTS_ONLY


# -- the page --------------------------------------------------------------------------------------------------------


def rows(page: str) -> list[list[str]]:
    """Cells of the table, without its two header lines."""
    lines = page[page.index(HEADER) :].splitlines()[2:]
    table = lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def counts(cells: list[str]) -> str:
    """The sentence above the table."""
    kinds = Counter(kind_of(cell) for cell in cells)
    said = f"{kinds['error']} of {len(cells)} stop the run with an error, {kinds['other']} end in a verdict of FAIL, a "
    said += f"warning, a metric or a probe, and {kinds['tests']} are noticed by our tests only, not by a run of yours."
    return f"<!-- counts -->\n{said}\n<!-- /counts -->"


def kind_of(cell: str) -> str:
    """error, other or tests."""
    return "tests" if cell == TESTS_ONLY else "error" if "Error" in cell else "other"


def complaints(page: str) -> list[str]:
    """Where the page says something else than the tests assert; without running them."""
    found = []
    listed = rows(page)
    for number, _, file, _, cell in listed:
        errors, words = claims(SILENT / file.strip("`"))
        named = set(re.findall(r"\b(\w+Error)\b", cell))
        strange = sorted(name for name in named if not insisted(name, errors))
        if strange:
            found.append(f"{number}: the page names {strange}, no planted bug insists on it")
        if words - set(cell.split("; ")) or (not named and not words and cell != TESTS_ONLY):
            found.append(f"{number}: the page says {cell!r}, the tests assert {sorted(errors | words)}")
    if counts([row[-1] for row in listed]) not in page:
        found.append("the counts above the table are not those of the table")
    return found


def rewrite(page: str, cells: dict[str, str]) -> str:
    """The page with these cells, by number."""
    lines = page.splitlines(keepends=True)
    for index, line in enumerate(lines):
        match = re.match(r"\| (\d\d+) \|", line)
        if match and match[1] in cells and line.count("|") >= 5 and "test_" in line:
            kept = [cell.strip() for cell in line.strip().strip("|").split("|")][:4]
            lines[index] = f"| {' | '.join([*kept, cells[match[1]]])} |\n"
    return COUNTS.sub(lambda _: counts([row[-1] for row in rows("".join(lines))]), "".join(lines))


def main() -> int:
    """Rewrite the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        found = complaints(page)
        print("\n".join(found) or "docs/failures.md says what the tests assert")
        return 1 if found else 0
    import pytest

    entered, recorder = entered_by_runs(), Recorder()
    if pytest.main(["-q", "-k", "planted", *map(str, sorted(SILENT.glob("test_*.py")))], plugins=[recorder]):
        return 1
    files = {row[0]: SILENT / row[2].strip("`") for row in rows(page)}
    PAGE.write_text(
        rewrite(page, {n: noticed(path, recorder.made, entered) for n, path in files.items()}), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
