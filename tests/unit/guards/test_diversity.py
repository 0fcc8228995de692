"""Copies among siblings are refused when the sampler's own probabilities say they are no accident."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import InvariantError
from surefoot.guards.invariants import DiversityGuard

LONG = (7, 8, 9, 7, 8, 9, 7, 8, 9, 2)


def copies(make_group: Any, n: int, of: int, logprob: float, *, task: str = "a", id: str | None = None) -> Any:
    said = [LONG] * n + [(30 + i, *LONG[1:]) for i in range(of - n)]
    return make_group(task, [0.0] * of, completions=said, logprob=logprob, id=id)


@pytest.mark.parametrize("n", [2, 8])
def test_identical_siblings_of_an_uncertain_policy_are_refused(n: int, make_group: Any) -> None:
    with pytest.raises(InvariantError, match=rf"{n} of 8 siblings are identical"):
        DiversityGuard().check([copies(make_group, n, 8, logprob=-4.0)])


def test_a_policy_that_is_sure_of_itself_may_repeat_itself(make_group: Any) -> None:
    assert DiversityGuard().check([copies(make_group, 8, 8, logprob=-0.01)]) == 1


def test_two_equal_short_answers_are_an_accident(make_group: Any) -> None:
    group = make_group("a", [0.0] * 4, completions=[(7, 2), (7, 2), (8, 2), (9, 2)], logprob=-2.0)
    assert DiversityGuard().check([group]) == 1


def test_the_claim_is_judged_by_probability_not_by_count(make_group: Any) -> None:
    """log C(8,2) + (2-1) * sum: 3.33 - 10 * x crosses log(1e-12) = -27.6 at x = 3.096."""
    DiversityGuard().check([copies(make_group, 2, 8, logprob=-3.05)])
    with pytest.raises(InvariantError):
        DiversityGuard().check([copies(make_group, 2, 8, logprob=-3.15)])


def test_the_same_set_at_the_next_visit_of_a_task_is_refused(make_group: Any) -> None:
    guard = DiversityGuard()
    guard.check([copies(make_group, 1, 8, -2.0, id="train/1/0")])
    guard.check([copies(make_group, 1, 8, -2.0, task="b", id="train/2/0")])
    with pytest.raises(InvariantError, match="equals the one of its last visit"):
        guard.check([copies(make_group, 1, 8, -2.0, id="train/9/0")])


def test_a_second_visit_with_other_answers_or_a_sure_policy_is_fine(make_group: Any) -> None:
    guard = DiversityGuard()
    guard.check([copies(make_group, 1, 8, -2.0)])
    guard.check([copies(make_group, 1, 7, -2.0)])
    guard.check([copies(make_group, 8, 8, -0.001)])
    guard.check([copies(make_group, 8, 8, -0.001)])


def test_rollouts_without_tokens_are_no_copies(make_group: Any) -> None:
    from surefoot.records import Group, Rollout, Task

    rollouts = tuple(Rollout("a", "g", i, (), failure="engine_down") for i in range(4))
    guard = DiversityGuard()
    for _ in range(2):
        guard.check([Group(Task(id="a", prompt="?"), "g", rollouts)])
