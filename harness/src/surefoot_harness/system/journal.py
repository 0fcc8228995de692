"""An append-only file of records that says what happened, in order, and survives the writer.

Owns       one file; its caller sees to it that nobody else writes to it.
Promises   a record whose durable append returned is there after any crash; a record is whole or absent; a torn tail is
           cut and counted; damage anywhere else is refused with its offset; an append that fails leaves the file as it
           was. A batch is not one record: a crash may keep its beginning.
Never      returns other data than was written, takes an unreadable file for a new one, or retries a failed fsync.

    begin(file, record) --> append(record) --> [header][frame][frame][frame]... --> open(path).records()

The ledger and the batches of a run (`storage/files.py`), cassettes (`tools/recording_file.py`) and what tests track
(`harness/tracker/tracker.py`) are files of this one format.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, NoReturn, Protocol, Self

from surefoot_harness.errors import StateError, StorageError
from surefoot_harness.system.files import storage_error, sync_folder
from surefoot_harness.system.json import decoder

# -- The file under a journal: what a journal asks of it, and the real one ------------------------


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
    """A real file: no link is followed, every byte is written or an OSError says why not.

    Args:
        create: make an empty one, readable for its owner alone, where there is none.
    """

    def __init__(self, path: Path, *, readonly: bool = False, create: bool = False) -> None:
        mode = os.O_RDONLY if readonly else os.O_RDWR | (os.O_CREAT if create else 0)
        try:
            self._descriptor = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
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
        """All of `data`; what the system takes only in part is offered again."""
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            offset, view = offset + written, view[written:]

    def truncate(self, size: int) -> None:
        """Cut the file."""
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        os.fsync(self._descriptor)

    def hold(self) -> None:
        """Be the only one who holds this file, until it is closed or the process ends; else a BlockingIOError."""
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Let go of it; a second time is nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


# -- The bytes of a journal: how a record is framed, and what a damaged frame means ---------------
# header   8 magic | u32 version | 16 id | u32 CRC-32 of these                                  32 bytes
# frame    4 magic | u32 length | u64 number | u64 synced | u32 CRC of the payload | u32 CRC of the head    32 bytes
# payload  `length` bytes of JSON in ASCII; an empty one is a seal, written when a journal is closed
#
# All numbers are little-endian; both CRCs of a frame start from the header's, so a frame of another journal does not
# pass. `number` counts frames from 1 and shows what is missing, doubled or moved. `synced` is how far the file was
# known to be on the disk when the frame was written: a whole frame whose `synced` lies behind a damaged place proves
# that the damage is no torn write. JSON in ASCII never contains the magic's first byte, so a reader finds the next
# frame by looking for it.


HEADER_MAGIC = b"\x89SFJ\r\n\x1a\n"
FRAME_MAGIC = b"\xf5SFR"
VERSION = 1
ID_BYTES = 16
MAX_PAYLOAD = 64 << 20
"""The largest record, in bytes. A longer length in a file is a damaged one, not a request for memory."""

_HEADER = struct.Struct(f"<8sI{ID_BYTES}sI")
_HEAD = struct.Struct("<4sIQQII")
_HEAD_BODY = struct.Struct("<4sIQQI")
HEADER_BYTES = _HEADER.size
HEAD_BYTES = _HEAD.size


_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))
_DECODER = decoder(repeated=True)  # a CRC checks the bytes and our encoder repeats no key: no look at each of them


class Head(NamedTuple):
    """The first 32 bytes of a frame, checked."""

    length: int
    number: int
    synced: int
    payload_crc: int


@dataclass(frozen=True, slots=True)
class Header:
    """Which journal this is: 16 random bytes, and the seed of every CRC in it."""

    id: bytes

    @property
    def seed(self) -> int:
        """Where the CRCs of this journal begin."""
        return zlib.crc32(self.pack()[:-4])

    def pack(self) -> bytes:
        """The first bytes of the file."""
        body = _HEADER.pack(HEADER_MAGIC, VERSION, self.id, 0)[:-4]
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes, name: str) -> Header:
        """Read a header; anything that is not one is a `StateError`. Never taken for an empty journal."""
        if len(data) < HEADER_BYTES:
            _not_a_journal(name, f"it has {len(data)} bytes, and the header alone has {HEADER_BYTES}")
        magic, version, identity, crc = _HEADER.unpack(data[:HEADER_BYTES])
        if magic != HEADER_MAGIC:
            _not_a_journal(name, "it does not begin as one")
        if crc != zlib.crc32(data[: HEADER_BYTES - 4]):
            _not_a_journal(name, "its header is damaged")
        if version != VERSION:
            _not_a_journal(name, f"it has format {version}, and this version reads format {VERSION}")
        return cls(identity)


def pack_frame(payload: bytes, *, number: int, synced: int, seed: int) -> bytes:
    """Head and payload of one frame."""
    body = _HEAD_BODY.pack(FRAME_MAGIC, len(payload), number, synced, zlib.crc32(payload, seed))
    return body + struct.pack("<I", zlib.crc32(body, seed)) + payload


def unpack_head(data: bytes, seed: int) -> Head | None:
    """The head at the beginning of `data`; None if there is no whole one."""
    if len(data) < HEAD_BYTES:
        return None
    magic, length, number, synced, payload_crc, head_crc = _HEAD.unpack(data[:HEAD_BYTES])
    if magic != FRAME_MAGIC or head_crc != zlib.crc32(data[: HEAD_BYTES - 4], seed):
        return None
    return Head(length, number, synced, payload_crc)


def payload_fits(payload: bytes, head: Head, seed: int) -> bool:
    """Whether these are the bytes that the head was written for."""
    return len(payload) == head.length and zlib.crc32(payload, seed) == head.payload_crc


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as canonical JSON in ASCII; what JSON has no word for, and what is too large, is a `StateError`."""
    try:
        payload = _ENCODER.encode(record).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(
            f"a record cannot be written to the journal: {str(error)[:200]}",
            "a journal holds JSON, so that what is read back is what was written",
            "write finite numbers, texts, lists and objects with text keys",
        ) from error
    if len(payload) > MAX_PAYLOAD:
        raise StateError(
            f"a record has {len(payload)} bytes, and a journal takes at most {MAX_PAYLOAD}",
            "a reader has to be able to tell a large record from a damaged length",
            "split it into several records",
        )
    return payload


