"""Keys of `[tools]`, and the two that go with them: config in, what rollouts may do out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tool_kit import call, speaker

from surefoot.errors import ConfigError, ModelError, SecurityError, TaskError, ToolError
from surefoot.protocols import Request
from surefoot.records import Rollout, Task
from surefoot.run.inputs import read_inputs
from surefoot.tools.session import TURNS, ToolLimits

Build = Callable[..., Any]
SERVER = Path(__file__).parents[3] / "examples" / "servers" / "calculator.py"
TOOLS = '''
def double(number: int) -> int:
    """Twice a number.

    Args:
        number: any.
    """
    if number == 13:
        return "9" * 1000
    return 2 * number
'''
WORLD = '''
class World:
    def reset(self, **row):
        self.count = 0
        return " Count."

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: how much.
        """
        self.count += number
        return self.count

    def get_reward(self) -> float:
        return float(self.count)
'''


@pytest.fixture
def with_tools(assembled: Build, tmp_path: Path) -> Build:
    """`with_tools(says, **keys)`: rollouts of two tasks by an engine that says what it is told."""
    (tmp_path / "my_tools.py").write_text(TOOLS)
    (tmp_path / "world.py").write_text(WORLD)

    def play(says: Callable[[Request, str], str], **keys: Any) -> list[Rollout]:
        known = {"tools__functions": ["my_tools.py:double"], "tools__in_prompt": False, "max_completion_length": 200}
        parts = assembled(published=False, **(known | keys))
        parts.runtime.collector.engine = speaker(says)
        try:
            groups = parts.runtime.collect(list(parts.train[:2]), 1)
        finally:
            parts.runtime.close()
        return [rollout for group in groups for rollout in group.rollouts]

    return play


def ask_once(name: str = "double", **arguments: Any) -> Callable[[Request, str], str]:
    return lambda request, context: "done" if "<|tool|>" in context else call(name, **arguments)


@pytest.mark.config_key("tools.functions", "tools.in_prompt")
def test_functions_are_called_and_templates_that_hide_them_are_refused(with_tools: Build) -> None:
    rollouts = with_tools(ask_once(number=21))
    assert {r.turns[0].calls[0].answer for r in rollouts} == {"42"}
    with pytest.raises(ModelError, match="does not show the tool 'double'"):
        with_tools(ask_once(number=21), tools__in_prompt=True)


@pytest.mark.mcp
@pytest.mark.config_key("tools.servers")
def test_servers_of_the_named_file_are_called(with_tools: Build, tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    server = {"command": "python", "args": [str(SERVER)], "isolation": "shared", "read": [str(SERVER.parent)]}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"calculator": server}}))
    says = ask_once("calculator__evaluate", expression="6*7")
    rollouts = with_tools(says, tools__functions=[], tools__servers="mcp.json")
    assert {r.turns[0].calls[0].answer for r in rollouts} == {"42"}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"calculator": {"comand": "python"}}}))
    with pytest.raises(ToolError, match="did you mean command"):
        with_tools(says, tools__functions=[], tools__servers="mcp.json")


@pytest.mark.config_key("tools.environment")
def test_an_environment_class_opens_answers_and_rewards(with_tools: Build) -> None:
    rollouts = with_tools(ask_once("add", number=3), tools__functions=[], tools__environment="world.py:World")
    assert {r.own_reward for r in rollouts} == {3.0}
    assert {r.reward_parts["environment"] for r in rollouts} == {3.0}


@pytest.mark.config_key("tools.environment")
def test_a_kind_of_environment_is_named_without_a_file(with_tools: Build) -> None:
    rollouts = with_tools(
        ask_once("step", action=0), tools__functions=[], tools__environment="gymnasium:CliffWalking-v1"
    )
    assert {r.turns[0].calls[0].answer for r in rollouts} == {"24"}, "one up from where it begins"
    assert {r.own_reward for r in rollouts} == {-1.0}, "the step's own reward"


@pytest.mark.config_key("max_turns")
def test_max_turns_counts_completions(with_tools: Build) -> None:
    for turns in (1, 3):
        rollouts = with_tools(lambda request, context: call("double", number=1), max_turns=turns)
        assert {(len(r.turns), r.ended) for r in rollouts} == {(turns, "max_turns")}


@pytest.mark.config_key("tools.turns_by_complexity")
def test_turns_follow_each_tasks_complexity(with_tools: Build, configure: Any, tmp_path: Path) -> None:
    rows = [
        {
            "id": f"{level}{i}",
            "prompt": f"{i}+{i}=",
            "answer": str(2 * i),
            "complexity": level,
            "verifier_type": "exact",
        }
        for i, level in enumerate(["easy"] * 40)
    ]
    tasks = tmp_path / "mine.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"tasks": str(tasks), "max_turns": 12, "tools__max_result_tokens": 4, "eval_tasks": 2}
    says = lambda request, context: "<tool_call></tool_call>"  # noqa: E731 - no call, and a turn
    turns: dict[bool, set[int]] = {}
    for by_complexity in (True, False):
        rollouts = with_tools(says, tools__turns_by_complexity=by_complexity, **keys)
        turns[by_complexity] = {len(r.turns) for r in rollouts}
    assert turns[True] == {5}
    assert min(turns[False]) > 5
    limits = ToolLimits(max_turns=20, turns_by_complexity=True)
    by_level = {level: limits.of(Task("t", "?", {"complexity": level})).max_turns for level in (None, *TURNS)}
    assert by_level == {None: 20, "easy": 5, "medium": 8, "hard": 12}
    with pytest.raises(ConfigError, match="hard tasks have 12 turns"):
        configure(tools__turns_by_complexity=True, max_turns=11)


def test_a_complexity_that_decides_nothing_is_refused_before_anything_starts(configure: Any, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    rows = [
        {"id": str(i), "prompt": f"{i}*7=", "answer": str(i), "complexity": "hard", "verifier_type": "exact"}
        for i in range(40)
    ]
    rows[-1]["complexity"] = "extreme"
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"tasks": str(tmp_path / "mine.jsonl"), "max_turns": 12, "tools__functions": ["my_tools.py:double"]}
    for on in (False, True):
        loaded = configure(tools__turns_by_complexity=on, **keys)
        if not on:
            read_inputs(loaded.config, tmp_path)
            continue
        with pytest.raises(TaskError, match="task 39: complexity is 'extreme'"):
            read_inputs(loaded.config, tmp_path)


@pytest.mark.config_key("tools.max_calls")
def test_more_calls_than_allowed_end_a_rollout(with_tools: Build) -> None:
    for limit, ended in ((3, "max_calls"), (4, "answered")):
        rollouts = with_tools(
            lambda request, context: "done" if context.count("<|tool|>") >= 4 else call("double", number=1) * 2,
            tools__max_calls=limit,
        )
        assert {r.ended for r in rollouts} == {ended}


@pytest.mark.config_key("tools.max_result_tokens")
def test_a_long_answer_is_cut_where_it_can_be_seen(with_tools: Build) -> None:
    seen = []
    for limit in (40, 80):
        rollouts = with_tools(ask_once(number=13), tools__max_result_tokens=limit)
        seen.append({len(r.turns[1].prompt_ids) - len(r.turns[0].prompt_ids) for r in rollouts})
    assert {b - a for a, b in zip(*map(sorted, seen), strict=True)} == {40}


@pytest.mark.config_key("tools.call_timeout_s", "tools.concurrency")
def test_patience_and_concurrency_reach_those_who_wait(configure: Any, assembled: Build, tmp_path: Path) -> None:
    (tmp_path / "my_tools.py").write_text(TOOLS)
    keys = {"tools__functions": ["my_tools.py:double"], "tools__in_prompt": False}
    for patience, threads in ((5.0, 3), (7.0, 9)):
        parts = assembled(published=False, tools__call_timeout_s=patience, tools__concurrency=threads, **keys)
        limits: ToolLimits = parts.runtime.collector.environment.limits
        assert (limits.call_timeout_s, parts.runtime.collector.tool_threads) == (patience, threads)
        parts.runtime.close()
    with pytest.raises(ConfigError, match="taken for a stall"):
        configure(tools__call_timeout_s=900.0, **keys)


@pytest.mark.config_key("tools.mode", "tools.cassette", "tools.on_miss")
def test_a_replay_answers_from_the_cassette_and_refuses_or_asks_what_it_does_not_hold(
    with_tools: Build, tmp_path: Path
) -> None:
    tape = {"tools__cassette": "tape.jsonl"}
    recorded = with_tools(ask_once(number=21), tools__mode="record", **tape)
    (tmp_path / "my_tools.py").write_text(TOOLS.replace("2 * number", "3 * number"))
    replayed = with_tools(ask_once(number=21), tools__mode="replay", **tape)
    assert replayed == recorded, "the changed tool was asked, or an answer was lost"
    with pytest.raises(ToolError, match="double"):
        with_tools(ask_once(number=5), tools__mode="replay", **tape)
    asked = with_tools(ask_once(number=5), tools__mode="replay", tools__on_miss="live", **tape)
    assert {r.turns[0].calls[0].outcome for r in asked} == {"ok"}


@pytest.mark.config_key("chat_template")
def test_another_template_is_what_the_model_reads(assembled: Build, tmp_path: Path) -> None:
    plain = assembled(published=False)
    own = plain.policy.tokenizer.chat_template
    (tmp_path / "t.jinja").write_text(own.replace("'<|assistant|>'", "'<|assistant|>Answer:'"))
    (tmp_path / "no.jinja").mkdir()
    changed = assembled(published=False, chat_template="t.jinja")
    task = plain.train[0].id
    before, after = (parts.codec.decode(parts.prompts[task]) for parts in (plain, changed))
    assert after == before + "Answer:"
    with pytest.raises(ModelError, match="cannot be read"):
        assembled(published=False, chat_template="no.jinja")


@pytest.mark.config_key("tools.allow_unsafe")
def test_code_without_a_sandbox_is_refused_unless_it_is_spelled_out(
    configure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.rewards.verifiers import code
    from surefoot.run.inputs import refuse_uncontained_code
    from surefoot.sandbox import sandbox

    loaded = configure()
    monkeypatch.setattr(sandbox, "available", sandbox_missing)
    monkeypatch.setattr(code, "_permitted", [False])
    with pytest.raises(SecurityError, match="sandbox"):
        refuse_uncontained_code(loaded.config, runs_code=True)
    assert code._permitted == [False]
    assert refuse_uncontained_code(configure(tools__allow_unsafe=True).config, runs_code=True)
    assert code._permitted == [True]
    assert not refuse_uncontained_code(loaded.config, runs_code=False)
    assert read_inputs(loaded.config, loaded.base).tools is None


def sandbox_missing() -> Any:
    from surefoot.sandbox.sandbox import HostReport

    return HostReport(False, ("user namespaces",))
