"""From a JSONL or JSON file to its index, in one pass and in bounded memory: rows are found, sorted and written.

Owns       the walk over a file that is larger than memory, and the making of its index.

Read next: `index.py`, what is written; `dataset.py`, who reads it.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import logging
import os
import struct
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple

from surefoot.data import files
from surefoot.data.files import (
    MAX_PROBLEMS,
    RowProblem,
    category_of,
    check_columns,
    complexity_of,
    kind,
    parquet_rows,
    parse_row,
    row_task,
    tool_problems,
)
from surefoot.data.on_disk.index import MAGIC, NUMBER, PAIR, ROW, VERSION, Footer, footer_bytes, id_hash, unreadable
from surefoot.data.tasks import Content, task_bytes
from surefoot.errors import StorageError, SurefootError, TaskError
from surefoot.records import Task
from surefoot.system.files import atomic_file, storage_error
from surefoot.system.process import exists
from surefoot.system.signals import tick

# -- Where each row begins and ends ----------------------------------------------------------------
# Promises   every row with its byte offset; a line of any length costs no more memory than the longest row allowed;
#            what is wrong with a row is told with line number and byte offset, and the walk goes on after it.
# Never      reads a file whole, or says what a row means.


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
    """A file whose rows lie between byte offsets: the user's own, or one that `spool_parquet` wrote."""

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
        spooled: the file was written by `spool_parquet`: a line is the row of that number, and may be a marked problem.
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


# -- Sort pairs of 64-bit numbers that do not fit into memory --------------------------------------
# Promises   the pairs come back in order, each once; memory is that of one 64th of them once they are many; nothing is
#            left on the disk.


SORT_PAIR = struct.Struct("<QQ")
IN_MEMORY = 1 << 16
_BUCKETS = 64
_SHIFT = 58
"""The upper 6 of 64 bits name the bucket, so buckets follow one another in order. Keys are hashes: they spread."""


