"""Two evaluations of the same tasks: worse, better or neither, and how often noise is taken for a change."""

from __future__ import annotations

import math
import random

import pytest

from surefoot.errors import InvariantError
from surefoot.guards import verdict as change
from surefoot.guards.verdict import Change, compare


def flips(worse: int, better: int, tasks: int) -> Change:
    """So many tasks went from right to wrong, and so many back; the others were wrong both times."""
    before = [1.0] * worse + [0.0] * (tasks - worse)
    after = [0.0] * worse + [1.0] * better + [0.0] * (tasks - worse - better)
    found = compare(before, after)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("worse", "better", "tasks", "verdict"),
    [
        (0, 0, 80, "same"),
        (1, 0, 9, "same"),
        (5, 2, 9, "same"),  # README's own first example once: 5 of 9 -> 2 of 9, and it says nothing
        (4, 0, 4, "same"),
        (21, 0, 150, "worse"),  # the demo: 0.14 -> 0.00
        (9, 0, 9, "worse"),
        (30, 30, 200, "same"),
        (0, 21, 150, "better"),
        (30, 60, 200, "better"),
    ],
)
def test_a_change_is_what_is_more_than_noise(worse: int, better: int, tasks: int, verdict: str) -> None:
    found = flips(worse, better, tasks)
    assert (found.worse, found.better) == (verdict == "worse", verdict == "better")
    assert found.tasks == tasks
    assert found.before - found.after == pytest.approx((worse - better) / tasks)


def binomial(n: int, p: float) -> list[float]:
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(n + 1)]
    return [math.exp(log + k * math.log(p) + (n - k) * math.log1p(-p)) for k, log in enumerate(logs)]


def false_alarms(tasks: int, flipping: float) -> float:
    """Share of runs that call an unchanged model worse, when each task's two answers differ with this chance."""
    total = 0.0
    for flipped, chance in enumerate(binomial(tasks, flipping)):
        if chance > 1e-12 and flipped:
            sides = binomial(flipped, 0.5)
            total += chance * sum(p for worse, p in enumerate(sides) if flips(worse, flipped - worse, tasks).worse)
    return total


@pytest.mark.parametrize("tasks", [3, 5, 8, 10, 12, 20, 23, 40])
def test_an_unchanged_model_is_called_worse_in_fewer_than_1_of_100_runs(tasks: int) -> None:
    """Exact. Two independent answers of one task differ in at most half of the runs, so 0.5 is the noisiest there is."""
    assert max(false_alarms(tasks, flipping) for flipping in (0.05, 0.2, 0.35, 0.5)) < 0.007


def test_planted_narrow_margin_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change, "MARGIN_SE", 1.0)
    assert false_alarms(20, 0.5) > 0.01


def test_rewards_of_any_size_are_compared_in_their_own_units() -> None:
    dice = random.Random(0)
    before = [dice.gauss(50.0, 20.0) for _ in range(60)]
    assert not compare(before, [dice.gauss(50.0, 20.0) for _ in range(60)]).worse  # type: ignore[union-attr]
    fell = compare(before, [value - 30.0 + dice.gauss(0.0, 5.0) for value in before])
    assert fell is not None
    assert fell.worse
    assert fell.noise < 12.0, "task by task: how hard each one is cancels out"
    assert "of 60" not in fell.text


def test_equal_answers_are_no_change_whatever_they_are() -> None:
    for scores in ([0.5] * 7, [0.0] * 7, [1.0, 0.0, 0.25]):
        found = compare(scores, list(scores))
        assert found is not None
        assert not found.worse
        assert not found.better


def test_a_task_that_was_graded_only_once_is_left_out_and_not_counted() -> None:
    found = compare([1.0, None, 1.0, 0.0], [1.0, 0.0, None, 0.0])
    assert found is not None
    assert (found.tasks, found.text) == (2, "1 of 2 -> 1 of 2")
    assert compare([1.0, None], [None, 0.0]) is None
    assert compare([], [1.0, 0.0]) is None, "nobody looked before training"
    assert compare([], []) is None


def test_other_tasks_cannot_be_compared() -> None:
    with pytest.raises(InvariantError, match="3 held-out tasks were answered before training and 2 after it"):
        compare([1.0, 0.0, 1.0], [1.0, 0.0])


def test_few_tasks_are_shown_as_a_count_and_many_as_a_share() -> None:
    assert flips(5, 2, 9).text == "5 of 9 -> 2 of 9"
    assert flips(21, 0, 150).text == "0.14 -> 0"
    assert flips(21, 0, 150).margin == "±0.078 at 150 tasks"
    halves = compare([0.5, 0.5], [0.5, 0.0])
    assert halves is not None
    assert halves.text == "0.5 -> 0.25", "a mean of marks that are not 0 or 1 is no count"
