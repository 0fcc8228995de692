"""Batches of tasks: at random, by curriculum, or one epoch through.

Owns       one resumable order over everything, and one for each level of difficulty.
Promises   every task once before any comes again, in each of the three ways; a curriculum's batch has exactly the
           places that its shares give (largest remainder), drawn from the whole level; a share of 0 gives none; a
           restored loader goes on exactly where it stopped.
Never      holds more tasks than a batch, when the data set is a `StreamingDataset`.

Read next: `large_stream.py`, the order; `curriculum.py`, the shares.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.data.curriculum import CurriculumSampler, no_tasks_of
from surefoot.data.large.large_stream import LargeTaskStream, identity_of
from surefoot.data.large.streaming import StreamingDataset
from surefoot.data.task_format import complexity_of
from surefoot.data.tasks import Border, foreign_state
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

_log = logging.getLogger(__name__)


class TaskDataLoader:
    """Deals batches from a data set, for code of one's own: no run uses it, its books follow a plan (`runtime.plans`).

    Args:
        dataset: a `StreamingDataset`, or any sequence of tasks.
        batch_size: how many tasks `epoch` gives at a time, and the others when they are not told.
        curriculum: whose shares `curriculum_batch` keeps.
        heldout: refuses what must not be trained on, in every batch.

    Example:
        >>> loader = TaskDataLoader([Task(id=str(i), prompt="?") for i in range(5)], batch_size=2)
        >>> [len(batch) for batch in loader.epoch()], len(loader.random_batch(3))
        ([2, 2, 1], 3)
    """

    def __init__(
        self, dataset: Sequence[Task], batch_size: int = 16, *, seed: int = 0,
        curriculum: CurriculumSampler | None = None, heldout: Border | None = None,
    ) -> None:  # fmt: skip
        if not len(dataset):
            raise TaskError("the data set has no tasks", "there is nothing to deal", "bring at least one task")
        if type(batch_size) is not int or batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size!r}", "a batch holds at least one task", "use for example 16")
        self.dataset, self.batch_size, self.curriculum = dataset, batch_size, curriculum
        self._seed, self._heldout = seed, heldout
        self._random = LargeTaskStream(dataset, seed, heldout=heldout)
        self._epochs = LargeTaskStream(dataset, seed, heldout=heldout)
        self._levels = {} if curriculum is None else self._open_levels(curriculum)

    @property
    def epochs_done(self) -> int:
        """Which epoch `epoch` is in, from 0."""
        return self._epochs.epoch

    def random_batch(self, n: int | None = None) -> list[Task]:
        """(n,) different tasks; every task comes once before any comes again. No run calls this."""
        return self._random.take(self.batch_size if n is None else n)

    def curriculum_batch(self, epoch: float, n: int | None = None) -> list[Task]:
        """(n,) different tasks with the epoch's shares, level by level. No run calls this: there levels are drawn."""
        if self.curriculum is None:
            raise ConfigError("the loader has no curriculum", "there are no shares to keep", "pass curriculum=")
        batch: list[Task] = []
        for level, count in self.curriculum.counts(self.batch_size if n is None else n, epoch).items():
            batch += self._of_level(level, count) if count else []
        return batch

    def epoch(self) -> Iterator[list[Task]]:
        """Batches until every task came once; the last may be smaller. Goes on in the middle after a resume."""
        if not self._epochs.left:
            self._epochs.next_epoch()
        while batch := self._epochs.rest(self.batch_size):
            yield batch

    def __iter__(self) -> Iterator[list[Task]]:
        return self.epoch()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain JSON data."""
        return {
            "tasks": identity_of(self.dataset), "random": self._random.state_dict(),
            "epochs": self._epochs.state_dict(),
            "levels": {level: stream.state_dict() for level, stream in self._levels.items()},
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a state of other tasks, seed or curriculum is refused."""
        mine = self.state_dict()
        if set(state) != set(mine) or state["tasks"] != mine["tasks"]:
            raise foreign_state(f"tasks {state.get('tasks')!r} instead of {mine['tasks']!r}")
        levels, curriculum = state["levels"], state["curriculum"]
        if not isinstance(levels, Mapping) or set(levels) != set(self._levels):
            raise foreign_state(f"levels {levels!r:.80} instead of {sorted(self._levels)}")
        if (curriculum is None) != (self.curriculum is None):
            raise foreign_state("one has a curriculum, the other has none")
        try:
            self._load(state)
        except BaseException:
            self._load(mine)  # a state that fits in part changes nothing
            raise

    def _load(self, state: Mapping[str, Any]) -> None:
        self._random.load_state_dict(state["random"])
        self._epochs.load_state_dict(state["epochs"])
        for level, stream in self._levels.items():
            stream.load_state_dict(state["levels"][level])
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])

    def _open_levels(self, curriculum: CurriculumSampler) -> dict[str, LargeTaskStream]:
        streams = {}
        for level in curriculum.levels:
            tasks = self._tasks_of(level)
            largest = max(curriculum.start[level], curriculum.end[level])
            if not len(tasks) and largest > 0:
                raise no_tasks_of(level, largest)
            if len(tasks):
                streams[level] = LargeTaskStream(tasks, self._seed, heldout=self._heldout)
        return streams

    def _tasks_of(self, level: str) -> Sequence[Task]:
        if isinstance(self.dataset, StreamingDataset):
            return self.dataset.filter(complexity=level)
        return [task for task in self.dataset if complexity_of(task.columns) == level]

    def _of_level(self, level: str, count: int) -> list[Task]:
        stream = self._levels[level]
        before = stream.epoch
        taken = stream.take(count)
        if stream.epoch > before:
            _log.info("all %s tasks were dealt; pass %d over them begins", level, stream.epoch + 1)
        return taken
