"""The index file of a task file: where each row lies, who it is, how hard it is. 56 bytes per row, read by the row.

Owns       the layout below, and the fingerprints that tie an index to its file.
Promises   one row costs one read, whatever the number of rows, and no memory; a torn, foreign or outdated index is
           never used; an index is there whole or not at all.
Never      reads or judges a task.

    magic | rows: n x 32 | by id: n x (hash, row), sorted | by level: n x row | twins: (row, earlier row) | footer

Rows are read with `pread`, not mapped: mapped pages would count as memory and grow with the file.

Read next: `build.py`, which writes it; `dataset.py`, which reads it.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from surefoot.errors import StateError, TaskError
from surefoot.system.files import sha256_number, sha256_of, sha256_of_file

MAGIC = b"SFTASKS1"
VERSION = 1
"""Of the layout and of the rules for rows: another version is built anew."""
ROW = struct.Struct("<QQIIHHI")
PAIR = struct.Struct("<QQ")
NUMBER = struct.Struct("<Q")
_TAIL = struct.Struct("<QI8s")
_ENDS = 1 << 16
_AT_ONCE = 4096


class RowRecord(NamedTuple):
    """One row of the file."""

    offset: int
    id_hash: int
    length: int
    crc: int
    """CRC-32 of the row's bytes: a row that changed is noticed whatever the file's date says."""
    level: int
    """Number of the complexity in the footer's list; 0 is "says nothing"."""
    category: int
    spare: int = 0


@dataclass(frozen=True)
class Footer:
    """What is known of the whole file."""

    version: int
    rows: int
    source: str
    """Fingerprint of the file that was indexed."""
    tasks: str
    """SHA-256 over every id, prompt and column, in order: the same as `tasks.fingerprint` of the same tasks."""
    form: str
    """Which rows were asked for: `auto` or `tool`."""
    levels: list[str | None]
    level_counts: list[int]
    categories: list[str | None]
    category_counts: list[int]
    twins: int
    """Rows whose prompt an earlier row has already."""
    bad_rows: int
    problems: list[str] = field(default_factory=list)
    """The first few bad rows, in words."""
    row_bytes: int = 0


def id_hash(task_id: str) -> int:
    """64 bits that are the same in every process: the number that `heldout.is_heldout` compares."""
    return sha256_number(task_id, errors="surrogatepass")


def file_fingerprint(path: Path, *, full: bool = False) -> str:
    """Size, date and SHA-256 of both ends; or size and SHA-256 of everything."""
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if full:
                return f"{facts.st_size} bytes, sha256 {sha256_of_file(file)}"
            first = file.read(_ENDS)
            file.seek(max(0, facts.st_size - _ENDS))
            ends = sha256_of([first, file.read(_ENDS)])
    except OSError as error:
        raise unreadable(path.name, error) from error
    return f"{facts.st_size} bytes, mtime {facts.st_mtime_ns}, ends {ends[:32]}"


def unreadable(name: str, error: OSError) -> TaskError:
    """The system refuses to hand the tasks over."""
    return TaskError(
        f"{name} cannot be read: {error.strerror or error}",
        "the file is there, but the system refuses to hand it over",
        "check the file's permissions, and the disk",
    )


def footer_bytes(footer: Footer) -> bytes:
    """How a footer ends the file: JSON, its length and CRC, the magic word once more."""
    text = json.dumps(asdict(footer), ensure_ascii=True).encode()
    return text + _TAIL.pack(len(text), zlib.crc32(text), MAGIC)


