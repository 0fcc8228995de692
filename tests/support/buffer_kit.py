"""Groups of two rollouts in a small buffer, by letters."""

from __future__ import annotations

from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.buffer import BufferedBatch, GroupBuffer
from surefoot.storage.ledger import Visit


def group_of(task: str, version: int) -> Group:
    rollouts = tuple(Rollout(task, "g", i, (Turn((1,), (2,), (-0.5,), version),), float(i)) for i in range(2))
    return Group(Task(id=task, prompt="?"), "g", rollouts)


def fill(buffer: GroupBuffer, names: str, version: int = 0) -> list[Visit]:
    """One group per letter."""
    items = [Visit(name, 0) for name in names]
    assert [buffer.put(item, version, group_of(item.task, version)) for item in items] == ["kept"] * len(items)
    return items


def names(taken: BufferedBatch | None) -> str:
    assert taken is not None, "the epoch has ended"
    return "".join(entry.item.task for entry in taken.batch)


def make(**keys: int) -> GroupBuffer:
    return GroupBuffer(**{"max_size": 8, "max_staleness": 1} | keys)
