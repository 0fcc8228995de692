"""A task file, its index and its cache, opened together: what all views of a `StreamingDataset` share.

Owns       the open files, and the decision whether an index may be used or has to be built.
Promises   a task is read with one seek and checked against its checksum; a file that is not the indexed one any more
           is refused with both fingerprints.

Read next: `build.py`.
"""

from __future__ import annotations

import heapq
import itertools
import os
import shutil
import tempfile
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from surefoot.data.files import SUFFIXES, RowProblem, of_known_kind
from surefoot.data.heldout import is_heldout, refuse_empty_side, side_key
from surefoot.data.lru import MISS, LRUCache
from surefoot.data.on_disk.build import Form, RowFile, bad_rows_error, build_index, changed, spool_parquet, spool_rows
from surefoot.data.on_disk.index import (
    AllRows,
    RowList,
    RowRecord,
    StoredRows,
    TaskIndex,
    file_fingerprint,
    id_hash,
    store_rows,
    unreadable,
)
from surefoot.errors import ConfigError, StateError, TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_of, storage_error

HIDDEN = ".surefoot"
"""The folder beside a task file that holds its index; it may be removed at any time."""
LARGE = 1 << 16
"""A row longer than this is not cached: a thousand of ten megabytes would be the whole memory."""


class TaskFileMissingError(TaskError, FileNotFoundError):
    """The file is not there; also a `FileNotFoundError`, which is what Python calls it."""

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.args = (what, why, fix)  # OSError would keep two of three


class TaskTable:
    """Reads tasks by row number or id. Safe to use from many threads, and after a fork."""

    def __init__(self, source: RowFile, index: TaskIndex, cache_size: int, fingerprint: Callable[[], str]) -> None:
        self.source, self.index = source, index
        self.folder = index.path.parent
        self.cache: LRUCache[int, Task] = LRUCache(cache_size)
        self._fingerprint = fingerprint
        try:
            self._fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(source.name, error) from error
        self._finalizer = weakref.finalize(self, os.close, self._fd)
        self._stamp = _stamp(os.fstat(self._fd))
        self._open = True
        self._refuse_changed()

    def task(self, row: int, *, cached: bool = True) -> Task:
        """The task of this row: from the cache, or by one read."""
        if cached and (known := self.cache.get(row)) is not MISS:
            return known
        record = self.index.row(row)
        self._refuse_changed()
        try:
            raw = os.pread(self._fd, record.length, record.offset)
        except OSError as error:
            raise unreadable(self.source.name, error) from error
        if len(raw) != record.length or zlib.crc32(raw) != record.crc:
            raise changed(self.source.name, self.index.footer.source, f"{self._fingerprint()} (row {row} differs)")
        try:
            task = self.source.task(raw)
        except RowProblem as problem:
            raise TaskError(
                f"{self.source.name}, byte {record.offset:,}: {problem}",
                "the row was good when the index was built",
                f"remove {self.index.path}; it is built anew",
            ) from problem
        if cached and record.length <= LARGE:
            self.cache.put(row, task)
        return task

    def find(self, task_id: str) -> int | None:
        """The row of this id; the id itself is compared, since two ids may share a hash."""
        for row in self.index.find(id_hash(task_id)):
            if self.task(row).id == task_id:
                return row
        return None

    def close(self) -> None:
        """Let go of the files."""
        self._open = False
        self._finalizer()
        self.index.close()

    def _refuse_changed(self) -> None:
        """By size and date, which costs a microsecond; the checksum of the row does the rest."""
        if not self._open:
            raise StateError("the data set was closed", "its files are not held any more", "open it again")
        try:
            now = _stamp(os.stat(self.source.path))
        except OSError as error:
            raise changed(self.source.name, self.index.footer.source, f"gone ({error.strerror})") from error
        if now != self._stamp:
            raise changed(self.source.name, self.index.footer.source, self._fingerprint())


def _stamp(facts: os.stat_result) -> tuple[int, int, int, int]:
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


