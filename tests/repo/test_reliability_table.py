"""The figures of the reliability page come from docs/figures.json, and that from the reports of real runs."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import figure_rows
import pytest
from figure_rows import MAX_AGE, UNNOTED, FiguresError, merged, parse, read_file, rows_of
from reliability_table import BEGIN, END, PROMISES, SHORT, main, table
from repo_tree import ROOT, run_python

PAGE = f"# Page\n\ntext\n\n{BEGIN}\nold\n{END}\n\nmore text\n"
EMPTY = '{"schema": 1, "rows": []}'
KILLS = {"figure": "P1", "what": "kill -9", "n": 10, "bad": 0, "note": "3 during a resume", "seeds": [4, 7]}
AROUND = {"commit": "abc", "changed": False, "cores": 2, "load": 0.5}


def write(folder: Path, name: str, *cases: str, date: str = "2026-01-02T03:04:05", seconds: float = 90.0) -> None:
    folder.mkdir(exist_ok=True)
    head = f'timestamp="{date}" time="{seconds}" tests="{len(cases)}"'
    (folder / f"{name}.xml").write_text(f"<testsuites><testsuite {head}>{''.join(cases)}</testsuite></testsuites>")
    (folder / f"{name}.json").write_text(json.dumps(AROUND))


def case(value: object = None, inside: str = "", name: str = "test_a", file: str = "tests.faults.test_x") -> str:
    text = json.dumps(value) if isinstance(value, dict) else value
    quoted = str(text).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    noted = "" if value is None else f'<properties><property name="figure" value="{quoted}"/></properties>'
    return f'<testcase classname="{file}" name="{name}">{noted}{inside}</testcase>'


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Arguments for a page and a file of the test's own, in a repository whose commits it makes."""
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "figures.json").write_text(EMPTY)
    places = {"reports": "reports", "page": "page.md", "file": "figures.json", "root": "."}
    return [word for name, path in places.items() for word in (f"--{name}", str(tmp_path / path))]


def git(folder: Path, *argv: str) -> str:
    head = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@x"]
    return subprocess.run([*head, *argv], capture_output=True, text=True, check=True).stdout.strip()


def commits(folder: Path, n: int) -> None:
    if not (folder / ".git").exists():
        git(folder, "init", "-q")
    for _ in range(n):
        git(folder, "commit", "-q", "--allow-empty", "-m", "x")


# -- from reports to the file ------------------------------------------------------------------------
def test_figures_are_added_up_by_name(tmp_path: Path, words: list[str]) -> None:
    other = {"figure": "P6", "what": "disk", "n": 4}
    write(tmp_path / "reports", "faults", case(KILLS), case(KILLS | {"note": "none", "seeds": [9, 9]}), case(other))
    assert main([*words, "--merge", "faults"]) == 0
    page = (tmp_path / "page.md").read_text()
    told = "3 during a resume; none; seeds 4 to 9; 2 cores, load 0.5 before"
    assert f"| P1 | kill -9 | 20 | 0 |  | make faults | abc | 2026-01-02 | {told} |" in page
    assert page.index("| P1 |") < page.index("| P6 |")
    assert page.startswith("# Page\n\ntext\n\n")
    assert page.endswith("\n\nmore text\n")
    assert "old" not in page.replace("more text", "")


def test_a_later_run_replaces_its_own_rows_and_leaves_all_others_with_their_commit(
    tmp_path: Path, words: list[str]
) -> None:
    disk = {"figure": "P6", "what": "disk", "n": 4}
    write(tmp_path / "reports", "faults", case(KILLS), case(disk, file="tests.faults.test_y"))
    assert main([*words, "--merge", "faults"]) == 0
    write(tmp_path / "reports", "faults", case(disk | {"n": 5}, file="tests.faults.test_y"), date="2026-02-03T00:00:00")
    (tmp_path / "reports/faults.json").write_text(json.dumps(AROUND | {"commit": "def", "changed": True}))
    assert main([*words, "--merge", "faults", "--whole"]) == 0
    rows = {row["what"]: row for row in read_file(tmp_path / "figures.json")}
    assert (rows["disk"]["times"], rows["disk"]["commit"], rows["disk"]["date"]) == (5, "def", "2026-02-03")
    assert (rows["kill -9"]["times"], rows["kill -9"]["commit"], rows["kill -9"]["date"]) == (10, "abc", "2026-01-02")
    assert "| def with changes |" in (tmp_path / "page.md").read_text()


