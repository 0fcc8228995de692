"""`MCPToolEnvironment`: its signature, its turns, and rewards that do not depend on how many steps they took."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import pytest

from surefoot.envs.servers import mcp_environment
from surefoot.envs.servers.mcp_environment import MCPToolEnvironment, register_with
from surefoot.errors import TaskError, ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.records import Task

DATA = {"task_metadata": {"task_id": "t/1"}, "prompt": "6*7?", "complexity": "medium", "ground_truth": "42"}
CALL = 'Let me see. <tool_call>{"name": "calc", "arguments": {"x": 1}}</tool_call>'


class Box:
    opening = None

    def __init__(self) -> None:
        self.closed = False

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        if arguments.get("x") == "boom":
            raise ToolFailedError("w", "y", "f", "tool_crashed")
        return ToolAnswer("42")

    def reward(self) -> float | None:
        return None

    def close(self) -> None:
        self.closed = True


class Kit:
    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.specs = [ToolSpec("calc", "", {"type": "object"})]

    def open(self, task: Task, rollout: str, seed: int) -> Box:
        assert task.id == "t/1"
        self.boxes.append(Box())
        return self.boxes[-1]

    def close(self) -> None: ...


def env(**settings: Any) -> MCPToolEnvironment:
    return MCPToolEnvironment(**{"task_data": DATA, "toolkit": Kit(), **settings})


def test_the_signature_is_the_contract() -> None:
    parameters = inspect.signature(MCPToolEnvironment).parameters
    assert list(parameters)[:3] == ["task_data", "toolkit", "max_turns"]
    assert inspect.iscoroutinefunction(MCPToolEnvironment.initialize_tools)
    assert inspect.iscoroutinefunction(MCPToolEnvironment.step)
    with pytest.raises(TypeError, match="task_config"):
        MCPToolEnvironment(task_config=DATA, toolkit=Kit())  # type: ignore[call-arg]


@pytest.mark.parametrize(("complexity", "turns"), [("easy", 5), ("medium", 8), ("hard", 12)])
def test_turns_follow_complexity_in_either_place(complexity: str, turns: int) -> None:
    assert env(task_data={**DATA, "complexity": complexity}).max_turns == turns
    assert env(task_data={"task_metadata": {"task_id": "t/1", "complexity": complexity}}).max_turns == turns
    assert env(max_turns=3).max_turns == 3


def test_an_unknown_complexity_is_refused_not_taken_for_medium() -> None:
    with pytest.raises(TaskError, match="complexity is 'extreme'"):
        env(task_data={**DATA, "complexity": "extreme"})


def test_a_step_before_the_tools_are_ready_or_after_the_end_is_an_error() -> None:
    async def story() -> None:
        world = env()
        with pytest.raises(ToolError, match="before the tools were ready"):
            await world.step("42")
        await world.initialize_tools()
        await world.step("42")
        with pytest.raises(ToolError, match="is over"):
            await world.step("42")

    asyncio.run(story())


def play(turns: int, final: str = "42") -> tuple[float, list[str]]:
    async def story() -> tuple[float, list[str]]:
        world, total, seen = env(), 0.0, []
        await world.initialize_tools()
        for _ in range(turns - 1):
            observation, reward, done, facts = await world.step(CALL)
            assert not done
            assert facts["outcomes"] == ["ok"]
            total += reward
            seen.append(observation)
        _, reward, done, _ = await world.step(final)
        assert done
        return total + reward, seen

    return asyncio.run(story())


def test_the_same_outcome_in_two_and_in_eight_turns_earns_the_same() -> None:
    assert play(2)[0] == play(8)[0] == 1.0
    assert play(2, final="41")[0] == play(8, final="41")[0] == 0.0
    assert play(3)[1] == ["42", "42"]


def test_planted_bug_a_running_total_at_every_turn_pays_long_rollouts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MCPToolEnvironment, "_increment", lambda self, final: 1.0)
    assert play(8)[0] != play(2)[0]


def test_a_judge_that_pays_on_the_way_still_adds_up_to_the_end() -> None:
    async def story() -> float:
        world, steps = env(judge=lambda data, final: 1.0 if final else 0.25), [CALL, CALL, "42"]
        await world.initialize_tools()
        return sum([(await world.step(action))[1] for action in steps])

    assert asyncio.run(story()) == 1.0


def test_calls_that_cannot_be_read_are_told_and_a_failed_server_is_raised() -> None:
    async def story() -> None:
        world = env()
        await world.initialize_tools()
        observation, _, done, facts = await world.step("<tool_call>{</tool_call>")
        assert not done
        assert facts["outcomes"] == ["refused"]
        assert "cannot be read" in observation
        with pytest.raises(ToolFailedError):
            await world.step('<tool_call>{"name": "calc", "arguments": {"x": "boom"}}</tool_call>')

    asyncio.run(story())


def test_the_last_turn_ends_the_rollout_and_the_tools_are_let_go() -> None:
    async def story() -> None:
        kit = Kit()
        world = env(toolkit=kit, max_turns=2)
        assert await world.initialize_tools() == ["calc"]
        assert not (await world.step(CALL))[2]
        assert (await world.step(CALL))[2]
        assert kit.boxes[0].closed

    asyncio.run(story())


def test_registration_passes_no_description_fails_loudly_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, str]] = []

    def register(id: str, entry_point: str) -> None:
        seen.append((id, entry_point))

    def broken(id: str, entry_point: str) -> None:
        raise RuntimeError("registry is read-only")

    with caplog.at_level(logging.INFO, logger=mcp_environment.__name__):
        register_with(register)
        register_with(register)
    assert seen == [("surefoot_mcp", "surefoot.envs.servers.mcp_environment:MCPToolEnvironment")] * 2
    assert len(caplog.records) == 1
    with pytest.raises(ToolError, match="registry is read-only"):
        register_with(broken)
    with pytest.raises(ToolError, match="registering"):
        register_with(lambda name: None)
