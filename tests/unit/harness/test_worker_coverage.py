"""Coverage of workers: what a record means, and what is never called complete."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness import worker_coverage
from surefoot.harness.worker_coverage import CoverageReport, meets, processes
from surefoot.harness.worker_coverage_child import options_of


def record(folder: Path, name: str, *events: str, tail: str = "", data: bool = False, **hello: Any) -> None:
    lines = [json.dumps({"event": "hello", "argv": ["python", name], **hello})]
    lines += [json.dumps({"event": event, "why": "no coverage here"}) for event in events]
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n" + tail)
    if data:
        (folder / f"{name}.cov").write_bytes(b"")


def test_a_record_without_an_end_is_a_process_that_did_not_finish(tmp_path: Path) -> None:
    record(tmp_path, "a", "touched", "end", data=True)
    record(tmp_path, "b", "touched")
    record(tmp_path, "c", "touched", tail='{"event": "en')
    record(tmp_path, "d", inherited=True)
    record(tmp_path, "e", "blind")
    seen = {process.name: process for process in processes(tmp_path)}
    assert [name for name in "abcde" if seen[name].ended] == ["a"]
    assert [name for name in "abcde" if seen[name].touched] == ["a", "b", "c", "d"]
    assert seen["e"].blind == ("no coverage here",)
    assert seen["a"].has_data
    assert not seen["b"].has_data


@pytest.mark.parametrize(
    ("lost", "cut", "blind", "line"),
    [
        ([], [], [], "coverage 83.1 %"),
        (["a", "b"], [], [], "coverage >= 83.1 %, lower bound: 2 workers left no data"),
        (["a"], [], ["why"], "coverage >= 83.1 %, lower bound: 1 worker left no data, 1 process could not be measured"),
        ([], ["a"], [], "coverage >= 83.1 %, lower bound: 1 worker ended by force after the last save"),
    ],
)
def test_the_line_says_lower_bound_exactly_when_something_was_lost(
    lost: list[str], cut: list[str], blind: list[str], line: str
) -> None:
    report = CoverageReport(83.19, [("a.py", 10, 2, 99.96)], 1, 3, lost, cut, blind)
    assert report.line == line
    assert report.lower_bound is (line != "coverage 83.1 %")
    assert report.as_json()["lower_bound"] is report.lower_bound
    assert "99.9 %" in report.text(), "rounded down: 100 % means all of it"


@pytest.mark.parametrize(("limit", "enough"), [(None, True), (83.1, True), (83.2, False), (100, False), (0, True)])
def test_the_limit_is_compared_with_the_exact_number(limit: float | None, enough: bool) -> None:
    assert meets(83.1, limit) is enough


@pytest.mark.parametrize("limit", [-1, 101, float("nan"), float("inf")])
def test_a_limit_that_is_no_percentage_is_refused(limit: float) -> None:
    with pytest.raises(ConfigError, match="fail-under"):
        meets(50, limit)


def test_no_run_is_not_a_percentage(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no run"):
        worker_coverage.report(tmp_path)


def test_a_run_in_which_nothing_was_measured_is_not_a_percentage(tmp_path: Path) -> None:
    folder = worker_coverage._new_run(tmp_path / "data", [tmp_path], ["true"], 0)
    record(folder, "a", "blind")
    record(folder, "b", "touched")
    with pytest.raises(StateError, match="no lines are no evidence") as caught:
        worker_coverage.report(tmp_path / "data")
    assert "no coverage here" in caught.value.what
    assert "left no data: python b" in caught.value.what


def test_missing_coverage_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "coverage", None)
    with pytest.raises(ConfigError, match="pip install"):
        worker_coverage.run(["true"], tmp_path, [tmp_path])


@pytest.mark.parametrize(
    "words", [{"command": []}, {"sources": [Path("no such folder")]}, {"save_every": float("nan")}]
)
def test_bad_arguments_are_refused_before_anything_starts(tmp_path: Path, words: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"command": ["true"], "data": tmp_path / "data", "sources": [tmp_path], **words}
    with pytest.raises(ConfigError):
        worker_coverage.run(**asked)
    assert not (tmp_path / "data").exists()


def test_a_data_folder_that_pythonpath_would_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PYTHONPATH"):
        worker_coverage.run(["true"], tmp_path / "a:b", [tmp_path])


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-c", "-I"], []),
        (["-I", "-c", "x"], ["-I"]),
        (["script.py", "-I"], []),
        (["-m", "x", "-S"], []),
        (["-W", "error", "-bb", "-Es", "x.py"], ["-bb", "-Es"]),
        (["-X", "-I", "-"], []),
        ([], []),
    ],
)
def test_only_the_interpreters_own_options_count(words: list[str], options: list[str]) -> None:
    assert options_of(words) == options