def decode(payload: bytes, where: str) -> dict[str, Any]:
    """The record back; a payload that is not a JSON object is a `StateError`."""
    try:
        record = _DECODER.decode(payload.decode("ascii"))
    except (ValueError, RecursionError) as error:  # also what is not ASCII
        raise StateError(
            f"{where} is not JSON: {str(error)[:200]}", "its CRC is right, so it was written by something else",
            "use the journal of this run as it was written",
        ) from error  # fmt: skip
    if not isinstance(record, dict):
        raise StateError(
            f"{where} is not a JSON object", "its CRC is right, so it was written by something else",
            "use the journal of this run as it was written",
        )  # fmt: skip
    return record


def first_record(file: JournalFile, name: str) -> dict[str, Any] | None:
    """What a file begins with; None where it is empty, or a crash ended its very first write (see `begin`).

    Looks at no more than that record and changes nothing; a file that begins as anything else is a `StateError`.
    """
    start = file.read(0, HEADER_BYTES + HEAD_BYTES)
    if len(start) < HEADER_BYTES and start[: len(HEADER_MAGIC)] == HEADER_MAGIC[: len(start)]:
        return None
    seed, rest = Header.unpack(start, name).seed, start[HEADER_BYTES:]
    if len(rest) < HEAD_BYTES and rest[: len(FRAME_MAGIC)] == FRAME_MAGIC[: len(rest)]:
        return None
    head = unpack_head(rest, seed)
    if head is None or head.number != 1 or head.length > MAX_PAYLOAD:
        _not_a_journal(name, "its first record is damaged")
    payload = file.read(HEADER_BYTES + HEAD_BYTES, head.length)
    if len(payload) < head.length:
        return None
    if not payload_fits(payload, head, seed):
        _not_a_journal(name, "its first record is damaged")
    return decode(payload, f"{name}, record 1")


def _not_a_journal(name: str, why: str) -> NoReturn:
    raise StateError(
        f"{name} is not a journal that can be read", f"{why}; it is not taken for a new one",
        "bring it back from a copy, or resume from a folder whose journal is whole",
    )  # fmt: skip


# -- An append-only file of records that says what happened, in order, and survives the writer ----


class JournalEntry(NamedTuple):
    """One record, with its number (from 1, with gaps where a seal is) and where it begins in the file."""

    number: int
    offset: int
    record: dict[str, Any]


