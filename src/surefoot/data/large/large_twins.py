"""`twins.keep_apart` for tasks that are not in memory.

Owns       the walk over a task file that compares every training task with the held-out tasks that are evaluated.
Promises   memory grows with the twins that are found, not with the file; equal prompts are looked for in everything
           that is held out, near-duplicates in what is evaluated, by the rule that holds for a list of tasks.
Never      reads a task twice that a number or its target tells apart from everything that is evaluated; or looks again
           for what an earlier start found in the same tasks: it lies beside the index, under a hash of all of them.

    every row --> template, and rows that may be alike --> those rows again, a few thousand at a time --> twins

Read next: `twins.py`, what becomes of them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice
from pathlib import Path

from surefoot.data.content import Content, task_content
from surefoot.data.heldout import How, Leak
from surefoot.data.large.large_stream import TasksById
from surefoot.data.large.row_lists import store_rows
from surefoot.data.large.streaming import StreamingDataset
from surefoot.data.near_duplicates import RULES, THRESHOLD, Likely, Sample, Text
from surefoot.data.tasks import canonical
from surefoot.data.twins import Mode, Twins, find, refuse_twins, seen
from surefoot.pulse import beat
from surefoot.records import Task
from surefoot.store.durable import write_json

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
    few, sample = seen(evaluated), Sample()
    candidates = store_rows(_candidates(data, train, [content for _, content in few], sample), data.table.folder)
    template, rows, near, counted = sample.template(), iter(candidates), {}, True
    while some := list(islice(rows, _AT_ONCE)):
        contents = [(str(row), _content(data, row)) for row in some if row not in copies]
        leaks, whole = find(contents, few, mode, template)
        near.update({int(leak.task_id): leak for leak in leaks})
        counted &= whole
        beat(f"comparing task {some[0]} with what is held out")
    return {row: leak._replace(task_id=data.table.task(row).id) for row, leak in near.items()}, counted


def _candidates(
    data: StreamingDataset, train: StreamingDataset, few: Sequence[Content], sample: Sample
) -> Iterator[int]:
    """Training rows that may be alike or the same; every row goes into the sample on the way."""
    likely, prompts, trained = Likely(few), {content.prompt for content in few}, train.rows()
    following = next(trained, None)
    for place, row in enumerate(data.rows()):
        content = _content(data, row)
        text = Text.of(content)
        sample.add(text)
        if row == following:
            following = next(trained, None)
            if text in likely or content.prompt in prompts:
                yield row
        if place % _AT_ONCE == 0:
            beat(f"comparing task {place} with what is held out")


# -- what an earlier start found ------------------------------------------------------------------


def _key(data: StreamingDataset, train: StreamingDataset, evaluated: Sequence[Task]) -> str:
    """Everything that the outcome depends on: every task, which of them are trained on and evaluated, the measure."""
    asked = [(known, content.prompt) for known, content in seen(evaluated)]
    parts = (RULES, THRESHOLD, data.fingerprint, train.fingerprint, asked)
    return hashlib.sha256(canonical(parts).encode("utf-8", "surrogatepass")).hexdigest()


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
