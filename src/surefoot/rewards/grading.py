"""Grading: who judges which tasks, how the values of several functions become one reward, and tasks with one answer.

Owns       the way from a group's name to its judges: groups of an evaluation set are played for the purpose
           `eval:NAME`; how the values of several functions become one reward.
Promises   siblings are scored in one call; a completion that a function failed on, or that all of
           them abstained from, has no reward and a reason, never 0; the task metric is kept apart.
Never      runs a reward function itself, or looks at a task's id or columns to decide who judges it: those are the
           user's.

Read next: `functions.py`, where the functions come from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from surefoot.errors import RewardError
from surefoot.guards.repetition import looping
from surefoot.guards.reward_values import ABSTAINED, NOT_FINITE, RewardValue
from surefoot.protocols import Grade, Graded
from surefoot.records import REPETITION, REPETITION_COST, Rollout, Task
from surefoot.rewards.functions import ENVIRONMENT_REWARD
from surefoot.rewards.pool import RewardJob, RewardPool

# -- Who judges which tasks, and what a rollout that goes round in circles costs -------------------


_SET = "eval:"


@dataclass(frozen=True)
class GradingRules:
    """What grading needs to know of the run, beside who judges."""

    max_steps: int = 0
    """Steps of the run, for reward functions that ask for `trainer_state`; 0 where nothing is trained."""
    repetition: Literal["penalise", "invalid", "off"] = "off"
    """What becomes of a training rollout that goes round in circles."""
    repetition_cost: float = 1.0
    """What is taken off its reward when it is penalised."""


@dataclass(frozen=True)
class Judges:
    """Functions of the reward pool, by name."""

    weights: Mapping[str, float]
    """Those that make up the reward."""
    metric: str | None
    """The one that says whether a task was solved."""

    @property
    def names(self) -> tuple[str, ...]:
        """Everybody who is asked."""
        return tuple(dict.fromkeys([*self.weights, *([] if self.metric is None else [self.metric])]))


@dataclass(frozen=True)
class EvalSet:
    """Tasks of the user's own that a run is measured on, and who judges them."""

    name: str
    tasks: tuple[Task, ...]
    """Those that are answered in an evaluation."""
    judges: Judges
    fingerprint: str
    """SHA-256 over all of its tasks, those that are not answered included."""


def purpose_of(name: str | None) -> str:
    """What groups of an evaluation are played for; None is the share of the tasks that is held out.

    Example:
        >>> purpose_of(None), purpose_of("gsm8k"), set_of("eval:gsm8k/0/3"), set_of("train/7/3")
        ('eval', 'eval:gsm8k', 'gsm8k', None)
    """
    return "eval" if name is None else _SET + name


def is_evaluation(group: str) -> bool:
    """Whether a group answers held-out tasks, of a set or not.

    Example:
        >>> is_evaluation("eval/0/3"), is_evaluation("eval:gsm8k/0/3"), is_evaluation("train/7/3")
        (True, True, False)
    """
    return group.partition("/")[0].partition(":")[0] == "eval"


def set_of(group: str) -> str | None:
    """The evaluation set that a group belongs to."""
    purpose = group.partition("/")[0]
    return purpose.removeprefix(_SET) if purpose.startswith(_SET) else None


# -- What a rollout that goes round in circles costs: less reward, or none at all -----------------


def repeats_itself(rollout: Rollout) -> bool:
    """Whether its last turn is a loop; with tools an earlier one would have been the last."""
    return rollout.ended == REPETITION or (bool(rollout.turns) and looping(rollout.turns[-1].text) is not None)


def after_repetition(grade: Grade, rollout: Rollout, rules: GradingRules) -> Grade:
    """The grade of a training rollout, once its loops are counted."""
    if rules.repetition == "off" or is_evaluation(rollout.group) or not repeats_itself(rollout):
        return grade
    if rules.repetition == "invalid":
        return replace(grade, reward=None, failure=REPETITION)
    cost = -rules.repetition_cost
    return replace(
        grade,
        reward=None if grade.reward is None else grade.reward + cost,
        parts={**grade.parts, REPETITION_COST: cost},
    )


# -- Ask once, grade -------------------------------------------------------------------------------


