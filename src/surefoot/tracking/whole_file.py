"""A small file that readers see whole: the old one or the new one, never half of either.

For what is written again and again while a run lives. It is not synced: after a power cut the last second may be
missing, and nobody resumes from it. What a run resumes from goes through the store.
"""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import StateError, StorageError
from surefoot.system.files import TooLongError, atomic_write, read_plain


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step, 0600; what the disk refuses is a `StorageError`, and leaves nothing behind."""
    try:
        atomic_write(path, data, durable=False)
    except OSError as error:
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