class TaskIndex:
    """An open index.

    Raises:
        StateError: the file is torn, foreign, or of another version; build it anew.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.close = weakref.finalize(self, os.close, self.fd)
        self.footer = self._read_footer()
        self.levels: dict[str | None, int] = {name: code for code, name in enumerate(self.footer.levels)}
        self.categories: dict[str | None, int] = {name: code for code, name in enumerate(self.footer.categories)}
        self._rows_at = len(MAGIC)
        self._ids_at = self._rows_at + ROW.size * self.rows
        self._levels_at = self._ids_at + PAIR.size * self.rows
        self._twins_at = self._levels_at + NUMBER.size * self.rows

    @property
    def rows(self) -> int:
        """How many."""
        return self.footer.rows

    def row(self, number: int) -> RowRecord:
        """One read."""
        if not 0 <= number < self.rows:
            raise IndexError(f"row {number} of {self.rows}")
        return RowRecord(*ROW.unpack(self._read(ROW.size, self._rows_at + ROW.size * number)))

    def all_rows(self) -> Iterator[tuple[int, RowRecord]]:
        """(number, row) in order, a few thousand in memory."""
        for start in range(0, self.rows, _AT_ONCE):
            count = min(_AT_ONCE, self.rows - start)
            block = self._read(ROW.size * count, self._rows_at + ROW.size * start)
            for number, values in enumerate(ROW.iter_unpack(block), start):
                yield number, RowRecord(*values)

    def find(self, hashed: int) -> list[int]:
        """Rows whose id has this hash, in order: nearly always one or none. About 20 reads in a million rows."""
        low, high = 0, self.rows
        while low < high:
            middle = (low + high) // 2
            if self._pair(self._ids_at, middle)[0] < hashed:
                low = middle + 1
            else:
                high = middle
        found = []
        while low < self.rows and (pair := self._pair(self._ids_at, low))[0] == hashed:
            found.append(pair[1])
            low += 1
        return found

    def level_section(self, level: str | None) -> tuple[int, int]:
        """(byte offset, count) of the rows of one level, as row numbers."""
        code = self.levels.get(level)
        if code is None:
            return self._levels_at, 0
        before = sum(self.footer.level_counts[:code])
        return self._levels_at + NUMBER.size * before, self.footer.level_counts[code]

    def twins(self) -> Iterator[tuple[int, int]]:
        """(row, earlier row with the same prompt)."""
        for number in range(self.footer.twins):
            yield self._pair(self._twins_at, number)

    def _pair(self, section: int, number: int) -> tuple[int, int]:
        first, second = PAIR.unpack(self._read(PAIR.size, section + PAIR.size * number))
        return first, second

    def _read(self, size: int, offset: int) -> bytes:
        data = os.pread(self.fd, size, offset)
        if len(data) != size:
            raise _damaged(self.path, "it became shorter while it was in use")
        return data

    def _read_footer(self) -> Footer:
        size = os.fstat(self.fd).st_size
        if size < len(MAGIC) + _TAIL.size or os.pread(self.fd, len(MAGIC), 0) != MAGIC:
            raise _damaged(self.path, "it does not begin like an index")
        length, crc, magic = _TAIL.unpack(os.pread(self.fd, _TAIL.size, size - _TAIL.size))
        begin = size - _TAIL.size - length
        if magic != MAGIC or begin < len(MAGIC):
            raise _damaged(self.path, "it does not end like an index")
        text = os.pread(self.fd, length, begin)
        if zlib.crc32(text) != crc:
            raise _damaged(self.path, "its footer is damaged")
        facts: dict[str, Any] = json.loads(text)
        if facts.get("version") != VERSION or set(facts) != {one.name for one in fields(Footer)}:
            raise _damaged(self.path, f"it has version {facts.get('version')}, this is version {VERSION}")
        footer = Footer(**facts)
        if begin != len(MAGIC) + (ROW.size + PAIR.size + NUMBER.size) * footer.rows + PAIR.size * footer.twins:
            raise _damaged(self.path, "its length does not fit its number of rows")
        return footer


def _damaged(path: Path, how: str) -> StateError:
    return StateError(f"the index {path.name} cannot be used: {how}", "rows would be looked for in the wrong place",
                      f"remove {path}; it is built anew")  # fmt: skip


# -- Lists of row numbers that may be longer than memory: all rows, or those stored in a file -----
# Promises   a view of a million rows costs eight bytes each on the disk and none in memory.


_ROWS_AT_ONCE = 8192


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
        for start in range(0, self._count, _ROWS_AT_ONCE):
            for (row,) in NUMBER.iter_unpack(self._read(start, min(_ROWS_AT_ONCE, self._count - start))):
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
            starts = range(0, self._count, _ROWS_AT_ONCE)
            rows = (self._read(start, min(_ROWS_AT_ONCE, self._count - start)) for start in starts)
            self._identity = whole, sha256_of(chain([whole.encode()], rows))
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
