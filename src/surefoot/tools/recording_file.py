"""The file under a cassette: a journal of framed records (`system/journal.py`), the first of which says what it is.

    {"format": 2, "kind": "cassette", ...}  {"kind": "life", ...}  {"kind": "open", ...}  {"kind": "call", ...} ...

Owns       what a cassette begins with, and who may write to it.
Promises   a record that is changed, missing, doubled, moved or from another cassette is seen; what a crash tore off is
           cut when recording goes on and left out when reading; anything else that is wrong is a `StateError`; after a
           write that failed nothing more is recorded: a recording with a gap must not come to look like a whole one.
           A cassette of format 1, one JSON object per line, is read as ever, and not added to.
Never      knows what the records mean.

Read next: `recording.py`.
"""

from __future__ import annotations

import contextlib
import json
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.errors import StateError, StorageError
from surefoot.system.files import storage_error
from surefoot.system.journal import FramedJournal, JournalEntry, SystemFile, encode, first_record

FORMAT = 2
RECORD_CAP = 16 << 20
"""Bytes of one record; what a tool may answer, as JSON."""


class RecordPlace(NamedTuple):
    """Where one record lies."""

    offset: int
    number: int


class CassetteJournal(FramedJournal):
    """A torn tail is the part of a record at its end, nothing else: what a tool once said is not said again."""

    strict = True


