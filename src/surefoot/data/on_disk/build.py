"""Sort pairs of 64-bit numbers that do not fit into memory.

Promises   the pairs come back in order, each once; memory is that of one 64th of them once they are many; nothing is
           left on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import IO, Literal

from surefoot.data.content import Content
from surefoot.data.files import MAX_PROBLEMS, RowProblem, check_columns, parse_row, row_task
from surefoot.data.on_disk.index import MAGIC, NUMBER, PAIR, ROW, VERSION, Footer, footer_bytes, id_hash, unreadable
from surefoot.data.on_disk.rows import FoundRow, RowFile
from surefoot.data.task_format import category_of, complexity_of, tool_problems
from surefoot.data.tasks import task_bytes
from surefoot.errors import StorageError, TaskError
from surefoot.records import Task
from surefoot.storage.files import sync_folder
from surefoot.system.heartbeat import tick
from surefoot.system.process import exists

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
_BEAT_ROWS = 2000
_log = logging.getLogger(__name__)


def build_index(
    source: RowFile, target: Path, fingerprint: Callable[[], str], *, max_bad_rows: int = 0, form: Form = "auto"
) -> None:
    """Write the index of `source` to `target`, or raise a `TaskError` that names what is wrong.

    Args:
        fingerprint: asked before and after: a file that changes while it is read is refused.
    """
    before = fingerprint()
    temporary = target.with_name(f".{target.name}.{threading.get_ident():x}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _sweep(target)
        with temporary.open("wb") as out, contextlib.ExitStack() as stack:
            out.write(MAGIC)
            build = _Build(source, out, target.parent, form, max_bad_rows)
            stack.callback(build.close)
            build.walk()
            build.finish(before)
            if (after := fingerprint()) != before:
                raise changed(source.name, before, after)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    except OSError as error:
        raise StorageError(
            f"{target} could not be written: {error.strerror or error}", "the index of a task file lies there",
            "free some space, or give cache_dir a folder that you may write to",
        ) from error  # fmt: skip
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


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
        with Path(self.out.name).open("rb") as file:
            file.seek(len(MAGIC) + ROW.size * number)
            return ROW.unpack(file.read(ROW.size))

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
