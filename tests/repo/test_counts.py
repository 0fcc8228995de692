"""Counts come from the runner's machine output and equal what it printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from count_tests import CountError, count, main, read_junit
from repo_tree import run_python

SUITE = """
import pytest
@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown")
def test_a(): pass
@pytest.mark.parametrize("x", range(3))
def test_b(x): pass
def test_c(): assert False, "on purpose"
def test_d(): pytest.skip("not today")
@pytest.mark.xfail(reason="known", strict=True)
def test_e(): assert False, "known"
def test_f(broken): pass
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    (tmp_path / "test_suite.py").write_text(SUITE, encoding="utf-8")
    args = [
        "--color=yes",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "--junitxml=suite.xml",
        "test_suite.py",
    ]
    result = run_python("-m", "pytest", *args, cwd=tmp_path)
    (tmp_path / "suite.txt").write_text(result.stdout, encoding="utf-8")
    return tmp_path / "suite.xml"


def test_junit_totals_equal_the_printed_summary(report: Path) -> None:
    counts, records = count(report)
    assert counts == {"passed": 5, "failed": 1, "skipped": 2, "errors": 1}
    assert len(records) == 8, "test_f passed and broke in its teardown: two counts, one record"


def test_each_test_leaves_a_result_record(report: Path) -> None:
    out = report.with_name("results.jsonl")
    assert main([str(report), "--results", str(out)]) == 1, "a failed test makes the total red"
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {tuple(record) for record in records} == {("test", "success", "outcome", "timestamp", "duration")}
    assert [r["success"] for r in records if r["test"].endswith("test_c")] == [False]
    assert all(record["duration"] >= 0 and record["timestamp"] for record in records)


def test_planted_wrong_summary_is_refused(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = report.with_suffix(".txt")
    printed.write_text(printed.read_text(encoding="utf-8").replace("5 passed", "6 passed"), encoding="utf-8")
    assert main([str(report)]) == 3
    assert "the printed summary says" in capsys.readouterr().err


def test_planted_header_that_does_not_add_up_is_refused(report: Path) -> None:
    report.write_text(report.read_text(encoding="utf-8").replace('failures="1"', 'failures="0"'), encoding="utf-8")
    with pytest.raises(CountError, match="add up to 1"):
        read_junit(report)


@pytest.mark.parametrize("text", ["", "<testsuites><testsuite></testsuite></testsuites>", "not xml"])
def test_missing_evidence_is_not_a_pass(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.xml").write_text(text, encoding="utf-8")
    assert main([str(tmp_path / "a.xml")]) == 3
    assert main([str(tmp_path / "gone.xml")]) == 3
