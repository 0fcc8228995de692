"""Scored groups, and which of them make up which batch: on the disk before the step that uses them.

Owns       `journal/batches_N.journal`, one file for the batches after step N, a new one at every checkpoint.
Promises   a batch that `append` returned from is there after any crash, whole; a batch that is not whole is not there;
           files go only when every step in them is behind two good checkpoints.
Never      holds two batches for one step, or changes one.

    append(step, items, groups) --> [group][group]...[batch] --> find(step), load(step): the same step once more

Read next: `journal.py` for the file, `group_records.py` for a group's form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.errors import InvariantError, StateError
from surefoot.records import Group, Task
from surefoot.store.durable import storage_error, sync_folder
from surefoot.store.failpoints import failpoint
from surefoot.store.group_records import EVENT as GROUP
from surefoot.store.group_records import group_record, read_group
from surefoot.store.journal import Journal
from surefoot.store.ledger_records import Item, read_item

BATCH = "batch"
NAME = re.compile(r"batches_(0|[1-9][0-9]{0,14})\.journal")


class Kept(NamedTuple):
    """Where a batch lies, and whom it is made of."""

    segment: int
    first: int
    """Number of its first record."""
    items: tuple[Item, ...]


class BatchLog:
    """Every batch that may have to be repeated, by its first step."""

    def __init__(self, folder: Path) -> None:
        """Open what is there: the last file for appending, the others for reading. Damage is a `StateError`."""
        self.folder = folder
        self._segments: dict[int, Journal] = {}
        self._kept: dict[int, Kept] = {}
        found = sorted(int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name)))
        try:
            for number in found:
                self._segments[number] = Journal.open(self._path(number), readonly=number != found[-1])
                self._read(number)
        except BaseException:
            self.close()
            raise

    def append(self, step: int, items: Sequence[Item], groups: Sequence[Group]) -> None:
        """Keep the batch that begins at `step`; durable when this returns."""
        if step in self._kept:
            raise InvariantError(
                f"step {step} has a batch already", "its step would be repeated from another one", "ask find() first"
            )
        if [item.task for item in items] != [group.task.id for group in groups]:
            raise InvariantError(f"step {step}: items and groups differ", "a batch is its items' groups", "pass both")
        journal = self._current()
        batch = {"event": BATCH, "step": step, "items": [list(item) for item in items]}
        failpoint("batches.before_append")
        numbers = journal.append_all([*map(group_record, groups), batch])
        failpoint("batches.after_append")
        self._kept[step] = Kept(max(self._segments), numbers[0], tuple(items))

    def find(self, step: int) -> Kept | None:
        """The batch that begins at `step`, if it was kept."""
        return self._kept.get(step)

    def load(self, step: int, tasks: Mapping[str, Task]) -> list[Group]:
        """Its groups, as they were."""
        kept = self._kept[step]
        entries = islice(self._segments[kept.segment].records(after=kept.first - 1), len(kept.items))
        return [read_group(entry.record, tasks) for entry in entries]

    def steps(self) -> list[int]:
        """First steps of every batch that is kept."""
        return sorted(self._kept)

    @property
    def torn_bytes(self) -> int:
        """What an interrupted append had left, and opening cut off."""
        return sum(journal.torn_bytes for journal in self._segments.values())

    def roll(self, step: int) -> None:
        """A checkpoint of `step` is complete: later batches go to a file of their own."""
        if step in self._segments or not self._segments:
            return
        journal = Journal.create(self._path(step))
        failpoint("batches.after_roll")
        former = self._segments[max(self._segments)]
        self._segments[step] = journal
        if not former.readonly:
            former.close()
            self._segments[_number(former)] = Journal.open(Path(former.name), readonly=True)

    def behind(self, step: int) -> list[int]:
        """Files that hold nothing after `step`, by their numbers; the newest is never among them."""
        return [number for number, following in pairwise(sorted(self._segments)) if following <= step]

    def forget(self, step: int) -> list[str]:
        """Take away files that hold nothing after `step`; the newest stays. Returns their names."""
        gone = []
        for number in self.behind(step):
            path = self._path(number)
            self._segments.pop(number).close()
            self._kept = {s: kept for s, kept in self._kept.items() if kept.segment != number}
            try:
                failpoint("batches.before_forget")
                path.unlink()
                sync_folder(self.folder)
            except OSError as error:
                raise storage_error(path, error) from error
            gone.append(path.name)
        return gone

    def close(self) -> None:
        """Make everything durable and let go."""
        for journal in self._segments.values():
            journal.close()

    def _path(self, number: int) -> Path:
        return self.folder / f"batches_{number}.journal"

    def _current(self) -> Journal:
        if not self._segments:
            self._segments[0] = Journal.create(self._path(0))
        return self._segments[max(self._segments)]

    def _read(self, number: int) -> None:
        """Index one file; groups without a batch behind them are what a crash left of an append."""
        waiting: list[tuple[int, str]] = []
        for entry, record in self._records(number):
            if record["event"] == GROUP:
                waiting.append((entry, record["task"]))
                continue
            step, items = record["step"], tuple(read_item(row) for row in record["items"])
            mine = waiting[len(waiting) - len(items) :]
            if type(step) is not int or step in self._kept or [task for _, task in mine] != [i.task for i in items]:
                raise self._odd(number, f"record {entry} is no batch that may follow (step {step!r})")
            self._kept[step] = Kept(number, entry - len(items), items)
            waiting = []

    def _records(self, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for entry in self._segments[number].records():
            keys = set(entry.record)
            is_group = keys >= {"event", "task"} and entry.record["event"] == GROUP
            is_batch = keys == {"event", "step", "items"} and entry.record["event"] == BATCH
            if not is_group and not is_batch:
                raise self._odd(number, f"record {entry.number} is neither a group nor a batch")
            yield entry.number, entry.record

    def _odd(self, number: int, what: str) -> StateError:
        return StateError(
            f"{self._path(number)}: {what}", "the same step could not be done once more", "bring it back from a copy"
        )


def _number(journal: Journal) -> int:
    match = NAME.fullmatch(Path(journal.name).name)
    assert match is not None, "a segment is named by this class"
    return int(match[1])
