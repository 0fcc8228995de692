"""Every kind of source is read, nothing is dropped in silence, and what cannot be read is a `StateError`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import StateError
from surefoot.harness.checks import run_checks
from surefoot.harness.series import Metrics, Series, describe
from surefoot.harness.sources import load_metrics
from surefoot.records import Verdict


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_our_own_run_folder_is_read_strictly(tmp_path: Path) -> None:
    write(tmp_path / "environment.json", {})
    write(tmp_path / "metrics.jsonl", lines({"step": 1, "loss": 0.5}, {"step": 1, "eval_loss": 0.4}))
    metrics = load_metrics(tmp_path)
    assert dict(metrics["loss"]) == {1: 0.5}
    assert dict(metrics["eval_loss"]) == {1: 0.4}
    write(tmp_path / "metrics.jsonl", '{"step": 1, "loss": NaN}\n')
    with pytest.raises(StateError, match="NaN is not a number"):
        load_metrics(tmp_path)
    write(tmp_path / "metrics.jsonl", '{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    with pytest.raises(StateError, match="torn"):
        load_metrics(tmp_path)


def test_a_strangers_lines_keep_nan_text_null_and_bools_as_they_are(tmp_path: Path) -> None:
    text = '{"step": 1, "a": NaN, "b": "NaN", "c": null, "d": true, "e": "0.5", "f": Infinity, "g": 1, "n": {"x": 1}}\n'
    metrics = load_metrics(write(tmp_path / "log.jsonl", text))
    assert math.isnan(metrics["a"][1])
    assert math.isnan(metrics["b"][1])
    assert [metrics[name][1] for name in "cdefg"] == [None, True, "0.5", math.inf, 1]
    assert "n" not in metrics
    for name in "abcdef":
        (row,) = run_checks(metrics, [f'data["{name}"]["1"] < 100']).rows
        assert row.status is Verdict.FAIL
        assert "at step 1" in row.message


@pytest.mark.parametrize("key", ["step", "global_step", "_step"])
def test_the_usual_names_of_a_step_are_known(tmp_path: Path, key: str) -> None:
    metrics = load_metrics(write(tmp_path / "log.jsonl", lines({key: 3.0, "loss": 0.5})))
    assert dict(metrics["loss"]) == {3: 0.5}


def test_rows_without_a_step_and_steps_logged_twice_are_told(tmp_path: Path) -> None:
    path = write(
        tmp_path / "log.jsonl",
        lines({"config": 1}, {"step": 1, "loss": 0.5}, {"step": 1, "loss": 0.7}, {"step": 1.5, "loss": 9}, [1]),
    )
    metrics = load_metrics(path)
    assert dict(metrics["loss"]) == {1: 0.7}
    assert metrics.notes == [
        "3 rows without a step were passed over, first row 1",
        "some steps were logged twice, the later row counts: loss",
    ]


def test_a_torn_last_line_of_a_stranger_is_left_out_and_told(tmp_path: Path) -> None:
    metrics = load_metrics(write(tmp_path / "log.jsonl", lines({"step": 1, "loss": 0.5}) + '{"step": 2, "lo'))
    assert dict(metrics["loss"]) == {1: 0.5}
    assert "row 2 is torn" in metrics.notes[0]
    for broken in ('{"step": 1, "loss": 0.5\n{"step": 2, "loss": 0.5}\n', '{"step": 1, "lo'):
        with pytest.raises(StateError, match="line 1"):
            load_metrics(write(tmp_path / "log.jsonl", broken))


def test_metric_step_value_files_keep_every_step(tmp_path: Path) -> None:
    content = {"train/loss": {"10": 0.5, "2": 0.7, "0": 0.9}, "score": 0.3, "empty": {}, "odd": {"x": 1}, "list": [1]}
    metrics = load_metrics(write(tmp_path / "metrics.json", content))
    assert metrics["train/loss"].steps == (0, 2, 10)
    assert metrics["score"].single
    assert len(metrics["empty"]) == 0
    odd, listed, score = run_checks(
        metrics, ['max(data["odd"]) < 9', 'max(data["list"]) < 9', 'data["score"] >= 0.3']
    ).rows
    assert (odd.status, odd.message) == (Verdict.FAIL, "odd cannot be used: 'x' is not a step")
    assert (listed.status, listed.message) == (Verdict.FAIL, "list cannot be used: it is a list, not step -> value")
    assert score.status is Verdict.PASS


def test_trl_writes_trainer_state_and_a_folder_that_holds_one_is_a_source(tmp_path: Path) -> None:
    history = [{"step": 1, "loss": 0.5, "epoch": 0.1}, {"step": 2, "loss": 0.4}, {"step": 2, "eval_loss": 0.6}]
    state = write(tmp_path / "trainer_state.json", {"log_history": history, "global_step": 2})
    for source in (state, tmp_path):
        metrics = load_metrics(source)
        assert dict(metrics["loss"]) == {1: 0.5, 2: 0.4}
        assert dict(metrics["eval_loss"]) == {2: 0.6}


def test_of_several_checkpoints_the_last_one_is_read_and_told(tmp_path: Path) -> None:
    for number in (5, 10, 9):
        history = {"log_history": [{"step": number, "loss": float(number)}]}
        write(tmp_path / f"checkpoint-{number}" / "trainer_state.json", history)
    metrics = load_metrics(tmp_path)
    assert dict(metrics["loss"]) == {10: 10.0}
    assert metrics.notes == ["read checkpoint-10/trainer_state.json"]


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("metrics.json", "", "not JSON"),
        ("metrics.json", "{", "not JSON"),
        ("metrics.json", "{}", "no recorded value"),
        ("metrics.json", '{"loss": {}}', "no recorded value"),
        ("metrics.json", "3", "neither"),
        ("metrics.json", '{"loss": {"1": 1, "1": 2}}', "there more than once"),
        ("metrics.json", '{"loss": {"1": 1, "01": 2}}', "two spellings"),
        ("metrics.json", '{"a":' * 100_000, "not JSON"),
        ("metrics.json", "\udcff", "not JSON"),
        ("log.jsonl", "", "no recorded value"),
        ("log.jsonl", "\n\n", "no recorded value"),
        ("log.jsonl", '{"loss": 1}\n', "without any of step"),
        ("log.jsonl", '{"step": 1}\n', "no recorded value"),
        ("log.jsonl", "not json\n", "line 1"),
        ("log.jsonl", '{"step": 1, "a": 1, "a": 2}\n', "there more than once"),
        ("trainer_state.json", '{"log_history": []}', "no recorded value"),
    ],
)
def test_what_holds_no_numbers_is_refused(tmp_path: Path, name: str, content: str, word: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode("utf-8", errors="surrogateescape"))
    with pytest.raises(StateError, match=word):
        load_metrics(path)


def test_a_missing_path_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "no.jsonl", tmp_path / "no.json", tmp_path / "no folder", tmp_path):
        with pytest.raises(StateError) as caught:
            load_metrics(source)
        assert caught.value.exit_code == 3


def test_odd_names_and_huge_steps_do_no_harm(tmp_path: Path) -> None:
    content = {"x \u202e\x1b[31m": {"1": 1.0}, "": {"1": 2.0}, "big": {"9" * 30: 1.0}, "back": {"-1": 5.0}}
    metrics = load_metrics(write(tmp_path / "a b ü.json", content))
    assert set(metrics) == {"x \u202e\x1b[31m", "", "back"}
    assert "big" in metrics.odd
    assert run_checks(metrics, ['data["back"][-1] == 5']).status is Verdict.PASS


def test_nearest_names_of_a_crowd_are_found_by_prefix() -> None:
    many = {f"gpu/{number}": Series(f"gpu/{number}", {1: 1.0}) for number in range(3000)}
    assert Metrics(many).nearest_names("gpu/x")[0].startswith("gpu/")
    assert Metrics({}).nearest_names("x") == []


def test_values_are_described_as_a_reader_would() -> None:
    assert [describe(value) for value in (None, True, 2, 10**400, [1])] == [
        "null",
        "true",
        "2",
        "a number beyond what can be computed with",
        "a list",
    ]
