"""Lists of row numbers that may be longer than memory: all rows, or those stored in a file.

Promises   a view of a million rows costs eight bytes each on the disk and none in memory.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from surefoot.data.large.task_index import NUMBER
from surefoot.errors import StateError

_AT_ONCE = 8192


class RowList(Protocol):
    """Row numbers in increasing order, by position."""

    def __len__(self) -> int: ...
    def __getitem__(self, position: int) -> int: ...
    def __iter__(self) -> Iterator[int]: ...
    def __contains__(self, row: object) -> bool: ...

    def position(self, row: int) -> int | None:
        """Where a row number stands; None where it does not."""

    def identity(self, whole: str) -> str:
        """A fingerprint of this choice out of the data set `whole`."""


class AllRows:
    """0 .. n-1."""

    def __init__(self, count: int) -> None:
        self._rows = range(count)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, position: int) -> int:
        return self._rows[position]

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __contains__(self, row: object) -> bool:
        return row in self._rows

    def position(self, row: int) -> int | None:
        """The number itself."""
        return row if row in self._rows else None

    def identity(self, whole: str) -> str:
        """The data set itself."""
        return whole


class StoredRows:
    """Row numbers that lie in a file, eight bytes each.

    Args:
        owner: kept alive as long as this is used, because the file is its own.
    """

    def __init__(self, fd: int, at: int, count: int, owner: object = None) -> None:
        self._fd, self._at, self._count, self._owner = fd, at, count, owner
        self._identity: tuple[str, str] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._count:
            raise IndexError(f"row {position} of {self._count}")
        (row,) = NUMBER.unpack(self._read(position, 1))
        return int(row)

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._count, _AT_ONCE):
            for (row,) in NUMBER.iter_unpack(self._read(start, min(_AT_ONCE, self._count - start))):
                yield row

    def __contains__(self, row: object) -> bool:
        return isinstance(row, int) and self.position(row) is not None

    def position(self, row: int) -> int | None:
        """By halves: the numbers are in order."""
        low, high = 0, self._count
        while low < high:
            middle = (low + high) // 2
            if self[middle] < row:
                low = middle + 1
            else:
                high = middle
        return low if low < self._count and self[low] == row else None

    def identity(self, whole: str) -> str:
        """Over the data set and every row number; asked once."""
        if self._identity is None or self._identity[0] != whole:
            digest = hashlib.sha256(whole.encode())
            for start in range(0, self._count, _AT_ONCE):
                digest.update(self._read(start, min(_AT_ONCE, self._count - start)))
            self._identity = whole, digest.hexdigest()
        return self._identity[1]

    def _read(self, position: int, count: int) -> bytes:
        data = os.pread(self._fd, NUMBER.size * count, self._at + NUMBER.size * position)
        if len(data) != NUMBER.size * count:
            raise StateError(
                "a list of rows became shorter while it was in use", "somebody cut the index file", "start again"
            )
        return data


def store_rows(rows: Iterable[int], folder: Path) -> StoredRows:
    """Write row numbers to a nameless file in `folder`; it is gone when nobody uses it any more."""
    with tempfile.TemporaryFile(dir=folder) as file:
        count = 0
        for row in rows:
            file.write(NUMBER.pack(row))
            count += 1
        file.flush()
        descriptor = os.dup(file.fileno())
    stored = StoredRows(descriptor, 0, count)
    weakref.finalize(stored, os.close, descriptor)
    return stored