class FramedJournal:
    """A journal that is open for appending (or, opened with `readonly`, for reading).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.journal"
        >>> with FramedJournal.begin(SystemFile(path, create=True), {"kind": "greetings"}, str(path)) as journal:
        ...     journal.append({"event": "hello"})
        2
        >>> [entry.record for entry in FramedJournal.open(path, readonly=True).records()]
        [{'kind': 'greetings'}, {'event': 'hello'}]
    """

    strict: ClassVar[bool] = False
    """Whether a whole frame behind a broken one is always damage. A power cut may leave such a file: it is then refused
    and not cut, which is right where what follows cannot be made again."""

    def __init__(self, file: JournalFile, name: str = "the journal", *, readonly: bool = False) -> None:
        """Look through `file`; cut a torn tail unless `readonly`."""
        self.name, self.readonly = name, readonly
        self.torn_bytes = 0
        """Bytes of an unfinished last append that were found (and cut) when this journal was opened."""
        self._file = file
        self._end = self._synced = HEADER_BYTES
        self._number, self._sealed, self._failed = 0, True, ""
        try:
            self._header = Header.unpack(file.read(0, HEADER_BYTES), name)
            self._seed = self._header.seed
            self._look_through()
        except OSError as error:
            raise storage_error(Path(name), error) from error

    @classmethod
    def begin(cls, file: JournalFile, record: Mapping[str, Any], name: str) -> Self:
        """A new journal with its first record, in a file where `first_record` has found none.

        Header and record are one write, so that a crash leaves a part that the next writer knows and replaces.
        """
        header = Header(os.urandom(ID_BYTES))
        first = pack_frame(encode(record), number=1, synced=0, seed=header.seed)
        try:
            file.truncate(0)
            file.write(0, header.pack() + first)
        except OSError as error:
            raise storage_error(Path(name), error) from error
        return cls(file, name)

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Self:
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
        payloads = [encode(record) for record in records]
        self.append_encoded(payloads, durable=durable)
        return list(range(self._number - len(payloads) + 1, self._number + 1))

    def append_encoded(self, payloads: Sequence[bytes], *, durable: bool) -> None:
        """`append_all` of records that went through `encode` already."""
        self._write(payloads)
        if durable:
            self.sync()

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
        self.failpoint("journal.after_sync")

    def records(self, after: int = 0) -> Iterator[JournalEntry]:
        """Every record with a number above `after`, in order, checked once more as it is read."""
        for offset, head, payload in self._frames(until=self._end, after=after):
            if payload:
                yield JournalEntry(head.number, offset, decode(payload, f"{self.name}, record {head.number}"))

    def record_at(self, offset: int, number: int) -> dict[str, Any]:
        """One record once more, by what `records` said of it; checked again. Many threads may ask."""
        head = self._head_at(offset, number)
        payload = b"" if head is None else self._file.read(offset + HEAD_BYTES, head.length)
        if head is None or not payload_fits(payload, head, self._seed):
            raise self._damaged(offset, f"frame {number} was whole when the journal was opened")
        return decode(payload, f"{self.name}, record {number}")

    @staticmethod
    def failpoint(name: str) -> None:
        """Called at each place where a crash matters; nothing here, a test's door in a subclass."""

    def close(self) -> None:
        """Make everything durable, add the seal that protects the last records, and let go of the file."""
        if self._failed == "it is closed":
            return
        try:
            if not self.readonly and not self._failed and not self._sealed:
                self.sync()
                self.failpoint("journal.before_seal")
                with suppress(StorageError):  # every record is on the disk; a seal only helps to see later damage
                    self._write([b""])
        finally:
            self._failed = "it is closed"
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, payloads: Iterable[bytes]) -> None:
        self._require_open()
        numbered = enumerate(payloads, self._number + 1)
        packed = [pack_frame(p, number=n, synced=self._synced, seed=self._seed) for n, p in numbered]
        if (size := self._file.size()) != self._end:
            self._failed = f"it has {size} bytes where this writer left {self._end}: somebody else writes to it"
            self._require_open()
        self.failpoint("journal.before_write")
        try:
            self._write_bytes(b"".join(packed))
            self.failpoint("journal.after_write")
        except OSError as error:
            self._take_back()
            raise storage_error(Path(self.name), error) from error
        except BaseException:
            self._take_back()
            raise
        self._end += sum(map(len, packed))
        self._number += len(packed)
        self._sealed = bool(packed) and len(packed[-1]) == HEAD_BYTES

    def _write_bytes(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE):
            if start:
                self.failpoint("journal.between_pieces")
            self._file.write(self._end + start, data[start : start + PIECE])

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

    def _frames(self, until: int | None = None, after: int = 0) -> Iterator[tuple[int, Head, bytes]]:
        """Whole frames from the beginning; ends at a torn tail, raises at any other damage.

        Payloads of frames up to the number `after` are not read: they come as b"".
        """
        offset, number = HEADER_BYTES, 1
        end = self._file.size() if until is None else until
        while offset < end:
            head, payload = self._head_at(offset, number), b""
            if head is not None and number > after:
                payload = self._file.read(offset + HEAD_BYTES, head.length)
            if head is None or (number > after and not payload_fits(payload, head, self._seed)):
                self._refuse_damage(offset, number, end, expected=until is not None)
                return
            yield offset, head, payload
            offset, number = offset + HEAD_BYTES + head.length, number + 1

    def _head_at(self, offset: int, number: int) -> Head | None:
        """The head at `offset`; None if it is not whole. A whole one that cannot be there is refused at once."""
        head = unpack_head(self._file.read(offset, HEAD_BYTES), self._seed)
        if head is None:
            return None
        if head.number != number:
            raise self._damaged(offset, f"frame {number} should be here, and it is frame {head.number}")
        if head.length > MAX_PAYLOAD or head.synced > offset:
            raise self._damaged(offset, f"frame {number} has an impossible head ({head.length} bytes long)")
        return head

    def _refuse_damage(self, offset: int, number: int, end: int, *, expected: bool) -> None:
        """Return if the damage at `offset` can be a write that a crash interrupted."""
        if expected:
            raise self._damaged(offset, f"frame {number} was whole when the journal was opened")
        for later, head in self._later_heads(offset + 1, end):
            if head.number >= number and self.strict:
                raise self._damaged(
                    offset, f"frame {number} is broken, and frame {head.number} at byte {later} is whole"
                )
            if head.number >= number and head.synced > offset:
                raise self._damaged(
                    offset, f"frame {number} is broken, and frame {head.number} at byte {later} was written when "
                    f"everything before byte {head.synced} was on the disk",
                )  # fmt: skip

    def _later_heads(self, offset: int, end: int) -> Iterator[tuple[int, Head]]:
        """Every whole head from `offset` on, found by its magic."""
        while offset < end:
            block = self._file.read(offset, PIECE + HEAD_BYTES - 1)
            at = block.find(FRAME_MAGIC)
            while 0 <= at < PIECE:
                head = unpack_head(block[at : at + HEAD_BYTES], self._seed)
                if head is not None:
                    yield offset + at, head
                at = block.find(FRAME_MAGIC, at + 1)
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
            self._end, self._number = offset + HEAD_BYTES + head.length, head.number
            self._sealed = head.length == 0
        self._synced = self._end
        self.torn_bytes = self._file.size() - self._end
        if self.readonly:
            return
        if self.torn_bytes:
            self.failpoint("journal.before_cut")
            self._file.truncate(self._end)
        self._file.sync()
        if self.torn_bytes:
            self.failpoint("journal.after_cut")


