"""How the marks of several functions become one reward."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import RewardError
from surefoot.guards.reward_values import RewardValue, parse_reward
from surefoot.protocols import Environment
from surefoot.records import Rollout, Task, Turn
from surefoot.rewards.grading import SingleTurnEnvironment
from surefoot.rewards.pool import RewardJob, RewardPool


class FakePool(RewardPool):
    """Says what it is told, function by function, and remembers the jobs it was given."""

    def __init__(self, said: Mapping[str, Sequence[Any]]) -> None:
        super().__init__(dict.fromkeys(said, print))
        self.said, self.jobs = said, list[RewardJob]()

    def score(self, jobs: Sequence[RewardJob]) -> list[dict[str, RewardValue]]:
        self.jobs += jobs
        total = sum(job.size for job in jobs)
        marks = {
            name: [v if isinstance(v, RewardValue) else parse_reward(v) for v in values]
            for name, values in self.said.items()
        }
        return [{name: column[i] for name, column in marks.items()} for i in range(total)]


TASK = Task(id="sums/1", prompt="1+1=", columns={"answer": "2"})


def rollout(text: str = "2", *, task: Task = TASK, group: str = "0", index: int = 0) -> Rollout:
    return Rollout(task.id, group, index, (Turn((1,), (2,), (-0.1,), version=0, text=text),))


def grade_one(said: Mapping[str, Any], weights: Mapping[str, float], metric: str | None = None) -> Any:
    env: Environment = SingleTurnEnvironment(FakePool({name: [value] for name, value in said.items()}), weights, metric)
    return env.grade([TASK], [rollout()])[0]


def test_the_reward_is_the_weighted_sum() -> None:
    grade = grade_one({"a": 1.0, "b": -0.5}, {"a": 2.0, "b": 0.5})
    assert (grade.reward, grade.parts, grade.failure) == (1.75, {"a": 1.0, "b": -0.5}, None)


def test_a_function_that_abstains_leaves_the_others_to_decide() -> None:
    grade = grade_one({"a": None, "b": 0.5}, {"a": 1.0, "b": 1.0})
    assert (grade.reward, grade.parts, grade.failure) == (0.5, {"a": None, "b": 0.5}, None)


def test_when_all_abstain_there_is_no_reward() -> None:
    grade = grade_one({"a": None, "b": None}, {"a": 1.0, "b": 1.0})
    assert (grade.reward, grade.failure) == (None, "a+b:abstained")
    assert grade_one({"a": None}, {"a": 1.0}).failure == "a:abstained"


@pytest.mark.parametrize("reason", ["raised", "timeout", "died", "nan", "not_a_number"])
def test_one_failed_function_of_two_takes_the_reward_away(reason: str) -> None:
    grade = grade_one({"a": 1.0, "b": RewardValue(None, reason)}, {"a": 1.0, "b": 1.0})
    assert (grade.reward, grade.failure) == (None, f"b:{reason}")


def test_a_function_of_weight_0_is_shown_and_decides_nothing() -> None:
    weights = {"real": 1.0, "shown": 0.0}
    assert grade_one({"real": None, "shown": 1.0}, weights).failure == "real:abstained"
    grade = grade_one({"real": 1.0, "shown": RewardValue(None, "raised")}, weights)
    assert (grade.reward, grade.parts) == (1.0, {"real": 1.0, "shown": None})


def test_a_sum_that_overflows_is_no_reward() -> None:
    assert grade_one({"a": 1e308}, {"a": 10.0}).failure == "sum:nan"
    assert grade_one({"a": 1e308, "b": -1e308}, {"a": 10.0, "b": 10.0}).failure == "sum:nan"


def test_the_metric_is_kept_apart_from_the_reward() -> None:
    grade = grade_one({"style": 0.3, "solved": 1.0}, {"style": 1.0}, metric="solved")
    assert (grade.reward, grade.correct, grade.parts) == (0.3, 1.0, {"style": 0.3})
    grade = grade_one({"style": 0.3, "solved": RewardValue(None, "raised")}, {"style": 1.0}, metric="solved")
    assert (grade.reward, grade.correct) == (0.3, None)


def test_siblings_travel_in_one_job_and_grades_come_back_in_the_order_of_the_rollouts() -> None:
    other = Task(id="sums/2", prompt="2+2=", columns={"answer": "4"})
    tasks = [TASK, other, TASK, other, TASK]
    rollouts = [rollout(str(i), task=task, group=g) for i, (task, g) in enumerate(zip(tasks, "01012", strict=True))]
    pool = FakePool({"f": [0.0, 2.0, 1.0, 3.0, 4.0]})  # in the order of the jobs: groups 0, 1, 2
    grades = SingleTurnEnvironment(pool, {"f": 1.0}).grade(tasks, rollouts)
    assert [job.completions for job in pool.jobs] == [["0", "2"], ["1", "3"], ["4"]]
    assert [job.columns["answer"] for job in pool.jobs] == [["2", "2"], ["4", "4"], ["2"]]
    assert [grade.reward for grade in grades] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_message_prompts_give_message_completions() -> None:
    task = Task(id="chat", prompt=({"role": "user", "content": "hi"},))
    pool = FakePool({"f": [1.0]})
    SingleTurnEnvironment(pool, {"f": 1.0}).grade([task], [rollout("hello", task=task)])
    assert pool.jobs[0].prompts == [[{"role": "user", "content": "hi"}]]
    assert pool.jobs[0].completions == [[{"role": "assistant", "content": "hello"}]]


def test_a_rollout_that_already_failed_is_not_graded() -> None:
    pool = FakePool({"f": [1.0]})
    lost = Rollout(TASK.id, "0", 1, (), failure="engine_error")
    grades = SingleTurnEnvironment(pool, {"f": 1.0}).grade([TASK, TASK], [lost, rollout()])
    assert [(grade.reward, grade.failure) for grade in grades] == [(None, "engine_error"), (1.0, None)]
    assert pool.jobs[0].size == 1


def test_a_rollout_is_never_graded_against_another_task() -> None:
    other = Task(id="sums/2", prompt="2+2=")
    with pytest.raises(RewardError, match="task sums/2 was given for task=sums/1"):
        SingleTurnEnvironment(FakePool({"f": [1.0]}), {"f": 1.0}).grade([other], [rollout()])
    with pytest.raises(RewardError, match="0 tasks for 1 rollouts"):
        SingleTurnEnvironment(FakePool({"f": [1.0]}), {"f": 1.0}).grade([], [rollout()])


@pytest.mark.parametrize(
    ("weights", "metric", "word"),
    [({"g": 1.0}, None, "'g'"), ({"f": 1.0}, "g", "'g'"), ({"f": 0.0}, None, "weights"), ({}, None, "weights"), ({"f": math.nan}, None, "weights")],
)  # fmt: skip
def test_names_and_weights_that_would_count_for_nothing_are_refused(weights: Any, metric: Any, word: str) -> None:
    with pytest.raises(RewardError, match=word):
        SingleTurnEnvironment(FakePool({"f": [1.0]}), weights, metric)


MARKS = st.sampled_from(["raised", "timeout", "died", "nan", "not_a_number", "abstained"]).map(
    lambda r: RewardValue(None, r)
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from("abc"), MARKS | st.floats(1, 2).map(lambda v: RewardValue(v, None)), min_size=1))
def test_a_failure_never_becomes_a_reward(said: dict[str, RewardValue]) -> None:
    """All values are at least 1, so a reward below 1 could only have come from a failure counted as 0."""
    grade = grade_one(said, dict.fromkeys(said, 1.0))
    failed = any(mark.reason not in (None, "abstained") for mark in said.values())
    values = [mark.value for mark in said.values() if mark.value is not None]
    assert (grade.reward is None) == (failed or not values) == (grade.failure is not None)
    if grade.reward is not None:
        assert grade.reward == pytest.approx(sum(values))


def test_with_tools_a_completion_is_always_messages_called_or_not() -> None:
    """A reward function that is sometimes handed text and sometimes messages fails on one of them."""
    from surefoot.rewards.grading import _job

    plain = rollout("42", task=TASK)
    with_tools = dataclasses.replace(plain, ended="answered")
    assert _job(TASK, [plain]).completions == ["42"]
    assert _job(TASK, [with_tools]).completions == [[{"role": "assistant", "content": "42"}]]
