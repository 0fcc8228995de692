"""The visits to one level's tasks, pass after pass, any of them in constant time.

Owns       which task the k-th visit of a level goes to.
Promises   every task once per pass; two visits of one task are at least `apart` visits apart, also over the border of
           two passes; a function of (seed, level, size, k) alone.
Never      stores an order of more than a thousand tasks.

    pass p:   first 2 apart positions: those that ended pass p - 1 go behind the others | the rest as it comes

Read next: `large/order.py`, the permutation; `curriculum.py`, which draws the levels.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from surefoot.data.large.order import Permutation
from surefoot.data.task_format import complexity_of
from surefoot.records import Task


class Visit(NamedTuple):
    """A task's id, and how often it was visited before."""

    task: str
    occurrence: int


class LevelOrder:
    """The order of one level.

    Args:
        apart: at most as many as there are tasks. A level of fewer than three times as many keeps one order for all
            passes: reshuffling it could bring a task back too soon.

    Example:
        >>> order = LevelOrder([Task(id=name, prompt="?") for name in "ab"], seed=0, level="easy", apart=2)
        >>> visits = [order.visit(k) for k in range(4)]
        >>> sorted(visits[:2])
        [Visit(task='a', occurrence=0), Visit(task='b', occurrence=0)]
        >>> [visit.task for visit in visits[:2]] == [visit.task for visit in visits[2:]]
        True
    """

    def __init__(self, tasks: Sequence[Task], seed: int, level: str, *, apart: int) -> None:
        self.tasks, self.level, self.apart = tasks, level, apart
        self._seed = zlib.crc32(f"{seed}/{level}".encode())
        self._pass, self._order, self._head = -1, Permutation(max(1, len(tasks)), self._seed, 0), list[int]()

    def visit(self, k: int) -> Visit:
        """The k-th visit, from 0."""
        number, place = divmod(k, len(self.tasks))
        if number != self._pass:
            self._begin(number)
        at = self._head[place] if place < len(self._head) else self._order(place)
        return Visit(self.tasks[at].id, number)

    def holds(self, task: Task) -> bool:
        """Whether the task is of this level."""
        return complexity_of(task.columns) == self.level

    def _begin(self, number: int) -> None:
        size, apart = len(self.tasks), self.apart
        reshuffled = size >= 3 * apart
        self._pass, self._order = number, Permutation(size, self._seed, number if reshuffled else 0)
        self._head = []
        if number and reshuffled:
            before = Permutation(size, self._seed, number - 1)
            late = {before(place) for place in range(size - apart, size)}  # the head of that pass does not reach here
            head = [self._order(place) for place in range(2 * apart)]
            self._head = [*(at for at in head if at not in late), *(at for at in head if at in late)]
