"""How many turns a task's rollouts may have, by how hard the task says it is.

Owns       the three numbers, and where a row says its complexity.
Promises   a complexity that is not one of the three is refused by the task's id, never taken for another.

Read next: `session.py`, which keeps the budget.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.errors import TaskError, ToolFailedError
from surefoot.guards.repetition import looping
from surefoot.protocols import Environment, Grade, Graded, Toolbox, Toolkit
from surefoot.records import REPETITION, REPETITION_COST, Rollout, Task, ToolCall
from surefoot.tools.parsing import TOOL_CALL, BadCall, RequestedCall, parse_calls

TURNS = {"easy": 5, "medium": 8, "hard": 12}
"""Complexity -> turns, the answer included."""


def complexity_in(row: Mapping[str, Any]) -> str | None:
    """What the row says, in its own column or in `task_metadata`; None where it says nothing.

    Example:
        >>> complexity_in({"task_metadata": {"task_id": "t/1", "complexity": "hard"}})
        'hard'
    """
    metadata = row.get("task_metadata")
    inner = metadata.get("complexity") if isinstance(metadata, Mapping) else None
    found = row.get("complexity") or inner
    return None if found is None else str(found)


def turns_of(row: Mapping[str, Any], task: str, otherwise: int) -> int:
    """Turns of a row's rollouts.

    Args:
        task: the task's id, for the error.
        otherwise: where the row says nothing.
    """
    complexity = complexity_in(row)
    if complexity is None:
        return otherwise
    if complexity not in TURNS:
        raise TaskError(
            f"task {task}: complexity is {complexity!r}", "it decides how many turns a rollout has",
            f"use one of {', '.join(TURNS)}, or one number of turns for all tasks",
        )  # fmt: skip
    return TURNS[complexity]


# -- Multi-turn rollouts: what a completion asks of tools, within budgets, and what it is told ----
# Owns       the budgets of one rollout (turns, calls, seconds) and the way from a completion to the tools' answers.
# Promises   a call that cannot be read, or of a tool that does not exist, is answered, not dropped; a budget that is
# used
# up ends the rollout by name; a failure of a tool's server is a `ToolFailedError`, never something the model
# reads and never a reward; looking at the rollout afterwards tells every call and its outcome.
# Never      samples, makes tokens, or scores.


ANSWERED, MAX_TURNS, MAX_CALLS = "answered", "max_turns", "max_calls"
DEADLINE = "rollout_deadline"
"""Failure reason: the rollout took longer than it may; nobody knows what it would have become."""
NO_TOOL, NOT_ASKED = "error: there is no tool", "not asked:"
"""How an answer begins that no tool gave: to a name that no tool has, and to a call beyond a budget."""
OWN = "environment"
"""Name of the reward that a rollout's own world gives."""


@dataclass(frozen=True)
class ToolLimits:
    """What one rollout may use."""

    max_turns: int = 8
    max_calls: int = 16
    call_timeout_s: float = 30.0
    rollout_timeout_s: float = 600.0
    turns_by_complexity: bool = False
    """5, 8 or 12 turns for easy, medium and hard tasks; those that say nothing have `max_turns`."""
    open_attempts: int = 3
    """How often a rollout's tools are asked for before it is given up."""
    stop_loops: bool = True
    """Whether a turn that repeats itself is the last one."""

    def of(self, task: Task) -> ToolLimits:
        """The limits of one task's rollouts."""
        if not self.turns_by_complexity:
            return self
        return replace(self, max_turns=turns_of(task.columns, task.id, self.max_turns))


@dataclass(frozen=True)
class Reply:
    """What a completion led to: calls with their answers, or the end of the rollout."""

    calls: tuple[ToolCall, ...] = ()
    ended: str | None = None
    """None when the model is to speak again."""


class ToolSession:
    """One rollout's tools and budgets, from its first turn to its reward."""

    def __init__(
        self, toolbox: Toolbox, names: Sequence[str], limits: ToolLimits, clock: Callable[[], float] = time.monotonic,
        call_format: str = TOOL_CALL,
    ) -> None:  # fmt: skip
        self.toolbox, self.names, self.limits, self._clock = toolbox, tuple(names), limits, clock
        self.call_format = call_format
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
        parsed = parse_calls(text, self.call_format)
        if self.limits.stop_loops and looping(text) is not None:
            return Reply(_unasked(parsed.items, f"{NOT_ASKED} this turn repeats itself"), REPETITION)
        if not parsed.items:
            return Reply(ended=ANSWERED)
        if self.turns >= self.limits.max_turns:
            return Reply(_unasked(parsed.items, f"{NOT_ASKED} this was the last turn"), MAX_TURNS)
        if self.calls + len(parsed.items) > self.limits.max_calls:
            return Reply(_unasked(parsed.items, f"{NOT_ASKED} {self.limits.max_calls} calls are allowed"), MAX_CALLS)
        self.calls += len(parsed.items)
        return Reply(tuple(self._ask(item) for item in parsed.items))

    def reward(self) -> float | None:
        """What the rollout's own world says of it."""
        return self.toolbox.reward()

    def close(self) -> None:
        """Let go of the tools."""
        self.toolbox.close()

    def _ask(self, item: RequestedCall | BadCall) -> ToolCall:
        if isinstance(item, BadCall):
            return ToolCall("", item.raw, f"error: {item.problem}", "refused")
        arguments = json.dumps(item.arguments, ensure_ascii=False)
        if item.name not in self.names:
            near = difflib.get_close_matches(item.name, self.names, n=3, cutoff=0.5) or self.names[:5]
            told = f"{NO_TOOL} {item.name[:80]!r}; there is {', '.join(near)}"
            return ToolCall(item.name[:80], arguments, told, "refused")
        left = self._until - self._clock()
        if left <= 0:
            raise ToolFailedError(
                f"a rollout took longer than {self.limits.rollout_timeout_s:g} s",
                "it holds a place and its siblings wait", "raise rollout_timeout_s, or make the tools faster", DEADLINE,
            )  # fmt: skip
        answer = self.toolbox.call(item.name, item.arguments, min(left, self.limits.call_timeout_s))
        return ToolCall(item.name, arguments, answer.text, answer.outcome)


