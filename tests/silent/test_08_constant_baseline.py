"""Silent failure 08: the grader wants a format that the prompt never asked for, so every reward is 0 and nothing is learned."""

from __future__ import annotations

import pytest
from silent_kit import TASKS, TinyEnvironment, make_engine, make_runtime, tiny_net

from surefoot.errors import RewardError
from surefoot.records import Rollout


def test_a_reward_that_tells_answers_apart_passes_the_preflight() -> None:
    groups = make_runtime(make_engine(tiny_net())).preflight(TASKS)
    assert {r for group in groups for r in group.rewards} == {0.0, 1.0}


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_planted_constant_reward_is_refused_before_step_1(value: float) -> None:
    runtime = make_runtime(make_engine(tiny_net()), environment=TinyEnvironment(lambda rollout: value))
    with pytest.raises(RewardError, match=f"all 12 baseline completions on 3 tasks got reward {value:g}"):
        runtime.preflight(TASKS)


def test_planted_format_that_no_answer_has_is_refused_and_an_answer_is_shown() -> None:
    def strict(rollout: Rollout) -> float:
        return float("<answer>" in rollout.text)

    runtime = make_runtime(make_engine(tiny_net()), environment=TinyEnvironment(strict))
    with pytest.raises(RewardError, match="one of them: '"):
        runtime.preflight(TASKS)
