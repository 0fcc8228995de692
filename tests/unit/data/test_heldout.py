"""Held-out split: the promises of `data/heldout.py`, each with a way to fail."""

from __future__ import annotations

import math
import random

import pytest

from surefoot.data.heldout import is_heldout, repeated_prompts, split_heldout
from surefoot.data.sources import sums_tasks
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

TASKS = sums_tasks(3000, seed=5)


def ids(tasks: tuple[Task, ...]) -> set[str]:
    return {task.id for task in tasks}


def test_every_task_is_on_exactly_one_side() -> None:
    train, heldout = split_heldout(TASKS, 0.1)
    assert ids(train).isdisjoint(ids(heldout))
    assert ids(train) | ids(heldout) == ids(TASKS)


def test_the_share_is_what_was_asked_for() -> None:
    _, heldout = split_heldout(TASKS, 0.1)
    assert abs(len(heldout) / len(TASKS) - 0.1) < 3 * math.sqrt(0.1 * 0.9 / len(TASKS))


def test_order_does_not_move_a_task_to_the_other_side() -> None:
    shuffled = random.Random(1).sample(TASKS, len(TASKS))
    assert ids(split_heldout(shuffled, 0.1)[1]) == ids(split_heldout(TASKS, 0.1)[1])


def test_adding_tasks_does_not_move_the_old_ones() -> None:
    before = split_heldout(TASKS[:1000], 0.1)[1]
    after = split_heldout(TASKS, 0.1)[1]
    assert ids(before) == ids(after) & ids(TASKS[:1000])


def test_planted_split_by_position_is_caught() -> None:
    """Teeth: holding out every tenth task passes the share and the disjointness, not this."""

    def by_position(tasks: tuple[Task, ...]) -> tuple[Task, ...]:
        return tasks[::10]

    assert ids(by_position(TASKS[:1000])) != ids(by_position(TASKS[1:])) & ids(TASKS[:1000])


def test_a_larger_fraction_only_adds_heldout_tasks() -> None:
    assert ids(split_heldout(TASKS, 0.1)[1]) < ids(split_heldout(TASKS, 0.2)[1])


def test_the_side_of_an_id_is_frozen() -> None:
    """First 8 bytes of SHA-256, computed once by hand: a changed rule would leak old held-out tasks."""
    assert [is_heldout(f"task/{i}", 0.5) for i in range(8)] == FROZEN


FROZEN = [True, True, False, True, False, False, True, False]


def test_both_sides_keep_the_order_given() -> None:
    train, heldout = split_heldout(TASKS, 0.3)
    place = {task.id: index for index, task in enumerate(TASKS)}
    for side in (train, heldout):
        places = [place[task.id] for task in side]
        assert places == sorted(places)


def test_fraction_zero_holds_out_nothing() -> None:
    train, heldout = split_heldout(TASKS, 0.0)
    assert train == TASKS
    assert heldout == ()


@pytest.mark.parametrize(("tasks", "fraction"), [(TASKS[:2], 1e-9), (TASKS[:2], 1.0), ((), 0.1)], ids=str)
def test_an_empty_side_is_refused(tasks: tuple[Task, ...], fraction: float) -> None:
    with pytest.raises(TaskError, match="heldout_fraction") as caught:
        split_heldout(tasks, fraction)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan, math.inf])
def test_a_fraction_that_is_no_share_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="heldout_fraction"):
        is_heldout("sums/1+1", fraction)


def test_one_question_under_two_ids_is_found_across_the_border() -> None:
    train = [Task(id="a", prompt="What is  1+1?"), Task(id="b", prompt="What is 2+2?")]
    heldout = [
        Task(id="c", prompt=({"role": "user", "content": "what is 1+1?\n"},)),
        Task(id="d", prompt=({"role": "system", "content": "What is 2+2?"},)),
    ]
    assert repeated_prompts(train, heldout) == (("a", "c"),)
