"""An append-only file of records that says what happened, in order, and survives the writer.

Owns       one file; nobody else writes to it (`lock.py` sees to that).
Promises   a record whose durable append returned is there after any crash; a record is whole or absent; a torn tail is
           cut and counted; damage anywhere else is refused with its offset; an append that fails leaves the file as it
           was. A batch is not one record: a crash may keep its beginning.
Never      returns other data than was written, takes an unreadable file for a new one, or retries a failed fsync.

    Journal.create(path) --> append(record) --> [header][frame][frame][frame]... --> Journal.open(path).records()

Read next: `frames.py` for the bytes, `ledger.py` for what is told.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from surefoot.errors import StateError, StorageError
from surefoot.store import frames
from surefoot.store.durable import atomic_write, storage_error
from surefoot.store.failpoints import failpoint
from surefoot.store.journal_file import PIECE, JournalFile, SystemFile


class Entry(NamedTuple):
    """One record, with its number (from 1, with gaps where a seal is) and where it begins in the file."""

    number: int
    offset: int
    record: dict[str, Any]


class Journal:
    """A journal that is open for appending (or, opened with `readonly`, for reading).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.journal"
        >>> with Journal.create(path) as journal:
        ...     journal.append({"event": "hello"})
        1
        >>> [entry.record for entry in Journal.open(path, readonly=True).records()]
        [{'event': 'hello'}]
    """

    def __init__(self, file: JournalFile, name: str = "the journal", *, readonly: bool = False) -> None:
        """Look through `file`; cut a torn tail unless `readonly`."""
        self.name, self.readonly = name, readonly
        self.torn_bytes = 0
        """Bytes of an unfinished last append that were found (and cut) when this journal was opened."""
        self._file = file
        self._end = self._synced = frames.HEADER_BYTES
        self._number, self._sealed, self._failed = 0, True, ""
        try:
            self._header = frames.Header.unpack(file.read(0, frames.HEADER_BYTES), name)
            self._seed = self._header.seed
            self._look_through()
        except OSError as error:
            raise storage_error(Path(name), error) from error

    @classmethod
    def create(cls, path: Path) -> Journal:
        """A new journal, on the disk before this returns. A path that exists is a `StateError`."""
        if path.exists() or path.is_symlink():
            raise StateError(f"{path} exists already", "a journal is never begun anew", "open it, or use another run")
        atomic_write(path, frames.Header(os.urandom(frames.ID_BYTES)).pack())
        failpoint("journal.created")
        return cls.open(path)

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Journal:
        """An existing journal; missing, foreign or damaged is a `StateError`. `readonly` changes nothing on disk."""
        file = SystemFile(path, readonly=readonly)
        try:
            return cls(file, str(path), readonly=readonly)
        except BaseException:
            file.close()
            raise

    @property
    def id(self) -> str:
        """What tells this journal from every other, 32 hexadecimal digits."""
        return self._header.id.hex()

    @property
    def last_number(self) -> int:
        """The number of the last frame; 0 when there is none."""
        return self._number

    @property
    def end(self) -> int:
        """Bytes of whole frames, header included."""
        return self._end

    def append(self, record: Mapping[str, Any], *, durable: bool = True) -> int:
        """Add one record; returns its number. With `durable` it is on the disk when this returns."""
        return self.append_all([record], durable=durable)[0]

    def append_all(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> list[int]:
        """Add records in order, with one write and at most one fsync; returns their numbers."""
        payloads = [frames.encode(record) for record in records]
        self._write(payloads)
        if durable:
            self.sync()
        return list(range(self._number - len(payloads) + 1, self._number + 1))

    def sync(self) -> None:
        """Everything appended so far is on the disk when this returns. After a failure the journal is done for."""
        self._require_open()
        try:
            self._file.sync()
        except OSError as error:  # the kernel may have thrown the bytes away: only a fresh look at the file can tell
            self._failed = f"an fsync failed: {error.strerror or error}"
            with suppress(OSError):
                self._file.truncate(self._synced)
            raise storage_error(Path(self.name), error) from error
        self._synced = self._end
        failpoint("journal.after_sync")

    def records(self, after: int = 0) -> Iterator[Entry]:
        """Every record with a number above `after`, in order, checked once more as it is read."""
        for offset, head, payload in self._frames(until=self._end, after=after):
            if payload:
                yield Entry(head.number, offset, frames.decode(payload, f"{self.name}, record {head.number}"))

    def close(self) -> None:
        """Make everything durable, add the seal that protects the last records, and let go of the file."""
        if self._failed == "it is closed":
            return
        try:
            if not self.readonly and not self._failed and not self._sealed:
                self.sync()
                failpoint("journal.before_seal")
                with suppress(StorageError):  # every record is on the disk; a seal only helps to see later damage
                    self._write([b""])
        finally:
            self._failed = "it is closed"
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, payloads: Iterable[bytes]) -> None:
        self._require_open()
        numbered = enumerate(payloads, self._number + 1)
        packed = [frames.pack_frame(p, number=n, synced=self._synced, seed=self._seed) for n, p in numbered]
        if (size := self._file.size()) != self._end:
            self._failed = f"it has {size} bytes where this writer left {self._end}: somebody else writes to it"
            self._require_open()
        failpoint("journal.before_write")
        try:
            self._file.write(self._end, b"".join(packed))
            failpoint("journal.after_write")
        except OSError as error:
            self._take_back()
            raise storage_error(Path(self.name), error) from error
        except BaseException:
            self._take_back()
            raise
        self._end += sum(map(len, packed))
        self._number += len(packed)
        self._sealed = bool(packed) and len(packed[-1]) == frames.HEAD_BYTES

    def _take_back(self) -> None:
        """The file as it was before this append; if not even that works, nothing more is written to it."""
        try:
            self._file.truncate(self._end)
        except OSError as error:
            self._failed = f"an append failed and could not be taken back: {error.strerror or error}"

    def _require_open(self) -> None:
        if self.readonly:
            raise StateError(f"{self.name} is open for reading", "only the driver of a run writes", "open it to write")
        if self._failed:
            raise StorageError(
                f"{self.name} takes no more records: {self._failed}",
                "what comes after could not be told from what was lost", "open it again: opening looks at the disk",
            )  # fmt: skip

    def _frames(self, until: int | None = None, after: int = 0) -> Iterator[tuple[int, frames.Head, bytes]]:
        """Whole frames from the beginning; ends at a torn tail, raises at any other damage.

        Payloads of frames up to the number `after` are not read: they come as b"".
        """
        offset, number = frames.HEADER_BYTES, 1
        end = self._file.size() if until is None else until
        while offset < end:
            head, payload = self._head_at(offset, number), b""
            if head is not None and number > after:
                payload = self._file.read(offset + frames.HEAD_BYTES, head.length)
            if head is None or (number > after and not frames.payload_fits(payload, head, self._seed)):
                self._refuse_damage(offset, number, end, expected=until is not None)
                return
            yield offset, head, payload
            offset, number = offset + frames.HEAD_BYTES + head.length, number + 1

    def _head_at(self, offset: int, number: int) -> frames.Head | None:
        """The head at `offset`; None if it is not whole. A whole one that cannot be there is refused at once."""
        head = frames.unpack_head(self._file.read(offset, frames.HEAD_BYTES), self._seed)
        if head is None:
            return None
        if head.number != number:
            raise self._damaged(offset, f"frame {number} should be here, and it is frame {head.number}")
        if head.length > frames.MAX_PAYLOAD or head.synced > offset:
            raise self._damaged(offset, f"frame {number} has an impossible head ({head.length} bytes long)")
        return head

    def _refuse_damage(self, offset: int, number: int, end: int, *, expected: bool) -> None:
        """Return if the damage at `offset` can be a write that a crash interrupted."""
        if expected:
            raise self._damaged(offset, f"frame {number} was whole when the journal was opened")
        for later, head in self._later_heads(offset + 1, end):
            if head.number >= number and head.synced > offset:
                raise self._damaged(
                    offset, f"frame {number} is broken, and frame {head.number} at byte {later} was written when "
                    f"everything before byte {head.synced} was on the disk",
                )  # fmt: skip

    def _later_heads(self, offset: int, end: int) -> Iterator[tuple[int, frames.Head]]:
        """Every whole head from `offset` on, found by its magic."""
        while offset < end:
            block = self._file.read(offset, PIECE + frames.HEAD_BYTES - 1)
            at = block.find(frames.FRAME_MAGIC)
            while 0 <= at < PIECE:
                head = frames.unpack_head(block[at : at + frames.HEAD_BYTES], self._seed)
                if head is not None:
                    yield offset + at, head
                at = block.find(frames.FRAME_MAGIC, at + 1)
            offset += PIECE

    def _damaged(self, offset: int, what: str) -> StateError:
        return StateError(
            f"{self.name} is damaged at byte {offset}: {what}",
            "this is no torn write of a crash: records that were safe are lost or changed",
            "bring the file back from a copy; going on would lose or repeat work without a trace",
        )

    def _look_through(self) -> None:
        """Find the end, cut what an interrupted append left, and make the rest durable before anything builds on it."""
        for offset, head, _ in self._frames():
            self._end, self._number = offset + frames.HEAD_BYTES + head.length, head.number
            self._sealed = head.length == 0
        self._synced = self._end
        self.torn_bytes = self._file.size() - self._end
        if self.readonly:
            return
        if self.torn_bytes:
            failpoint("journal.before_cut")
            self._file.truncate(self._end)
        self._file.sync()
        if self.torn_bytes:
            failpoint("journal.after_cut")
