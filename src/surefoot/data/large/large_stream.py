"""`TaskStream` for data sets that are not in memory: the same promises and the same methods, in constant memory.

Owns       the order in which tasks are visited, as a seed, an epoch and a position.
Promises   every task exactly once per epoch; no task twice in one `take`; resuming at any point takes as long as at the
           beginning; a task that the border names is refused on the way out.
Never      holds more tasks than one take.

Read next: `order.py`, why nothing has to be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from surefoot.data.heldout import HeldoutLeakError, Leak, is_heldout, side_key
from surefoot.data.large.order import IndexStream
from surefoot.data.large.streaming import StreamingDataset
from surefoot.data.tasks import Border, fingerprint
from surefoot.errors import TaskError
from surefoot.pulse import beat
from surefoot.records import Task

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
        self, tasks: Sequence[Task], seed: int, *, heldout: Border | None = None, check_all: bool = False
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
            beat(f"comparing task {start} with what is held out")


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
