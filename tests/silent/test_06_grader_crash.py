"""Silent failure 06: a grader that crashes is counted as a wrong answer, and the policy learns to avoid the crash."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from silent_kit import TASKS, make_runtime, prepare

from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import PartialGroupError, RewardError
from surefoot.protocols import Grade, Request
from surefoot.rewards.grading import SingleTurnEnvironment
from surefoot.rewards.pool import RewardPool

POISON = 13


def fragile(completions: Sequence[str], **_: Any) -> list[float]:
    if any(text.startswith(str(POISON)) for text in completions):
        raise ZeroDivisionError("the grader's own bug")
    return [float(text.startswith("7")) for text in completions]


def script(request: Request) -> list[int]:
    """Siblings 0 to 3: right, wrong, one that the grader cannot stand, right."""
    return [[7, 2], [9, 2], [POISON, 2], [7, 8, 2]][int(request.id[-1])]


@pytest.fixture
def environment() -> Iterator[SingleTurnEnvironment]:
    with RewardPool({"fragile": fragile}, workers=1) as pool:
        yield SingleTurnEnvironment(pool, {"fragile": 1.0})


def collect(environment: Any, *, max_failures: float = 1.0) -> Any:
    runtime = make_runtime(ScriptedEngine(script), environment=environment, max_failures=max_failures)
    return runtime.collect(TASKS[:1], step=1)


def check(group: Any) -> None:
    assert group.rewards == (1.0, 0.0, None, 1.0)


def test_only_the_guilty_answer_loses_its_verdict_and_it_gets_no_number(environment: SingleTurnEnvironment) -> None:
    (group,) = collect(environment)
    check(group)
    assert group.rollouts[2].failure == "fragile:raised"
    assert [s.index for s in prepare([group], partial_groups="train")] == [0, 1, 3]
    with pytest.raises(PartialGroupError, match="1 fragile:raised"):
        prepare([group], partial_groups="refuse")


def test_by_default_the_run_stops_and_says_so(environment: SingleTurnEnvironment) -> None:
    with pytest.raises(RewardError, match="fragile:raised"):
        collect(environment, max_failures=0.0)


def test_planted_zero_for_a_crash_is_seen(environment: SingleTurnEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    real = environment.grade

    def forgiving(tasks: Any, rollouts: Any) -> list[Grade]:
        return [g if g.reward is not None else Grade(0.0, {}) for g in real(tasks, rollouts)]

    monkeypatch.setattr(environment, "grade", forgiving)
    (group,) = collect(environment)
    with pytest.raises(AssertionError):
        check(group)