class RecordingFile:
    """One cassette, read or appended to. Safe to use from many threads.

    Args:
        header: what the first record says besides its format; given when recording, and kept as it was found otherwise.
    """

    def __init__(self, path: Path, *, header: Mapping[str, Any] | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._broken: StorageError | None = None
        self._file = _open(path, recording=header is not None)
        self._journal: CassetteJournal | LineCassette
        try:
            if self._file.read(0, len(_OLD_START)) == _OLD_START:
                self._journal, self.header = self._old(recording=header is not None)
            else:
                self._journal, self.header = self._framed(header)
        except OSError as error:
            self._file.close()
            raise storage_error(path, error) from error
        except BaseException:
            self._file.close()
            raise

    def records(self) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
        """Every record after the header, checked."""
        with _as_a_cassette(self.path):
            for entry in self._journal.records():
                if entry.record["kind"] != "cassette":
                    yield RecordPlace(entry.offset, entry.number), entry.record

    def record_at(self, place: RecordPlace) -> dict[str, Any]:
        """A record once more, checked again."""
        with _as_a_cassette(self.path):
            return self._journal.record_at(*place)

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one record; its number. It outlives this process at once, and the machine after `sync`."""
        payload = encode(record)
        if len(payload) > RECORD_CAP:
            why = f"a record of a cassette has at most {RECORD_CAP}"
            raise StateError(f"an answer has {len(payload)} bytes as JSON", why, "have the tool answer with less")
        with self._lock:
            if self._broken is not None:
                raise self._broken
            try:
                self._writer.append_encoded([payload], durable=False)
            except StorageError as error:
                self._broken = error
                raise
            return self._writer.last_number

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        with self._lock:
            if not self._journal.readonly:
                self._writer.sync()

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._journal.close()

    @property
    def _writer(self) -> CassetteJournal:
        assert isinstance(self._journal, CassetteJournal), "a cassette of format 1 is never opened to record"
        return self._journal

    def _framed(self, header: Mapping[str, Any] | None) -> tuple[CassetteJournal, dict[str, Any]]:
        name = str(self.path)
        with _as_a_cassette(self.path):
            first = first_record(self._file, name)
            if first is None and header is not None:
                first = {"kind": "cassette", "format": FORMAT, **header}
                return CassetteJournal.begin(self._file, first, name), first
            if first is None:
                raise _wrong(self.path, "has no whole first record")
            if first.get("kind") != "cassette" or first.get("format") != FORMAT:  # before a tail of another kind is cut
                raise _wrong(self.path, f"does not begin as a cassette of format {FORMAT}")
            return CassetteJournal(self._file, name, readonly=header is None), first

    def _old(self, *, recording: bool) -> tuple[LineCassette, dict[str, Any]]:
        if recording:
            raise StateError(
                f"{self.path} is a cassette of format 1, and this surefoot records to format {FORMAT}",
                "an older surefoot wrote it; it is replayed as it is, but nothing can be added to it",
                "record to a new file, or go on with the surefoot that began it",
            )
        with _as_a_cassette(self.path):
            lines = LineCassette(self._file, self.path)
        return lines, lines.header


def _open(path: Path, *, recording: bool) -> SystemFile:
    try:
        file = SystemFile(path, readonly=not recording, create=recording)
    except StateError as error:
        raise StateError(
            f"the cassette {error.what}",
            "tool calls are recorded to it or replayed from it",
            "check the path; a cassette is made by a run that records",
        ) from error
    try:
        if recording:
            file.hold()
    except BlockingIOError as error:
        file.close()
        raise StateError(
            f"the cassette {path} is being recorded by another process",
            "two writers would mix their records",
            "give each run a cassette of its own",
        ) from error
    return file


@contextlib.contextmanager
def _as_a_cassette(path: Path) -> Iterator[None]:
    """What is wrong with a file, in the words of whoever wanted to replay it."""
    try:
        yield
    except StateError as error:
        found = error.what.removeprefix(f"{path} ")
        raise _wrong(path, f"is not a cassette that can be used: it {found}") from error


def _wrong(path: Path, what: str) -> StateError:
    return StateError(
        f"{path} {what}",
        "a replay that answers from a damaged cassette would not be the run that was recorded",
        "bring it back from a copy, or record again to a new file",
    )


# -- Format 1: one JSON object per line, each with a checksum. Read only ---------------------------
#     {"crc":"5f2b1c08","record":{"n":0,"kind":"cassette",...}}
# Lines count from 0 and their checksums begin with the header's. A last line without its end is a torn write.


LINE_CAP = 16 << 20
"""Bytes of one line; a longer one in a file is damage, not a request for memory."""
_PIECE = 1 << 20
_OLD_START, _BEFORE, _AFTER = b'{"crc":"', b'{"crc":"%08x","record":', b"}\n"


class LineCassette:
    """A cassette of format 1, with the methods that a replay asks of a `FramedJournal`."""

    readonly = True

    def __init__(self, file: SystemFile, path: Path) -> None:
        self._file, self._path, self._seed = file, path, 0
        line = self._line_at(0)
        if line is None:
            raise _wrong(path, "has no whole first line")
        self.header = self._checked(line, 0)
        if self.header.get("kind") != "cassette" or self.header.get("format") != 1:
            raise _wrong(path, "does not begin as a cassette of format 1")
        self._first, self._seed = len(line), zlib.crc32(line)

    def records(self) -> Iterator[JournalEntry]:
        """Every record behind the header, with numbers from 1."""
        offset, number = self._first, 1
        while (line := self._line_at(offset)) is not None:
            yield JournalEntry(number, offset, self._checked(line, number))
            offset, number = offset + len(line), number + 1

    def record_at(self, offset: int, number: int) -> dict[str, Any]:
        """A record once more, checked again."""
        return self._checked(self._line_at(offset) or b"", number)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _line_at(self, offset: int) -> bytes | None:
        """The line that begins here, its end included; None at the end of the file, or where a line has no end."""
        found = bytearray()
        while (end := found.find(b"\n")) < 0:
            piece = self._file.read(offset + len(found), min(_PIECE, max(256, len(found))))
            if not piece:
                return None
            found += piece
            if len(found) > LINE_CAP + _PIECE:
                raise _wrong(self._path, f"has a line of more than {LINE_CAP} bytes at byte {offset}")
        return bytes(found[: end + 1])

    def _checked(self, line: bytes, number: int) -> dict[str, Any]:
        text = line[len(_BEFORE % 0) : -len(_AFTER)]
        record = json.loads(text) if line == (_BEFORE % zlib.crc32(text, self._seed)) + text + _AFTER else None
        if not isinstance(record, dict) or record.get("n") != number:
            raise _wrong(self._path, f"has a line {number + 1} that is damaged, or does not belong there")
        return record
