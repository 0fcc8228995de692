"""`MCPToolEnvironment`: one task with MCP tools, step by step, for frameworks that bring their own loop.

Owns       one rollout's toolbox, its turns, and how much reward was already given out.
Promises   the rewards of all steps add up to the value of where the rollout ended: the same outcome earns the same in
           two turns and in eight; a failure of a tool's server is raised, never an observation and never a reward.
Never      is used by our own runs: `tools.py` plays those.

Read next: `mcp_client.py`, the tools; `tool_calls.py`, how calls are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from surefoot.errors import RewardError, TaskError, ToolError
from surefoot.protocols import Toolbox, Toolkit
from surefoot.records import Task
from surefoot.rewards.verifiers.multi import TYPE, MultiVerifier, gold_of, problem_of
from surefoot.tools.parsing import BadCall, parse_calls
from surefoot.tools.session import TURNS, turns_of

Judge = Callable[[Mapping[str, Any], str], float]
"""(task data, everything the model said so far) -> the value of the rollout as it stands, between 0 and 1."""
Step = tuple[str, float, bool, dict[str, Any]]
"""Observation, reward of this step, whether it is over, and what else is known."""


class MCPToolEnvironment:
    """One task, its tools and its turns.

    Args:
        task_data: one row of a file of tool tasks: `task_metadata.task_id`, `prompt`, `reward_spec.ground_truth`,
            and `complexity` (easy, medium, hard).
        toolkit: where the tools come from.
        max_turns: 5, 8 or 12 by complexity when left out; 8 where the row names none.
        judge: what the rollout is worth as it stands. By default what the row's `verifier_type` says of the final
            text, as in a run; of a row that names none, 1 when it is the gold answer to the letter.
        call_timeout_s: longest wait for one tool.

    Example:
        >>> row = {"prompt": "6*7?", "reward_spec": {"ground_truth": "42"}, "complexity": "hard"}
        >>> MCPToolEnvironment(task_data=row, toolkit=None).max_turns
        12
    """

    def __init__(
        self, *, task_data: Mapping[str, Any], toolkit: Toolkit | None, max_turns: int | None = None,
        judge: Judge | None = None, call_timeout_s: float = 30.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.task_data, self.toolkit, self.seed = dict(task_data), toolkit, seed
        by_row = turns_of(self.task_data, task_id(self.task_data), TURNS["medium"]) if max_turns is None else max_turns
        self.max_turns = by_row
        if self.max_turns < 1:
            raise TaskError(f"max_turns = {max_turns}", "a rollout has at least one turn", "give 1 or more")
        self.turn, self.done = 0, False
        self._verifier: MultiVerifier | None = None
        self._judge, self._timeout_s = judge or self._default_judge(), call_timeout_s
        self._said: list[str] = []
        self._given = 0.0
        self._toolbox: Toolbox | None = None

    def _default_judge(self) -> Judge:
        """What a run would judge this row by; a row that nobody could judge is refused, not worth 0."""
        if problem_of(self.task_data).get(TYPE) is not None:
            self._verifier = MultiVerifier()
            self._verifier.check(self.task_data)
            return self._verified
        if gold_of(self.task_data) is None:
            raise TaskError(
                f"task {task_id(self.task_data)} has no gold answer, and no judge was given",
                "every rollout would be worth 0",
                "give reward_spec.ground_truth, or pass judge=",
            )
        return final_text_is_right

    def _verified(self, task_data: Mapping[str, Any], final: str) -> float:
        if self._verifier is None or not final.strip():
            return 0.0  # before the end nothing was answered, and silence is no answer
        said = self._verifier.verify(task_data, final)
        if said.score is None:
            raise RewardError(
                f"task {task_id(task_data)}: its verifier gave no verdict ({said.reason})",
                "a failed grader is not a wrong answer", "look at the row, or pass judge=",
            )  # fmt: skip
        return said.score

    async def initialize_tools(self) -> list[str]:
        """Open the rollout's tools; their names. Again, and everything begins anew."""
        if self.toolkit is None:
            raise ToolError("this environment has no toolkit", "there are no tools to open", "pass toolkit=")
        await self.close()
        task = Task(id=task_id(self.task_data), prompt=_prompt(self.task_data), columns=self.task_data)
        self._toolbox = await asyncio.to_thread(self.toolkit.open, task, f"{task.id}/0", self.seed)
        self.turn, self.done, self._given, self._said = 0, False, 0.0, []
        return [spec.name for spec in self.toolkit.specs]

    async def step(self, action: str) -> Step:
        """Ask what `action` asks for; what the tools said, and how much more the rollout is worth than before."""
        toolbox = self._ready(action)
        self.turn += 1
        self._said.append(action)
        parsed = parse_calls(action)
        observation, outcomes = "", list[str]()
        for item in parsed.items:
            if isinstance(item, BadCall):
                text, outcome = item.problem, "refused"
            else:
                answer = await asyncio.to_thread(toolbox.call, item.name, item.arguments, self._timeout_s)
                text, outcome = answer.text, answer.outcome
            observation += ("\n" if observation else "") + text
            outcomes.append(outcome)
        self.done = not parsed.items or self.turn >= self.max_turns
        reward = self._increment(parsed.rest)
        if self.done:
            await self.close()
        facts = {"turn": self.turn, "max_turns": self.max_turns, "outcomes": outcomes, "problems": parsed.problems}
        return observation, reward, self.done, facts

    def _ready(self, action: str) -> Toolbox:
        if self._toolbox is None or self.done:
            raise ToolError(
                "this rollout is over" if self.done else "step was called before the tools were ready",
                "a step without tools would look like a model that chose not to use them",
                "await initialize_tools() first",
            )
        if not isinstance(action, str):
            raise ToolError(f"an action is text, not {type(action).__name__}", "it is what the model said", "pass text")
        return self._toolbox

    def _increment(self, final: str) -> float:
        """How much more the rollout is worth than at the last step; before the end no final text is judged."""
        worth = float(self._judge(self.task_data, final if self.done else ""))
        change, self._given = worth - self._given, worth
        return change

    async def close(self) -> None:
        """Let go of the tools and of the verifier's worker. May be called twice."""
        if self._verifier is not None:
            self._verifier.close()
        toolbox, self._toolbox = self._toolbox, None
        if toolbox is not None:
            await asyncio.to_thread(toolbox.close)


def final_text_is_right(task_data: Mapping[str, Any], final: str) -> float:
    """1.0 when the last word is the task's gold answer, to the letter once spaces around it are gone; else 0.0.

    The gold answer is `reward_spec.ground_truth`, as in a file of tool tasks, or `answer` or `ground_truth` beside it.
    """
    return float(final.strip() != "" and final.strip() == str(gold_of(task_data)).strip())


def task_id(task_data: Mapping[str, Any]) -> str:
    """The id that a task carries, in its metadata or beside it."""
    metadata = task_data.get("task_metadata")
    inner = metadata.get("task_id") if isinstance(metadata, Mapping) else None
    return str(inner or task_data.get("task_id") or "task")


def _prompt(task_data: Mapping[str, Any]) -> Any:
    prompt = task_data.get("prompt", "")
    return prompt if isinstance(prompt, str) else tuple(prompt)
