"""A buffer's state comes back as it was, or is refused; nothing of it is dropped in silence."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from buffer_kit import fill, group_of, make, names

from surefoot.errors import InvariantError, StateError
from surefoot.records import Task
from surefoot.runtime.buffer import BufferCounts, GroupBuffer, StaleGroups
from surefoot.storage.ledger import Visit

TASKS = {name: Task(id=name, prompt="?") for name in "abcd"}


def in_use() -> GroupBuffer:
    buffer = make(max_reads=2, max_staleness=3)
    a, *_ = fill(buffer, "ab", version=1)
    fill(buffer, "cd", version=3)
    buffer.take(2, 3)
    buffer.settle([a], "used")
    return buffer


def test_a_state_is_json_and_comes_back_with_what_was_in_hand_in_front() -> None:
    state = json.loads(json.dumps(in_use().state_dict()))
    again = make(max_reads=2, max_staleness=3)
    assert again.load_state_dict(state, TASKS, 3) == StaleGroups()
    assert again.tally() == BufferCounts(put=4, waiting=4, reads=1, unread=3, versions={1: 2, 3: 2})
    taken = again.take(4, 3)
    assert names(taken) == "bcda"
    assert taken is not None
    assert [entry.group for entry in taken.batch] == [group_of(w.item.task, w.version) for w in taken.batch]


def test_what_is_stale_after_a_restart_is_returned_and_a_smaller_buffer_keeps_all() -> None:
    state = in_use().state_dict()
    later = make(max_reads=2, max_staleness=3, max_size=1)
    assert later.load_state_dict(state, TASKS, 5) == StaleGroups(back=(Visit("b", 0),), spent=(Visit("a", 0),))
    assert (later.tally().wasted, later.tally().used, later.tally().left) == (1, 1, 2)
    assert later.put(Visit("b", 0), 5, group_of("b", 5)) == "full"
    assert names(later.take(1, 5)) == "c"


@pytest.mark.parametrize("remaining", [0, 3, -1, 1.0])
def test_odd_numbers_of_reads_are_refused(remaining: Any) -> None:
    state = in_use().state_dict()
    state["waiting"][0][2] = remaining
    with pytest.raises(StateError):
        make(max_reads=2).load_state_dict(state, TASKS, 3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_reads": 1}, "max_reads was 1 and is 2"), ({"format": 2}, "format 1"), ({"version": 9}, "version 9"),
        ({"put": 5}, "5 put"), ({"reads": 3}, "3 reads"), ({"reads": 0}, "0 reads"), ({"extra": 1}, "keys"),
        ({"done": 1}, "done 1"), ({"fates": {"used": 0}}, "fates"), ({"waiting": None}, "TypeError"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(StateError, match=words):
        make(max_reads=2).load_state_dict(in_use().state_dict() | change, TASKS, 3)


def test_a_state_with_an_item_twice_or_a_strange_task_is_refused() -> None:
    state = in_use().state_dict()
    state["waiting"][1] = state["waiting"][0]
    with pytest.raises(StateError, match="twice"):
        make(max_reads=2).load_state_dict(state, TASKS, 3)
    with pytest.raises(StateError, match="task 'd'"):
        make(max_reads=2).load_state_dict(in_use().state_dict(), {k: v for k, v in TASKS.items() if k != "d"}, 3)


def test_a_refused_state_leaves_the_buffer_as_it_was_and_one_in_use_takes_none() -> None:
    buffer = make(max_reads=2)
    with pytest.raises(StateError):
        buffer.load_state_dict(in_use().state_dict() | {"put": 5}, TASKS, 3)
    assert buffer.tally() == BufferCounts()
    fill(buffer, "a")
    with pytest.raises(InvariantError, match="in use"):
        buffer.load_state_dict(in_use().state_dict(), TASKS, 3)


ODD: list[Any] = [None, -1, 10**30, 0.5, "x", [], {}, True, math.nan, [[]]]


def mutants(state: Any) -> Iterator[Any]:
    """The state with one place of it changed, in every place."""
    for path in list(places(state)):
        for odd in ODD:
            mutant = copy.deepcopy(state)
            here = mutant
            for key in path[:-1]:
                here = here[key]
            here[path[-1]] = odd
            yield mutant


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def test_every_mutated_state_is_refused_or_adds_up_and_nothing_else_is_raised() -> None:
    state = in_use().state_dict()
    state["waiting"] = state["waiting"][:2]
    state |= {"put": 2, "reads": 0}
    make(max_reads=2, max_staleness=3).load_state_dict(state, TASKS, 3)
    refused = 0
    for mutant in mutants(state):
        buffer = make(max_reads=2, max_staleness=3)
        try:
            buffer.load_state_dict(mutant, TASKS, 3)
        except StateError:
            refused += 1
        else:
            assert buffer.tally().lost == 0
            assert all(w.version >= 0 and w.group.task.id == w.item.task for w in buffer._waiting.values())
    assert refused > 500