# -- What can still be read of a damaged file ------------------------------------------------------


class Salvaged(NamedTuple):
    """Every whole record of a file, and a sentence for each place that holds none."""

    records: list[JournalEntry]
    problems: list[str]


def salvage(path: Path) -> Salvaged:
    """What is whole in a file that a crash or a bad disk may have damaged, for whom a part is better than nothing.

    `FramedJournal.open` refuses damage; this names it and goes on behind it. A file without a header is a `StateError`.
    """
    file = SystemFile(path, readonly=True)
    try:
        data = file.read(0, file.size())
    finally:
        file.close()
    found = Salvaged([], [])
    seed, offset = Header.unpack(data, str(path)).seed, HEADER_BYTES
    while offset < len(data):
        frame = _frame_at(data, offset, seed)
        if frame is None:
            start, offset = offset, _next_frame(data, offset + 1, seed)
            found.problems.append(f"{offset - start} bytes from byte {start} on are torn or damaged")
            continue
        head, payload = frame
        try:
            if payload:
                found.records.append(JournalEntry(head.number, offset, decode(payload, f"record {head.number}")))
        except StateError as error:
            found.problems.append(error.what)
        offset += HEAD_BYTES + head.length
    return found


def _frame_at(data: bytes, offset: int, seed: int) -> tuple[Head, bytes] | None:
    head = unpack_head(data[offset : offset + HEAD_BYTES], seed)
    payload = b"" if head is None else data[offset + HEAD_BYTES : offset + HEAD_BYTES + head.length]
    return None if head is None or not payload_fits(payload, head, seed) else (head, payload)


def _next_frame(data: bytes, offset: int, seed: int) -> int:
    """Where the next whole frame begins; the end of `data` if there is none."""
    while (offset := data.find(FRAME_MAGIC, offset)) >= 0:
        if _frame_at(data, offset, seed) is not None:
            return offset
        offset += 1
    return len(data)
