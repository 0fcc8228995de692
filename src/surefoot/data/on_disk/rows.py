"""Where each row of a JSONL or JSON file begins and ends, found in one pass and in bounded memory.

Owns       the walk over a file that is larger than memory.
Promises   every row with its byte offset; a line of any length costs no more memory than the longest row allowed;
           what is wrong with a row is told with line number and byte offset, and the walk goes on after it.
Never      reads a file whole, or says what a row means.

Read next: `build.py`, which walks.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from surefoot.data import files
from surefoot.data.files import RowProblem, parquet_rows, parse_row, row_task
from surefoot.data.task_format import kind
from surefoot.errors import SurefootError, TaskError
from surefoot.records import Task
from surefoot.system.files import atomic_file, storage_error
from surefoot.system.heartbeat import tick

BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 16
MARK = b"!"
"""Begins a line of a spooled file that tells why its row could not be written; JSON never begins like this."""


class FoundRow(NamedTuple):
    """One row, or what stands in its place."""

    place: str
    offset: int
    raw: bytes
    """The row's own bytes; empty where there is a problem."""
    problem: str | None = None


@dataclass(frozen=True)
class RowFile:
    """A file whose rows lie between byte offsets: the user's own, or one that `rows.py` wrote."""

    path: Path
    name: str
    """As people know it; stands in every message."""
    stem: str
    """Begins the ids that were left out, and is the tasks' `dataset`."""
    spooled: bool = False

    @property
    def is_list(self) -> bool:
        """One JSON list, not a row per line."""
        return not self.spooled and self.path.suffix.lower() == ".json"

    def scan(self, file: BinaryIO) -> Iterator[FoundRow]:
        """Every row with its offset."""
        if self.is_list:
            return scan_json(file, self.name)
        return scan_jsonl(file, self.name, spooled=self.spooled)

    def task(self, raw: bytes) -> Task:
        """The task that these bytes are; raises `RowProblem`."""
        return row_task(parse_row(raw), self.stem, Counter())


def scan_jsonl(file: BinaryIO, name: str, *, spooled: bool = False) -> Iterator[FoundRow]:
    """Every line of the file.

    Args:
        spooled: the file was written by `rows.py`: a line is the row of that number, and may be a marked problem.
    """
    number, offset = 0, 0
    blank: tuple[int, int, int] | None = None
    while line := file.readline(files.MAX_LINE_BYTES + 1):
        number, start = number + 1, offset
        offset += len(line)
        place = f"{name}[{number - 1}]" if spooled else f"{name}:{number}"
        if len(line) > files.MAX_LINE_BYTES:
            offset += _skip_line(file) if not line.endswith(b"\n") else 0
            problem = f"is {offset - start:,} bytes long; a task has at most {files.MAX_LINE_BYTES:,}"
            yield FoundRow(place, start, b"", problem)
            continue
        raw = line.rstrip(b" \t\r\n")  # what JSON calls white space: a file that is read whole keeps the rest too
        if number == 1 and raw.startswith(BOM):
            raw, start = raw[len(BOM) :], start + len(BOM)
        if not raw.strip():
            first, at, count = blank or (number, start, 0)
            blank = first, at, count + 1
            continue
        if blank is not None:  # at the end of a file empty lines mean nothing; before a task something is missing
            yield FoundRow(f"{name}:{blank[0]}", blank[1], b"", f"begins {blank[2]} empty line(s) between tasks")
            blank = None
        if spooled and raw.startswith(MARK):
            yield FoundRow(place, start, b"", raw[len(MARK) :].decode("utf-8", "replace"))
        else:
            yield FoundRow(place, start, raw)


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line without keeping it; how many bytes that were."""
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def scan_json(file: BinaryIO, name: str) -> Iterator[FoundRow]:
    """Every element of the file's one list. What cannot be walked over ends the walk with a `RowProblem`."""
    window = _Window(file)
    window.skip_space()
    if window.peek() != "[":
        raise RowProblem(f"is not a list of tasks: it begins with {window.peek()!r} (one task per line is .jsonl)")
    window.advance(1)
    window.skip_space()
    index = 0
    if window.peek() == "]":
        window.advance(1)
    else:
        while True:
            window.skip_space()
            start = window.offset
            yield FoundRow(f"{name}[{index}]", start, window.element(f"{name}[{index}]"))
            index += 1
            window.skip_space()
            after = window.peek()
            if after not in (",", "]"):
                raise RowProblem(f"is torn: {after or 'the end of the file'!r} follows element {index - 1}")
            window.advance(1)
            if after == "]":
                break
    window.skip_space()
    if window.peek():
        raise RowProblem(f"goes on after its list, at byte {window.offset:,}")


