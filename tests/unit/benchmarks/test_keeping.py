"""What a run pays for being kept: the shares, from lines that are known."""

from __future__ import annotations

import argparse
import json
from typing import Any

import figure_rows
import pytest
from benchmark_scripts import benchmark
from reliability_table import PROMISES

keeping: Any = benchmark("keeping")


def lines(steps: int, save_steps: int, save_s: float) -> list[dict[str, float]]:
    """Steps of two seconds that keep for ten milliseconds; a save is paid by the step after it."""
    paying = {step + 1 for step in range(save_steps, steps, save_steps)} if save_steps else set()
    return [
        {"step": float(step), "step_time": 2.0, "timing/keep": 0.01 + save_s * (step in paying)}
        for step in range(1, steps + 1)
    ]


def test_a_checkpoint_is_counted_once_in_ten_minutes_and_not_in_the_steps_without() -> None:
    found = keeping.shares(lines(31, 10, 3.0), 10)
    assert found.saves == pytest.approx((3.0, 3.0, 3.0))
    assert found.plain == pytest.approx(0.005)
    assert found.with_checkpoints == pytest.approx(0.005 + 3.0 / keeping.SAVE_S)
    assert found.as_run == pytest.approx((31 * 0.01 + 9.0) / 62.0)
    assert found.worst == pytest.approx(3.01 / 2)


def test_a_run_without_a_checkpoint_has_none_in_its_share() -> None:
    found = keeping.shares(lines(6, 0, 0.0), 0)
    assert found.saves == ()
    assert found.plain == found.with_checkpoints == found.as_run == pytest.approx(0.005)


@pytest.mark.parametrize(("save_s", "bad"), [(3.0, 0), (30.0, 1)])
def test_the_row_is_one_of_docs_figures_and_too_much_is_a_failure(save_s: float, bad: int) -> None:
    args = argparse.Namespace(device="cpu", shape_tasks=8, shape_tokens=256)
    cell = keeping.Cell("a shape", [], 0.02, save_steps=10)
    row = keeping.figure(cell, keeping.shares(lines(31, 10, save_s), 10), keeping.Load(0.01, 60.0, False), 0.3, args)
    kept = figure_rows.checked(json.loads(json.dumps(row)) | {"commit": "abc", "changed": False})
    assert (kept["bad"], kept["times"]) == (bad, 31)
    assert kept["what"].startswith(keeping.KEPT)
    assert any(begins == keeping.KEPT for _, begins, _ in PROMISES)
