"""Ask once, grade: the environment of tasks that need one answer.

Owns       how the marks of several functions become one reward.
Promises   siblings are scored in one call; a completion that a function failed on, or that all of
           them abstained from, has no reward and a reason, never 0; the task metric is kept apart.
Never      runs a reward function itself.

Read next: `grading.py`, where the functions come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.envs.rewards.marks import ABSTAINED, NOT_FINITE, Mark
from surefoot.envs.rewards.reward_pool import RewardJob, RewardPool
from surefoot.errors import RewardError
from surefoot.protocols import Grade
from surefoot.records import Rollout, Task


class SingleTurnEnvironment:
    """Grades finished rollouts with the functions of a reward pool.

    `weights` names the functions that make up the reward; `metric` names the one that says whether
    the task was solved. A function with weight 0 is shown among the parts and decides nothing.

    Args:
        alone: nobody else gives a reward, so at least one function has to.
    """

    def __init__(
        self, pool: RewardPool, weights: Mapping[str, float], metric: str | None = None, *, alone: bool = True
    ) -> None:
        _check(pool, weights, metric, alone)
        self.pool, self.weights, self.metric = pool, dict(weights), metric

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
        """One grade per rollout, in order; `tasks[i]` is the task of `rollouts[i]`."""
        if len(tasks) != len(rollouts):
            raise RewardError(
                f"grade got {len(tasks)} tasks for {len(rollouts)} rollouts",
                "each rollout is graded against its own task",
                "pass one task per rollout",
            )
        groups: dict[tuple[str, str], list[int]] = {}
        for position, rollout in enumerate(rollouts):
            if rollout.failure is None:
                groups.setdefault((rollout.task_id, rollout.group), []).append(position)
        jobs = [_job(tasks[members[0]], [rollouts[i] for i in members]) for members in groups.values()]
        grades = [Grade(None, {}, rollout.failure) for rollout in rollouts]
        order = [position for members in groups.values() for position in members]
        for position, marks in zip(order, self.pool.score(jobs), strict=True):
            grades[position] = self._grade(marks)
        return grades

    def explain_failures(self) -> str:
        """Reasons so far, counted, with the telling lines of each one's first story."""
        lines = []
        for reason, (count, story) in self.pool.describe_failures().items():
            lines.append(f"\n    {count} x {reason}")
            lines += [f"\n      {line}" for line in _gist(story.strip().splitlines())]
        return "".join(lines)

    def close(self) -> None:
        """End every worker."""
        self.pool.close()

    def _grade(self, marks: Mapping[str, Mark]) -> Grade:
        parts = {name: marks[name].value for name in self.weights}
        correct = None if self.metric is None else marks[self.metric].value
        failure = self._failure(marks)
        if failure is not None:
            return Grade(None, parts, failure, correct)
        reward = sum(w * value for name, w in self.weights.items() if w and (value := parts[name]) is not None)
        if not math.isfinite(reward):
            return Grade(None, parts, f"sum:{NOT_FINITE}", correct)
        return Grade(reward, parts, None, correct)

    def _failure(self, marks: Mapping[str, Mark]) -> str | None:
        deciding = {name: marks[name] for name, weight in self.weights.items() if weight}
        for name, mark in deciding.items():
            if mark.reason not in (None, ABSTAINED):
                return f"{name}:{mark.reason}"
        if deciding and all(mark.value is None for mark in deciding.values()):
            return f"{'+'.join(deciding)}:{ABSTAINED}"
        return None


def _gist(story: Sequence[str]) -> Sequence[str]:
    """Three lines of a story: a traceback tells at its end, a stack dump right after its title."""
    dumps = [number for number, line in enumerate(story) if line.endswith("(most recent call first):")]
    if not dumps:
        return story[-3:]
    return [story[0], *story[dumps[-1] + 1 : dumps[-1] + 3]]


def _job(task: Task, rollouts: Sequence[Rollout]) -> RewardJob:
    """The siblings of one visit, in the form TRL hands to reward functions."""
    strangers = [str(rollout) for rollout in rollouts if rollout.task_id != task.id]
    if strangers:
        raise RewardError(
            f"task {task.id} was given for {strangers[0]}",
            "a completion graded against another task's answer is noise",
            "pass the rollouts' own tasks, in the same order",
        )
    prompt: Any = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    talks = [conversation(rollout) for rollout in rollouts]
    completions: list[Any] = talks
    if isinstance(prompt, str) and not any(rollout.ended for rollout in rollouts):  # with tools it is always messages
        completions = [rollout.text for rollout in rollouts]
    columns = {name: [value] * len(rollouts) for name, value in task.columns.items()}
    return RewardJob([prompt] * len(rollouts), completions, columns)


def conversation(rollout: Rollout) -> list[dict[str, Any]]:
    """What was said, as messages: the policy's turns, and tools' answers between them.

    Example:
        >>> from surefoot.records import ToolCall, Turn
        >>> turn = Turn((1,), (2,), (-0.1,), 0, text="6*7?", calls=(ToolCall("calc", "{}", "42"),))
        >>> [message["content"] for message in conversation(Rollout("t", "g", 0, (turn,), ended="max_turns"))]
        ['6*7?', '42']
    """
    messages: list[dict[str, Any]] = []
    for turn in rollout.turns:
        messages.append({"role": "assistant", "content": turn.text})
        messages += [
            {"role": "tool", "name": call.name, "content": call.answer, "outcome": call.outcome} for call in turn.calls
        ]
    return messages


def _check(pool: RewardPool, weights: Mapping[str, float], metric: str | None, alone: bool) -> None:
    wanted = [*weights, *([] if metric is None else [metric])]
    unknown = [name for name in wanted if name not in pool.functions]
    if unknown:
        raise RewardError(
            f"no reward function is called {unknown[0]!r}; there are {', '.join(pool.functions)}",
            "its weight or metric would silently count for nothing",
            "use the names that the pool was given",
        )
    if (alone and not any(weights.values())) or not all(math.isfinite(weight) for weight in weights.values()):
        raise RewardError(
            f"reward weights are {dict(weights)}",
            "the reward would be 0 or not a number for every completion",
            "give at least one function a finite weight other than 0",
        )
