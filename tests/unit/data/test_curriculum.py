"""Shares that move from easy to hard, drawn by the sampler's own stream; seen tasks wait until their level is done."""

from __future__ import annotations

import json
import logging
import math
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.curriculum import CurriculumSampler, largest_remainder
from surefoot.errors import StateError, TaskError
from surefoot.records import Task

LEVELS = ("easy", "medium", "hard")
CHI_2 = 13.82
"""0.1 % point of chi-square with 2 degrees of freedom."""


def pool(**sizes: int) -> dict[str, list[Task]]:
    return {
        level: [Task(id=f"{level}{i}", prompt="?", columns={"complexity": level}) for i in range(n)]
        for level, n in sizes.items()
    }


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


# -- shares ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(0, (0.3, 0.5, 0.2)), (5, (0.2, 0.45, 0.35)), (10, (0.1, 0.4, 0.5)), (50, (0.1, 0.4, 0.5))],
)
def test_shares_move_linearly_and_then_stay(epoch: int, expected: tuple[float, ...]) -> None:
    shares = CurriculumSampler().shares(epoch)
    assert tuple(shares) == LEVELS
    assert tuple(shares.values()) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("total", [0, -3])
def test_a_transition_of_no_length_is_over(total: int) -> None:
    sampler = CurriculumSampler()
    assert sampler.shares(0, total_epochs=total) == sampler.shares(99)
    assert sampler.shares(2, total_epochs=4) == pytest.approx(sampler.shares(5))


@given(epoch=st.floats(0, 1e9), length=st.floats(0.01, 1e6))
def test_shares_sum_to_one_at_every_moment(epoch: float, length: float) -> None:
    shares = CurriculumSampler(transition_epochs=length).shares(epoch)
    assert math.fsum(shares.values()) == pytest.approx(1, abs=1e-12)
    assert min(shares.values()) >= 0


@pytest.mark.parametrize(
    "settings",
    [
        {"start": {"easy": 0.5, "hard": 0.6}, "end": {"easy": 0.5, "hard": 0.5}},
        {"start": {"easy": 0.5, "hard": 0.5}, "end": {"easy": 0.5, "hard": 0.49}},
        {"start": {"easy": 1.2, "hard": -0.2}, "end": {"easy": 0.5, "hard": 0.5}},
        {"start": {"easy": math.nan, "hard": 0.5}, "end": {"easy": 0.5, "hard": 0.5}},
        {"start": {"easy": 1.0}, "end": {"hard": 1.0}},
        {"start": {"easy": 0.5, "hard": 0.5}, "end": {"easy": 0.5, "medium": 0.5}},
        {"start": {}, "end": {}},
        {"start": {"easy": "1"}, "end": {"easy": 1.0}},
        {"transition_epochs": 0},
        {"transition_epochs": -1},
        {"transition_epochs": math.nan},
        {"transition_epochs": math.inf},
    ],
    ids=str,
)
def test_a_curriculum_that_makes_no_sense_is_a_value_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="why"):
        CurriculumSampler(**settings)


@pytest.mark.parametrize("epoch", [-1, math.nan, None])
def test_an_epoch_that_is_none_is_refused(epoch: Any) -> None:
    with pytest.raises(ValueError, match="epoch"):
        CurriculumSampler().shares(epoch)


# -- drawing ----------------------------------------------------------------------------------


def chi_square(sampler: CurriculumSampler, epoch: int, draws: int = 6000) -> float:
    counts = Counter(sampler.draw(epoch) for _ in range(draws))
    expected = CurriculumSampler().shares(epoch)
    return sum((counts[level] - share * draws) ** 2 / (share * draws) for level, share in expected.items())


@pytest.mark.parametrize("epoch", [0, 5, 20])
def test_levels_are_drawn_by_their_shares(epoch: int) -> None:
    assert chi_square(CurriculumSampler(seed=4), epoch) < CHI_2


def test_planted_bug_shares_that_never_move_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = CurriculumSampler(seed=4)
    first = stuck.shares(0)
    monkeypatch.setattr(stuck, "shares", lambda epoch: first)
    assert chi_square(stuck, 20) > CHI_2


def test_a_share_of_nothing_is_never_drawn() -> None:
    sampler = CurriculumSampler({"easy": 1.0, "hard": 0.0}, {"easy": 1.0, "hard": 0.0})
    assert {sampler.draw(0) for _ in range(500)} == {"easy"}


def test_two_samplers_and_the_global_generator_never_disturb_one_another() -> None:
    alone = CurriculumSampler(seed=1)
    expected = [alone.draw(0) for _ in range(50)]
    random.seed(7)
    undisturbed = [random.random() for _ in range(50)]
    random.seed(7)
    one, other = CurriculumSampler(seed=1), CurriculumSampler(seed=2)
    mixed = [(one.draw(0), other.draw(0), random.random()) for _ in range(50)]
    assert [own for own, _, _ in mixed] == expected
    assert [value for _, _, value in mixed] == undisturbed
    assert [own for _, own, _ in mixed] != expected


