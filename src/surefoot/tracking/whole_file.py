"""A small file that readers see whole: the old one or the new one, never half of either.

For what is written again and again while a run lives. It is not synced: after a power cut the last second may be
missing, and nobody resumes from it. What a run resumes from goes through the store.
"""

from __future__ import annotations

import os
from pathlib import Path

from surefoot.errors import StateError, StorageError
from surefoot.system.files import TooLongError, read_plain


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step, 0600; what the disk refuses is a `StorageError`, and leaves nothing behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError as error:
        _forget(temporary)
        raise StorageError(
            f"{path} could not be written: {error.strerror or error}",
            "the disk or the folder's rights refused it",
            "free some space, or choose a folder that you may write to",
        ) from error


def read_bounded(path: Path, limit: int) -> bytes | None:
    """The file's bytes; None when there is none. A longer one than `limit`, a link or a pipe is a `StateError`."""
    try:
        return read_plain(path, limit)
    except FileNotFoundError:
        return None
    except TooLongError:
        raise StateError(
            f"{path} has more than {limit} bytes", "a run does not write it that long", "check what is in it"
        ) from None
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror or error}", "it is part of the run", "check the run folder"
        ) from error


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the folder itself is gone or closed to us: the error that is raised says so
