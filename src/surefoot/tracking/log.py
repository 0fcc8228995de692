"""`metrics.jsonl`, written; `surefoot_harness.metrics_file` reads it, and so does who judges a run from outside.

Owns       the format: one flat JSON object per line, `step` first, every other value a finite number.
Promises   a value that is None, NaN, infinite, a bool or text is refused, never turned into 0; each step is
           there once per kind (training, evaluation), in order; numbers keep every digit; a line is whole.
Never      rounds, averages, or skips a line it cannot read.

    {"step": 7, "loss": 0.0123, "reward": 0.5, ...}
    {"step": 25, "eval_accuracy": 0.61, "eval_n": 400, ...}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from surefoot.errors import NumericsError, StateError, StorageError
from surefoot.system.files import APPEND, plain_descriptor
from surefoot.tracking.metrics import lookup
from surefoot_harness.metrics_file import EVALUATION, LINE_BYTES, Row, kind_of, lines_of, parse_row, read_metrics

__all__ = ["EVALUATION", "LINE_BYTES", "MetricsLog", "Row", "kind_of", "metrics_until", "read_metrics"]


class MetricsLog:
    """Appends to one `metrics.jsonl`; an existing file is read first and continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: dict[str, int] = {}
        for row in read_metrics(path) if path.exists() else []:
            self._last[kind_of(row)] = int(row["step"])
        try:
            self._file = plain_descriptor(path, APPEND)
        except OSError as error:
            raise self._refused(error) from error
        self._size = os.fstat(self._file).st_size

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; on return it has left this process."""
        kind = kind_of(metrics)
        self._check_step(step, kind)
        row = {"step": step} | {name: _checked(step, name, value) for name, value in metrics.items()}
        self._append(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")
        self._last[kind] = step

    def close(self) -> None:
        """Make the file durable and let go of it; a second call does nothing."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_step(self, step: object, kind: str) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"step is {step!r}", "steps count from 0", "log with the optimiser step")
        if kind in self._last and step <= self._last[kind]:
            raise StateError(
                f"step {step} ({kind}) comes after step {self._last[kind]} in {self.path.name}",
                "a step that is there twice would be judged twice",
                "log each step once, in order",
            )

    def _append(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the disk took a part: take it back, no reader shall see half a line
                os.ftruncate(self._file, self._size)
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise self._refused(error) from error
        self._size += len(line)

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path} could not be written: {error.strerror}",
            "a run without its numbers cannot be judged",
            "free some space or check the rights of the folder",
        )


def _checked(step: int, name: str, value: object) -> float:
    if name == "step" or lookup(name) is None:
        raise StateError(
            f"step {step}: metric {name!r} is not registered",
            "a number under a name that nobody declared is a number that nobody checks",
            "add it to tracking/metrics.py with unit, reduction and meaning",
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise NumericsError(
            f"step {step}: {name} = {value!r} is not a finite number",
            "a placeholder would be read as a measurement",
            "leave the name out when it is undefined; convert arrays with float()",
        )
    return value


def metrics_until(path: Path, *, train: int, evaluation: int) -> tuple[bytes | None, int]:
    """The lines of a `metrics.jsonl` up to a step, as they are, and how many bytes of a torn last line were left out.

    For a resume: what comes later is written once more. None when there is no file.

    Args:
        train: the last step whose training line is kept.
        evaluation: the last step whose evaluation is kept; -1 when none is.
    """
    if not path.exists() and not path.is_symlink():
        return None, 0
    last = {"train": train, "eval": evaluation}
    kept: list[bytes] = []
    for number, line in enumerate(lines_of(path, "a resume keeps the numbers so far"), 1):
        if not line.endswith(b"\n"):
            return b"".join(kept), len(line)
        row = parse_row(path, number, line)
        kept += [line] if row["step"] <= last[kind_of(row)] else []
    return b"".join(kept), 0
