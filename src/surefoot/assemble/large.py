"""A run from a task file that is not held in memory: what stands in for lists and dictionaries of all tasks.

Promises   memory does not grow with the file; a prompt that is longer than max_prompt_length is refused by the task's
           name when its turn comes, because nobody read it before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from surefoot.config import Config
from surefoot.data.files import SUFFIXES
from surefoot.data.large.large_stream import HeldoutRule
from surefoot.data.large.lru import MISS, LRUCache
from surefoot.data.large.streaming import StreamingDataset
from surefoot.data.sources import scorer_of
from surefoot.data.tasks import TaskSet
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

LOOKED_AT = 1000
"""Tasks that graders are shown before training; of the others they say so when they come."""
KEPT_PROMPTS = 4096


class Large(NamedTuple):
    """A task file on the disk, divided."""

    looked_at: TaskSet
    """The first tasks, for graders to look at."""
    train: StreamingDataset
    heldout: tuple[Task, ...]
    """Those that are evaluated: at most `eval_tasks`, chosen by hash."""
    border: HeldoutRule | None
    held_out: int
    """All that are not trained on."""


def open_large(config: Config, base: Path, cache_dir: Path | None = None) -> Large:
    """The file that `tasks` names; its index is made now if there is none.

    Args:
        cache_dir: where the index goes; beside the file when left out.
    """
    path = base / Path(config.tasks).expanduser()
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"stream_tasks = true with tasks = {config.tasks!r}",
            f"a file is streamed, one of {', '.join(SUFFIXES)}", "name a file, or set stream_tasks = false",
        )  # fmt: skip
    data = StreamingDataset(path, max_bad_rows=config.max_bad_rows, cache_dir=cache_dir)
    if config.heldout_fraction > 0:
        train, heldout = data.split_heldout(config.heldout_fraction)
        chosen, border = tuple(heldout.smallest(config.eval_tasks)), HeldoutRule(config.heldout_fraction)
    else:
        train, chosen, border = data, (), None
    if len(train) < config.tasks_per_step:
        raise TaskError(
            f"{len(train)} tasks are left to train on, tasks_per_step is {config.tasks_per_step}",
            "a step would hold the same task twice",
            "bring more tasks, or lower tasks_per_step or heldout_fraction",
        )
    first = tuple(data[: min(LOOKED_AT, len(data))])
    tasks = TaskSet(path.stem, first, scorer_of(first), data.fingerprint)
    return Large(tasks, train, chosen, border, len(data) - len(train))


class LargePrompts(Mapping[str, tuple[int, ...]]):
    """Token ids of prompts, encoded when they are asked for; the last few thousand are kept.

    Args:
        encode: a task's prompt as tokens; refuses what is too long.
    """

    def __init__(
        self, train: StreamingDataset, heldout: Sequence[Task], encode: Callable[[Task], tuple[int, ...]]
    ) -> None:
        self._train, self._encode = train, encode
        self._heldout = {task.id: task for task in heldout}
        self._kept: LRUCache[str, tuple[int, ...]] = LRUCache(KEPT_PROMPTS)

    def __getitem__(self, task_id: str) -> tuple[int, ...]:
        kept = self._kept.get(task_id)
        if kept is not MISS:
            return kept
        task = self._heldout.get(task_id) or self._train.get(task_id)
        if task is None:
            raise KeyError(task_id)
        ids = self._encode(task)
        self._kept.put(task_id, ids)
        return ids

    def __len__(self) -> int:
        return len(self._train) + len(self._heldout)

    def __iter__(self) -> Iterator[str]:
        yield from self._heldout
        yield from (task.id for task in self._train)


def within(task: Task, ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """These tokens, unless they are more than a streamed prompt may have."""
    if len(ids) > limit:
        raise TaskError(
            f"the prompt of {task.id} has {len(ids)} tokens, max_prompt_length is {limit}",
            "a streamed file is not read whole before training, so long prompts cannot be left out beforehand",
            "raise max_prompt_length, remove the task, or set stream_tasks = false",
        )
    return ids
