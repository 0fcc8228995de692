"""Whole files or none: write beside the target, flush, rename, and make the rename durable."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.system.files import read_plain

LONGEST = 1 << 30
"""Bytes of evidence in one JSON file that are read at all."""


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`; a crash at any moment leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """`value` as indented JSON, atomically. NaN and infinity are refused: JSON has none."""
    write_atomic(path, json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def make_unseen(folder: Path) -> Path:
    """Make a folder of ours; a new one tells git to look away, as pytest's cache does; an old one stays."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / ".gitignore", "# made by surefoot\n*\n")
    return folder


def read_json(path: Path) -> Any:
    """The value in a JSON file; unreadable, torn or not JSON is a `StateError`, never a default."""
    try:
        return json.loads(read_plain(path, LONGEST), parse_constant=_no_constant)
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}", "it holds the evidence", "check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is not JSON: {error}", "half a file is no evidence", "restore it or rerun") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
