"""The memory cells: which settings there are, one line for each, and an exit code that tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import benchmark

memory_cells: Any = benchmark("memory_cells")


def run(monkeypatch: pytest.MonkeyPatch, out: Path, answer: dict[str, Any], *words: str) -> tuple[int, list[Any]]:
    asked: list[Any] = []

    def run_cell(shape: Any, work: Any, rank: Any, *, timeout_s: float) -> dict[str, Any]:
        asked.append((shape, work, rank))
        return dict(answer)

    monkeypatch.setattr(memory_cells, "run_cell", run_cell)
    monkeypatch.setattr(sys, "argv", ["memory_cells.py", "--out", str(out), *words])
    return memory_cells.main(), asked


def test_the_six_settings_and_two_more_are_asked_for_as_they_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, asked = run(monkeypatch, tmp_path, {"peak": 1 << 30})
    lines = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert code == 0
    assert [line["cell"] for line in lines] == [
        "full-135M", "lora-135M", "full-0.6B", "lora-0.6B", "full-1.7B", "lora-1.7B", *memory_cells.MORE,
    ]  # fmt: skip
    assert all(line["ratio"] == line["predicted"] / 2**30 for line in lines)
    assert [rank for *_, rank in asked].count(16) == 3
    assert {work.device for _, work, _ in asked} == {"cuda"}
    counts = [round(shape.parameters / 1e6) for shape, *_ in asked]
    assert set(counts) == {135, 596, 1721}, "the shapes are those of the models that they are named after"


def test_a_cell_that_is_not_measured_fails_the_run_and_keeps_its_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, asked = run(monkeypatch, tmp_path, {"error": "out of memory"}, "--tiny", "--cells", "full-0.6B")
    (line,) = [json.loads(line) for line in (tmp_path / "cells.jsonl").read_text().splitlines()]
    assert code == 1
    assert line["error"] == "out of memory"
    assert line["predicted"] > 0
    assert asked[0][1].device == "cpu"
