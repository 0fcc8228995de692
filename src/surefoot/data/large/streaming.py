"""`StreamingDataset`: tasks by the million, one seek away, none of them in memory.

Owns       a task file together with its index, its cache of parsed tasks, and the views cut out of it.
Promises   memory does not grow with the number of tasks; every task was checked when the index was built and is
           checked again against its checksum when it is read; a file that changed is refused with both fingerprints;
           shards are disjoint and complete and the same in every process.
Never      reads a file whole, skips a row without counting it, or trusts a date alone.

    file (or spool) --once--> index  |  position --index--> offset, length --one read--> Task --> LRU cache

Read next: `task_index.py`, the index; `large_stream.py`, the order in which a run visits the tasks.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from surefoot.data.heldout import is_heldout, refuse_empty_side, side_key
from surefoot.data.large.index_build import Form
from surefoot.data.large.row_lists import AllRows, RowList, StoredRows, store_rows
from surefoot.data.large.task_index import RowRecord
from surefoot.data.large.task_table import TaskTable, open_table
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

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
