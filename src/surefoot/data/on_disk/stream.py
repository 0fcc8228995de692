"""`TaskStream` for data sets that are not in memory: the same promises and the same methods, in constant memory.

Owns       the order in which tasks are visited, as a seed, an epoch and a position.
Promises   every task exactly once per epoch; no task twice in one `take`; resuming at any point takes as long as at the
           beginning; a task that the border names is refused on the way out.
Never      holds more tasks than one take.

Read next: `data/order.py`, why nothing has to be stored.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path
from typing import Any

from surefoot.data.heldout import (
    HeldoutLeakError,
    How,
    Leak,
    Mode,
    Twins,
    contents_of,
    find_twins,
    is_heldout,
    refuse_twins,
    side_key,
)
from surefoot.data.near_duplicates import RULES, THRESHOLD, ComparedText, Likely, Sample
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.index import store_rows
from surefoot.data.order import IndexStream
from surefoot.data.tasks import Content, HeldoutGate, canonical, fingerprint, task_content
from surefoot.errors import TaskError
from surefoot.records import Task
from surefoot.storage.files import write_json
from surefoot.system.files import sha256_of
from surefoot.system.signals import tick

_CHECKED_AT_ONCE = 1000


class LargeTaskStream:
    """Deals tasks without end, one keyed permutation per epoch.

    Args:
        tasks: a `StreamingDataset`, or any sequence; it is asked for one task at a time.
        heldout: refuses what must not be trained on, in every take.
        check_all: also walk over every task once, now.

    Example:
        >>> stream = LargeTaskStream([Task(id=str(i), prompt="?") for i in range(3)], seed=0)
        >>> sorted(task.id for task in stream.take(3)), stream.epoch
        (['0', '1', '2'], 0)
    """

    def __init__(
        self, tasks: Sequence[Task], seed: int, *, heldout: HeldoutGate | None = None, check_all: bool = False
    ) -> None:
        if not len(tasks):
            raise TaskError("the task stream has no tasks", "there is nothing to train on", "bring at least one task")
        self._tasks, self._heldout = tasks, heldout
        self._indices = IndexStream(len(tasks), seed, identity_of(tasks))
        if check_all:
            self._check_all()

    @property
    def epoch(self) -> int:
        """The pass over the tasks that the last dealt task belongs to, from 0."""
        return self._indices.epoch

    @property
    def left(self) -> int:
        """How many tasks of this epoch were not dealt yet."""
        return len(self._tasks) - self._indices.position

    def take(self, n: int) -> list[Task]:
        """(n,) the next tasks, all different."""
        return self._deal(self._indices.take(n))

    def rest(self, n: int) -> list[Task]:
        """Up to n tasks of what is left of this epoch; none when it is over."""
        return self._deal(self._indices.rest(n))

    def next_epoch(self) -> None:
        """Begin the next pass, whatever is left of this one."""
        self._indices.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain JSON data of a few hundred bytes."""
        return self._indices.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a state of other tasks or another seed is refused."""
        self._indices.load_state_dict(state)

    def _deal(self, positions: Sequence[int]) -> list[Task]:
        dealt = [self._tasks[position] for position in positions]
        if self._heldout is not None:
            self._heldout.refuse(dealt, near=False)
        return dealt

    def _check_all(self) -> None:
        if self._heldout is None:
            return
        for start in range(0, len(self._tasks), _CHECKED_AT_ONCE):
            positions = range(start, min(start + _CHECKED_AT_ONCE, len(self._tasks)))
            self._heldout.refuse([self._tasks[at] for at in positions], near=False)
            tick(f"comparing task {start} with what is held out")


class TasksById(Mapping[str, Task]):
    """A data set as a mapping from ids to tasks, in place of a dictionary that would hold all of them."""

    def __init__(self, tasks: StreamingDataset) -> None:
        self._tasks = tasks

    def __getitem__(self, task_id: str) -> Task:
        task = self._tasks.get(task_id)
        if task is None:
            raise KeyError(task_id)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[str]:
        return (task.id for task in self._tasks)


class HeldoutRule:
    """A border that knows the rule and no list: what `split_heldout` holds out by the same rule is refused.

    Prompts that would be on both sides, and near-duplicates, are dealt with where a run divides its tasks.
    """

    def __init__(self, fraction: float, *, seed: int = 0, group: str | None = None) -> None:
        self.fraction, self.seed, self.group = fraction, seed, group

    def refuse(self, tasks: Iterable[Task], *, near: bool = True) -> None:
        """Raise if any of `tasks` is held out; likeness is not looked for."""
        held = (task for task in tasks if is_heldout(side_key(task, self.group), self.fraction, self.seed))
        leaks = [Leak(task.id, task.id, "id", 1.0) for task in held]
        if leaks:
            raise HeldoutLeakError(
                f"{len(leaks)} task(s) to train on are held out: {', '.join(map(str, leaks[:5]))}",
                "held-out accuracy would measure memory", "deal from the training side of split_heldout alone", leaks,
            )  # fmt: skip


def identity_of(tasks: Sequence[Task]) -> str:
    """Names the tasks and their order: the set's own fingerprint, or one over everything."""
    known = getattr(tasks, "fingerprint", None)
    return known if isinstance(known, str) else fingerprint(tasks)


