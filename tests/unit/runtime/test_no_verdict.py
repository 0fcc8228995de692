"""Whose doing it is when rollouts have no verdict: the error's type, and the remedy."""

from __future__ import annotations

import pytest

from surefoot.errors import RewardError, ToolError
from surefoot.learner.chat import FORGED
from surefoot.records import Rollout, Turn
from surefoot.runtime.base import NO_ROOM, from_tools, no_verdict_error, too_many_failures
from surefoot.runtime.rollout import NONFINITE_LOGPROB, NOT_FINITE, UNDECODABLE
from surefoot.tools.session import DEADLINE

TURN = Turn((1,), (2,), (-0.5,), 0)
GRADER, TOOLS = "mend the reward function", "mend the tools"


def rollouts(*failures: str | None) -> list[Rollout]:
    return [
        Rollout("t", "g", i, (TURN,), reward=None if failure else 1.0, failure=failure)
        for i, failure in enumerate(failures)
    ]


@pytest.mark.parametrize("reason", ["tool_crashed", "tool_timeout", "sandbox_failed", DEADLINE, FORGED, NOT_FINITE])
def test_failures_of_tools_are_the_tools(reason: str) -> None:
    assert from_tools(reason)
    error = too_many_failures(rollouts(None, reason), "step 3", 0.0, "\n    1 x it")
    assert type(error) is ToolError
    assert (
        error.what == f"1 of 2 rollouts in step 3 got no verdict ({reason}); max_reward_failures allows 0\n    1 x it"
    )
    assert TOOLS in error.fix
    assert GRADER not in str(error)
    assert error.exit_code == 4


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [("score:raised", GRADER), (UNDECODABLE, "rows"), (NONFINITE_LOGPROB, "sampler"), (NO_ROOM, "shorter prompts")],
)
def test_failures_of_others_are_not(reason: str, remedy: str) -> None:
    error = too_many_failures(rollouts(reason), "the preflight", 0.0, "")
    assert type(error) is RewardError
    assert remedy in error.fix
    assert TOOLS not in error.fix


def test_where_both_failed_the_side_with_more_failures_gives_the_type_and_both_are_named() -> None:
    mixed = too_many_failures(rollouts("tool_crashed", "tool_crashed", "f:raised"), "step 1", 0.1, "")
    other = too_many_failures(rollouts("tool_crashed", "f:died", "f:raised"), "step 1", 0.1, "")
    assert (type(mixed), type(other)) == (ToolError, RewardError)
    for error in (mixed, other):
        assert TOOLS in error.fix
        assert GRADER in error.fix


def test_where_nobody_has_a_verdict_it_is_the_same() -> None:
    dead = no_verdict_error(rollouts("tool_crashed", "tool_crashed"), "none", "why", "or else", "")
    assert (type(dead), dead.what, GRADER in dead.fix) == (ToolError, "none (tool_crashed)", False)
    assert type(no_verdict_error(rollouts("f:died"), "none", "why", "", "")) is RewardError
