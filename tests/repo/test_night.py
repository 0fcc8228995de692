"""The night in parts: which parts there are, what comes next, what is recorded, and that the last full night is young."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import figure_rows
import night
import psutil
import pytest
from figure_rows import MAX_AGE, FiguresError
from night import Night, Part, counted, estimate, in_turn, parts, problems, run_parts, together, with_records
from repo_tree import ROOT

A, B, C = (Part(f"tests/runs/test_{name}.py") for name in "abc")
RARE = "import pytest\n@pytest.mark.nightly\ndef test_long(): assert True, 'it is'\n"


def record(commit: str = "new", outcome: str = "passed", seconds: float = 9.0) -> dict[str, Any]:
    failed = [] if outcome == "passed" else ["test_x"]
    return {"commit": commit, "outcome": outcome, "failed": failed, "seconds": seconds, "passed": 1, "date": "2026"}


# -- the real tree -----------------------------------------------------------------------------------


def test_the_last_full_night_is_young_and_all_of_it_passed() -> None:
    found = night.read()
    assert problems(found, parts(), night.ages(found)) == []


def test_the_list_of_what_never_ran_only_gets_shorter() -> None:
    """Against the first version of the file, which git has; a clone without a history cannot say."""
    if why := figure_rows.why_no_history(ROOT):
        pytest.skip(why)
    first = figure_rows._git(ROOT, "log", "--diff-filter=A", "--format=%H", "--", str(night.FILE))
    if not first:
        pytest.skip("the file of records was not committed yet")
    text = figure_rows._git(ROOT, "show", f"{first.split()[-1]}:{night.FILE}")
    assert text is not None, "git knows a commit and not what is in it"
    assert set(night.read().not_yet) <= set(json.loads(text)["not_yet"]), "run it instead: scripts/night.py --parts"


def test_every_file_that_keeps_tests_from_a_day_is_a_part_of_the_night() -> None:
    known = parts()
    names = [part.name for part in known]
    assert len(names) == len(set(names)) > 150
    slices = [name for name in names if name.startswith("tests/faults/test_every_failpoint.py ")]
    assert len(slices) == 12
    assert "tests/runs/test_gpu.py" not in names, "make test-gpu runs it"
    assert all((ROOT / part.file).is_file() for part in known)


# -- which parts, and in what order ------------------------------------------------------------------


def test_marks_make_a_part_and_words_in_strings_do_not(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    texts = {
        "rare": RARE,
        "word": "X = '@pytest.mark.nightly'\ndef test_x(): pass\n",
        "turn": RARE.replace("nightly", "turns(3)"),
        "gpu": RARE.replace("@pytest.mark.nightly", "@pytest.mark.gpu('learn')\n@pytest.mark.nightly"),
        "long": "def test_x(): pass\n",
    }
    for name, text in texts.items():
        (tmp_path / "tests" / f"test_{name}.py").write_text(text)
    (tmp_path / "tests" / "times.json").write_text(json.dumps({"long": {"test_long.py::test_x": 3.0}}))
    assert parts(tmp_path) == [
        Part("tests/test_long.py", required=False),
        Part("tests/test_rare.py"),
        Part("tests/test_turn.py"),
    ]


def test_never_run_comes_first_then_the_longest_untouched_and_this_commit_is_done() -> None:
    also = Part("tests/unit/test_d.py", required=False)
    known, age = [A, B, C, also], {"old": 50, "older": 59, "new": 0}
    found = Night({A.name: record("old"), B.name: record("older")}, [])
    assert in_turn(known, found, age, "new", {}) == [C, also, B, A]
    failed = Night({A.name: record(), B.name: record(outcome="failed"), C.name: record()}, [])
    assert in_turn([A, B, C], failed, age, "new", {}) == [B], "what failed is tried again"


def test_only_what_ends_in_time_begins_and_short_files_share_a_call() -> None:
    found = Night({A.name: record(seconds=100), B.name: record(seconds=5), C.name: record(seconds=6)}, [])
    assert together([A, B, C], 60, found, {}) == [B, C]
    assert together([A, B, C], 600, found, {}) == [A]
    assert together([A, B, C], 11.5, found, {}) == [B], "with its start C would be too late"
    assert together([A, B, C], 5, found, {}) == []
    assert together([A], 299, Night({}, []), {}) == [], "nobody knows how long it takes"
    kills = Part("tests/faults/test_kills.py")
    known = Night({kills.name: record(seconds=5), B.name: record(seconds=5)}, [])
    assert together([kills, B], 600, known, {}) == [kills], "it notes figures"
    assert estimate(Part("tests/unit/test_d.py", required=False), found, {"tests/unit/test_d.py": 3.0}) == 9.0


# -- what is red -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "not_yet", "word"),
    [
        ({}, [], "never run whole"),
        ({A.name: record("old")}, [], f"last run {MAX_AGE + 1} commits ago"),
        ({A.name: record(outcome="failed")}, [], "failed at new: test_x"),
        ({A.name: record()}, [A.name], "take it off"),
        ({A.name: record()}, ["tests/gone.py"], "take it off"),
    ],
    ids=["never run", "old", "failed", "run and on the list", "gone and on the list"],
)
def test_planted_gaps_are_seen(records: dict[str, Any], not_yet: list[str], word: str) -> None:
    (finding,) = problems(Night(records, not_yet), [A], {"old": MAX_AGE + 1, "new": 0})
    assert word in finding


def test_a_full_young_night_is_in_order_and_rare_files_that_days_run_whole_are_not_asked_for() -> None:
    known = [A, B, Part("tests/unit/test_d.py", required=False)]
    assert problems(Night({A.name: record("old")}, [B.name]), known, {"old": MAX_AGE}) == []
    assert problems(Night({A.name: record("old")}, [B.name]), known, None) == [], "no history, no age"


def test_a_record_takes_its_part_off_the_list_and_files_that_are_gone_leave_it() -> None:
    found = Night({"tests/gone.py": record()}, [A.name, B.name, "tests/gone_too.py"])
    assert with_records(found, {A.name: record()}, [A, B]) == Night({A.name: record()}, [B.name])


# -- running -----------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one long test, which runs without workers; its name decides the figures' files too."""
    root = tmp_path / "repo"
    (root / "tests/faults").mkdir(parents=True)
    (root / "docs").mkdir()
    shutil.copy(ROOT / "tests/conftest.py", root / "tests/conftest.py")
    (root / "pytest.ini").write_text("[pytest]\nmarkers =\n  nightly: x\naddopts = -p no:cacheprovider\n")
    (root / "tests/faults/test_kills.py").write_text(RARE)
    (root / "docs/night.json").write_text('{"records": {}, "not_yet": ["tests/faults/test_kills.py"]}')
    (root / "docs/figures.json").write_text('{"schema": 1, "rows": []}')
    (root / "docs/reliability.md").write_text("<!-- figures -->\n<!-- /figures -->\n")
    (root / ".gitignore").write_text(".reports\n__pycache__\n.hypothesis\n")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "x")
    monkeypatch.setattr(night, "ALONE", ("tests/faults/test_kills.py",))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return root


