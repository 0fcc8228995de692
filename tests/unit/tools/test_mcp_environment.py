"""`MCPToolEnvironment`: its signature, its turns, and rewards that do not depend on how many steps they took."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import RewardError, TaskError, ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.records import Task
from surefoot.runtime import mcp_environment
from surefoot.runtime.mcp_environment import MCPToolEnvironment

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
    inside = {"task_metadata": {"task_id": "t/1", "complexity": complexity}, "ground_truth": "42"}
    assert env(task_data=inside).max_turns == turns
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


# -- the documented row, and a real server ---------------------------------------------------------
EXAMPLES = Path(__file__).parents[3] / "examples"


def documented(category: str, task: str) -> dict[str, Any]:
    """One line of the shipped file of tool tasks."""
    with (EXAMPLES / "tasks" / "tool_tasks.jsonl").open(encoding="utf-8") as file:
        rows = (json.loads(line) for line in file)
        return next(row for row in rows if row["task_metadata"]["task_id"] == f"{category}-{task}")


def solve(row: dict[str, Any], toolkit: Any, final: str) -> tuple[float, list[str], list[str]]:
    """The calls of the row's own solution, then `final` with what was read; reward, observations, outcomes."""

    async def story() -> tuple[float, list[str], list[str]]:
        world = MCPToolEnvironment(task_data=row, toolkit=toolkit)
        names = await world.initialize_tools()
        total, seen, outcomes, read = 0.0, list[str](), list[str](), ""
        for step in row["extra_info"]["solution"]:
            assert step["tool"] in names
            action = json.dumps({"name": step["tool"], "arguments": step["arguments"]})
            observation, reward, done, facts = await world.step(f"<tool_call>{action}</tool_call>")
            assert not done
            total, seen, outcomes = total + reward, [*seen, observation], outcomes + facts["outcomes"]
            found = re.search(step["read"], observation)
            assert found, observation
            read = found[1]
        _, reward, done, facts = await world.step(final.replace("READ", read))
        assert (done, facts["max_turns"]) == (True, {"easy": 5, "medium": 8, "hard": 12}[row["complexity"]])
        return total + reward, seen, outcomes

    return asyncio.run(story())


@pytest.mark.mcp
def test_a_documented_row_with_a_real_server_earns_what_a_run_would_give_it() -> None:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    from surefoot.tools.mcp.servers import read_servers
    from surefoot.tools.mcp.toolkit import MCPToolkit

    servers = [each for each in read_servers(EXAMPLES / "servers/servers.json")[0] if each.name == "calculator"]
    toolkit = MCPToolkit(servers)
    try:
        row = documented("calculator", "0001")
        assert row["reward_spec"] == {"ground_truth": "41306449", "verifier_type": "math"}
        assert solve(row, toolkit, "<answer>READ</answer>") == (1.0, ["41306449"], ["ok"])
        assert solve(row, toolkit, "<answer>41306448</answer>")[0] == 0.0
        bare = {**row, "reward_spec": {"ground_truth": "41306449"}}
        assert solve(bare, toolkit, " READ\n")[0] == 1.0
        assert solve(bare, toolkit, "It is READ")[0] == 0.0
    finally:
        toolkit.close()


def test_planted_bug_a_judge_that_reads_the_top_level_alone_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"task_metadata": {"task_id": "t/1"}, "prompt": "6*7?", "reward_spec": {"ground_truth": "42"}}

    def worth() -> float:
        async def story() -> float:
            world = env(task_data=row)
            await world.initialize_tools()
            return (await world.step("42"))[1]

        return asyncio.run(story())

    assert worth() == 1.0
    monkeypatch.setattr(mcp_environment, "gold_of", lambda row: row.get("ground_truth", ""))
    assert worth() == 0.0


@pytest.mark.parametrize("row", [{}, {"reward_spec": {}}, {"reward_spec": {"ground_truth": " "}}])
def test_a_row_that_nobody_could_judge_is_refused_not_worth_0(row: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"task t/9 has no gold answer, and no judge was given"):
        env(task_data={"task_metadata": {"task_id": "t/9"}, "prompt": "?", **row})
    assert env(task_data={"prompt": "?", **row}, judge=lambda data, final: 1.0).max_turns == 8
    with pytest.raises(RewardError, match="there is no verifier of type 'maths'"):
        env(task_data={**DATA, "verifier_type": "maths"})