def test_what_a_whole_test_file_no_longer_notes_is_gone_and_only_then(tmp_path: Path, words: list[str]) -> None:
    write(tmp_path / "reports", "faults", case(KILLS), case({"figure": "P1", "what": "renamed since", "n": 1}))
    assert main([*words, "--merge", "faults"]) == 0
    write(tmp_path / "reports", "faults", case(KILLS))
    for whole, left in ((False, ["kill -9", "renamed since"]), (True, ["kill -9"])):
        assert main([*words, "--merge", "faults", *["--whole"] * whole]) == 0
        assert [row["what"] for row in read_file(tmp_path / "figures.json")] == left


def test_times_are_kept_as_three_numbers_and_more_than_is_promised_is_a_failure(
    tmp_path: Path, words: list[str]
) -> None:
    quick = {"figure": "P11", "what": "stop", "n": 1, "bad": 0, "limit_s": 10.0}
    write(tmp_path / "reports", "faults", *(case(quick | {"seconds": [second / 10]}) for second in range(1, 101)))
    assert main([*words, "--merge", "faults"]) == 0
    told = "| P11 | stop | 100 | 0 | 5 s median, 9.9 s p99, 10 s longest, 10 s promised |"
    assert told in (tmp_path / "page.md").read_text()
    write(tmp_path / "reports", "faults", case(quick | {"seconds": [10.1]}), case(quick | {"seconds": [0.0123]}))
    assert main([*words, "--merge", "faults"]) == 1
    assert "| P11 | stop | 2 | 1 | 12.3 ms median, 10.1 s p99" in (tmp_path / "page.md").read_text()


def test_how_long_a_whole_run_took_is_published_and_half_of_one_is_not(tmp_path: Path, words: list[str]) -> None:
    write(tmp_path / "reports", "faults", case(KILLS), seconds=1200)
    asked = [*words, "--merge", "faults", "--times", "make test", "make faults"]
    assert main(asked) == 0
    assert "all its tests" not in (tmp_path / "page.md").read_text(), "one of two reports each"
    write(tmp_path / "reports", "test", case(), seconds=540)
    write(tmp_path / "reports", "faults_alone", case(KILLS), seconds=600)
    assert main(asked) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| P24 | `make test`: time of all its tests | 1 | 0 | 540 s, 10 min promised | make test | abc |" in page
    assert "| P24 | `make faults`: time of all its tests | 1 | 0 | 30 min |" in page
    assert "1 tests; test 9.0 min" in page
    assert "| P24 | `make nightly` |  |  |  | not measured yet |" in page
    write(tmp_path / "reports", "test", case(), seconds=601)
    assert main(asked) == 1, "longer than is promised"
    assert "time of all its tests | 1 | 1 | 10 min, 10 min promised |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("how", ["<failure/>", "<error/>"])
def test_a_failed_test_is_a_failure_in_the_table_and_the_exit_code(tmp_path: Path, words: list[str], how: str) -> None:
    write(tmp_path / "reports", "test", case(KILLS, inside=how), case(None, inside=how, name="test_b"))
    assert main([*words, "--merge", "test"]) == 1
    page = (tmp_path / "page.md").read_text()
    assert "| P1 | kill -9 | 10 | 1 |" in page
    assert f"| {UNNOTED} tests/faults/test_x.py | 1 | 1 |" in page
    assert "tests.faults.test_x::test_b" in page
    write(tmp_path / "reports", "test", case(KILLS), case(None, name="test_b"))
    assert main([*words, "--merge", "test", "--whole"]) == 0
    assert UNNOTED not in (tmp_path / "page.md").read_text(), "it passes now"


def test_plain_text_stands_for_itself_and_cannot_break_the_table(tmp_path: Path, words: list[str]) -> None:
    odd = "P13: worst | overrun\n<script>0.3</script> s \x1b[1m"
    texts = [odd.replace("\n", "&#10;").replace("\x1b", ""), '{"n": 3}', "[1]"]
    write(tmp_path / "reports", "test", *map(case, texts))
    assert main([*words, "--merge", "test"]) == 0
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(PROMISES) + 3
    assert all(line.replace("\\|", "").count("|") == 10 for line in lines)
    assert "<script>" not in "".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        '{"what": 3}', '{"what": "x", "n": -1}', '{"what": "x", "n": true}', '{"what": "x", "bad": 0.5}', "NaN", "",
        '{"what": "x", "seconds": [NaN]}', '{"what": "x", "seconds": 3}', '{"what": "x", "seeds": [0.5]}',
    ],
)  # fmt: skip
def test_an_object_that_is_no_figure_is_shown_as_it_is_and_never_counted(text: str) -> None:
    assert parse(text) == {"what": text}


