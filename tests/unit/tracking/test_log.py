"""`metrics.jsonl`: what goes in comes out, digit for digit, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import NumericsError, StateError, StorageError
from surefoot.tracking.metrics import MetricsLog, read_metrics


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_numbers_keep_every_digit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step, value in enumerate(values):
            log.log(step, {"loss": value})
    assert [row["loss"] for row in read_metrics(path)] == values


def test_a_line_is_flat_and_begins_with_its_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.log(7, {"reward": 0.1 + 0.2, "num_tokens": 12})
    assert path.read_text() == '{"step": 7, "reward": 0.30000000000000004, "num_tokens": 12}\n', "before close"
    log.close()
    log.close()


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), -float("inf"), True, "0.5", 1j, [1.0], np.float32(1), np.array(1.0)]
)
def test_what_is_no_finite_number_is_refused_and_leaves_no_line(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        with pytest.raises(NumericsError, match="reward"):
            log.log(1, {"loss": 1.0, "reward": value})
        log.log(1, {"loss": 1.0})
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}]


@pytest.mark.parametrize("name", ["rewards", "Loss", "step", "my_metric"])
def test_a_name_that_nobody_registered_is_refused(tmp_path: Path, name: str) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(StateError, match="not registered"):
        log.log(1, {name: 1.0})


def test_each_step_is_there_once_per_kind_and_in_order(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log(0, {"eval_accuracy": 0.1})
        log.log(1, {"loss": 1.0})
        log.log(1, {"eval_accuracy": 0.2, "timing/eval": 0.5})
        with pytest.raises(StateError, match="step 1"):
            log.log(1, {"loss": 2.0})
        with pytest.raises(StateError, match="step 1"):
            log.log(1, {"eval_accuracy": 0.3})
        log.log(2, {"loss": 2.0})
        with pytest.raises(StateError):
            log.log(1, {"loss": 2.0})


def test_an_evaluation_of_sets_alone_is_an_evaluation(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log(1, {"loss": 1.0})
        log.log(1, {"eval/exam/accuracy": 0.2, "eval/exam/pass@4": 0.5, "timing/eval": 0.5})
        with pytest.raises(StateError, match=r"step 1 \(eval\)"):
            log.log(1, {"eval/exam/accuracy": 0.3})
        with pytest.raises(StateError, match="not registered"):
            log.log(2, {"eval/exam/acuracy": 0.3})


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(StateError):
        log.log(step, {"loss": 1.0})


def test_an_existing_log_is_continued_not_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(1, {"loss": 1.0})
    with MetricsLog(path) as log:
        with pytest.raises(StateError):
            log.log(1, {"loss": 1.0})
        log.log(2, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_nobody_else_may_read_the_file(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        assert log.path.stat().st_mode & 0o777 == 0o600


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError):
        MetricsLog(tmp_path / "metrics.jsonl")
    assert not (tmp_path / "elsewhere").exists()


def test_half_a_line_is_taken_back_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(1, {"loss": 1.0})
        real = os.write
        monkeypatch.setattr("surefoot.tracking.metrics.os.write", lambda fd, data: real(fd, data[:5]))
        with pytest.raises(StorageError, match="No space left"):
            log.log(2, {"loss": 2.0})
        monkeypatch.undo()
        log.log(2, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]


GOOD = '{"step": 1, "loss": 1.0}\n'


@pytest.mark.parametrize(
    "bad",
    [
        '{"step": 2, "loss": 2',
        '{"step": 2, "loss": 2.0}',  # whole, but without its newline: nobody knows what was cut
        '{"step": 2, "loss": NaN}\n',
        '{"step": 2, "loss": Infinity}\n',
        '{"step": 2, "loss": 1e999}\n',
        '{"step": 2, "loss": null}\n',
        '{"step": 2, "loss": true}\n',
        '{"step": 2, "loss": "2"}\n',
        '{"step": 2, "loss": {"a": 1}}\n',
        '{"step": 2, "loss": 1, "loss": 2}\n',
        '{"loss": 2.0, "step": 2}\n',
        '{"step": -2, "loss": 2.0}\n',
        '{"step": 2.0, "loss": 2.0}\n',
        "[1]\n",
        "\n",
        "\x00\n",
    ],
)
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(GOOD + bad)
    with pytest.raises(StateError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD.encode() + b'{"step": 2, "\xff": "\xff"}\n')
    with pytest.raises(StateError, match=":2: "):
        read_metrics(path)


def test_a_missing_log_is_no_empty_log(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        read_metrics(tmp_path / "metrics.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert read_metrics(tmp_path / "empty.jsonl") == []


def test_lines_are_json_for_anybody(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.log(3, {"rewards/größe/mean": 1.0})
    assert json.loads(path.read_text()) == {"step": 3, "rewards/größe/mean": 1.0}
