"""Who judges which tasks: the run's graders, or those of an evaluation set.

Owns       the way from a group's name to its judges: groups of a set are played for the purpose `eval:NAME`.
Never      looks at a task's id or columns to decide who judges it: those are the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.guards.repetition import looping
from surefoot.protocols import Grade
from surefoot.records import REPETITION, REPETITION_COST, Rollout, Task

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
