"""Batches of about equal work: tasks are counted by the turns they are expected to take.

Owns       the expected turns of a level, and how many tasks of each make up a batch.
Promises   at least one task and at most `max_batch`; a batch that has not reached 0.8 of the target takes one more
           task, unless that would exceed 1.2 of it; the shares asked for are kept within one task, so that long tasks
           are not starved by short ones; a complexity that nobody knows is counted and treated by a stated rule.
Never      sorts the shortest to the front.

Read next: `curriculum.py`, where shares come from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from surefoot.data.curriculum import Shares, check_shares, largest_remainder
from surefoot.data.task_format import complexity_of
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
