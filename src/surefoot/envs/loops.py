"""What a rollout that goes round in circles costs: less reward, or none at all.

Owns       who is looked at, and what is taken off.
Promises   a loop that is found carries a signal: its turn stays on the record, and its rollout earns less than it would
           have, or has no reward under that reason; held-out answers are judged as they stand.

Read next: `guards/repetition.py`, what a loop is.
"""

from __future__ import annotations

from dataclasses import replace

from surefoot.envs.judges import GradingRules, is_evaluation
from surefoot.guards.repetition import looping
from surefoot.protocols import Grade
from surefoot.records import REPETITION, REPETITION_COST, Rollout


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
