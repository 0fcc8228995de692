"""The built-in tasks are right, distinct and the same everywhere."""

from __future__ import annotations

import pytest

from surefoot.data.sources import SUMS_LIMIT, sum_task, sums_tasks
from surefoot.errors import TaskError

ALL = SUMS_LIMIT * SUMS_LIMIT


def test_every_answer_is_the_sum_that_the_prompt_asks_for() -> None:
    for task in sums_tasks(ALL, seed=0):
        assert isinstance(task.prompt, str)
        a, b = task.prompt.removesuffix("=").split("+")
        assert task.columns["answer"] == str(int(a) + int(b))
        assert task.id == f"sums/{a}+{b}"


def test_no_task_comes_twice() -> None:
    assert len({task.id for task in sums_tasks(ALL, seed=3)}) == ALL


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert sums_tasks(50, seed=1) == sums_tasks(50, seed=1)
    assert sums_tasks(50, seed=1) != sums_tasks(50, seed=2)


def test_a_smaller_set_is_a_prefix_of_a_larger_one() -> None:
    assert sums_tasks(200, seed=4)[:50] == sums_tasks(50, seed=4)


def test_the_order_is_frozen() -> None:
    """Plain arithmetic on SHA-256: a platform or Python version that differs would change every run."""
    assert [task.id for task in sums_tasks(4, seed=0)] == FROZEN


FROZEN = ["sums/80+55", "sums/4+81", "sums/86+27", "sums/98+80"]


def test_a_small_set_mixes_carries_and_sizes() -> None:
    answers = [int(task.columns["answer"]) for task in sums_tasks(100, seed=0)]
    assert min(answers) < 50
    assert max(answers) > 150


@pytest.mark.parametrize("n", [0, -1, ALL + 1])
def test_more_tasks_than_there_are_sums_is_refused(n: int) -> None:
    with pytest.raises(TaskError, match=f"asked for {n} tasks and has 10000"):
        sums_tasks(n, seed=0)


def test_one_task_looks_as_documented() -> None:
    task = sum_task(7, 0)
    assert (task.id, task.prompt, task.columns, task.dataset) == ("sums/7+0", "7+0=", {"answer": "7"}, "sums")
