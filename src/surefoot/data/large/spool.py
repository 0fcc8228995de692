"""Rows that have no place in a file, written into one: Parquet, Hugging Face data sets, generators.

Owns       the way from a source that can only be walked to a file in which every row is one seek away.
Promises   one row in memory at a time; a row that JSON cannot hold is written as a marked problem, so that it is
           counted like any other bad row; the file is there whole or not at all.
Never      changes a value to make it fit.

Read next: `scan.py`, which reads it back.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefoot.data.files import RowProblem, parquet_rows
from surefoot.data.large.scan import MARK
from surefoot.data.task_format import kind
from surefoot.errors import SurefootError, TaskError
from surefoot.pulse import beat
from surefoot.store.durable import storage_error, sync_folder

MAX_SPOOL_BYTES = 2**36
"""64 GiB: what a source may unfold to. A generator without an end stops here and not at a full disk."""
_BEAT_ROWS = 2000


def spool_parquet(path: Path, target: Path) -> None:
    """Write the rows of a Parquet file to `target`, one JSON object a line."""
    try:
        spool_rows((row for _, row in parquet_rows(path, MAX_SPOOL_BYTES)), target, path.name)
    except RowProblem as problem:
        raise TaskError(f"{path.name} {problem}", "its rows cannot be told apart", "write the file again") from problem


def spool_rows(rows: Iterable[object], target: Path, name: str) -> None:
    """Write rows to `target`, one JSON object a line."""
    temporary = target.with_name(f".{target.name}.{threading.get_ident():x}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary.open("wb", buffering=1 << 20) as out:
            size = 0
            for number, row in enumerate(_each(rows, name)):
                size += out.write(_line(row) + b"\n")
                if size > MAX_SPOOL_BYTES:
                    raise _endless(name, number)
                if number % _BEAT_ROWS == 0:
                    beat(f"reading {name}, row {number}")
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise storage_error(target, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _each(rows: Iterable[object], name: str) -> Iterable[object]:
    """The rows; whatever a source of somebody else's raises is a fault of the tasks, with its number."""
    number = 0
    try:
        for row in rows:
            yield row
            number += 1
    except (SurefootError, RowProblem, OSError):
        raise
    except Exception as error:
        raise TaskError(
            f"{name} failed after {number} rows: {type(error).__name__}: {error}",
            "a data set that ends early would be trained on as if it were whole",
            "mend the source, or write its rows to a .jsonl file yourself",
        ) from error


def _line(row: object) -> bytes:
    if not isinstance(row, Mapping):
        return MARK + f"is {kind(row)}, not an object with a prompt".encode()
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_refuse).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return MARK + _why(row, error).encode("utf-8", "replace").replace(b"\n", b" ")


def _refuse(value: Any) -> object:
    raise TypeError(f"{type(value).__name__}")


def _why(row: Mapping[Any, Any], error: Exception) -> str:
    """Names the column, since a person has to find it."""
    for column, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False, default=_refuse).encode()
        except TypeError as inner:
            return f"column {column!r} holds a {inner}; a task is plain data: text, numbers, lists, objects"
        except (ValueError, RecursionError) as inner:
            return f"column {column!r} cannot be written as JSON: {inner}"
    return f"cannot be written as JSON: {error}"


def _endless(name: str, number: int) -> TaskError:
    return TaskError(
        f"{name} gave more than {MAX_SPOOL_BYTES:,} bytes in {number:,} rows",
        "a generator without an end would fill the disk",
        "let it end, for example with itertools.islice",
    )