class DiskSort:
    """Collects (key, value), both below 2^64, and gives them back sorted.

    Args:
        folder: where the buckets lie while there are too many pairs for memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pairs: list[tuple[int, int]] = []
        self._buckets: list[IO[bytes]] = []

    def add(self, key: int, value: int) -> None:
        """One more pair."""
        if self._buckets:
            self._buckets[key >> _SHIFT].write(SORT_PAIR.pack(key, value))
            return
        self._pairs.append((key, value))
        if len(self._pairs) > IN_MEMORY:
            self._buckets = [self._bucket() for _ in range(_BUCKETS)]
            pairs, self._pairs = self._pairs, []
            for pair in pairs:
                self.add(*pair)

    def _bucket(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._folder)

    def sorted(self) -> Iterator[tuple[int, int]]:
        """All pairs in order; only once."""
        yield from sorted(self._pairs)
        for bucket in self._buckets:
            bucket.seek(0)
            yield from sorted(SORT_PAIR.iter_unpack(bucket.read()))
            bucket.close()

    def close(self) -> None:
        """Give the room back, also when nobody asked for the result."""
        self._pairs = []
        for bucket in self._buckets:
            bucket.close()


# -- Build the index of a task file: one pass over the rows, each of them checked -----------------
# Owns       what makes a task file acceptable: every row by the rules of `files.py`, bad rows counted and capped, ids
# unique.
# Promises   memory does not grow with the file, up to a 64th of the hashes; a bad row is named with line and byte
# offset; two rows with one id are refused by comparing the ids themselves, never their hashes alone.
# Never      keeps a task, or leaves half an index behind.
#
# scan --> row rules --> rows, hashes --sort--> ids unique? prompts repeated? --> index file, renamed into place


Form = Literal["auto", "tool"]
MAX_LEVELS, MAX_CATEGORIES = 64, 65_535
_log = logging.getLogger(__name__)


def build_index(
    source: RowFile, target: Path, fingerprint: Callable[[], str], *, max_bad_rows: int = 0, form: Form = "auto"
) -> None:
    """Write the index of `source` to `target`, or raise a `TaskError` that names what is wrong.

    Args:
        fingerprint: asked before and after: a file that changes while it is read is refused.
    """
    before = fingerprint()
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(target)
        with atomic_file(target, mode=0o666) as out, contextlib.ExitStack() as stack:
            out.write(MAGIC)
            build = _Build(source, out, target.parent, form, max_bad_rows)
            stack.callback(build.close)
            build.walk()
            build.finish(before)
            if (after := fingerprint()) != before:
                raise changed(source.name, before, after)
    except OSError as error:
        raise StorageError(
            f"{target} could not be written: {error.strerror or error}", "the index of a task file lies there",
            "free some space, or give cache_dir a folder that you may write to",
        ) from error  # fmt: skip


def _sweep(target: Path) -> None:
    """Take away what a build that was killed left behind."""
    for stale in target.parent.glob(f".{target.name}.*.tmp"):
        owner = stale.name.rsplit(".", 2)[-2]
        if owner.isdigit() and int(owner) != os.getpid() and not exists(int(owner)):
            stale.unlink(missing_ok=True)


def changed(name: str, before: str, now: str) -> TaskError:
    """The file is not the one that was indexed."""
    return TaskError(
        f"{name} changed while it was in use\n    before: {before}\n    now:    {now}",
        "rows would be read from the wrong place, and the run could not be repeated",
        "start again with the file at rest; the index is then built anew",
    )


@dataclass
class _Build:
    """One build under way."""

    source: RowFile
    out: IO[bytes]
    folder: Path
    form: Form
    max_bad_rows: int
    rows: int = 0
    row_bytes: int = 0
    bad: int = 0
    problems: list[str] = field(default_factory=list)
    columns: tuple[str, set[str]] | None = None
    levels: dict[str | None, int] = field(default_factory=lambda: {None: 0})
    categories: dict[str | None, int] = field(default_factory=lambda: {None: 0})
    level_files: dict[int, IO[bytes]] = field(default_factory=dict)
    category_counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.ids, self.prompts = DiskSort(self.folder), DiskSort(self.folder)
        self.digest = hashlib.sha256()

    def close(self) -> None:
        """Give temporary files back."""
        self.ids.close()
        self.prompts.close()
        for file in self.level_files.values():
            file.close()

    def walk(self) -> None:
        """Every row of the file."""
        with self.source.path.open("rb", buffering=1 << 20) as file:
            try:
                for found in _reading(self.source.scan(file), self.source.name):
                    self._one(found)
            except RowProblem as problem:  # the walk itself cannot go on: no cap makes that acceptable
                self._refuse([*self.problems, f"{self.source.name}: {problem}"], self.bad + 1)
        if self.bad > self.max_bad_rows:
            self._refuse(self.problems, self.bad)
        if not self.rows:
            raise TaskError(f"{self.source.name} has no tasks", "there is nothing to train on", "write one task a row")

    def _one(self, found: FoundRow) -> None:
        if found.problem is not None:
            return self._note(found, found.problem)
        try:
            value = parse_row(found.raw)
            if self.form == "tool" and (wrong := tool_problems(value)):
                raise RowProblem("; ".join(wrong))
            task = row_task(value, self.source.stem, Counter())
            expected = self.columns or (found.place, set(task.columns))
            check_columns(task, *expected)
            level = _code(self.levels, complexity_of(task.columns), "complexity", MAX_LEVELS)
            category = _code(self.categories, category_of(task.columns), "category", MAX_CATEGORIES)
        except RowProblem as problem:
            return self._note(found, str(problem))
        self.columns = expected
        return self._keep(found, task, level, category)

    def _keep(self, found: FoundRow, task: Task, level: int, category: int) -> None:
        self.digest.update(task_bytes(task))
        hashed = id_hash(task.id)
        self.out.write(ROW.pack(found.offset, hashed, len(found.raw), zlib.crc32(found.raw), level, category, 0))
        self.ids.add(hashed, self.rows)
        self.prompts.add(int(Content.of(task.messages()).prompt_hash[:16], 16), self.rows)
        if level not in self.level_files:
            self.level_files[level] = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - `close` does
        self.level_files[level].write(NUMBER.pack(self.rows))
        self.category_counts[category] += 1
        self.rows += 1
        self.row_bytes += len(found.raw)
        if self.rows % _BEAT_ROWS == 0:
            tick(f"indexing {self.source.name}, row {self.rows}")

    def _note(self, found: FoundRow, problem: str) -> None:
        """One bad row; the reading ends when there are too many, and enough of them to show."""
        self.bad += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(f"{found.place} (byte {found.offset:,}): {problem}")
        if self.bad > self.max_bad_rows and len(self.problems) >= MAX_PROBLEMS:
            self._refuse(self.problems, self.bad)

    def _refuse(self, problems: list[str], bad: int) -> None:
        raise bad_rows_error(self.source.name, problems, bad, self.max_bad_rows)

    # -- after the last row ---------------------------------------------------------------

    def finish(self, fingerprint: str) -> None:
        """The sections behind the rows, and the footer."""
        self.out.flush()
        self._write_ids()
        level_counts = self._write_levels()
        twins = self._write_twins()
        footer = Footer(
            VERSION, self.rows, fingerprint, self.digest.hexdigest(), self.form, list(self.levels), level_counts,
            list(self.categories), [self.category_counts[code] for code in range(len(self.categories))], twins,
            self.bad, self.problems, self.row_bytes,
        )  # fmt: skip
        self.out.write(footer_bytes(footer))
        if self.bad or twins:
            _log.warning("%s: %d bad rows left out, %d prompts repeated", self.source.name, self.bad, twins)

    def _write_ids(self) -> None:
        repeated: list[str] = []
        for hashed, pairs in groupby(self.ids.sorted(), key=lambda pair: pair[0]):
            numbers = [number for _, number in pairs]
            for number in numbers:
                self.out.write(PAIR.pack(hashed, number))
            if len(numbers) > 1 and len(repeated) < MAX_PROBLEMS:
                repeated += islice(self._repeated(numbers), MAX_PROBLEMS)
        if repeated:
            raise TaskError(
                f"{self.source.name} has ids more than once\n    " + "\n    ".join(repeated[:MAX_PROBLEMS]),
                "groups, the held-out split and the accounts go by id",
                "make the ids unique; a row without an id that repeats another word for word has the same one",
            )

    def _repeated(self, numbers: list[int]) -> Iterator[str]:
        """Rows of one hash whose ids are really the same: two different ids may share a hash and are fine."""
        first: dict[str, int] = {}
        with self.source.path.open("rb") as file:
            for number in numbers:
                row = self._row(number)
                file.seek(row[0])
                task_id = self.source.task(file.read(row[2])).id
                if task_id in first:
                    earlier, later = self._place(first[task_id]), self._place(number)
                    yield f"{later}: id {task_id!r} was already used by {earlier}"
                first.setdefault(task_id, number)

    def _row(self, number: int) -> tuple[int, ...]:
        return ROW.unpack(os.pread(self.out.fileno(), ROW.size, len(MAGIC) + ROW.size * number))

    def _place(self, number: int) -> str:
        """`file:line`, counted only now that somebody asks."""
        if self.source.is_list or self.source.spooled:
            return f"{self.source.name}[{number}]"
        left, lines = self._row(number)[0], 1
        with self.source.path.open("rb") as file:
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                lines, left = lines + block.count(b"\n"), left - len(block)
        return f"{self.source.name}:{lines}"

    def _write_levels(self) -> list[int]:
        counts = []
        for code in range(len(self.levels)):
            file = self.level_files.get(code)
            counts.append(0 if file is None else file.tell() // NUMBER.size)
            if file is not None:
                file.seek(0)
                while block := file.read(1 << 20):
                    self.out.write(block)
        return counts

    def _write_twins(self) -> int:
        count = 0
        seen: tuple[int, int] | None = None
        for hashed, number in self.prompts.sorted():
            if seen is None or seen[0] != hashed:
                seen = hashed, number
            else:
                self.out.write(PAIR.pack(number, seen[1]))
                count += 1
        return count


def _reading(rows: Iterator[FoundRow], name: str) -> Iterator[FoundRow]:
    """A disk that fails while the tasks are read is not a disk that fails while the index is written."""
    try:
        yield from rows
    except OSError as error:
        raise unreadable(name, error) from error


def _code(table: dict[str | None, int], value: str | None, name: str, most: int) -> int:
    if value not in table and len(table) > most:
        raise RowProblem(f"{name} {value!r} is number {most + 1}; at most {most} different ones can be told apart")
    return table.setdefault(value, len(table))


def bad_rows_error(name: str, problems: list[str], bad: int, allowed: int) -> TaskError:
    """Too many rows are not tasks."""
    more = f"\n    and {bad - len(problems)} more" if bad > len(problems) else ""
    return TaskError(
        f"{name}: {bad} bad row(s), max_bad_rows is {allowed}\n    " + "\n    ".join(problems) + more,
        "a row that is skipped or guessed changes what is trained on, and nobody would see it",
        "correct the rows; or allow as many with max_bad_rows, and they are left out and counted",
    )