class _Window:
    """A moving piece of the file as text, which knows the byte offset of where it stands."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decode = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self.offset = "", 0, 0
        self._read, self._ended = 0, False
        self._decoder = json.JSONDecoder()
        if self.peek() == "\ufeff":
            self.advance(1)

    def peek(self) -> str:
        """The next character; empty at the end of the file."""
        if self._at >= len(self._text):
            self._more(CHUNK)
        return self._text[self._at : self._at + 1]

    def advance(self, characters: int) -> None:
        """Go on, and forget what lies behind."""
        self.offset += len(self._text[self._at : self._at + characters].encode())
        self._at += characters
        if self._at > CHUNK:
            self._text, self._at = self._text[self._at :], 0

    def skip_space(self) -> None:
        """To the next character that means something."""
        while (character := self.peek()) and character in " \t\r\n":
            self.advance(1)

    def element(self, place: str) -> bytes:
        """The bytes of the value that begins here; the window then stands behind it."""
        step = CHUNK
        while True:
            try:
                _, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # a number could go on in the next piece
                    break
            except RecursionError as error:
                raise RowProblem(f"element {place} is nested without end") from error
            except ValueError as error:
                if self._ended:
                    raise RowProblem(f"element {place}, at byte {self.offset:,}, is not JSON: {error}") from error
            if len(self._text) - self._at > files.MAX_LINE_BYTES:
                raise RowProblem(
                    f"element {place}, at byte {self.offset:,}, is not JSON or longer than "
                    f"{files.MAX_LINE_BYTES:,} bytes"
                )
            self._more(step)
            step *= 2
        raw = self._text[self._at : end].encode()
        self.advance(end - self._at)
        return raw

    def _more(self, size: int) -> None:
        data = self._file.read(size)
        self._ended = not data
        try:
            self._text += self._decode.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            raise RowProblem(f"is not UTF-8 near byte {self._read + error.start:,}") from error
        self._read += len(data)


# -- Rows that have no place in a file, written into one: Parquet, Hugging Face data sets, generators
# Owns       the way from a source that can only be walked to a file in which every row is one seek away.
# Promises   one row in memory at a time; a row that JSON cannot hold is written as a marked problem, so that it is
# counted like any other bad row; the file is there whole or not at all.
# Never      changes a value to make it fit.


MAX_SPOOL_BYTES = 2**36
"""64 GiB: what a source may unfold to. A generator without an end stops here and not at a full disk."""
_BEAT_ROWS = 2000


def spool_parquet(path: Path, target: Path) -> None:
    """Write the rows of a Parquet file to `target`, one JSON object a line."""
    try:
        spool_rows((row for _, row in parquet_rows(path, MAX_SPOOL_BYTES)), target, path.name)
    except RowProblem as problem:
        raise TaskError(f"{path.name} {problem}", "its rows cannot be told apart", "write the file again") from problem


def spool_rows(rows: Iterable[object], target: Path, name: str) -> None:
    """Write rows to `target`, one JSON object a line."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_file(target, mode=0o666) as out:
            size = 0
            for number, row in enumerate(_each(rows, name)):
                size += out.write(_line(row) + b"\n")
                if size > MAX_SPOOL_BYTES:
                    raise _endless(name, number)
                if number % _BEAT_ROWS == 0:
                    tick(f"reading {name}, row {number}")
    except OSError as error:
        raise storage_error(target, error) from error


def _each(rows: Iterable[object], name: str) -> Iterable[object]:
    """The rows; whatever a source of somebody else's raises is a fault of the tasks, with its number."""
    number = 0
    try:
        for row in rows:
            yield row
            number += 1
    except (SurefootError, RowProblem, OSError):
        raise
    except Exception as error:
        raise TaskError(
            f"{name} failed after {number} rows: {type(error).__name__}: {error}",
            "a data set that ends early would be trained on as if it were whole",
            "repair the source, or write its rows to a .jsonl file yourself",
        ) from error


def _line(row: object) -> bytes:
    if not isinstance(row, Mapping):
        return MARK + f"is {kind(row)}, not an object with a prompt".encode()
    try:
        return json.dumps(dict(row), ensure_ascii=False, allow_nan=False, default=_refuse).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return MARK + _why(row, error).encode("utf-8", "replace").replace(b"\n", b" ")


def _refuse(value: Any) -> object:
    raise TypeError(f"{type(value).__name__}")


def _why(row: Mapping[Any, Any], error: Exception) -> str:
    """Names the column, since a person has to find it."""
    for column, value in row.items():
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False, default=_refuse).encode()
        except TypeError as inner:
            return f"column {column!r} holds a {inner}; a task is plain data: text, numbers, lists, objects"
        except (ValueError, RecursionError) as inner:
            return f"column {column!r} cannot be written as JSON: {inner}"
    return f"cannot be written as JSON: {error}"


def _endless(name: str, number: int) -> TaskError:
    return TaskError(
        f"{name} gave more than {MAX_SPOOL_BYTES:,} bytes in {number:,} rows",
        "a generator without an end would fill the disk",
        "let it end, for example with itertools.islice",
    )
