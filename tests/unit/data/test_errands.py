"""The built-in tasks for tool use are right, distinct, half and half, and the same everywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from surefoot.data.heldout import is_heldout
from surefoot.data.sources import KINDS, PER_KIND, TOTAL, errands_tasks, load_tasks, multiplication_task, reversal_task
from surefoot.errors import TaskError


def test_every_answer_is_the_one_that_the_prompt_asks_for() -> None:
    for task in errands_tasks(TOTAL, seed=0):
        subject = str(task.prompt).removesuffix("=")
        if task.columns["kind"] == "times":
            a, b = subject.split("*")
            assert task.columns["answer"] == str(int(a) * int(b))
            assert task.id == f"times/{subject}"
        else:
            digits = subject.removeprefix("turn ")
            assert task.columns["answer"] == "".join(reversed(digits))
            assert task.id == f"turn/{digits}"


def test_there_are_thousands_of_each_kind_and_none_comes_twice() -> None:
    tasks = errands_tasks(TOTAL, seed=3)
    assert len({task.id for task in tasks}) == TOTAL
    assert Counter(task.columns["kind"] for task in tasks) == dict.fromkeys(KINDS, PER_KIND)


@pytest.mark.parametrize("n", [2, 50, 1000])
def test_a_set_of_any_even_size_is_half_and_half(n: int) -> None:
    assert Counter(task.columns["kind"] for task in errands_tasks(n, seed=1)) == dict.fromkeys(KINDS, n // 2)


def test_the_heldout_share_holds_both_kinds() -> None:
    held = Counter(task.columns["kind"] for task in errands_tasks(2000, seed=0) if is_heldout(task.id, 0.1))
    assert min(held[kind] for kind in KINDS) >= 70


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert errands_tasks(50, seed=1) == errands_tasks(50, seed=1)
    assert errands_tasks(50, seed=1) != errands_tasks(50, seed=2)


@pytest.mark.parametrize("n", [1, 49, 50])
def test_a_smaller_set_is_a_prefix_of_a_larger_one(n: int) -> None:
    assert errands_tasks(200, seed=4)[:n] == errands_tasks(n, seed=4)


def test_the_order_is_frozen() -> None:
    """Plain arithmetic on SHA-256: a platform or Python version that differs would change every run."""
    assert [task.id for task in errands_tasks(4, seed=0)] == FROZEN


FROZEN = ["times/354*59", "turn/2852", "times/596*71", "turn/7404"]


@pytest.mark.parametrize("n", [0, -1, TOTAL + 1])
def test_more_tasks_than_there_are_errands_is_refused(n: int) -> None:
    with pytest.raises(TaskError, match=f"asked for {n} tasks and has 20000"):
        errands_tasks(n, seed=0)


def test_one_task_of_each_kind_looks_as_documented() -> None:
    product, number = multiplication_task(347, 86), reversal_task("0042")
    assert (product.id, product.prompt, product.dataset) == ("times/347*86", "347*86=", "errands")
    assert product.columns == {"answer": "29842", "kind": "times"}
    assert (number.id, number.prompt) == ("turn/0042", "turn 0042=")
    assert number.columns == {"answer": "2400", "kind": "turn"}


def test_a_config_reaches_them_by_name_and_exact_match_judges() -> None:
    found = load_tasks("builtin:errands", base=Path(), num_tasks=20, seed=5)
    assert (found.name, found.tasks, found.scorer) == ("builtin:errands", errands_tasks(20, seed=5), "exact")


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(TaskError, match=r"no built-in tasks 'errand'; did you mean errands\?"):
        load_tasks("builtin:errand", base=Path(), num_tasks=20, seed=5)
