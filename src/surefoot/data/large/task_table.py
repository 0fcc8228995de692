"""A task file, its index and its cache, opened together: what all views of a `StreamingDataset` share.

Owns       the open files, and the decision whether an index may be used or has to be built.
Promises   a task is read with one seek and checked against its checksum; a file that is not the indexed one any more
           is refused with both fingerprints.

Read next: `index_build.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from surefoot.data.files import SUFFIXES, RowProblem
from surefoot.data.large.index_build import Form, bad_rows_error, build_index, changed
from surefoot.data.large.lru import MISS, LRUCache
from surefoot.data.large.scan import RowFile
from surefoot.data.large.spool import spool_parquet, spool_rows
from surefoot.data.large.task_index import TaskIndex, file_fingerprint, id_hash, unreadable
from surefoot.errors import StateError, TaskError
from surefoot.records import Task
from surefoot.store.durable import storage_error

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
    if path.suffix.lower() not in SUFFIXES:
        raise TaskError(
            f"{path.name} ends in {path.suffix!r}",
            f"the ending says how to read the rows; known are {', '.join(SUFFIXES)}",
            "convert the file, or rename it if it already is one of these",
        )
    return path


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
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:10]
