"""Oldest weights first: a slow group is not overtaken until it is too old."""

from __future__ import annotations

from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.buffer import GroupBuffer
from surefoot.storage.ledger import Visit


def put(buffer: GroupBuffer, name: str, version: int) -> None:
    turn = Turn((1,), (2,), (-0.1,), version)
    buffer.put(Visit(name, 0), version, Group(Task(name, "?"), name, (Rollout(name, name, 0, (turn,), 1.0),)))


def taken(buffer: GroupBuffer, n: int, version: int) -> list[str]:
    found = buffer.take(n, version)
    assert found is not None
    return [waiting.item.task for waiting in found.batch]


def filled(*, oldest_version_first: bool) -> GroupBuffer:
    buffer = GroupBuffer(max_size=9, max_staleness=3, oldest_version_first=oldest_version_first)
    for name, version in [("a", 2), ("b", 1), ("c", 2), ("d", 0), ("e", 1)]:
        put(buffer, name, version)
    return buffer


def test_by_version_and_among_equals_by_arrival() -> None:
    assert taken(filled(oldest_version_first=True), 4, 2) == ["d", "b", "e", "a"]
    assert taken(filled(oldest_version_first=False), 4, 2) == ["a", "b", "c", "d"]


def test_evict_lets_go_of_what_is_too_old_and_takes_nothing() -> None:
    buffer = filled(oldest_version_first=True)
    assert [item.task for item in buffer.evict(4).back] == ["d"]
    tally = buffer.tally()
    assert (tally.waiting, tally.in_hand, tally.wasted) == (4, 0, 1)
    assert not buffer.evict(4)
    assert [item.task for item in buffer.items()] == ["a", "b", "c", "e"]
    taken(buffer, 2, 4)
    assert sorted(item.task for item in buffer.items()) == ["a", "b", "c", "e"], "waiting and in hand"
