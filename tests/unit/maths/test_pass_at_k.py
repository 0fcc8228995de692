"""pass@k against going through every choice of k answers."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.maths.pass_at_k import mean_pass_at, pass_at_k, powers_up_to

RIGHT = st.lists(st.booleans(), min_size=1, max_size=9)


def by_hand(right: list[bool], k: int) -> float:
    """The share of all choices of k answers that hold a right one."""
    choices = list(itertools.combinations(right, k))
    return sum(map(any, choices)) / len(choices)


@given(right=RIGHT, data=st.data())
def test_it_is_the_share_of_all_choices(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    assert math.isclose(pass_at_k(len(right), sum(right), k), by_hand(right, k), abs_tol=1e-12)


@given(tasks=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=6))
def test_the_mean_is_over_tasks_and_one_answer_is_the_accuracy(tasks: list[list[bool]]) -> None:
    found = mean_pass_at(tasks, 4)
    assert list(found) == [1, 2, 4]
    for k, share in found.items():
        assert math.isclose(share, sum(by_hand(right, k) for right in tasks) / len(tasks), abs_tol=1e-12)
    assert math.isclose(found[1], sum(map(sum, tasks)) / (4 * len(tasks)), abs_tol=1e-12)
    assert found[1] <= found[2] <= found[4]


def test_the_plain_power_is_not_it() -> None:
    """The estimate that many write first is too high where answers are few."""
    assert pass_at_k(4, 1, 2) == 0.5
    assert 1 - (1 - 1 / 4) ** 2 < 0.5, (
        "and here it is too low: with one right answer of four, two hold it half the time"
    )


def test_a_task_with_too_few_judged_answers_does_not_count_for_that_k() -> None:
    assert mean_pass_at([[True, False], [False, False, False, False]], 4) == {1: 0.25, 2: 0.5, 4: 0.0}
    assert mean_pass_at([[True]], 4) == {1: 1.0}


@pytest.mark.parametrize(("n", "ks"), [(1, []), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_powers_of_two_and_all(n: int, ks: list[int]) -> None:
    assert powers_up_to(n) == ks


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_what_is_not_defined_is_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(n, c, k)
