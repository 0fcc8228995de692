"""Where each row of a JSONL or JSON file begins and ends, found in one pass and in bounded memory.

Owns       the walk over a file that is larger than memory.
Promises   every row with its byte offset; a line of any length costs no more memory than the longest row allowed;
           what is wrong with a row is told with line number and byte offset, and the walk goes on after it.
Never      reads a file whole, or says what a row means.

Read next: `index_build.py`, which walks.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from surefoot.data import files
from surefoot.data.files import RowProblem, parse_row, row_task
from surefoot.records import Task

BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 16
MARK = b"!"
"""Begins a line of a spooled file that tells why its row could not be written; JSON never begins like this."""


class Found(NamedTuple):
    """One row, or what stands in its place."""

    place: str
    offset: int
    raw: bytes
    """The row's own bytes; empty where there is a problem."""
    problem: str | None = None


@dataclass(frozen=True)
class RowFile:
    """A file whose rows lie between byte offsets: the user's own, or one that `spool.py` wrote."""

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

    def scan(self, file: BinaryIO) -> Iterator[Found]:
        """Every row with its offset."""
        if self.is_list:
            return scan_json(file, self.name)
        return scan_jsonl(file, self.name, spooled=self.spooled)

    def task(self, raw: bytes) -> Task:
        """The task that these bytes are; raises `RowProblem`."""
        return row_task(parse_row(raw), self.stem, Counter())


def scan_jsonl(file: BinaryIO, name: str, *, spooled: bool = False) -> Iterator[Found]:
    """Every line of the file.

    Args:
        spooled: the file was written by `spool.py`: a line is the row of that number, and may be a marked problem.
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
            yield Found(place, start, b"", problem)
            continue
        raw = line.rstrip(b" \t\r\n")  # what JSON calls white space: a file that is read whole keeps the rest too
        if number == 1 and raw.startswith(BOM):
            raw, start = raw[len(BOM) :], start + len(BOM)
        if not raw.strip():
            first, at, count = blank or (number, start, 0)
            blank = first, at, count + 1
            continue
        if blank is not None:  # at the end of a file empty lines mean nothing; before a task something is missing
            yield Found(f"{name}:{blank[0]}", blank[1], b"", f"begins {blank[2]} empty line(s) between tasks")
            blank = None
        if spooled and raw.startswith(MARK):
            yield Found(place, start, b"", raw[len(MARK) :].decode("utf-8", "replace"))
        else:
            yield Found(place, start, raw)


def _skip_line(file: BinaryIO) -> int:
    """Read to the end of the line without keeping it; how many bytes that were."""
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def scan_json(file: BinaryIO, name: str) -> Iterator[Found]:
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
            yield Found(f"{name}[{index}]", start, window.element(f"{name}[{index}]"))
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