def test_no_evidence_is_not_good_news(tmp_path: Path, words: list[str]) -> None:
    asked = [*words, "--merge", "test"]
    assert main(asked) == 1, "no folder"
    write(tmp_path / "reports", "test", case())
    assert main(asked) == 1, "no figure"
    (tmp_path / "reports" / "test.xml").write_text("<testsuites><torn")
    assert main(asked) == 1, "no XML"
    write(tmp_path / "reports", "test", case(KILLS))
    (tmp_path / "reports" / "test.json").unlink()
    assert main(asked) == 1, "nobody knows the commit"
    write(tmp_path / "reports", "test", case(KILLS))
    (tmp_path / "page.md").write_text("no marks")
    assert main(asked) == 1
    assert (tmp_path / "figures.json").read_text() == EMPTY, "nothing half done"
    (tmp_path / "page.md").write_text(f"{END} {BEGIN}")
    assert main(asked) == 1
    (tmp_path / "page.md").unlink()
    assert main(asked) == 1


def test_reports_of_other_tools_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "reports", "coverage", case(KILLS))
    with pytest.raises(FiguresError, match="holds no report"):
        rows_of(tmp_path / "reports", ["faults"])


def test_rows_from_another_machine_are_added_as_they_are(tmp_path: Path, words: list[str]) -> None:
    commits(tmp_path, 2)
    measured = git(tmp_path, "rev-parse", "--short=10", "HEAD~1")
    row = {"figure": "P23", "what": "kept", "times": 9, "bad": 0, "run": "keeping.py", "tests": [], "date": "2026-01-02",
           "seeds": None, "notes": ["one H200"], "seconds": None, "cores": 16, "load": 0.1}  # fmt: skip
    (tmp_path / "add").write_text(json.dumps(row) + "\n")
    assert main([*words, "--add", str(tmp_path / "add")]) == 1  # of which commit?
    assert main([*words, "--add", str(tmp_path / "add"), "--commit", "never-seen"]) == 1
    assert read_file(tmp_path / "figures.json") == []
    assert main([*words, "--add", str(tmp_path / "add"), "--commit", "HEAD~1"]) == 0
    [kept] = read_file(tmp_path / "figures.json")
    assert (kept["commit"], kept["cores"], kept["notes"]) == (measured, 16, ["one H200"])
    (tmp_path / "add").write_text(json.dumps(row | {"times": "nine", "commit": measured}))
    assert main([*words, "--add", str(tmp_path / "add")]) == 1


