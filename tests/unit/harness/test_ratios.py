"""Ratios by cell and commit: a line is read or refused, and a regression beyond the intervals is marked."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

from surefoot_harness.errors import StateError
from surefoot_harness.ratios import RatioRow, append_ratios, checked_ratio, ratio_trends, read_ratios
from surefoot_harness.verdict import Verdict

GOOD = RatioRow("2026-11-15", "a46ab46", "decoding", "HF", "2 cores", 2.0, 1.9, 2.2, "higher")
COST = replace(GOOD, cell="recording", ratio=1.2, low=1.1, high=1.3, better="lower")


def row(day: int, ratio: float, width: float = 0.1, base: RatioRow = GOOD) -> RatioRow:
    return replace(base, date=f"2026-11-{day:02}", ratio=ratio, low=ratio - width, high=ratio + width)


def status(*rows: RatioRow, last: int = 20) -> Verdict:
    (found,) = ratio_trends(rows, last=last)
    return found.status


def trend(path: Path, *words: str) -> Ran:
    return surefoot("trend", str(path), *words, cwd=path.parent)


# -- the rule -------------------------------------------------------------------------------------


def test_worse_beyond_both_intervals_is_a_regression_and_within_them_is_not() -> None:
    assert status(row(1, 2.0), row(2, 1.79)) is Verdict.FAIL
    assert status(row(1, 2.0), row(2, 1.81)) is Verdict.PASS
    assert status(row(1, 2.0), row(2, 3.0)) is Verdict.PASS
    assert status(row(1, 1.2, base=COST), row(2, 1.41, base=COST)) is Verdict.FAIL, "where less is better"
    assert status(row(1, 1.2, base=COST), row(2, 0.5, base=COST)) is Verdict.PASS


def test_a_decline_in_small_steps_is_seen_and_the_window_ends() -> None:
    """Each within its neighbour's interval: the best is what counts."""
    slide = [row(day, 2.0 - 0.05 * day) for day in range(1, 8)]
    assert status(*slide) is Verdict.FAIL
    assert status(*slide, last=2) is Verdict.PASS
    assert status(*reversed(slide)) is Verdict.FAIL, "by date, not by line"


def test_what_cannot_be_judged_is_never_no_change() -> None:
    bare = replace(GOOD, low=None, high=None)
    assert status(GOOD) is Verdict.INCOMPLETE
    assert status(bare, row(20, 1.0)) is Verdict.INCOMPLETE
    assert status(row(1, 2.0), replace(bare, date="2026-11-20")) is Verdict.INCOMPLETE
    other = [GOOD, replace(row(20, 0.5), machine="1 H200")]
    assert [each.status for each in ratio_trends(other)] == [Verdict.INCOMPLETE] * 2, "another machine"


# -- the file -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"ratio": 0}, {"ratio": True}, {"ratio": "2"}, {"ratio": 3.0}, {"low": None}, {"low": -1.0}, {"commit": "HEAD"},
        {"date": "yesterday"}, {"cell": " "}, {"better": "faster"}, {"load": -0.1}, {"limit_share": "half"},
    ],
    ids=str,
)  # fmt: skip
def test_planted_line_that_is_no_ratio_is_refused_by_its_number(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "history.jsonl"
    append_ratios(path, [GOOD])
    with path.open("a") as file:
        file.write(json.dumps(asdict(GOOD) | change) + "\n")
    with pytest.raises(StateError, match="line 2 is no measured ratio"):
        read_ratios(path)
    with pytest.raises(StateError, match="line 2"):
        append_ratios(path, [GOOD])
    with pytest.raises(ValueError):
        checked_ratio(asdict(GOOD) | change)


@pytest.mark.parametrize("line", ["", "{", "[]", "null", '{"ratio": NaN}', '{"ratio": 1, "ratio": 2}', "{} "])
def test_planted_line_that_is_no_row_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(json.dumps(asdict(GOOD)) + "\n" + line + "\n")
    with pytest.raises(StateError, match="line 2"):
        read_ratios(path)


def test_what_was_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert append_ratios(path, [GOOD, COST]) == 2
    assert read_ratios(path) == [GOOD, COST]


# -- through the command --------------------------------------------------------------------------


def test_a_planted_regression_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    append_ratios(path, [GOOD, COST, row(19, 1.5), row(19, 1.21, base=COST)])
    shown = trend(path)
    assert shown.code == 0, shown.err
    assert shown.out.count("REGRESSION") == 1
    assert "FAIL  1.5x [1.4, 1.6] is worse than 2x [1.9, 2.2] of 2026-11-15, a46ab46 (higher is better)" in shown.out
    assert trend(path, "--fail-on-change").code == 1
    assert trend(path, "--test", "recording", "--fail-on-change").code == 0
    found = json.loads(trend(path, "--json").out)["trends"]
    assert [each["status"] for each in found] == ["FAIL", "PASS"]


def test_a_file_that_cannot_be_read_and_a_cell_that_is_not_there_are_typed_errors(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    assert trend(path).code == 3
    path.write_text("nonsense\n")
    refused = trend(path)
    assert (refused.code, refused.out) == (3, "")
    assert "line 1 is no measured ratio" in refused.err
    path.write_text(json.dumps(asdict(GOOD)) + "\n")
    unknown = trend(path, "--test", "encoding")
    assert unknown.code == 3
    assert "measured are: decoding" in unknown.err