class SingleTurnEnvironment:
    """Grades finished rollouts with the functions of a reward pool.

    `weights` names the functions that make up the reward; `metric` names the one that says whether
    the task was solved. A function with weight 0 is shown among the parts and decides nothing.

    Args:
        alone: nobody else gives a reward, so at least one function has to.
        sets: who judges the tasks of each evaluation set instead.
        rules: what becomes of loops, and how long the run is; without them nothing is looked at but the functions.
    """

    def __init__(
        self, pool: RewardPool, weights: Mapping[str, float], metric: str | None = None, *, alone: bool = True,
        sets: Mapping[str, Judges] | None = None, rules: GradingRules | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.own, self.sets = pool, Judges(dict(weights), metric), dict(sets or {})
        self.rules = rules or GradingRules()
        for judges in (self.own, *self.sets.values()):
            _check(pool, judges.weights, judges.metric, alone)

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout], each: Graded | None = None) -> list[Grade]:
        """One grade per rollout, in order; `tasks[i]` is the task of `rollouts[i]`.

        Args:
            each: told of every group of siblings as soon as all of them have their grades.
        """
        if len(tasks) != len(rollouts):
            raise RewardError(
                f"grade got {len(tasks)} tasks for {len(rollouts)} rollouts",
                "each rollout is graded against its own task",
                "pass one task per rollout",
            )
        siblings: dict[tuple[str, str], list[int]] = {}
        for position, rollout in enumerate(rollouts):
            siblings.setdefault((rollout.task_id, rollout.group), []).append(position)
        answered = {name: [i for i in group if rollouts[i].failure is None] for name, group in siblings.items()}
        asked = [name for name, members in answered.items() if members]
        judges = {name: self.judges_of(name[1]) for name in asked}
        jobs = [
            _job(
                tasks[answered[name][0]], [rollouts[i] for i in answered[name]],
                judges[name].names if self.sets else None, self.rules.max_steps,
            )
            for name in asked
        ]  # fmt: skip
        grades = [Grade(None, {}, rollout.failure) for rollout in rollouts]

        def graded(position: int, values: Mapping[str, RewardValue], who: Judges) -> Grade:
            return after_repetition(_grade(values, who), rollouts[position], self.rules)

        def tell(name: tuple[str, str], judged: Sequence[Mapping[str, RewardValue]]) -> None:
            assert each is not None, "asked for only where somebody listens"
            told = {i: graded(i, values, judges[name]) for i, values in zip(answered[name], judged, strict=True)}
            each(siblings[name], [told.get(i, grades[i]) for i in siblings[name]])

        for name in [name for name, members in answered.items() if not members and each is not None]:
            tell(name, ())  # nobody of this group is left to be graded
        scored = self.pool.score(jobs, *([] if each is None else [lambda n, judged: tell(asked[n], judged)]))
        order = [(position, judges[name]) for name in asked for position in answered[name]]
        for (position, who), values in zip(order, scored, strict=True):
            grades[position] = graded(position, values, who)
        return grades

    def judges_of(self, group: str) -> Judges:
        """Who judges this group."""
        name = set_of(group)
        if name is None:
            return self.own
        if name not in self.sets:
            raise RewardError(
                f"group {group} belongs to an evaluation set {name!r} that has no judges",
                "graders of other tasks would judge it", f"known are {', '.join(self.sets) or 'none'}",
            )  # fmt: skip
        return self.sets[name]

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


def _grade(values: Mapping[str, RewardValue], judges: Judges) -> Grade:
    parts = {name: values[name].value for name in judges.weights}
    correct = None if judges.metric is None else values[judges.metric].value
    spent = {name: seconds for name, mark in values.items() if (seconds := mark.seconds) is not None}
    failure = _failure(values, judges.weights)
    if failure is not None:
        return Grade(None, parts, failure, correct, spent)
    reward = sum(w * value for name, w in judges.weights.items() if w and (value := parts[name]) is not None)
    if not math.isfinite(reward):
        return Grade(None, parts, f"sum:{NOT_FINITE}", correct, spent)
    return Grade(reward, parts, None, correct, spent)


def _failure(values: Mapping[str, RewardValue], weights: Mapping[str, float]) -> str | None:
    deciding = {name: values[name] for name, weight in weights.items() if weight}
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


def _job(
    task: Task, rollouts: Sequence[Rollout], asked: tuple[str, ...] | None = None, max_steps: int = 0
) -> RewardJob:
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
    if any(rollout.own_reward is not None for rollout in rollouts):
        columns[ENVIRONMENT_REWARD] = _environment_rewards(task, rollouts)
    # The oldest weights of the siblings: a fact of the rollouts, so that a run that is resumed hands over the same.
    progress = {"global_step": min(rollout.version for rollout in rollouts), "max_steps": max_steps}
    return RewardJob(
        [prompt] * len(rollouts), completions, columns, asked, task.id,
        [rollout.completion_ids for rollout in rollouts], progress,
    )  # fmt: skip


def _environment_rewards(task: Task, rollouts: Sequence[Rollout]) -> list[float | None]:
    """What each rollout's own world says of it, for reward functions that weigh it."""
    if ENVIRONMENT_REWARD in task.columns:
        raise RewardError(
            f"task {task.id} has a column named {ENVIRONMENT_REWARD!r}",
            "reward functions receive what the rollout's own world says under that name",
            "rename the column",
        )
    return [rollout.own_reward for rollout in rollouts]


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