def kind_of_call(call: ToolCall) -> str:
    """What became of a call, in the words that people are told.

    Example:
        >>> kind_of_call(ToolCall("clock", "{}", "12:30")), kind_of_call(ToolCall("", "{", "error: ...", "refused"))
        ('succeeded', 'could not be read')
    """
    if call.outcome != "refused":
        return "succeeded" if call.outcome == "ok" else "failed"
    if call.answer.startswith(NOT_ASKED):
        return "over a budget"
    if not call.name:
        return "could not be read"
    return "unknown tool" if call.answer.startswith(NO_TOOL) else "invalid arguments"


def _unasked(items: Sequence[RequestedCall | BadCall], why: str) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(
            item.name if isinstance(item, RequestedCall) else "",
            json.dumps(item.arguments, ensure_ascii=False) if isinstance(item, RequestedCall) else item.raw,
            why, "refused",
        )
        for item in items
    )  # fmt: skip


class ToolEnvironment:
    """`protocols.Environment` with tools: hands out sessions, grades finished rollouts.

    Args:
        graders: reward functions; without any, the rollouts' own world is the only judge.
        adds_own: what the world says is added to what they say; false where one of them has it among its parts.
        call_format: how the policy writes calls, one of `tool_calls.FORMS`.
    """

    def __init__(
        self, graders: Environment, toolkit: Toolkit, limits: ToolLimits,
        clock: Callable[[], float] = time.monotonic, *, adds_own: bool = True, call_format: str = TOOL_CALL,
    ) -> None:  # fmt: skip
        self.graders, self.toolkit, self.limits, self._clock = graders, toolkit, limits, clock
        self.adds_own, self.call_format = adds_own, call_format
        self._names = [spec.name for spec in toolkit.specs]
        self._failures: dict[str, tuple[int, str]] = {}

    def open(self, task: Task, rollout: str, seed: int) -> ToolSession:
        """Tools for one rollout; asked for again when there are none to be had at the moment."""
        limits = self.limits.of(task)
        for attempt in range(1, self.limits.open_attempts + 1):
            try:
                box = self.toolkit.open(task, rollout, seed)
                return ToolSession(box, self._names, limits, self._clock, self.call_format)
            except ToolFailedError:
                if attempt == self.limits.open_attempts:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def shown(self, task: Task) -> Sequence[str] | None:
        """Names of the tools that this task's prompt shows; None for all."""
        return tools_of(task, getattr(self.toolkit, "routes", {}))

    def failed(self, error: ToolFailedError) -> None:
        """Remember why a rollout was lost, for whoever has to repair it."""
        count, story = self._failures.get(error.reason, (0, f"{error.what}\nfix: {error.fix}"))
        self._failures[error.reason] = (count + 1, story)

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout], each: Graded | None = None) -> list[Grade]:
        """One grade per rollout, in order; what the rollout's own world said is added to what the functions say."""

        def both(places: Sequence[int], grades: Sequence[Grade]) -> None:
            assert each is not None, "asked for only where somebody listens"
            each(places, [self._with_own(grade, rollouts[place]) for place, grade in zip(places, grades, strict=True)])

        if sync := getattr(self.toolkit, "sync", None):  # a cassette: what is graded can be replayed
            sync()
        grades = self.graders.grade(tasks, rollouts, *([] if each is None else [both]))
        return [self._with_own(grade, rollout) for grade, rollout in zip(grades, rollouts, strict=True)]

    def _with_own(self, grade: Grade, rollout: Rollout) -> Grade:
        return _with_own(grade, rollout, adds=self.adds_own)

    def explain_failures(self) -> str:
        """Why graders and tools failed so far."""
        lines = [
            f"\n    {count} x {reason}" + "".join(f"\n      {line}" for line in _gist(story.splitlines()))
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


def _gist(story: Sequence[str], most: int = 16) -> Sequence[str]:
    """What failed stands first, what to do about it last; of many lines between them the latest are kept."""
    return story if len(story) <= most else [story[0], "    ...", *story[len(story) - most + 2 :]]


def _with_own(grade: Grade, rollout: Rollout, *, adds: bool) -> Grade:
    """The grade with what the rollout's own world says among the parts, and added unless a function weighed it."""
    own = rollout.own_reward
    if rollout.failure is not None:
        return Grade(None, grade.parts, rollout.failure)
    if own is None:  # where no function decides, nobody did
        return grade if grade.parts.keys() - {REPETITION_COST} else Grade(None, {}, f"{OWN}:no_verdict", grade.correct)
    parts = {**grade.parts, OWN: own}
    if grade.reward is None or not adds:
        return replace(grade, parts=parts)
    return replace(grade, reward=grade.reward + own, parts=parts)
