"""Which tasks are never trained on: a pure function of the task's id.

Owns       the border between training tasks and held-out tasks.
Promises   a task keeps its side when others are added, removed or reordered; a larger
           fraction only adds held-out tasks; no side is ever silently empty.
Never      looks at the seed, the position, the order, or Python's `hash()`.

Read next: `tasks.py`, which deals out the training side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from surefoot.errors import ConfigError, TaskError
from surefoot.records import Message, Task

_RANGE = 2**64


def is_heldout(task_id: str, fraction: float) -> bool:
    """Whether this id falls into the held-out share.

    The first 8 bytes of SHA-256(id), read as a number in [0, 1), lie below `fraction`.

    Example:
        >>> is_heldout("sums/47+85", 0.0), is_heldout("sums/47+85", 1.0)
        (False, True)
    """
    if not 0.0 <= fraction <= 1.0:  # also refuses NaN
        raise ConfigError(
            f"heldout_fraction is {fraction}",
            "a share of the tasks lies between 0 and 1",
            "use for example heldout_fraction = 0.1",
        )
    digest = hashlib.sha256(task_id.encode("utf-8")).digest()
    return int.from_bytes(digest[:8], "big") < int(fraction * _RANGE)


def split_heldout(tasks: Sequence[Task], fraction: float) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """(train, held-out), each in the order given; every task is on exactly one side."""
    sides: tuple[list[Task], list[Task]] = ([], [])
    for task in tasks:
        sides[is_heldout(task.id, fraction)].append(task)
    train, heldout = sides
    if fraction > 0 and not (train and heldout):
        raise TaskError(
            f"heldout_fraction = {fraction} splits {len(tasks)} tasks into {len(train)} to train on "
            f"and {len(heldout)} held out",
            "an accuracy over no tasks, or a training over none, would say nothing",
            "bring more tasks, change heldout_fraction, or set heldout_fraction = 0 to hold out nothing",
        )
    return tuple(train), tuple(heldout)


def repeated_prompts(train: Sequence[Task], heldout: Sequence[Task]) -> tuple[tuple[str, str], ...]:
    """Pairs (train id, held-out id) that ask the same thing under two ids.

    The split goes by id, so a prompt that occurs twice may sit on both sides; what is
    measured there is memory. Case and whitespace are ignored.
    """
    seen = {_normal(task): task.id for task in train}
    keys = ((_normal(task), task.id) for task in heldout)
    return tuple((seen[key], task_id) for key, task_id in keys if key in seen)


def _normal(task: Task) -> tuple[tuple[str, str], ...]:
    return tuple(_normal_message(message) for message in task.messages())


def _normal_message(message: Message) -> tuple[str, str]:
    return str(message["role"]), " ".join(str(message["content"]).casefold().split())
