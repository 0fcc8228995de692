"""Silent failure 54: a tool's server dies, and the rollout is graded as if the model had been wrong."""

from __future__ import annotations

from typing import Any

import pytest
from tool_kit import Box, Graders, Kit, call, play

from surefoot.errors import ToolFailedError
from surefoot.learner.samples import drop_ungraded
from surefoot.protocols import Request, ToolAnswer
from surefoot.records import Group


def asks_once(request: Request, context: str) -> str:
    return "42" if "<|tool|>42" in context else "no idea" if "<|tool|>" in context else call()


def dies_for(index: str) -> Kit:
    def make(rollout: str) -> Box:
        def answer(*_: Any) -> str:
            if rollout.endswith(index):
                raise ToolFailedError("the server is gone", "it crashed", "look at its log", "tool_crashed")
            return "42"

        return Box(answer)

    return Kit(make)


def played(kit: Kit) -> Group:
    right = Graders(lambda rollout: float(rollout.turns[-1].text == "42"))
    (one,) = play(asks_once, kit, graders=right)
    return one.group


def test_a_rollout_whose_tool_died_has_no_verdict_and_its_sibling_keeps_its_own() -> None:
    group = played(dies_for("/1"))
    assert group.rewards == (1.0, None)
    assert [rollout.failure for rollout in group.rollouts] == [None, "tool_crashed"]
    assert drop_ungraded([group], partial="drop").dropped == {"tool_crashed": 1, "partial_group": 1}


def test_planted_error_text_as_an_answer_is_scored_like_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others do: the exception's text goes into the context, the model answers something, the grader says 0."""
    honest = Box.call

    def fed(self: Box, *args: Any) -> ToolAnswer:
        try:
            return honest(self, *args)
        except ToolFailedError as error:
            return ToolAnswer(f"error: {error.what}")

    monkeypatch.setattr(Box, "call", fed)
    group = played(dies_for("/1"))
    assert group.rewards == (1.0, 0.0), "the planted bug is in place"
    assert not drop_ungraded([group], partial="drop").dropped, (
        "and nothing but the reason on the rollout would have told"
    )
