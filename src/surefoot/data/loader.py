"""Batches of about equal work: tasks are counted by the turns they are expected to take.

Owns       the expected turns of a level, and how many tasks of each make up a batch.
Promises   at least one task and at most `max_batch`; a batch that has not reached 0.8 of the target takes one more
           task, unless that would exceed 1.2 of it; the shares asked for are kept within one task, so that long tasks
           are not starved by short ones; a complexity that nobody knows is counted and treated by a stated rule.
Never      sorts the shortest to the front.

Read next: `curriculum.py`, where shares come from.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from surefoot.data.curriculum import CurriculumSampler, Shares, check_shares, largest_remainder, no_tasks_of
from surefoot.data.files import complexity_of
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import LargeTaskStream, identity_of
from surefoot.data.tasks import HeldoutGate, foreign_state
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

EXPECTED_TURNS: Mapping[str, float] = MappingProxyType({"easy": 4.0, "medium": 6.5, "hard": 10.0})
"""Means of 3 to 5, 5 to 8 and 8 to 12 turns."""
ENOUGH, TOO_MUCH = 0.8, 1.2
"""Shares of the target between which a batch is full."""


class TaskBatcher:
    """Fills batches up to a target of expected turns, for code of one's own: no run uses it.

    Args:
        target_turns: how many turns a batch should take in all.
        max_batch: how many tasks it may hold.
        expected_turns: level -> turns.
        unknown_as: the level that a task of no or an unknown complexity is treated as; None refuses such a task.

    Example:
        >>> batcher = TaskBatcher(target_turns=20)
        >>> pool = [Task(id=str(i), prompt="?", columns={"complexity": "hard"}) for i in range(9)]
        >>> len(batcher.batch(pool)), batcher.estimate(batcher.batch(pool))
        (2, 20.0)
    """

    def __init__(
        self, target_turns: float = 64, max_batch: int = 16, *,
        expected_turns: Mapping[str, float] = EXPECTED_TURNS, unknown_as: str | None = "hard",
    ) -> None:  # fmt: skip
        if not target_turns > 0 or target_turns == float("inf"):
            raise ConfigError(f"target_turns = {target_turns}", "a batch takes some turns", "use for example 64")
        if type(max_batch) is not int or max_batch < 1:
            raise ConfigError(f"max_batch = {max_batch!r}", "a batch holds at least one task", "use for example 16")
        if not expected_turns or not all(turns > 0 for turns in expected_turns.values()):
            raise ConfigError(f"expected_turns = {dict(expected_turns)}", "every task takes some turns", "correct it")
        if unknown_as is not None and unknown_as not in expected_turns:
            raise ConfigError(
                f"unknown_as = {unknown_as!r}", f"known levels are {', '.join(expected_turns)}", "use one of them"
            )
        self.target_turns, self.max_batch, self.unknown_as = target_turns, max_batch, unknown_as
        self.expected_turns = dict(expected_turns)
        self.unknown: Counter[str] = Counter()
        """Tasks batched whose complexity is not in the table, by what they said; "" for nothing."""

    def turns(self, task: Task) -> float:
        """Expected turns of one task."""
        return self.expected_turns[self.level(task)]

    def estimate(self, tasks: Iterable[Task]) -> float:
        """Expected turns of all of them."""
        return sum(map(self.turns, tasks))

    def level(self, task: Task) -> str:
        """The task's complexity, or what `unknown_as` makes of it."""
        found = complexity_of(task.columns)
        if found is not None and found in self.expected_turns:
            return found
        if self.unknown_as is None:
            raise TaskError(
                f"task {task.id!r} has the complexity {found!r}", f"known are {', '.join(self.expected_turns)}",
                "give it one of these, or say with unknown_as how to treat it",
            )  # fmt: skip
        return self.unknown_as

    def batch(self, pool: Sequence[Task], shares: Shares | None = None) -> list[Task]:
        """The next batch out of `pool`, in the pool's order; nothing out of nothing.

        Args:
            shares: of each level; without it those of the pool. Where a level has too few tasks, the others take its
                places; a level without a share is left alone.
        """
        by_level = self._by_level(pool)
        if shares is None:
            wanted = {level: len(tasks) / len(pool) for level, tasks in by_level.items()}
        else:
            check_shares("shares", shares)
            wanted = {level: share for level, share in shares.items() if share > 0 and by_level.get(level)}
        counts = self._fill(wanted, {level: len(tasks) for level, tasks in by_level.items()})
        chosen = {task.id for level, count in counts.items() for task in by_level[level][:count]}
        taken = [task for task in pool if task.id in chosen]
        self._count_unknown(taken)
        return taken

    def batches(self, tasks: Iterable[Task], shares: Shares | None = None) -> Iterator[list[Task]]:
        """Every task once; what the shares leave alone comes at the end, by the shares of what is left."""
        pool = list(tasks)
        while pool:
            taken = self.batch(pool, shares) or self.batch(pool)
            gone = {task.id for task in taken}
            pool = [task for task in pool if task.id not in gone]
            yield taken

    def _fill(self, shares: Mapping[str, float], there: Mapping[str, int]) -> dict[str, int]:
        """How many of each level: one more task until there is enough, and not one too many."""
        best: dict[str, int] = {}
        possible = min(self.max_batch, sum(there[level] for level in shares))
        for size in range(1, possible + 1):
            counts = _within(shares, there, size)
            turns = sum(self.expected_turns[level] * count for level, count in counts.items())
            if best and turns > TOO_MUCH * self.target_turns:
                break
            best = counts
            if turns >= ENOUGH * self.target_turns:
                break
        return best

    def _by_level(self, pool: Sequence[Task]) -> dict[str, list[Task]]:
        by_level: dict[str, list[Task]] = {}
        for task in pool:
            by_level.setdefault(self.level(task), []).append(task)
        return by_level

    def _count_unknown(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            found = complexity_of(task.columns)
            if found is None or found not in self.expected_turns:
                self.unknown[found or ""] += 1


def _within(shares: Mapping[str, float], there: Mapping[str, int], size: int) -> dict[str, int]:
    """`size` tasks by share, no level beyond what it has; places that it cannot fill go to the others by share."""
    fixed: dict[str, int] = {}
    while True:
        free = {level: share for level, share in shares.items() if level not in fixed}
        total = sum(free.values())
        counts = largest_remainder({level: share / total for level, share in free.items()}, size - sum(fixed.values()))
        over = {level: there[level] for level, count in counts.items() if count > there[level]}
        if not over:
            return fixed | counts
        fixed |= over


# -- Batches of tasks: at random, by curriculum, or one epoch through -----------------------------
# Owns       one resumable order over everything, and one for each level of difficulty.
# Promises   every task once before any comes again, in each of the three ways; a curriculum's batch has exactly the
# places that its shares give (largest remainder), drawn from the whole level; a share of 0 gives none; a
# restored loader goes on exactly where it stopped.
# Never      holds more tasks than a batch, when the data set is a `StreamingDataset`.


_log = logging.getLogger(__name__)


class TaskDataLoader:
    """Deals batches from a data set, for code of one's own: no run uses it, its tasks come from `runtime.task_queue`.

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
        curriculum: CurriculumSampler | None = None, heldout: HeldoutGate | None = None,
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
