"""How many turns a task's rollouts may have, by how hard the task says it is.

Owns       the three numbers, and where a row says its complexity.
Promises   a complexity that is not one of the three is refused by the task's id, never taken for another.

Read next: `tools.py`, which keeps the budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import TaskError

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
