"""Task sets and the stream: nothing twice, nothing lost, resumable at every position."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.tasks import TaskSet, TaskStream, fingerprint
from surefoot.errors import ConfigError, StateError, TaskError
from surefoot.records import Task


def some_tasks(n: int) -> list[Task]:
    return [Task(id=f"t{i}", prompt=f"task {i}", columns={"answer": i}) for i in range(n)]


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


# -- the stream -----------------------------------------------------------------


@given(size=st.integers(1, 12), takes=st.lists(st.integers(1, 12), max_size=30), seed=st.integers(0, 5))
def test_no_task_twice_in_a_take_and_every_task_once_per_epoch(size: int, takes: list[int], seed: int) -> None:
    stream = TaskStream(some_tasks(size), seed)
    dealt: list[str] = []
    for n in takes:
        taken = ids(stream.take(min(n, size)))
        assert len(set(taken)) == len(taken)
        dealt += taken
    for start in range(0, len(dealt) - size + 1, size):
        assert len(set(dealt[start : start + size])) == size
    assert stream.epoch == max(0, (len(dealt) - 1) // size)


def test_a_task_held_over_an_epoch_border_is_put_back_not_lost() -> None:
    """5 tasks in takes of 3: the second take crosses a border with 2 tasks in hand, in every second epoch."""
    stream = TaskStream(some_tasks(5), seed=0)
    counts = Counter(task_id for _ in range(100) for task_id in ids(stream.take(3)))
    assert set(counts.values()) == {60}


def naive_take(order: Callable[[int], list[str]], size: int, n: int, start: int) -> list[str]:
    """The planted bug: epochs simply joined end to end."""
    return [order((start + i) // size)[(start + i) % size] for i in range(n)]


def test_planted_bug_epochs_joined_end_to_end_repeat_a_task_in_one_take() -> None:
    def order(epoch: int) -> list[str]:
        return random.Random(epoch).sample([f"t{i}" for i in range(5)], 5)

    takes = [naive_take(order, 5, 3, start) for start in range(0, 60, 3)]
    assert any(len(set(taken)) < 3 for taken in takes)


def test_each_epoch_has_its_own_order() -> None:
    stream = TaskStream(some_tasks(50), seed=0)
    first, second = ids(stream.take(50)), ids(stream.take(50))
    assert sorted(first) == sorted(second)
    assert first != second
    assert first != [f"t{i}" for i in range(50)]


def test_the_order_depends_on_the_seed_and_not_on_the_order_of_the_file() -> None:
    tasks = some_tasks(50)
    assert ids(TaskStream(tasks, 0).take(50)) == ids(TaskStream(tasks[::-1], 0).take(50))
    assert ids(TaskStream(tasks, 0).take(50)) != ids(TaskStream(tasks, 1).take(50))


def test_the_global_random_state_is_neither_read_nor_moved() -> None:
    random.seed(1)
    state = random.getstate()
    first = ids(TaskStream(some_tasks(9), 0).take(9))
    assert random.getstate() == state
    random.seed(2)
    assert ids(TaskStream(some_tasks(9), 0).take(9)) == first


@given(before=st.integers(0, 15), n=st.integers(1, 7))
def test_a_restored_stream_goes_on_exactly_where_it_stopped(before: int, n: int) -> None:
    whole, saved = TaskStream(some_tasks(7), 3), TaskStream(some_tasks(7), 3)
    for _ in range(before):
        whole.take(n)
        saved.take(n)
    state = json.loads(json.dumps(saved.state_dict()))
    resumed = TaskStream(some_tasks(7), 3)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == whole.state_dict()
    assert [ids(resumed.take(n)) for _ in range(9)] == [ids(whole.take(n)) for _ in range(9)]


def test_resuming_at_an_epoch_border_still_deals_tasks() -> None:
    stream = TaskStream(some_tasks(4), 0)
    stream.take(4)
    resumed = TaskStream(some_tasks(4), 0)
    resumed.load_state_dict(stream.state_dict())
    assert len(resumed.take(4)) == 4
    assert resumed.epoch == 1


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 9},
        {"tasks": "0" * 64},
        {"position": 99},
        {"position": -1},
        {"position": "3"},
        {"epoch": None},
        {"held": ["stranger"]},
        {"needed": 99},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_foreign_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    stream = TaskStream(some_tasks(7), 3)
    stream.take(5)
    before = stream.state_dict()
    with pytest.raises(StateError, match="does not fit") as caught:
        stream.load_state_dict(before | change)
    assert caught.value.exit_code == 3
    assert stream.state_dict() == before


def test_a_state_of_other_tasks_is_refused() -> None:
    with pytest.raises(StateError, match="tasks"):
        TaskStream(some_tasks(8), 3).load_state_dict(TaskStream(some_tasks(7), 3).state_dict())


def test_more_tasks_than_there_are_is_refused_without_dealing_any() -> None:
    stream = TaskStream(some_tasks(3), 0)
    with pytest.raises(TaskError, match="4 different tasks were asked for and there are 3"):
        stream.take(4)
    assert stream.state_dict() == TaskStream(some_tasks(3), 0).state_dict()


@pytest.mark.parametrize("n", [0, -1])
def test_a_take_of_nothing_is_refused(n: int) -> None:
    with pytest.raises(ConfigError, match="take"):
        TaskStream(some_tasks(3), 0).take(n)


def test_a_stream_of_no_tasks_or_of_repeated_ids_is_refused() -> None:
    with pytest.raises(TaskError, match="no tasks"):
        TaskStream([], 0)
    with pytest.raises(TaskError, match="more than once: 't0'"):
        TaskStream([*some_tasks(2), *some_tasks(1)], 0)


# -- the set --------------------------------------------------------------------


def test_a_set_with_repeated_ids_is_refused() -> None:
    with pytest.raises(TaskError, match="more than once"):
        TaskSet.of("twice", some_tasks(2) * 2, None)


@pytest.mark.parametrize(
    "other",
    [
        Task(id="t1", prompt="p", columns={"answer": 1}),
        Task(id="t0", prompt="q", columns={"answer": 1}),
        Task(id="t0", prompt="p", columns={"answer": "1"}),
        Task(id="t0", prompt="p", columns={"Answer": 1}),
        Task(id="t0", prompt="p", columns={"answer": 1}, dataset="d"),
        Task(id="t0", prompt=({"role": "user", "content": "p"},), columns={"answer": 1}),
    ],
    ids=["id", "prompt", "type of a value", "column name", "dataset", "messages"],
)
def test_the_fingerprint_notices_every_part_of_a_task(other: Task) -> None:
    task = Task(id="t0", prompt="p", columns={"answer": 1})
    assert fingerprint([task]) != fingerprint([other])


def test_the_fingerprint_notices_order_but_not_the_order_of_columns() -> None:
    tasks = some_tasks(2)
    assert fingerprint(tasks) != fingerprint(tasks[::-1])
    ab = Task(id="t", prompt="p", columns={"a": 1, "b": 2})
    ba = Task(id="t", prompt="p", columns={"b": 2, "a": 1})
    assert fingerprint([ab]) == fingerprint([ba])