# -- seen tasks -----------------------------------------------------------------------------------


def test_marks_can_be_asked_for_and_forgotten() -> None:
    sampler = CurriculumSampler()
    sampler.mark("a")
    assert sampler.seen("a")
    assert not sampler.seen("b")
    sampler.reset()
    assert not sampler.seen("a")


def cover(sampler: CurriculumSampler, size: int, batch: int) -> set[str]:
    """All tasks of one level, in as many batches as they just need."""
    tasks = pool(easy=size)
    return {task_id for _ in range(math.ceil(size / batch)) for task_id in ids(sampler.sample(tasks, batch, 0))}


ONE_LEVEL = ({"easy": 1.0}, {"easy": 1.0})


@pytest.mark.parametrize(("size", "batch"), [(20, 5), (21, 5), (7, 7), (5, 1)])
def test_every_task_is_seen_in_as_few_batches_as_possible(size: int, batch: int) -> None:
    assert len(cover(CurriculumSampler(*ONE_LEVEL), size, batch)) == size


def test_planted_bug_marks_that_nobody_consults_leave_tasks_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = CurriculumSampler(*ONE_LEVEL)
    monkeypatch.setattr(sampler, "mark", lambda task_id: None)
    assert len(cover(sampler, 50, 5)) < 50


def test_an_exhausted_level_begins_anew_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    sampler, tasks = CurriculumSampler(*ONE_LEVEL), pool(easy=4)
    with caplog.at_level(logging.INFO):
        first = ids(sampler.sample(tasks, 4, 0))
        assert not caplog.records
        second = ids(sampler.sample(tasks, 4, 0))
    assert sorted(first) == sorted(second)
    assert [record.getMessage() for record in caplog.records] == ["all 4 easy tasks were seen; they begin anew"]
    assert sampler.resets == 1


@given(sizes=st.tuples(*[st.integers(6, 12)] * 3), n=st.integers(1, 6), batches=st.integers(1, 12))
def test_no_batch_holds_a_task_twice_also_over_a_reset(sizes: tuple[int, ...], n: int, batches: int) -> None:
    sampler, tasks = CurriculumSampler(), pool(**dict(zip(LEVELS, sizes, strict=True)))
    for epoch in range(batches):
        batch = ids(sampler.sample(tasks, n, epoch))
        assert len(set(batch)) == n


def test_a_level_with_a_share_and_no_tasks_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match="asks for 20% hard tasks and there are none"):
        CurriculumSampler().sample(pool(easy=3, medium=3), 2, 0)
    with pytest.raises(TaskError, match="needs more than the 2 easy tasks"):
        CurriculumSampler(*ONE_LEVEL).sample(pool(easy=2), 3, 0)


# -- resume --------------------------------------------------------------------------------------


@given(before=st.integers(0, 12), n=st.integers(1, 4))
def test_a_restored_sampler_goes_on_exactly_where_it_stopped(before: int, n: int) -> None:
    tasks = pool(easy=6, medium=6, hard=6)
    whole, saved = CurriculumSampler(seed=3), CurriculumSampler(seed=3)
    for epoch in range(before):
        whole.sample(tasks, n, epoch)
        saved.sample(tasks, n, epoch)
    resumed = CurriculumSampler(seed=3)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert [ids(resumed.sample(tasks, n, 9)) for _ in range(5)] == [ids(whole.sample(tasks, n, 9)) for _ in range(5)]


@pytest.mark.parametrize("change", [{"asked": -1}, {"seen": "ab"}, {"seen": [1]}, {"surprise": 1}, {"resets": None}])
def test_a_foreign_state_is_refused(change: dict[str, Any]) -> None:
    sampler = CurriculumSampler(seed=3)
    with pytest.raises(StateError, match="does not fit"):
        sampler.load_state_dict(sampler.state_dict() | change)
    with pytest.raises(StateError, match="does not fit"):
        sampler.load_state_dict(CurriculumSampler(seed=4).state_dict())


# -- places from shares ------------------------------------------------------------------------------


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), n=st.integers(0, 60))
def test_places_sum_up_stay_within_one_and_nothing_comes_of_nothing(weights: list[int], n: int) -> None:
    shares = {index: weight / sum(weights) for index, weight in enumerate(weights)}
    counts = largest_remainder(shares, n)
    assert sum(counts.values()) == n
    assert all(abs(counts[level] - shares[level] * n) < 1 + 1e-5 for level in shares)
    assert not any(counts[level] for level in shares if shares[level] == 0)


def test_places_of_small_batches_are_the_expected_ones() -> None:
    assert CurriculumSampler().counts(10, 0) == {"easy": 3, "medium": 5, "hard": 2}
    assert CurriculumSampler().counts(1, 0) == {"easy": 0, "medium": 1, "hard": 0}
    assert CurriculumSampler().counts(16, 10) == {"easy": 2, "medium": 6, "hard": 8}