def open_table(
    source: Any, folder: Path | None, *, cache_size: int, max_bad_rows: int, form: Form, full_hash: bool,
    name: str | None, key: str | None,
) -> TaskTable:  # fmt: skip
    """The table of any source; writes rows and index where they are not there or not of this source."""
    temporary: str | None = None
    if not isinstance(source, str | Path) and folder is None:
        temporary = tempfile.mkdtemp(prefix="surefoot-tasks-")
        folder = Path(temporary)
    try:
        rows = _row_file(source, folder, full_hash, name, key)
        table = _open(rows, _folder(rows.path, folder), cache_size, max_bad_rows, form, full_hash)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:
        weakref.finalize(table, _remove, temporary, os.getpid())
    return table


def _remove(folder: str, owner: int) -> None:
    """Not in a fork, whose end is not the end of the data set."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _open(
    rows: RowFile, folder: Path, cache_size: int, max_bad_rows: int, form: Form, full_hash: bool
) -> TaskTable:  # fmt: skip
    def fingerprint() -> str:
        return file_fingerprint(rows.path, full=full_hash)

    place = folder / f"{_slug(rows.path.name)}-{_short(str(rows.path.resolve()))}.index"
    index = _usable(place, fingerprint(), form)
    if index is None:
        build_index(rows, place, fingerprint, max_bad_rows=max_bad_rows, form=form)
        index = TaskIndex(place)
    footer = index.footer
    if footer.bad_rows > max_bad_rows:
        raise bad_rows_error(rows.name, footer.problems, footer.bad_rows, max_bad_rows)
    return TaskTable(rows, index, cache_size, fingerprint)


def _usable(place: Path, fingerprint: str, form: Form) -> TaskIndex | None:
    """The index, if it is one and belongs to this very file; everything else is built anew."""
    try:
        index = TaskIndex(place)
    except (OSError, StateError):
        return None
    return index if (index.footer.source, index.footer.form) == (fingerprint, form) else None


def _row_file(source: Any, folder: Path | None, full_hash: bool, name: str | None, key: str | None) -> RowFile:
    if isinstance(source, str | Path):
        path = _existing(Path(source)).absolute()  # also after somebody changed the working folder
        if path.suffix.lower() != ".parquet":
            return RowFile(path, path.name, path.stem)
        spool = _folder(path, folder) / f"{_slug(path.stem)}-{_short(str(path.resolve()))}.rows.jsonl"
        _spool_once(spool, file_fingerprint(path, full=full_hash), lambda: spool_parquet(path, spool))
        return RowFile(spool, path.name, path.stem, spooled=True)
    called = name or "rows"
    known = key if key is not None else _hugging_face_key(source)
    if folder is None:
        raise TaskError(f"{called} has no folder", "its rows have to be written somewhere", "give cache_dir")
    spool = folder.absolute() / f"{_slug(called)}-{_short(called)}.rows.jsonl"
    _spool_once(spool, known, lambda: spool_rows(_rows_of(source, called), spool, called))
    return RowFile(spool, called, called, spooled=True)


def _spool_once(spool: Path, key: str | None, write: Callable[[], None]) -> None:
    """Write the rows unless they are there under the same key; without a key nobody knows, so they are written."""
    note = spool.with_suffix(".key")
    kept = note.read_text("utf-8") if key is not None and note.is_file() and spool.is_file() else None
    if kept is not None and kept == f"{key}\n{file_fingerprint(spool)}\n":
        return
    note.unlink(missing_ok=True)
    write()
    if key is not None:
        try:
            note.write_text(f"{key}\n{file_fingerprint(spool)}\n", "utf-8")
        except OSError as error:
            raise storage_error(note, error) from error


def _rows_of(source: Any, name: str) -> Iterable[object]:
    rows = source() if callable(source) else source
    if isinstance(rows, str | bytes | dict) or not isinstance(rows, Iterable):
        raise TaskError(
            f"{name} is {type(rows).__name__}", "rows come from a file, a data set, a function or an iterable",
            "pass a path, a list of rows, or a function that returns an iterable of rows",
        )  # fmt: skip
    return rows


def _hugging_face_key(source: Any) -> str | None:
    """A Hugging Face data set names its own contents; anything else does not."""
    value = getattr(source, "_fingerprint", None)
    return value if isinstance(value, str) and type(source).__module__.startswith("datasets") else None


def _existing(path: Path) -> Path:
    if not path.is_file():
        state = "is a folder" if path.is_dir() else "does not exist"
        raise TaskFileMissingError(
            f"the task file {path} {state}", "there is nothing to read tasks from", f"use a {', '.join(SUFFIXES)} file"
        )
    return of_known_kind(path, path.name)


def _folder(path: Path, given: Path | None) -> Path:
    folder = path.parent / HIDDEN if given is None else given.absolute()
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            if given is None:
                (folder / ".gitignore").write_text("*\n", "utf-8")  # nobody wants an index in a repository
    except OSError as error:
        raise TaskError(
            f"{folder} cannot be made: {error.strerror}", "the index of a task file lies there", "give cache_dir"
        ) from error
    return folder


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:40] or "rows"


def _short(text: str) -> str:
    return sha256_of(text, errors="surrogateescape")[:10]


# -- `StreamingDataset`: tasks by the million, one seek away, none of them in memory --------------
# Owns       a task file together with its index, its cache of parsed tasks, and the views cut out of it.
# Promises   memory does not grow with the number of tasks; every task was checked when the index was built and is
# checked again against its checksum when it is read; a file that changed is refused with both fingerprints;
# shards are disjoint and complete and the same in every process.
# Never      reads a file whole, skips a row without counting it, or trusts a date alone.
#
# file (or spool) --once--> index  |  position --index--> offset, length --one read--> Task --> LRU cache


Predicate = Callable[[Task], bool]


@dataclass(frozen=True)
class Statistics:
    """A data set in numbers."""

    tasks: int
    bytes: int
    """Of the rows themselves."""
    complexity: dict[str | None, int]
    category: dict[str | None, int]
    bad_rows: int
    """Rows of the whole file that were left out, within `max_bad_rows`."""
    repeated_prompts: int
    """Rows of the whole file that ask what an earlier row asks."""


class StreamingDataset(Sequence[Task]):
    """A sequence of tasks that lies on the disk.

    Args:
        source: a .jsonl, .json or .parquet file; a Hugging Face data set; a function that returns rows; or any iterable
            of rows. All but the first two are written to a file of rows once.
        cache_dir: where index and row files lie. Without it: `.surefoot` beside the file; for what is no file, a
            private folder that is removed with the data set.
        cache_size: how many parsed tasks are kept.
        max_bad_rows: how many malformed rows may be left out, counted; with 0 the first one is an error.
        form: `tool` demands the format of tool tasks of every row; `auto` of those that have its columns.
        shard_id, num_shards: keep this share of the tasks, by a stable hash of their ids.
        full_hash: tie the index to the SHA-256 of the whole file, not to its size, date and ends.
        name: what messages and derived ids call a source that is no file.
        key: names the contents of a source that is no file; with it (and `cache_dir`) the rows are written only once.
    """

    def __init__(
        self, source: Any, *, cache_dir: str | Path | None = None, cache_size: int = 1024, max_bad_rows: int = 0,
        form: Form = "auto", shard_id: int = 0, num_shards: int = 1, full_hash: bool = False, name: str | None = None,
        key: str | None = None,
    ) -> None:  # fmt: skip
        check_shard(shard_id, num_shards)
        if type(max_bad_rows) is not int or max_bad_rows < 0:
            raise ConfigError(f"max_bad_rows = {max_bad_rows!r}", "it is a count", "use a whole number from 0 on")
        folder = None if cache_dir is None else Path(cache_dir)
        self._table = open_table(
            source, folder, cache_size=cache_size, max_bad_rows=max_bad_rows, form=form, full_hash=full_hash,
            name=name, key=key,
        )  # fmt: skip
        self._rows: RowList = AllRows(self._table.index.rows)
        if num_shards > 1:
            self._rows = self._chosen(lambda row: row.id_hash % num_shards == shard_id)

    @classmethod
    def _view(cls, table: TaskTable, rows: RowList) -> StreamingDataset:
        view = cls.__new__(cls)
        view._table, view._rows = table, rows
        return view

    # -- a sequence -------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, position: int) -> Task: ...

    @overload
    def __getitem__(self, position: slice) -> list[Task]: ...

    def __getitem__(self, position: int | slice) -> Task | list[Task]:
        if isinstance(position, slice):
            return [self[at] for at in range(*position.indices(len(self)))]
        at = position + len(self) if position < 0 else position
        if not 0 <= at < len(self):
            raise IndexError(f"task {position} of {len(self)}")
        return self._table.task(self._rows[at])

    def __iter__(self) -> Iterator[Task]:
        return (self._table.task(row) for row in self._rows)

    def __contains__(self, item: object) -> bool:
        """Whether this very task is in the data set; for an id, see `get`."""
        return isinstance(item, Task) and self.get(item.id) == item

    def get(self, task_id: str) -> Task | None:
        """The task of this id, found without a walk; None where this data set or view has none."""
        row = self._table.find(task_id)
        return None if row is None or row not in self._rows else self._table.task(row)

    def position(self, task_id: str) -> int | None:
        """Where the task of this id stands in this data set or view; None where it does not."""
        row = self._table.find(task_id)
        return None if row is None else self._rows.position(row)

    # -- what is known ------------------------------------------------------------------------

    @property
    def fingerprint(self) -> str:
        """SHA-256 over every id, prompt and column in order, and over the choice that a view made."""
        whole = self._table.index.footer.tasks
        return whole if isinstance(self._rows, AllRows) else self._rows.identity(whole)

    @property
    def levels(self) -> dict[str | None, int]:
        """Complexity -> number of tasks, in the order of first appearance."""
        return self.statistics().complexity

    @property
    def table(self) -> TaskTable:
        """The file, index and cache that all views share."""
        return self._table

    def statistics(self) -> Statistics:
        """Counts; of a view by one walk over its index rows, of the whole file at once."""
        footer = self._table.index.footer
        if isinstance(self._rows, AllRows):
            sizes, levels, categories = footer.row_bytes, footer.level_counts, footer.category_counts
        else:
            sizes, levels, categories = self._count()
        named = (
            {name: n for name, n in zip(names, counts, strict=True) if n}
            for names, counts in ((footer.levels, levels), (footer.categories, categories))
        )
        return Statistics(len(self), sizes, next(named), next(named), footer.bad_rows, footer.twins)

    def _count(self) -> tuple[int, list[int], list[int]]:
        footer, size = self._table.index.footer, 0
        levels: Counter[int] = Counter()
        categories: Counter[int] = Counter()
        for row in map(self._table.index.row, self._rows):
            size += row.length
            levels[row.level] += 1
            categories[row.category] += 1
        return (
            size, [levels[code] for code in range(len(footer.levels))],
            [categories[code] for code in range(len(footer.categories))],
        )  # fmt: skip

    # -- views ----------------------------------------------------------------------------------

    def filter(
        self, *, complexity: str | Iterable[str] | None = None, category: str | Iterable[str] | None = None,
        predicate: Predicate | None = None,
    ) -> StreamingDataset:  # fmt: skip
        """The tasks for which everything given is true; the first two are answered by the index alone."""
        if isinstance(complexity, str) and category is None and predicate is None and isinstance(self._rows, AllRows):
            at, count = self._table.index.level_section(complexity)
            return self._view(self._table, StoredRows(self._table.index.fd, at, count, self._table.index))
        levels = _codes(self._table.index.levels, complexity)
        categories = _codes(self._table.index.categories, category)

        def wanted(row: RowRecord) -> bool:
            return (levels is None or row.level in levels) and (categories is None or row.category in categories)

        return self._view(self._table, self._chosen(wanted, predicate))

    def level(self, complexity: str | None) -> StreamingDataset:
        """The tasks of one complexity; None means those that name none."""
        if complexity is not None:
            return self.filter(complexity=complexity)
        return self._view(self._table, self._chosen(lambda row: row.level == 0))

    def shard(self, shard_id: int, num_shards: int) -> StreamingDataset:
        """One of `num_shards` disjoint parts that together are everything; a task's part depends on its id alone."""
        check_shard(shard_id, num_shards)
        return self._view(self._table, self._chosen(lambda row: row.id_hash % num_shards == shard_id))

    def split_heldout(
        self, fraction: float, *, seed: int = 0, group: str | None = None
    ) -> tuple[StreamingDataset, StreamingDataset]:
        """(train, held out) by the rule of `heldout.is_heldout`; without a seed or a group the index alone answers.

        A prompt that is on both sides is refused; which prompts are repeated is in the index.
        """
        train, heldout = self.sides(fraction, seed=seed, group=group)
        self._refuse_twins(train, heldout)
        return train, heldout

    def sides(
        self, fraction: float, *, seed: int = 0, group: str | None = None
    ) -> tuple[StreamingDataset, StreamingDataset]:
        """As `split_heldout`, for a caller who looks at `crossing` prompts himself."""
        is_heldout("", fraction, seed)  # refuses a fraction that is none
        border = int(fraction * 2**64)
        if group is None and not seed:
            train = self._view(self._table, self._chosen(lambda row: row.id_hash >= border))
            heldout = self._view(self._table, self._chosen(lambda row: row.id_hash < border))
        else:
            heldout = self.filter(predicate=lambda task: is_heldout(side_key(task, group), fraction, seed))
            train = self.without(heldout)
        refuse_empty_side(fraction, len(train), len(heldout), group)
        return train, heldout

    def crossing(self, train: StreamingDataset, heldout: StreamingDataset) -> Iterator[tuple[int, int]]:
        """(training row, held-out row) of every training task whose prompt is held out too, from the index alone."""
        for first, pairs in itertools.groupby(self._table.index.twins(), key=lambda pair: pair[1]):
            rows = [first, *(row for row, _ in pairs)]
            held = next((row for row in rows if row in heldout._rows), None)
            if held is not None:
                yield from ((row, held) for row in rows if row in train._rows)

    def without(self, others: StreamingDataset | Collection[int]) -> StreamingDataset:
        """This data set less the tasks of another view of it, or less these rows of the file."""
        gone: Container[int] = others._rows if isinstance(others, StreamingDataset) else set(others)
        kept = store_rows((row for row in self._rows if row not in gone), self._table.folder)
        return self._view(self._table, kept)

    def rows(self) -> Iterator[int]:
        """The numbers of its rows in the file, in order."""
        return iter(self._rows)

    def smallest(self, n: int) -> list[Task]:
        """The `n` tasks with the smallest hashes of their ids: a choice that depends on nothing else, in that order."""
        rows = ((self._table.index.row(number).id_hash, number) for number in self._rows)
        return [self._table.task(number) for _, number in heapq.nsmallest(n, rows)]

    def close(self) -> None:
        """Let go of the files; views share them. What happens by itself when nobody holds the data set any more."""
        self._table.close()

    def __reduce__(self) -> Any:
        raise ConfigError(
            "a StreamingDataset cannot be sent to another process", "it holds open files, and views that have no name",
            "open the file there: shard_id and num_shards divide it, and the index is there already",
        )  # fmt: skip

    def __enter__(self) -> StreamingDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _chosen(self, wanted: Callable[[RowRecord], bool], predicate: Predicate | None = None) -> RowList:
        table = self._table
        if isinstance(self._rows, AllRows):
            rows: Iterator[tuple[int, RowRecord]] = table.index.all_rows()
        else:
            rows = ((number, table.index.row(number)) for number in self._rows)
        kept = (number for number, row in rows if wanted(row))
        if predicate is not None:
            kept = (number for number in kept if predicate(table.task(number, cached=False)))
        return store_rows(kept, table.folder)

    def _refuse_twins(self, train: StreamingDataset, heldout: StreamingDataset) -> None:
        found = list(itertools.islice(self.crossing(train, heldout), 6))
        if found:
            pairs = ", ".join(f"{self._table.task(a).id} = {self._table.task(b).id}" for a, b in found[:5])
            raise TaskError(
                f"held-out prompts are also training prompts: {pairs}{' and more' if len(found) > 5 else ''}",
                "held-out accuracy would measure memory",
                "remove the repeated rows",
            )


def check_shard(shard_id: int, num_shards: int) -> None:
    """Raise a ValueError unless 0 <= shard_id < num_shards."""
    whole = type(shard_id) is int and type(num_shards) is int
    if not whole or num_shards < 1 or not 0 <= shard_id < num_shards:
        raise ConfigError(
            f"shard_id = {shard_id!r} of num_shards = {num_shards!r}",
            "shards are numbered from 0, so the last is num_shards - 1",
            "use 0 <= shard_id < num_shards",
        )


def _codes(table: dict[str | None, int], names: str | Iterable[str] | None) -> set[int] | None:
    if names is None:
        return None
    return {table[name] for name in ([names] if isinstance(names, str) else names) if name in table}
