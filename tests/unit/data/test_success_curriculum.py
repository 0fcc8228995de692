"""Tasks near the middle are preferred, others can come back, and an attempt without a verdict is no failure."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.curriculum import SuccessCurriculum
from surefoot.errors import StateError, TaskError
from surefoot.records import Task

TASKS = [Task(id=name, prompt="?") for name in ("never", "half", "always", "fresh")]


def played(**settings: Any) -> SuccessCurriculum:
    curriculum = SuccessCurriculum(**settings)
    for _ in range(40):
        curriculum.report("never", 0.0)
        curriculum.report("half", 1.0)
        curriculum.report("half", 0.0)
        curriculum.report("always", 1.0)
    return curriculum


def chosen(curriculum: SuccessCurriculum, draws: int = 2000) -> Counter[str]:
    return Counter(curriculum.choose(TASKS, 1)[0].id for _ in range(draws))


def test_tasks_near_the_middle_are_preferred_and_the_others_still_come() -> None:
    counts = chosen(played())
    assert counts["half"] > 2 * counts["always"] > 0
    assert counts["half"] > 2 * counts["never"] > 0
    assert counts["fresh"] > 2 * counts["always"], "a task nobody has played is explored"


def test_the_draw_is_exactly_in_proportion_to_the_weights() -> None:
    curriculum, draws = played(explore=0.3), 4000
    weights = {task.id: curriculum.weight(task.id) for task in TASKS}
    counts, total = chosen(curriculum, draws), sum(weights.values())
    chi = sum((counts[name] - draws * w / total) ** 2 / (draws * w / total) for name, w in weights.items())
    assert chi < 16.27, "3 degrees of freedom, 0.1 % point"


def test_planted_bug_equal_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SuccessCurriculum, "weight", lambda self, task_id: 1.0)
    counts = chosen(played())
    assert counts["half"] < 2 * counts["always"]


def test_an_attempt_without_a_verdict_changes_nothing_but_its_count() -> None:
    curriculum = played()
    before = curriculum.rate("half"), curriculum.weight("half")
    curriculum.report("half", None)
    assert (curriculum.rate("half"), curriculum.weight("half")) == before
    assert curriculum.unjudged == 1


def test_planted_bug_a_missing_verdict_counted_as_zero_moves_the_rate() -> None:
    curriculum = played()
    before = curriculum.rate("half")
    curriculum.report("half", 0.0)
    assert curriculum.rate("half") != before


@pytest.mark.parametrize("outcome", [math.nan, math.inf, -0.1, 1.1, "1"])
def test_an_outcome_that_is_no_share_is_refused(outcome: Any) -> None:
    curriculum = SuccessCurriculum()
    with pytest.raises(TaskError, match="was reported with"):
        curriculum.report("a", outcome)
    assert curriculum.rate("a") is None


def test_newer_attempts_count_more_because_the_policy_changes() -> None:
    curriculum = SuccessCurriculum(fade=0.5)
    for outcome in [0.0] * 10 + [1.0] * 10:
        curriculum.report("a", outcome)
    assert (curriculum.rate("a") or 0) > 0.99


def test_no_more_is_remembered_than_allowed() -> None:
    curriculum = SuccessCurriculum(remember=3)
    for name in "abcd":
        curriculum.report(name, 1.0)
    assert curriculum.rate("a") is None
    assert curriculum.rate("d") == 1.0


@given(before=st.integers(0, 10))
def test_a_restored_curriculum_makes_the_same_choices(before: int) -> None:
    whole, saved = played(seed=2), played(seed=2)
    for _ in range(before):
        whole.choose(TASKS, 2)
        saved.choose(TASKS, 2)
    resumed = SuccessCurriculum(seed=2)
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert [resumed.choose(TASKS, 2) for _ in range(6)] == [whole.choose(TASKS, 2) for _ in range(6)]


@pytest.mark.parametrize("change", [{"asked": -1}, {"rates": [["a", math.nan, 1]]}, {"rates": 3}, {"more": 1}], ids=str)
def test_a_foreign_state_is_refused(change: dict[str, Any]) -> None:
    curriculum = played()
    with pytest.raises(StateError, match="does not fit"):
        curriculum.load_state_dict(curriculum.state_dict() | change)
    with pytest.raises(StateError, match="does not fit"):
        curriculum.load_state_dict(played(seed=9).state_dict())


def test_none_comes_twice_and_too_many_are_refused() -> None:
    curriculum = played()
    assert sorted(task.id for task in curriculum.choose(TASKS, 4)) == ["always", "fresh", "half", "never"]
    with pytest.raises(TaskError, match="5 of 4 candidates"):
        curriculum.choose(TASKS, 5)


@pytest.mark.parametrize("settings", [{"explore": 0}, {"explore": 1.1}, {"fade": 0}, {"fade": math.nan}], ids=str)
def test_settings_outside_their_range_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="share above 0"):
        SuccessCurriculum(**settings)  # type: ignore[arg-type]
