"""The harness's own files: written whole and durably, in folders that are made on the way; read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot_harness.errors import StateError
from surefoot_harness.system.files import atomic_write, read_plain
from surefoot_harness.system.json import parse

LONGEST = 1 << 30
"""Bytes of evidence in one JSON file that are read at all."""


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`; a crash at any moment leaves the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data)


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
        return parse(read_plain(path, LONGEST))
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror}", "it holds the evidence", "check the path"
        ) from error
    except ValueError as error:
        raise StateError(f"{path} is not JSON: {error}", "half a file is no evidence", "restore it or rerun") from error
