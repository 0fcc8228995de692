"""The built-in tasks: two-digit addition, every answer exact.

Owns       the 10,000 sums a+b with a and b from 0 to 99.
Promises   the same (n, seed) gives the same tasks everywhere; no task twice; a smaller n
           is a prefix of a larger one.
Never      reads a file, the clock, or a global random state.

Read next: `sources.py`, which reaches this file as "builtin:sums".
"""

from __future__ import annotations

import hashlib

from surefoot.errors import TaskError
from surefoot.records import Task

LIMIT = 100
"""Both numbers lie in range(LIMIT)."""

NAME = "sums"


def sum_task(a: int, b: int) -> Task:
    """One addition as a task.

    Example:
        >>> task = sum_task(47, 85)
        >>> task.id, task.prompt, task.columns["answer"]
        ('sums/47+85', '47+85=', '132')
    """
    return Task(id=f"{NAME}/{a}+{b}", prompt=f"{a}+{b}=", columns={"answer": str(a + b)}, dataset=NAME)


def sums_tasks(n: int, seed: int) -> tuple[Task, ...]:
    """(n,) distinct tasks, in an order that only the seed decides."""
    total = LIMIT * LIMIT
    if not 1 <= n <= total:
        raise TaskError(
            f"builtin:sums was asked for {n} tasks and has {total}",
            "a task that comes twice would be counted as two",
            f"set num_tasks between 1 and {total}",
        )
    tasks = (sum_task(a, b) for a in range(LIMIT) for b in range(LIMIT))
    return tuple(sorted(tasks, key=lambda task: _rank(task.id, seed))[:n])


def _rank(task_id: str, seed: int) -> bytes:
    """A position that depends on the seed and the id alone, on every platform."""
    return hashlib.sha256(f"{seed}/{task_id}".encode()).digest()
