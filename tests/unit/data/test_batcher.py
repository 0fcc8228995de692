"""Batches of about equal work that keep the shares asked for; short tasks do not crowd out long ones."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.files import complexity_of
from surefoot.data.loader import EXPECTED_TURNS, TaskBatcher
from surefoot.errors import TaskError
from surefoot.records import Task


def pool(easy: int = 0, medium: int = 0, hard: int = 0, **others: int) -> list[Task]:
    sizes = {"easy": easy, "medium": medium, "hard": hard, **others}
    return [
        Task(id=f"{level}{i}", prompt="?", columns={"complexity": level})
        for level, n in sizes.items()
        for i in range(n)
    ]


def levels(tasks: list[Task]) -> Counter[str | None]:
    return Counter(complexity_of(task.columns) for task in tasks)


def test_nothing_out_of_nothing() -> None:
    assert TaskBatcher().batch([]) == []
    assert list(TaskBatcher().batches([])) == []


def test_the_estimate_is_the_sum_of_the_averages() -> None:
    batcher = TaskBatcher()
    assert batcher.estimate(pool(easy=3, medium=2, hard=1)) == 3 * 4 + 2 * 6.5 + 10
    assert dict(EXPECTED_TURNS) == {"easy": 4, "medium": 6.5, "hard": 10}


@pytest.mark.parametrize(
    ("tasks", "target", "size"),
    [
        (pool(easy=99), 64, 13),  # 13 * 4 = 52 >= 51.2
        (pool(hard=99), 64, 6),  # 60 >= 51.2
        (pool(medium=99), 64, 8),  # 52 >= 51.2
        (pool(easy=99), 1000, 16),  # max_batch
        (pool(hard=99), 8, 1),  # one task is already more than 1.2 * 8, and there is at least one
        (pool(hard=99), 14, 1),  # a second one would make 20 > 16.8
        (pool(easy=2), 64, 2),  # all there is
    ],
)
def test_a_batch_is_full_at_the_target_and_never_one_task_beyond(tasks: list[Task], target: float, size: int) -> None:
    assert len(TaskBatcher(target).batch(tasks)) == size


def test_a_mixed_pool_keeps_its_shares_and_hard_tasks_are_not_starved() -> None:
    batch = TaskBatcher().batch(pool(easy=300, medium=500, hard=200))
    counts = levels(batch)
    assert all(abs(counts[level] - share * len(batch)) < 1 for level, share in
               {"easy": 0.3, "medium": 0.5, "hard": 0.2}.items())  # fmt: skip
    assert counts["hard"] >= 1


def shortest_first(tasks: list[Task]) -> list[Task]:
    """The planted bug: sort by length, fill to the target."""
    taken: list[Task] = []
    batcher = TaskBatcher()
    for task in sorted(tasks, key=batcher.turns):
        if len(taken) < 16 and batcher.estimate(taken) < 0.8 * 64:
            taken.append(task)
    return taken


def test_planted_bug_shortest_first_starves_hard_tasks() -> None:
    assert levels(shortest_first(pool(easy=300, medium=500, hard=200))) == {"easy": 13}


SHARES = st.tuples(*[st.integers(0, 10)] * 3).filter(any)


@given(weights=SHARES, target=st.floats(1, 300), most=st.integers(1, 40))
def test_shares_asked_for_are_kept_within_one_task(weights: tuple[int, ...], target: float, most: int) -> None:
    names = ("easy", "medium", "hard")
    shares = {name: weight / sum(weights) for name, weight in zip(names, weights, strict=True)}
    batcher = TaskBatcher(target, most)
    batch = batcher.batch(pool(easy=50, medium=50, hard=50), shares)
    counts = levels(batch)
    assert 1 <= len(batch) <= most
    assert all(abs(counts[name] - shares[name] * len(batch)) < 1 + 1e-5 for name in names)
    assert not any(counts[name] for name in names if shares[name] == 0)
    assert len(batch) == 1 or batcher.estimate(batch) <= 1.2 * target


@given(sizes=st.tuples(*[st.integers(0, 12)] * 3), target=st.floats(1, 100), most=st.integers(1, 9))
def test_batches_hold_every_task_exactly_once(sizes: tuple[int, int, int], target: float, most: int) -> None:
    tasks = pool(*sizes)
    batches = list(TaskBatcher(target, most).batches(tasks, {"easy": 0.5, "hard": 0.5}))
    assert sorted(task.id for batch in batches for task in batch) == sorted(task.id for task in tasks)
    assert all(1 <= len(batch) <= most for batch in batches)


def test_where_a_level_runs_short_the_others_take_its_places() -> None:
    batch = TaskBatcher(1000, 10).batch(pool(easy=20, hard=1), {"easy": 0.5, "medium": 0.0, "hard": 0.5})
    assert levels(batch) == {"easy": 9, "hard": 1}


def test_an_unknown_complexity_is_counted_and_treated_as_stated() -> None:
    batcher = TaskBatcher(30, unknown_as="hard")
    batch = batcher.batch([*pool(odd=2), Task(id="none", prompt="?")])
    assert batcher.estimate(batch) == 30
    assert batcher.unknown == {"odd": 2, "": 1}
    with pytest.raises(TaskError, match="has the complexity 'odd'"):
        TaskBatcher(unknown_as=None).batch(pool(odd=1))


def test_planted_bug_unknown_as_medium_without_a_word_is_another_estimate() -> None:
    assert TaskBatcher(unknown_as="medium").estimate(pool(odd=2)) != TaskBatcher().estimate(pool(odd=2))


def test_within_a_level_the_order_of_the_pool_is_kept() -> None:
    batch = TaskBatcher(40).batch(pool(easy=9))
    assert [task.id for task in batch] == [f"easy{i}" for i in range(8)]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_turns": 0}, {"target_turns": -1}, {"target_turns": math.nan}, {"target_turns": math.inf},
        {"max_batch": 0}, {"max_batch": 2.5}, {"unknown_as": "odd"}, {"expected_turns": {}},
        {"expected_turns": {"hard": 0}},
    ],
    ids=str,
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="why"):
        TaskBatcher(**settings)


def test_shares_that_do_not_sum_to_one_are_refused() -> None:
    with pytest.raises(ValueError, match="sum to"):
        TaskBatcher().batch(pool(easy=3), {"easy": 0.5})
