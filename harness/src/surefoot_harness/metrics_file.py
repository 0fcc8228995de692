"""`metrics.jsonl`, read: one flat JSON object per line, `step` first, every other value a finite number.

Promises   anything torn, odd or not finite is a `StateError` with its line number, never a skipped line.
Never      rounds, averages, or fills in what is missing.

The writer is the trainer's: `surefoot.tracking.metrics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot_harness.errors import StateError
from surefoot_harness.system.files import TooLongError, bounded_lines, open_plain
from surefoot_harness.system.json import parse

Row = dict[str, float]
EVALUATION = ("eval_", "eval/")
"""How names of evaluations begin: of held-out tasks, and of one evaluation set."""
LINE_BYTES = 1 << 20
"""No line is longer: one of a hundred evaluation sets and fifty tools has a tenth of it."""


def kind_of(metrics: Mapping[str, Any]) -> str:
    """`eval` for a line with any name of an evaluation, `eval_*` or `eval/*`, else `train`."""
    return "eval" if any(name.startswith(EVALUATION) for name in metrics) else "train"


def read_metrics(path: Path) -> list[Row]:
    """Every line of a `metrics.jsonl`, in order; anything torn or odd is a `StateError` with its line number."""
    rows: list[Row] = []
    for line in lines_of(path, "no numbers, no judgement"):
        if not line.endswith(b"\n"):
            raise corrupt(path, len(rows) + 1, "the line is torn (no newline at its end)")
        rows.append(parse_row(path, len(rows) + 1, line))
    return rows


def lines_of(path: Path, why: str) -> Iterator[bytes]:
    """Each line with its newline; a link, a pipe or a line without end is a `StateError`."""
    number = 0
    try:
        with open_plain(path) as file:
            for line in bounded_lines(file, LINE_BYTES):
                number += 1
                yield line
    except TooLongError as error:
        raise corrupt(path, number + 1, str(error.strerror)) from error
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}", why, "check the run folder") from error


def parse_row(path: Path, number: int, data: bytes) -> Row:
    """The numbers of one whole line, which is line `number` of `path`."""
    try:
        row = parse(data[:-1].decode("utf-8"))
    except ValueError as error:
        raise corrupt(path, number, str(error)) from error
    if not isinstance(row, dict) or next(iter(row), None) != "step":
        raise corrupt(path, number, "not an object that begins with step")
    for name, value in row.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise corrupt(path, number, f"{name} is not a finite number")
    if not isinstance(row["step"], int) or row["step"] < 0:
        raise corrupt(path, number, "step is not a whole number from 0")
    return row


def corrupt(path: Path, number: int, why: str) -> StateError:
    """The refusal of one line."""
    return StateError(
        f"{path.name}:{number}: {why}", "a judgement over damaged numbers is no judgement", "restore or rerun"
    )
