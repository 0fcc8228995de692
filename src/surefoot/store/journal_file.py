"""The file under a journal: what a journal asks of it, and the real one.

Read next: `journal.py`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from surefoot.errors import StateError
from surefoot.store.durable import storage_error, sync_folder
from surefoot.store.failpoints import failpoint

PIECE = 1 << 20
"""Bytes handed to the system at a time, when writing and when searching."""


class JournalFile(Protocol):
    """What a journal needs of a file. `SystemFile` is the real one; tests bring a disk that forgets."""

    def size(self) -> int:
        """Bytes in the file now."""

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes; fewer only at the end of the file."""

    def write(self, offset: int, data: bytes) -> None:
        """All of `data`, or an OSError."""

    def truncate(self, size: int) -> None:
        """Cut the file."""

    def sync(self) -> None:
        """Return when everything written is on the disk."""

    def close(self) -> None:
        """Let go of it."""


class SystemFile:
    """A real file: no link is followed, every byte is written or an OSError says why not."""

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        mode = os.O_RDONLY if readonly else os.O_RDWR
        try:
            self._descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StateError(
                f"{path} cannot be opened: {error.strerror or error}",
                "a journal that is missing is not taken for an empty one",
                "give the folder of a run that has begun, with the rights to read and write it",
            ) from error
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            os.close(self._descriptor)
            raise StateError(f"{path} is not a plain file", "a journal is one", "give the file that a run wrote")
        try:
            if not readonly:
                sync_folder(path.parent)
        except OSError as error:
            os.close(self._descriptor)
            raise storage_error(path, error) from error

    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes; fewer only at the end of the file."""
        found = bytearray()
        while len(found) < count and (block := os.pread(self._descriptor, count - len(found), offset + len(found))):
            found += block
        return bytes(found)

    def write(self, offset: int, data: bytes) -> None:
        """All of `data`, in pieces; what the system takes only in part is offered again."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view[:PIECE], offset)
            offset, view = offset + written, view[written:]
            if view:
                failpoint("journal.between_pieces")

    def truncate(self, size: int) -> None:
        """Cut the file."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)
