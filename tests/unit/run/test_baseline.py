"""What an agent did in a preflight that was refused, in words: every kind of call, and one rollout."""

from __future__ import annotations

import pytest
from tool_kit import Box, Kit, call, play

from surefoot.errors import ToolFailedError
from surefoot.protocols import Request, ToolAnswer
from surefoot.records import Group
from surefoot.run import preflight
from surefoot.run.preflight import calls_of, story
from surefoot.tools.session import ToolLimits

HOSTILE = "no\x1b[31m file\nhere"


def group_of(*firsts: str, answer: object = "42", turns: int = 3) -> Group:
    """Each sibling says one of these first, and 42 when it was answered."""

    def says(request: Request, context: str) -> str:
        return "42" if "<|tool|>" in context else firsts[int(request.id.split("/")[3])]

    def asked(name: str, arguments: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    from dataclasses import replace

    from tool_kit import SAMPLING

    sampling = replace(SAMPLING, num_generations=len(firsts))
    (one,) = play(says, Kit(lambda rollout: Box(asked)), sampling=sampling, limits=ToolLimits(max_turns=turns))
    return one.group


def test_every_kind_of_call_is_counted() -> None:
    group = group_of(call(x=1), call("nobody"), "<tool_call>{</tool_call>", "42")
    assert next(story([group])) == (
        "tool calls: 3, by 3 of 4 rollouts: 1 succeeded, 0 failed, 1 unknown tool, 0 invalid arguments, "
        "1 could not be read"
    )
    refused = ToolAnswer('{"error": "wrong_arguments"}', "refused")
    assert "1 invalid arguments" in next(story([group_of(call(x=1), "42", answer=refused)]))
    assert "1 failed" in next(story([group_of(call(x=1), "42", answer=ToolAnswer("no", "error"))]))
    assert "1 over a budget" in next(story([group_of(call(x=1), "42", turns=1)]))
    assert next(story([group_of("42", "41")])) == "tool calls: 0, by 0 of 2 rollouts"
    assert list(story([])) == []


def test_calls_that_their_server_did_not_survive_are_counted_as_lost() -> None:
    group = group_of(call(x=1) + call(x=2), "42", answer=ToolFailedError("w", "y", "f", "tool_crashed"))
    assert calls_of(group.rollouts[0]) == {preflight.LOST: 2}
    lines = list(story([group]))
    assert lines[0].endswith("0 invalid arguments, 2 lost with their server")
    assert lines[1] == "one of them, task t, no verdict: tool_crashed"


def test_the_rollout_that_tells_most_is_shown_and_nothing_in_it_moves_the_cursor() -> None:
    lines = list(story([group_of("42", call(x=1), answer=ToolAnswer(HOSTILE, "error"))]))
    assert lines[1:] == [
        "one of them, task t, reward 1, ended by answered",
        "  user: 6*7=",
        f"  assistant: {call(x=1)}",
        r"  tool tool (failed): no\x1b[31m file\nhere",
        "  assistant: 42",
    ]


def test_a_long_rollout_is_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "MOST_MESSAGES", 4)
    monkeypatch.setattr(preflight, "MOST_CHARS", 10)
    lines = list(story([group_of(call(x=1) * 2, "42")]))[2:]
    assert [line.strip()[:9] for line in lines] == ["user: 6*7", "assistant", "...", "tool tool", "assistant"]
    assert lines[1].endswith(f"... ({len(call(x=1) * 2)} characters)")
