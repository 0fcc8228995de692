from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import StateError
from surefoot.harness.suites import verdicts
from surefoot.harness.suites.manifest import DENY
from surefoot.harness.suites.verdicts import Part, denied, new_folder_name, overall, read_parts, report, write_part
from surefoot.records import Verdict


def part(name: str, verdict: Verdict = Verdict.PASS, **changes: Any) -> Part:
    given: dict[str, Any] = dict(name=name, verdict=verdict, return_code=0 if verdict is Verdict.PASS else 1, command=["t"], duration=1.5)  # fmt: skip
    return Part(**given | changes)


def six_parts_of_which_one_failed(folder: Path) -> None:
    for number in range(6):
        write_part(folder, part(f"p{number}", Verdict.FAIL if number == 3 else Verdict.PASS), DENY)
    text, verdict = report(folder)
    assert verdict == Verdict.FAIL
    assert "overall  FAIL" in text


def test_six_parts_of_which_one_failed_are_a_fail(tmp_path: Path) -> None:
    six_parts_of_which_one_failed(tmp_path)


def test_planted_percentage_rule_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_share(parts: list[dict[str, Any]]) -> Verdict:
        return Verdict.PASS if sum(p["success"] for p in parts) / len(parts) > 0.8 else Verdict.FAIL

    monkeypatch.setattr(verdicts, "overall", by_share)
    with pytest.raises(AssertionError):
        six_parts_of_which_one_failed(tmp_path)


def test_a_part_has_every_field_and_its_texts(tmp_path: Path) -> None:
    write_part(tmp_path, part("a/b", stdout="said", stderr="judged"), DENY)
    record = json.loads((tmp_path / "a__b.json").read_text())
    assert set(record) >= {"success", "return_code", "output", "command", "name", "timestamp", "duration"}
    assert (record["success"], record["name"], record["output"]) == (True, "a/b", "said")
    assert (tmp_path / "a__b.stdout.txt").read_text() == "said"
    assert (tmp_path / "a__b.stderr.txt").read_text() == "judged"


def test_secrets_are_taken_out_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-value")
    write_part(tmp_path, part("a", stdout="x s3cr3t-value", stderr="s3cr3t-value", command=["--t=s3cr3t-value"]), DENY)
    assert all("s3cr3t" not in path.read_text() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        "WARNING: import failed: flash",
        "UserWarning: failed to register op",
        "ERROR registration failed",
        "WARN fallback used",
    ],
)
def test_a_warning_on_the_deny_list_turns_the_part_red(tmp_path: Path, line: str) -> None:
    record = write_part(tmp_path, part("a", stdout=f"fine\n{line}\nfine"), DENY)
    assert (record["success"], record["verdict"], record["warnings"]) == (False, "FAIL", [line])


@pytest.mark.parametrize(
    "line", ["sample: what is a fallback used for?", "WARNING: slow disk", "0 import failed tests"]
)
def test_ordinary_lines_are_not_accused(line: str) -> None:
    assert denied(line, DENY) == []


def test_the_deny_list_can_be_another(tmp_path: Path) -> None:
    assert denied("WARNING: slow disk", ["slow disk"]) == ["WARNING: slow disk"]


@pytest.mark.parametrize("verdict", [Verdict.SKIP, Verdict.INCOMPLETE, Verdict.ERROR, Verdict.FAIL])
def test_whatever_is_not_a_pass_is_not_a_pass(tmp_path: Path, verdict: Verdict) -> None:
    write_part(tmp_path, part("a"), DENY)
    write_part(tmp_path, part("b", verdict, return_code=0), DENY)
    assert overall(read_parts(tmp_path)) == verdict


def test_optional_parts_do_not_decide_and_alone_prove_nothing(tmp_path: Path) -> None:
    write_part(tmp_path, part("b", Verdict.ERROR, required=False), DENY)
    assert overall(read_parts(tmp_path)) == Verdict.FAIL
    write_part(tmp_path, part("a"), DENY)
    assert overall(read_parts(tmp_path)) == Verdict.PASS


@pytest.mark.parametrize("change", [{"return_code": 1}, {"success": False}, {"warnings": ["x"]}])
def test_a_part_that_contradicts_itself_is_not_a_pass(tmp_path: Path, change: dict[str, Any]) -> None:
    record = write_part(tmp_path, part("a"), DENY)
    (tmp_path / "a.json").write_text(json.dumps(record | change))
    assert report(tmp_path)[1] == Verdict.FAIL


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"name": "a"}'])
def test_a_torn_or_foreign_part_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(StateError):
        report(tmp_path)


def test_an_unknown_verdict_is_refused(tmp_path: Path) -> None:
    record = write_part(tmp_path, part("a"), DENY)
    (tmp_path / "a.json").write_text(json.dumps(record | {"verdict": "GREEN"}))
    with pytest.raises(StateError, match="verdict"):
        report(tmp_path)


def test_an_empty_or_missing_folder_proves_nothing(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StateError, match="holds no results"):
            report(folder)


def test_the_report_is_made_from_the_json_only(tmp_path: Path) -> None:
    record = write_part(tmp_path, part("a", stdout="ok"), DENY)
    (tmp_path / "a.stdout.txt").write_text("ERROR everything burns")
    before = report(tmp_path)
    assert before[1] == Verdict.PASS
    (tmp_path / "a.json").write_text(json.dumps(record | {"name": "renamed"}))
    assert "renamed" in report(tmp_path)[0]


def test_a_folder_is_named_by_its_moment() -> None:
    assert new_folder_name(datetime.datetime(2026, 1, 2, 3, 4, 5)) == "test_results_20260102_030405"
