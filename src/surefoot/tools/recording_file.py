"""The file under a cassette: one JSON object per line, each with a checksum, only ever appended to.

    {"crc": "5f2b1c08", "record": {"n": 0, "kind": "cassette", ...}}

Owns       the form of a line, and what a damaged one means.
Promises   lines count from 0 and their checksums begin with the header's, so that a line that is changed, missing,
           doubled, moved or from another cassette is seen; a last line without its end is a torn write: it is cut when
           recording goes on and left out when reading; anything else that is wrong is a `StateError`; after a write
           that failed nothing more is written.
Never      knows what the records mean.

Read next: `recording.py`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from surefoot.errors import StateError, StorageError
from surefoot.system.files import storage_error, sync_folder

FORMAT = 1
LINE_CAP = 16 << 20
"""Bytes of one line; a longer one in a file is damage, not a request for memory."""
_PIECE = 1 << 20
_BEFORE, _AFTER = b'{"crc":"%08x","record":', b"}\n"


class RecordPlace(NamedTuple):
    """Where one record lies."""

    offset: int
    length: int
    number: int


class RecordingFile:
    """One cassette, read or appended to. Safe to use from many threads.

    Args:
        header: what the first line says besides its format; given when recording, and kept as it was found otherwise.
    """

    def __init__(self, path: Path, *, header: Mapping[str, Any] | None) -> None:
        self.path, self._recording = path, header is not None
        self._lock = threading.Lock()
        self._broken: StorageError | None = None
        self._seed, self._first, self._next = 0, 0, 1
        self._file = self._open()
        try:
            self._end = os.fstat(self._file).st_size
            if header is not None and self._is_unwritten():
                self._begin(header)
            self.header = self._read_header()
        except BaseException:
            os.close(self._file)
            raise

    # -- reading ----------------------------------------------------------------

    def lines(self) -> Iterator[tuple[RecordPlace, dict[str, Any]]]:
        """Every record after the header, checked; when recording, what a torn write left is cut."""
        offset, number = self._first, 1
        while (data := self._line_at(offset)) is not None:
            yield RecordPlace(offset, len(data), number), self._checked(data, number)
            offset, number = offset + len(data), number + 1
        self._next = number
        if offset < self._end and self._recording:
            os.ftruncate(self._file, offset)
            os.fsync(self._file)
        self._end = offset

    def record_at(self, place: RecordPlace) -> dict[str, Any]:
        """A record once more, checked again."""
        return self._checked(os.pread(self._file, place.length, place.offset), place.number)

    # -- writing ----------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one record; its number. It outlives this process at once, and the machine after `sync`."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            number = self._next
            data = _packed({"n": number, **record}, self._seed)
            if len(data) > LINE_CAP:
                why = f"a line of a cassette has at most {LINE_CAP}"
                raise StateError(f"an answer has {len(data)} bytes as JSON", why, "have the tool answer with less")
            self._write(data)
            self._next = number + 1
            return number

    def sync(self) -> None:
        """Return when everything written is on the disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            try:
                if self._recording:
                    self.sync()
            finally:
                os.close(self._file)
                self._file = -1

    # -- inside -----------------------------------------------------------------

    def _open(self) -> int:
        mode = os.O_RDWR | os.O_CREAT if self._recording else os.O_RDONLY
        try:
            file = os.open(self.path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(
                f"the cassette {self.path} cannot be opened: {error.strerror or error}",
                "tool calls are recorded to it or replayed from it",
                "check the path; a cassette is made by a run that records",
            ) from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                _refuse(self.path, "it is not a plain file")
            if self._recording:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise StateError(
                f"the cassette {self.path} is being recorded by another process",
                "two writers would mix their lines",
                "give each run a cassette of its own",
            ) from error
        except BaseException:
            os.close(file)
            raise
        return file

    def _is_unwritten(self) -> bool:
        """Whether there is nothing, or only what a torn first write of ours left; anything else is somebody's."""
        start = _BEFORE[:8]
        found = os.pread(self._file, len(start), 0)
        return found == start[: len(found)] and self._line_at(0) is None

    def _begin(self, header: Mapping[str, Any]) -> None:
        os.ftruncate(self._file, 0)
        self._end = 0
        first = {"n": 0, "kind": "cassette", "format": FORMAT, "id": secrets.token_hex(8), **header}
        self._write(_packed(first, 0))
        try:
            os.fsync(self._file)
            sync_folder(self.path.parent)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def _read_header(self) -> dict[str, Any]:
        data = self._line_at(0)
        if data is None:
            _refuse(self.path, "its first line is missing or torn")
        header = self._checked(data, 0)
        if header.get("kind") != "cassette" or header.get("format") != FORMAT:
            _refuse(self.path, f"it does not begin as a cassette of format {FORMAT}")
        self._first, self._seed = len(data), zlib.crc32(data)
        return header

    def _line_at(self, offset: int) -> bytes | None:
        """The line that begins here, its end included; None at the end of the file, or where a line has no end."""
        found = bytearray()
        while (end := found.find(b"\n")) < 0:
            piece = os.pread(self._file, min(_PIECE, max(256, len(found))), offset + len(found))
            if not piece:
                return None
            found += piece
            if len(found) > LINE_CAP + _PIECE:
                _refuse(self.path, f"a line of more than {LINE_CAP} bytes begins at byte {offset}")
        return bytes(found[: end + 1])

    def _checked(self, data: bytes, number: int) -> dict[str, Any]:
        text = data[len(_BEFORE % 0) : -len(_AFTER)]
        record = json.loads(text) if data == _framed(text, self._seed) else None
        if not isinstance(record, dict) or record.get("n") != number:
            _refuse(self.path, f"line {number + 1} is damaged, or does not belong there")
        return record

    def _write(self, data: bytes) -> None:
        view, offset = memoryview(data), self._end
        try:
            while view:
                written = os.pwrite(self._file, view, offset)
                view, offset = view[written:], offset + written
        except OSError as error:
            self._broken = storage_error(self.path, error)  # half a line may stand there: nothing may follow it
            raise self._broken from error
        self._end = offset


def _packed(record: Mapping[str, Any], seed: int) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _framed(text.encode("ascii"), seed)


def _framed(text: bytes, seed: int) -> bytes:
    return (_BEFORE % zlib.crc32(text, seed)) + text + _AFTER


def _refuse(path: Path, why: str) -> NoReturn:
    raise StateError(
        f"{path} is not a cassette that can be used: {why}",
        "a replay that answers from a damaged cassette would not be the run that was recorded",
        "bring it back from a copy, or record again to a new file",
    )