# -- `twins.keep_apart` for tasks that are not in memory ------------------------------------------
# Owns       the walk over a task file that compares every training task with the held-out tasks that are evaluated.
# Promises   memory grows with the twins that are found, not with the file; equal prompts are looked for in everything
# that is held out, near-duplicates in what is evaluated, by the rule that holds for a list of tasks.
# Never      reads a task twice that a number or its target tells apart from everything that is evaluated; or looks
# again
# for what an earlier start found in the same tasks: it lies beside the index, under a hash of all of them.
#
# every row --> template, and rows that may be alike --> those rows again, a few thousand at a time --> twins


_AT_ONCE = 4096


def keep_apart_on_disk(
    data: StreamingDataset, train: StreamingDataset, heldout: StreamingDataset | None, evaluated: Sequence[Task],
    mode: Mode,
) -> tuple[StreamingDataset, Twins]:  # fmt: skip
    """(what may be trained on, what was found); raises `HeldoutLeakError` when a twin may not stay.

    Args:
        data: both sides together.
        heldout: the other side of the file; None where all of it may be trained on.
        evaluated: the held-out tasks that are answered, wherever they lie; near-duplicates of the others would change
            no number.
    """
    began = time.perf_counter()
    of_row = data.table.task
    crossing = () if heldout is None else data.crossing(train, heldout)
    found = {row: Leak(of_row(row).id, of_row(held).id, "content", 1.0) for row, held in crossing}
    note, key = data.table.index.path.with_suffix(".near.json"), _key(data, train, evaluated)
    near, counted = _kept(note, key, data), True
    known = near is not None
    if near is None:
        near, counted = _near(data, train, evaluated, mode, found.keys())
        if counted:
            _keep(note, key, near)
    found |= near
    leaks = tuple(found[row] for row in sorted(found))
    twins = Twins(mode, len(train), len(evaluated), leaks, time.perf_counter() - began, counted, known)
    if found:
        answered = {task.id: task for task in evaluated}
        others = TasksById(data)
        refuse_twins(twins, TasksById(train).__getitem__, lambda known: answered.get(known) or others[known])
    return (train.without(found) if found and mode == "drop" else train), twins


def _near(
    data: StreamingDataset, train: StreamingDataset, evaluated: Sequence[Task], mode: Mode, copies: Set[int]
) -> tuple[dict[int, Leak], bool]:
    """Twins by row, less those that are known already, and whether those are all."""
    few, sample = contents_of(evaluated), Sample()
    candidates = store_rows(_candidates(data, train, [content for _, content in few], sample), data.table.folder)
    template, rows, near, counted = sample.template(), iter(candidates), {}, True
    while some := list(islice(rows, _AT_ONCE)):
        contents = [(str(row), _content(data, row)) for row in some if row not in copies]
        leaks, whole = find_twins(contents, few, mode, template)
        near.update({int(leak.task_id): leak for leak in leaks})
        counted &= whole
        tick(f"comparing task {some[0]} with what is held out")
    return {row: leak._replace(task_id=data.table.task(row).id) for row, leak in near.items()}, counted


def _candidates(
    data: StreamingDataset, train: StreamingDataset, few: Sequence[Content], sample: Sample
) -> Iterator[int]:
    """Training rows that may be alike or the same; every row goes into the sample on the way."""
    likely, prompts, trained = Likely(few), {content.prompt for content in few}, train.rows()
    following = next(trained, None)
    for place, row in enumerate(data.rows()):
        content = _content(data, row)
        text = ComparedText.of(content)
        sample.add(text)
        if row == following:
            following = next(trained, None)
            if text in likely or content.prompt in prompts:
                yield row
        if place % _AT_ONCE == 0:
            tick(f"comparing task {place} with what is held out")


# -- what an earlier start found ------------------------------------------------------------------


def _key(data: StreamingDataset, train: StreamingDataset, evaluated: Sequence[Task]) -> str:
    """Everything that the outcome depends on: every task, which of them are trained on and evaluated, the measure."""
    asked = [(known, content.prompt) for known, content in contents_of(evaluated)]
    parts = (RULES, THRESHOLD, data.fingerprint, train.fingerprint, asked)
    return sha256_of(canonical(parts), errors="surrogatepass")


def _kept(note: Path, key: str, data: StreamingDataset) -> dict[int, Leak] | None:
    """Twins by row; None where nobody looked, or at other tasks. A note that cannot be read is no note."""
    try:
        told = json.loads(note.read_text("utf-8"))
        pairs = told["pairs"] if told["key"] == key else None
        return None if pairs is None else {row: _leak(data, row, *more) for row, *more in pairs}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None


def _leak(data: StreamingDataset, row: int, heldout: str, how: How, overlap: float) -> Leak:
    return Leak(data.table.task(row).id, heldout, how, overlap)


def _keep(note: Path, key: str, near: Mapping[int, Leak]) -> None:
    pairs = [[row, leak.heldout_id, leak.how, leak.overlap] for row, leak in sorted(near.items())]
    write_json(note, {"key": key, "pairs": pairs})


def _content(data: StreamingDataset, row: int) -> Content:
    content = task_content(data.table.task(row, cached=False))
    assert content is not None, "a task of a file has a prompt"
    return content