def test_what_pytest_itself_writes_is_understood(tmp_path: Path) -> None:
    """With two workers, as the real runs are."""
    (tmp_path / "test_it.py").write_text(
        "import json, pytest\n"
        "@pytest.mark.parametrize('i', range(4))\n"
        "def test_it(record_property, i):\n"
        f"    record_property('figure', json.dumps({KILLS!r}))\n"
    )
    reports = tmp_path / "reports"
    words = ["-q", "-p", "no:cacheprovider", "-p", "xdist.plugin", "--rootdir", str(tmp_path), "-n", "2"]
    done = run_python("-m", "pytest", *words, f"--junitxml={reports}/test.xml", "test_it.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (reports / "test.json").write_text(json.dumps(AROUND))
    (row,) = rows_of(reports, ["test"])
    assert (row["figure"], row["times"], row["bad"], row["run"]) == ("P1", 40, 0, "make test")
    assert row["tests"] == ["test_it.py"]
    assert figure_rows.suite_times(reports / "test.xml")[0] > 0


# -- the check -----------------------------------------------------------------------------------------
@pytest.fixture
def published(tmp_path: Path, words: list[str]) -> list[str]:
    """Figures of the present commit, on the page; `--check` is green."""
    commits(tmp_path, 1)
    write(tmp_path / "reports", "faults", case(KILLS))
    here = figure_rows.surroundings(tmp_path)
    (tmp_path / "reports/faults.json").write_text(json.dumps(here))
    assert main([*words, "--merge", "faults"]) == 0
    assert main([*words, "--check"]) == 0
    return words


def test_the_check_needs_no_reports(tmp_path: Path, published: list[str]) -> None:
    for path in (tmp_path / "reports").iterdir():
        path.unlink()
    assert main([*published, "--check"]) == 0


def test_planted_an_edited_number_on_the_page_is_red(
    tmp_path: Path, published: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(page.read_text().replace("| 10 |", "| 10,000 |"))
    assert main([*published, "--check"]) == 1
    assert "is not what figures.json says" in capsys.readouterr().err
    assert "10,000" in page.read_text(), "a check writes nothing"
    assert main(published) == 0
    assert main([*published, "--check"]) == 0


def test_planted_an_edited_file_or_a_missing_row_is_red(tmp_path: Path, published: list[str]) -> None:
    page, kept = tmp_path / "page.md", tmp_path / "figures.json"
    before = kept.read_text()
    kept.write_text(before.replace('"times": 10', '"times": 11'))
    assert main([*published, "--check"]) == 1
    kept.write_text(EMPTY)
    assert main([*published, "--check"]) == 1, "a row that is gone from the file"
    was = page.read_text()
    assert main(published) == 0
    assert main([*published, "--check"]) == 1, "page and file agree on nothing at all: no evidence"
    page.write_text(was)
    kept.write_text(before)
    lines = page.read_text().splitlines(keepends=True)
    for begins in ("| P1 |", "| P23 |"):
        page.write_text("".join(line for line in lines if not line.startswith(begins)))
        assert main([*published, "--check"]) == 1, f"a page without {begins}"


def test_planted_a_stale_row_is_red_with_the_command_that_measures_it(
    tmp_path: Path, published: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    commits(tmp_path, MAX_AGE)
    assert main([*published, "--check"]) == 0
    commits(tmp_path, 1)
    assert main([*published, "--check"]) == 1
    said = capsys.readouterr().err
    assert "1 figures (P1) are more than 60 commits of the main line old" in said
    assert 'make faults KILLS="x"' in said
    assert main([*published, "--forget-stale"]) == 0
    assert main([*published, "--check"]) == 1
    assert "no evidence" in capsys.readouterr().err, "the only row was stale: nothing is left"
    assert "| P1 | kill -9 at random instants |  |  |  | not measured yet |" in (tmp_path / "page.md").read_text()


def test_a_row_of_a_commit_that_nobody_has_is_red(tmp_path: Path, words: list[str]) -> None:
    commits(tmp_path, 1)
    write(tmp_path / "reports", "faults", case(KILLS))
    assert main([*words, "--merge", "faults"]) == 0
    assert main([*words, "--check"]) == 1


def test_a_row_with_failures_is_red(tmp_path: Path, published: list[str]) -> None:
    kept = tmp_path / "figures.json"
    kept.write_text(kept.read_text().replace('"bad": 0', '"bad": 1'))
    assert main(published) == 1
    assert main([*published, "--check"]) == 1


@pytest.mark.parametrize("what", ["shallow", "no git"])
def test_without_history_only_the_ages_are_left_out_and_it_says_so(
    tmp_path: Path, published: list[str], capsys: pytest.CaptureFixture[str], what: str
) -> None:
    commits(tmp_path, MAX_AGE + 5)
    clone = tmp_path / "clone"
    git(
        tmp_path, "clone", "-q", "--depth", "1", f"file://{tmp_path}", str(clone)
    ) if what == "shallow" else clone.mkdir()
    capsys.readouterr()
    asked = [*published, "--check", "--root", str(clone)]
    if what == "no git":
        asked[-1] = "/proc"  # a folder that no repository is above
    assert main(asked) == 0
    assert "ages not looked at: " in capsys.readouterr().out
    page = tmp_path / "page.md"
    page.write_text(page.read_text().replace("| 10 |", "| 12 |"))
    assert main(asked) == 1, "page and file are compared all the same"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": 2, "rows": []}', '{"schema": 1, "rows": [{}]}', '{"schema": 1, "rows": [3]}']
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, words: list[str], text: str) -> None:
    (tmp_path / "figures.json").write_text(text)
    assert main([*words, "--check"]) == 1


# -- ours ------------------------------------------------------------------------------------------------
def test_our_own_page_is_what_our_own_file_says_in_less_than_a_second() -> None:
    """Its ages too, where there is a history: `make check` runs the same command."""
    best = min(_timed() for _ in range(3))
    assert best < 1.0, "the quick check is to stay quick"


def _timed() -> float:
    began = time.process_time()
    assert main(["--check"]) == 0
    return time.process_time() - began


def test_every_promise_can_be_measured_by_tests_that_exist() -> None:
    assert {figure for figure, _, _ in PROMISES} == {f"P{number}" for number in range(1, 25)}
    assert {figure for figure, begins, _ in PROMISES if not begins} == SHORT.keys()
    for _, _, tests in PROMISES:
        for name in tests.split():
            assert (ROOT / f"tests/faults/test_{name}.py").exists(), name


def test_the_makefile_tries_everything_that_a_promise_needs() -> None:
    text = (ROOT / "Makefile").read_text()
    listed = text.partition("EVERY_KILL := ")[2].partition("KILLS := $(EVERY_KILL)")[0].replace("\\\n", " ").split()
    assert {name for _, _, tests in PROMISES for name in tests.split()} - set(listed) == set()
    check = text.partition("\ncheck:")[2].partition("\n\n")[0]
    assert "scripts/reliability_table.py --check" in check


def test_every_row_of_ours_is_in_its_one_place_in_the_file() -> None:
    path = ROOT / "docs/figures.json"
    assert figure_rows.as_text(read_file(path)) == path.read_text()


def test_merging_nothing_changes_nothing() -> None:
    rows: list[dict[str, Any]] = read_file(ROOT / "docs/figures.json")
    assert merged(rows, []) == rows
    assert table(rows) == table(reversed(rows))
