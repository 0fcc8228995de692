"""Task files for the tests of `StreamingDataset`: rows with every label, in every format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LEVELS = ("easy", "medium", "hard")


def row(i: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"t{i}", "prompt": f"Frage {i}: wie groß? ∑", "answer": str(i),
        "complexity": LEVELS[i % 3], "category": f"c{i % 2}",
    } | more  # fmt: skip


def write(path: Path, rows: list[Any], *, text: str | None = None) -> Path:
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in rows)
    path.write_text(lines if text is None else text, encoding="utf-8")
    return path


def ids(tasks: Any) -> list[str]:
    return [task.id for task in tasks]


def as_jsonl(tmp_path: Path, rows: list[Any]) -> Path:
    return write(tmp_path / "t.jsonl", rows)


def as_json(tmp_path: Path, rows: list[Any]) -> Path:
    return write(tmp_path / "t.json", [], text="\ufeff " + json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


def as_parquet(tmp_path: Path, rows: list[Any]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    pyarrow.parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "t.parquet")
    return tmp_path / "t.parquet"


FORMS = pytest.mark.parametrize("make", [as_jsonl, as_json, as_parquet], ids=["jsonl", "json", "parquet"])


def rows_of(n: int) -> Iterator[dict[str, Any]]:
    return (row(i) for i in range(n))