def git(folder: Path, *words: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x", *words]
    subprocess.run(command, capture_output=True, check=True)


def test_a_part_leaves_a_record_of_its_commit_and_the_whole_night_its_time(tree: Path) -> None:
    known = parts(tree)
    noted = (
        'def test_long(record_property):\n    record_property(\'figure\', \'{"figure": "P1", "what": "kill", "n": 3}\')'
    )
    (tree / "tests/faults/test_kills.py").write_text(RARE.replace("def test_long(): assert True, 'it is'", noted))
    git(tree, "commit", "-qam", "x")
    assert run_parts(known, known, 6, tree) == 0
    found = night.read(tree)
    one = found.records["tests/faults/test_kills.py"]
    assert (one["commit"], one["outcome"], one["passed"], found.not_yet) == (night.state(tree)[0], "passed", 1, [])
    assert problems(found, known, night.ages(found, tree)) == []
    rows = {row["what"]: row for row in figure_rows.read_file(tree / "docs/figures.json")}
    assert (rows["kill"]["times"], rows["kill"]["run"]) == (3, "make nightly")
    assert rows["`make nightly`: time of all its tests"]["notes"][0].startswith("1 tests in 1 parts")
    assert "| P1 | kill | 3 |" in (tree / "docs/reliability.md").read_text()
    head, age = night.state(tree)[0], night.ages(found, tree)
    assert in_turn(known, found, age, head, {}) == [], "a night that is started again goes on"


def test_a_test_that_fails_is_recorded_by_name(tree: Path) -> None:
    (tree / "tests/faults/test_kills.py").write_text(RARE.replace("True", "False"))
    git(tree, "commit", "-qam", "x")
    known = parts(tree)
    assert run_parts(known, known, 6, tree) == 1
    (finding,) = problems(night.read(tree), known, None)
    assert "failed at" in finding
    assert "test_long" in finding


def test_a_tree_with_changes_is_not_recorded_and_time_that_is_over_starts_nothing(tree: Path) -> None:
    known = parts(tree)
    assert run_parts(known, known, 0.1, tree) == 0
    (tree / "tests/faults/test_kills.py").write_text(RARE + "\n")
    with pytest.raises(FiguresError, match="has changes"):
        run_parts(known, known, 6, tree)
    assert night.read(tree) == Night({}, ["tests/faults/test_kills.py"])


def test_a_tree_that_changes_meanwhile_is_not_recorded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(chosen: list[Part], seconds: float, root: Path) -> dict[str, Any]:
        git(root, "commit", "-q", "--allow-empty", "-m", "y")
        return {part.name: record() for part in chosen}

    monkeypatch.setattr(night, "run", run)
    with pytest.raises(FiguresError, match="changed while"):
        run_parts(parts(tree), parts(tree), 10, tree)
    assert night.read(tree).records == {}


def test_skipped_whole_or_without_a_report_is_no_pass(tmp_path: Path) -> None:
    (gone,) = counted(tmp_path / "none.xml", [A], 3.0, "pytest ended with 3")
    assert (gone["outcome"], gone["failed"]) == ("failed", ["pytest ended with 3"])
    case = '<testcase classname="tests.runs.test_{}" name="test_x" time="{}">{}</testcase>'
    cases = case.format("a", 3, "") + case.format("b", 0, "<skipped/>") + case.format("c", 1, "<error/>")
    (tmp_path / "x.xml").write_text(f"<testsuite>{cases}</testsuite>")
    a, b, c = counted(tmp_path / "x.xml", [A, B, C], 8.0, "")
    assert (a["outcome"], a["passed"], a["seconds"]) == ("passed", 1, 6.0)
    assert (b["failed"], c["failed"]) == (["every test was skipped"], ["test_x"])


def test_slices_leave_no_test_out_and_none_twice(tree: Path) -> None:
    text = "import pytest\n@pytest.mark.parametrize('n', range(12))\ndef test_x(n): pass\n"
    (tree / "tests/faults/test_kills.py").write_text(text)
    ran: list[str] = []
    for k in (1, 2, 3):
        words = ["-m", "pytest", "--collect-only", "-q", f"--slice={k}/3", "tests"]
        done = subprocess.run(
            [night.sys.executable, *words], cwd=tree, env={**os.environ}, capture_output=True, text=True, check=True
        )
        mine = [line for line in done.stdout.splitlines() if "::" in line]
        assert 0 < len(mine) < 12, done.stdout
        ran += mine
    assert len(ran) == len(set(ran)) == 12


STOPPED = """
import subprocess, sys, time
sys.path[:0] = ["scripts"]
import night
from surefoot.system.process import Child

def run_parts(*_):
    with Child.start([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        print(child.pid, flush=True)
        child.wait(60)
    return 0

night.run_parts = run_parts
sys.exit(night.main(["--parts", "test_kills"]))
"""


def test_a_night_that_is_told_to_end_leaves_no_test_running() -> None:
    with subprocess.Popen([sys.executable, "-c", STOPPED], cwd=ROOT, stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        under_way = int(asked.stdout.readline())
        asked.terminate()
        assert asked.wait(30) == 128 + signal.SIGTERM
    assert not psutil.pid_exists(under_way)
