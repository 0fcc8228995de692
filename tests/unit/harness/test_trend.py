"""The trend of a metric: the rule, its false-alarm rate, and what a history with holes says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from command import surefoot

from surefoot.errors import ConfigError, StateError
from surefoot.harness import trend
from surefoot.harness.trend import NEEDED, flag, read_history, trends
from surefoot.records import Verdict

TEST = "test_a::test_one"


def write(folder: Path, values: list[Any], *, metric: str = "loss", test: str = TEST) -> Path:
    """A history with one session per value; the string "absent" leaves the metric out."""
    history = folder / "unit_results"
    history.mkdir(exist_ok=True)
    for i, value in enumerate(values):
        session = {
            "exit_status": 0,
            "git_commit": f"{i:040x}",
            "dirty": i % 2 == 0,
            "start_time": f"2026-01-{1 + i // 24:02d} {i % 24:02d}:00:00",
            "metrics": {test: {"_elapsed": 1.0} | ({} if value == "absent" else {metric: value})},
        }
        (history / f"{i:04d}.json").write_text(json.dumps(session))
    return history


def noise(count: int, seed: int, *, step: float = 0.0) -> list[float]:
    draw = random.Random(seed)
    return [draw.gauss(10.0, 1.0) + (step if i == count - 1 else 0.0) for i in range(count)]


def alarms(looks: int, *, count: int, step: float = 0.0) -> float:
    """How often the newest of `count` values is flagged."""
    hits = 0
    for seed in range(looks):
        *before, newest = noise(count, seed, step=step)
        hits += bool(flag(newest, before))
    return hits / looks


@pytest.mark.parametrize("count", [9, 10, 11, 12, 16, 21, 51])
def test_steady_noise_is_flagged_in_at_most_one_look_of_a_hundred(count: int) -> None:
    assert alarms(2000, count=count) <= 0.0167  # 1 in 100, and three standard errors of 2000 looks


def test_a_step_of_ten_noise_widths_is_nearly_always_flagged() -> None:
    assert alarms(200, count=21, step=10.0) >= 0.99


def test_planted_limit_that_ignores_how_little_is_known_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trend, "limit", lambda count: 2.6)
    with pytest.raises(AssertionError):
        test_steady_noise_is_flagged_in_at_most_one_look_of_a_hundred(NEEDED + 1)


def test_a_step_stays_flagged_until_the_new_level_fills_half_the_window(tmp_path: Path) -> None:
    values = noise(20, 0) + [value + 50 for value in noise(14, 1)]
    (found,) = trends(read_history(write(tmp_path, values)), "loss", last=20)
    flags = [bool(point.flag) for point in found.points]
    assert flags[:20] == [False] * 20
    assert flags[20:30] == [True] * 10
    assert not flags[-1]


def test_one_outlier_does_not_shift_the_rule() -> None:
    before = [10.0, 11.0, 9.0, 10.5, 9.5, 10.2, 9.8, 10.1, 1e6]
    assert flag(10.4, before) == ""
    assert flag(20.0, before).startswith("above 10.1")


@pytest.mark.parametrize(
    ("value", "before", "flagged"),
    [
        (5.0, [5.0] * 10, False),
        (5.0 + 1e-12, [5.0] * 10, False),
        (5.1, [5.0] * 10, True),
        (9.0, [8.0] * 8 + [9.0, 7.0], False),
        (80.0, [8.0] * 8 + [9.0, 7.0], True),
        (1e308, [-1e308] * 10, True),
        (0.0, [0.0] * 10, False),
    ],
)
def test_counts_and_constants_are_judged_too(value: float, before: list[float], flagged: bool) -> None:
    assert bool(flag(value, before)) == flagged


def judged(tmp_path: Path, values: list[Any]) -> Verdict:
    return trends(read_history(write(tmp_path, values)), "loss")[0].status


@pytest.mark.parametrize(
    ("newest", "status"),
    [(10.0, "PASS"), (99.0, "FAIL"), ("non-finite: nan", "FAIL"), ("absent", "FAIL"), (None, "FAIL"), (True, "FAIL"), ([1], "FAIL")],
    ids=str,
)  # fmt: skip
def test_a_newest_value_that_is_missing_or_no_number_is_never_no_change(
    tmp_path: Path, newest: Any, status: str
) -> None:
    assert judged(tmp_path, [*noise(12, 3), newest]) == status


def test_too_little_history_is_incomplete(tmp_path: Path) -> None:
    assert judged(tmp_path, noise(NEEDED, 1)) is Verdict.INCOMPLETE
    assert judged(tmp_path, [*noise(NEEDED, 1), 10.0]) is Verdict.PASS


@pytest.mark.parametrize("text", ["{ torn", "[]", "{}", '{"start_time": "x", "metrics": {}}', '{"start_time": "2026-01-01 00:00:00", "metrics": []}', '{"a": NaN}', ""])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_and_keeps_the_verdict_open(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, noise(12, 1))
    (folder / "odd name.json").write_text(text)
    history = read_history(folder)
    assert len(history.unreadable) == 1
    assert "odd name.json" in history.unreadable[0]
    assert trends(history, "loss")[0].status is Verdict.INCOMPLETE


def test_sessions_are_ordered_by_time_and_not_by_file_name(tmp_path: Path) -> None:
    folder = write(tmp_path, [1.0, 2.0])
    late = json.loads((folder / "0001.json").read_text()) | {"started_at": "2025-01-01T00:00:00+09:00"}
    (folder / "0001.json").write_text(json.dumps(late))
    (found,) = trends(read_history(folder), "loss")
    assert [point.value for point in found.points] == [2.0, 1.0]


def test_a_test_whose_key_grew_longer_keeps_its_history(tmp_path: Path) -> None:
    folder = write(tmp_path, noise(10, 1))
    session = json.loads((folder / "0009.json").read_text())
    longer = "tests.a.test_a::test_one"
    session |= {"metrics": {longer: {"loss": 10.0}}, "node_ids": {longer: "tests/a/test_a.py::test_one"}}
    (folder / "0010.json").write_text(json.dumps(session | {"start_time": "2026-02-01 00:00:00"}))
    both = session | {"metrics": {TEST: {"loss": 11.0}}, "node_ids": {TEST: "tests/a/test_a.py::test_one"}}
    (folder / "0011.json").write_text(json.dumps(both | {"start_time": "2026-02-02 00:00:00"}))
    found = {each.test: each for each in trends(read_history(folder), "loss")}
    assert len(found["tests/a/test_a.py::test_one"].points) == 12


def test_an_unknown_metric_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    history = read_history(write(tmp_path, [1.0]))
    with pytest.raises(StateError, match="did you mean loss"):
        trends(history, "los")
    with pytest.raises(StateError, match="test_b"):
        trends(history, "loss", "test_b::x")
    with pytest.raises(ConfigError):
        trends(history, "loss", last=3)


# -- through the command line ---------------------------------------------------------------


def test_the_command_prints_a_table_and_fails_on_a_change_when_asked(tmp_path: Path) -> None:
    write(tmp_path, [*noise(12, 3), 99.0])
    done = surefoot("trend", "loss", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "2026-01-01 00:00:00  0000000000  yes" in done.out
    assert "▁" in done.out
    assert "FAIL  the newest value is above" in done.out
    failed = surefoot("trend", "loss", "--fail-on-change", "--json", "--test", TEST, cwd=tmp_path)
    assert failed.code == 1
    whole = json.loads(failed.out)
    assert whole["unreadable"] == []
    assert (whole["trends"][0]["status"], len(whole["trends"][0]["points"])) == ("FAIL", 13)


def test_the_command_has_an_exit_code_for_each_kind_of_nothing(tmp_path: Path) -> None:
    assert surefoot("trend", "loss", cwd=tmp_path).code == 3
    write(tmp_path, noise(12, 3))
    assert surefoot("trend", "reward", cwd=tmp_path).code == 3
    assert surefoot("trend", "loss", "--last", "2", cwd=tmp_path).code == 2
    (tmp_path / "unit_results" / "z.json").write_text("{")
    done = surefoot("trend", "loss", "--fail-on-change", cwd=tmp_path)
    assert done.code == 1
    assert "z.json" in done.err
