"""Multi-turn rollouts: what a completion asks of tools, within budgets, and what it is told.

Owns       the budgets of one rollout (turns, calls, seconds) and the way from a completion to the tools' answers.
Promises   a call that cannot be read, or of a tool that does not exist, is answered, not dropped; a budget that is used
           up ends the rollout by name; a failure of a tool's server is a `ToolFailedError`, never something the model
           reads and never a reward; looking at the rollout afterwards tells every call and its outcome.
Never      samples, makes tokens, or scores.

Read next: `runtime/tool_rounds.py`, which plays whole groups with these.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from surefoot.envs.single_turn import SingleTurnEnvironment
from surefoot.envs.tool_calls import BadCall, Call, parse_calls
from surefoot.errors import ToolFailedError
from surefoot.guards.repetition import looping
from surefoot.protocols import Grade, Toolbox, Toolkit
from surefoot.records import Rollout, Task, ToolCall

ANSWERED, MAX_TURNS, MAX_CALLS, REPETITION = "answered", "max_turns", "max_calls", "repetition"
DEADLINE = "rollout_deadline"
"""Failure reason: the rollout took longer than it may; nobody knows what it would have become."""
OWN = "environment"
"""Name of the reward that a rollout's own world gives."""


@dataclass(frozen=True)
class ToolLimits:
    """What one rollout may use."""

    max_turns: int = 8
    max_calls: int = 16
    call_timeout_s: float = 30.0
    rollout_timeout_s: float = 600.0
    open_attempts: int = 3
    """How often a rollout's tools are asked for before it is given up."""


@dataclass(frozen=True)
class Reply:
    """What a completion led to: calls with their answers, or the end of the rollout."""

    calls: tuple[ToolCall, ...] = ()
    ended: str | None = None
    """None when the model is to speak again."""


class ToolSession:
    """One rollout's tools and budgets, from its first turn to its reward."""

    def __init__(
        self, toolbox: Toolbox, names: Sequence[str], limits: ToolLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.toolbox, self.names, self.limits, self._clock = toolbox, tuple(names), limits, clock
        self.opening = toolbox.opening
        self.turns = self.calls = 0
        self._until = clock() + limits.rollout_timeout_s

    @property
    def expired(self) -> bool:
        """Whether the rollout has used up its seconds."""
        return self._clock() >= self._until

    def answer(self, text: str) -> Reply:
        """Ask what this completion asks for; a `ToolFailedError` when somebody other than the model failed."""
        self.turns += 1
        parsed = parse_calls(text)
        if looping(text) is not None:
            return Reply(_unasked(parsed.items, "not asked: this turn repeats itself"), REPETITION)
        if not parsed.items:
            return Reply(ended=ANSWERED)
        if self.turns >= self.limits.max_turns:
            return Reply(_unasked(parsed.items, "not asked: this was the last turn"), MAX_TURNS)
        if self.calls + len(parsed.items) > self.limits.max_calls:
            return Reply(_unasked(parsed.items, f"not asked: {self.limits.max_calls} calls are allowed"), MAX_CALLS)
        self.calls += len(parsed.items)
        return Reply(tuple(self._ask(item) for item in parsed.items))

    def reward(self) -> float | None:
        """What the rollout's own world says of it."""
        return self.toolbox.reward()

    def close(self) -> None:
        """Let go of the tools."""
        self.toolbox.close()

    def _ask(self, item: Call | BadCall) -> ToolCall:
        if isinstance(item, BadCall):
            return ToolCall("", item.raw, f"error: {item.problem}", "refused")
        arguments = json.dumps(item.arguments, ensure_ascii=False)
        if item.name not in self.names:
            near = difflib.get_close_matches(item.name, self.names, n=3, cutoff=0.5) or self.names[:5]
            told = f"error: there is no tool {item.name[:80]!r}; there is {', '.join(near)}"
            return ToolCall(item.name[:80], arguments, told, "refused")
        left = self._until - self._clock()
        if left <= 0:
            raise ToolFailedError(
                f"a rollout took longer than {self.limits.rollout_timeout_s:g} s",
                "it holds a place and its siblings wait", "raise rollout_timeout_s, or make the tools faster", DEADLINE,
            )  # fmt: skip
        answer = self.toolbox.call(item.name, item.arguments, min(left, self.limits.call_timeout_s))
        return ToolCall(item.name, arguments, answer.text, answer.outcome)


def _unasked(items: Sequence[Call | BadCall], why: str) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            item.name if isinstance(item, Call) else "",
            json.dumps(item.arguments, ensure_ascii=False) if isinstance(item, Call) else item.raw, why, "refused",
        )
        for item in items
    )  # fmt: skip


class ToolEnvironment:
    """`protocols.Environment` with tools: hands out sessions, grades finished rollouts.

    Args:
        graders: reward functions; without any, the rollouts' own world is the only judge.
    """

    def __init__(
        self, graders: SingleTurnEnvironment, toolkit: Toolkit, limits: ToolLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.graders, self.toolkit, self.limits, self._clock = graders, toolkit, limits, clock
        self._names = [spec.name for spec in toolkit.specs]
        self._failures: dict[str, tuple[int, str]] = {}

    def open(self, task: Task, rollout: str, seed: int) -> ToolSession:
        """Tools for one rollout; asked for again when there are none to be had at the moment."""
        for attempt in range(1, self.limits.open_attempts + 1):
            try:
                return ToolSession(self.toolkit.open(task, rollout, seed), self._names, self.limits, self._clock)
            except ToolFailedError:
                if attempt == self.limits.open_attempts:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def shown(self, task: Task) -> Sequence[str] | None:
        """Names of the tools that this task's prompt shows; None for all."""
        return tools_of(task, getattr(self.toolkit, "routes", {}))

    def failed(self, error: ToolFailedError) -> None:
        """Remember why a rollout was lost, for whoever has to mend it."""
        count, story = self._failures.get(error.reason, (0, str(error)))
        self._failures[error.reason] = (count + 1, story)

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
        """One grade per rollout, in order; what the rollout's own world said is added to what the functions say."""
        if sync := getattr(self.toolkit, "sync", None):  # a cassette: what is graded can be replayed
            sync()
        grades = self.graders.grade(tasks, rollouts)
        return [_with_own(grade, rollout) for grade, rollout in zip(grades, rollouts, strict=True)]

    def explain_failures(self) -> str:
        """Why graders and tools failed so far."""
        lines = [
            f"\n    {count} x {reason}" + "".join(f"\n      {line}" for line in story.splitlines()[-8:])
            for reason, (count, story) in self._failures.items()
        ]
        return "".join(lines) + self.graders.explain_failures()

    def close(self) -> None:
        """End every server and every grader."""
        try:
            self.toolkit.close()
        finally:
            self.graders.close()


def tools_of(task: Task, routes: Mapping[str, Sequence[str]]) -> Sequence[str] | None:
    """Names of the tools of a task that chooses its environment; None when all tasks have all.

    Args:
        routes: environment -> its tools; empty when there is nothing to choose.
    """
    return routes.get(str(task.columns.get("environment")), ()) if routes else None


def _with_own(grade: Grade, rollout: Rollout) -> Grade:
    own = rollout.own_reward
    if rollout.failure is not None:
        return Grade(None, grade.parts, rollout.failure)
    if own is None:  # where no function decides, nobody did
        return grade if grade.parts else Grade(None, {}, f"{OWN}:no_verdict", grade.correct)
    parts = {**grade.parts, OWN: own}
    if grade.reward is None:
        return replace(grade, parts=parts)
    return replace(grade, reward=grade.reward + own, parts=parts)
