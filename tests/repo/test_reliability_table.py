"""The figures of the reliability page come from the reports; what the reports do not say is not in the table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reliability_table import BEGIN, END, UNNOTED, FiguresError, main, parse, read_rows
from repo_tree import run_python

PAGE = f"# Page\n\ntext\n\n{BEGIN}\nold\n{END}\n\nmore text\n"


def write(folder: Path, name: str, *cases: str, date: str = "2026-01-02T03:04:05") -> None:
    folder.mkdir(exist_ok=True)
    body = "".join(cases)
    (folder / f"{name}.xml").write_text(f'<testsuites><testsuite timestamp="{date}">{body}</testsuite></testsuites>')


def case(value: object = None, inside: str = "", name: str = "test_a") -> str:
    text = json.dumps(value) if isinstance(value, dict) else value
    quoted = str(text).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    noted = "" if value is None else f'<properties><property name="figure" value="{quoted}"/></properties>'
    return f'<testcase classname="tests.x" name="{name}">{noted}{inside}</testcase>'


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    (tmp_path / "page.md").write_text(PAGE)
    return ["--reports", str(tmp_path / "reports"), "--page", str(tmp_path / "page.md")]


KILLS = {"figure": "P1", "what": "kill -9", "n": 10, "bad": 0, "note": "3 during a resume"}


def test_figures_are_added_up_by_name_and_kind_of_run(tmp_path: Path, words: list[str]) -> None:
    write(
        tmp_path / "reports",
        "side",
        case(KILLS),
        case(KILLS | {"note": "none"}),
        case({"figure": "P6", "what": "disk", "n": 4}),
    )
    write(tmp_path / "reports", "nightly_1", case(KILLS | {"n": 1200}), date="2026-01-09T01:00:00")
    assert main(words) == 0
    page = (tmp_path / "page.md").read_text()
    assert "| P1 | kill -9 | 20 | 0 | every day | 2026-01-02 | 3 during a resume; none |" in page
    assert "| P1 | kill -9 | 1,200 | 0 | nightly | 2026-01-09 | 3 during a resume |" in page
    assert page.index("P1") < page.index("P6")
    assert page.startswith("# Page\n\ntext\n\n")
    assert page.endswith("\n\nmore text\n")
    assert "old" not in page.replace("more text", "")


def test_the_check_is_green_after_writing_and_red_when_either_side_changes(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "reports", "faults", case(KILLS))
    assert main([*words, "--check"]) == 1
    assert main(words) == 0
    assert main([*words, "--check"]) == 0
    page = tmp_path / "page.md"
    page.write_text(page.read_text().replace("| 10 |", "| 10,000 |"))
    assert main([*words, "--check"]) == 1
    assert "is not what the reports say" in capsys.readouterr().err
    assert "10,000" in page.read_text(), "a check writes nothing"
    assert main(words) == 0
    write(tmp_path / "reports", "faults", case(KILLS), case(KILLS))
    assert main([*words, "--check"]) == 1


@pytest.mark.parametrize("how", ["<failure/>", "<error/>"])
def test_a_failed_test_is_a_failure_in_the_table_and_the_exit_code(tmp_path: Path, words: list[str], how: str) -> None:
    write(tmp_path / "reports", "side", case(KILLS, inside=how), case(None, inside=how, name="test_b"))
    assert main(words) == 1
    page = (tmp_path / "page.md").read_text()
    assert "| P1 | kill -9 | 10 | 1 |" in page
    assert f"| {UNNOTED} | 1 | 1 |" in page
    assert "tests.x::test_b" in page


def test_plain_text_stands_for_itself_and_cannot_break_the_table(tmp_path: Path, words: list[str]) -> None:
    odd = "P13: worst | overrun\n<script>0.3</script> s \x1b[1m"
    write(
        tmp_path / "reports",
        "side",
        case(odd.replace("\n", "&#10;").replace("\x1b", "")),
        case('{"n": 3}'),
        case("[1]"),
    )
    assert main(words) == 0
    lines = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert all(line.replace("\\|", "").count("|") == 8 for line in lines)
    assert "<script>" not in "".join(lines)


@pytest.mark.parametrize(
    "text",
    ['{"what": 3}', '{"what": "x", "n": -1}', '{"what": "x", "n": true}', '{"what": "x", "bad": 0.5}', "NaN", ""],
)
def test_an_object_that_is_no_figure_is_shown_as_it_is_and_never_counted(text: str) -> None:
    assert parse(text) == {"what": text}


def test_no_evidence_is_not_good_news(tmp_path: Path, words: list[str]) -> None:
    assert main(words) == 1, "no folder"
    write(tmp_path / "reports", "side", case())
    assert main(words) == 1, "no figure"
    (tmp_path / "reports" / "side.xml").write_text("<testsuites><torn")
    assert main(words) == 1, "no XML"
    write(tmp_path / "reports", "side", case(KILLS))
    (tmp_path / "page.md").write_text("no marks")
    assert main(words) == 1
    (tmp_path / "page.md").write_text(f"{END} {BEGIN}")
    assert main(words) == 1
    (tmp_path / "page.md").unlink()
    assert main(words) == 1


def test_reports_of_other_tools_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "reports", "coverage", case(KILLS))
    with pytest.raises(FiguresError, match="holds no report"):
        read_rows(tmp_path / "reports")


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
    done = run_python("-m", "pytest", *words, f"--junitxml={reports}/side.xml", "test_it.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = read_rows(reports)
    assert (row.figure, row.times, row.bad, row.kind) == ("P1", 40, 0, "every day")
