"""A border around a few tasks, for a training side that is too large to hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surefoot.data.content import Content
from surefoot.data.heldout import HeldoutLeakError, Leak
from surefoot.data.tasks import Border
from surefoot.records import Task

_SHOWN = 3


class ContentBorder:
    """Refuses tasks that ask what one of `never_trained` asks, and whatever the border that it goes with refuses.

    Prompts are compared under the rule of `content.py`, whatever their targets; likeness is not looked for.

    Args:
        beside: another border over the same training side; None when there is none.
    """

    def __init__(self, never_trained: Sequence[Task], beside: Border | None = None) -> None:
        self._beside = beside
        self._ids = {task.id for task in never_trained}
        self._prompts = {Content.of(task.messages()).prompt: task.id for task in never_trained}

    def refuse(self, tasks: Iterable[Task], *, near: bool = True) -> None:
        """Raise if any of `tasks` is held out."""
        asked = list(tasks)
        if self._beside is not None:
            self._beside.refuse(asked, near=near)
        leaks = [leak for task in asked if (leak := self._leak(task)) is not None]
        if leaks:
            more = " ..." if len(leaks) > _SHOWN else ""
            raise HeldoutLeakError(
                f"{len(leaks)} task(s) to train on are held out: {'; '.join(map(str, leaks[:_SHOWN]))}{more}",
                "held-out accuracy would measure memory", "remove the repeated rows from one side", leaks,
            )  # fmt: skip

    def _leak(self, task: Task) -> Leak | None:
        if task.id in self._ids:
            return Leak(task.id, task.id, "id", 1.0)
        held = self._prompts.get(Content.of(task.messages()).prompt)
        return None if held is None else Leak(task.id, held, "content", 1.0)
