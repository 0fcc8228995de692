"""Tasks of reasoning-gym as a world: the model hands in an answer with a tool, the dataset's own scorer judges it.

Owns       the tool `submit_answer`, and where the task's entry comes from: the columns `reasoning_gym` and `entry` of
           `tasks = "reasoning_gym:NAME"`, or the column `reasoning_gym` alone, and a new entry from the group's seed.
Promises   one answer per rollout, unless more are allowed, and then the last one counts; no answer is scored as the
           dataset scores it; whether an answer was right is not said to the model.
Never      changes an entry.

Read next: `data/sources.py`, which makes the tasks.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.envs.sources.tool_threads import StuckThreads, ThreadRunner
from surefoot.envs.sources.world_pool import WorldLimits, WorldToolkit
from surefoot.envs.sources.worlds import OK, REFUSED, Said
from surefoot.errors import ToolError

_SUBMIT: Mapping[str, Any] = {
    "name": "submit_answer",
    "description": "Hand in the final answer. It is not told whether it is right.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the answer, and nothing else"}},
        "required": ["answer"],
    },
}


class ReasoningGymWorld:
    """One entry of one dataset, and what was handed in."""

    def __init__(self, attempts: int = 1) -> None:
        self.specs: Sequence[Mapping[str, Any]] = [_SUBMIT]
        self._attempts, self._given = attempts, list[str]()
        self._dataset, self._entry = "", dict[str, Any]()

    def reset(self, row: Mapping[str, Any], extras: Mapping[str, Any], deadline_s: float) -> str | None:
        """The row's own entry, whose question is the prompt already; or a new one, whose question is shown."""
        self._given = []
        self._dataset = str(row["reasoning_gym"])
        if "entry" in row:
            self._entry = dict(row["entry"])
            return None
        import reasoning_gym

        self._entry = dict(reasoning_gym.create_dataset(self._dataset, size=1, seed=extras["seed"] % 2**31)[0])
        return str(self._entry["question"])

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> Said:
        """Take an answer."""
        if len(self._given) >= self._attempts:
            return Said.of(f"not taken: {self._attempts} answer(s) were handed in already", REFUSED)
        self._given.append(arguments["answer"])
        return Said.of("taken", OK)

    def reward(self, deadline_s: float) -> Any:
        """The dataset's own score of the last answer."""
        from reasoning_gym import get_score_answer_fn

        answer = self._given[-1].strip() if self._given else None
        return get_score_answer_fn(self._dataset)(answer, self._entry)

    def close(self) -> None:
        """Nothing to let go of."""


class ReasoningGymToolkit(WorldToolkit):
    """`submit_answer` for tasks of reasoning-gym.

    Args:
        attempts: answers that a rollout may hand in.
    """

    def __init__(self, attempts: int = 1, limits: WorldLimits | None = None) -> None:
        try:
            importlib.import_module("reasoning_gym")  # here: its two seconds are not one rollout's
        except ImportError as error:
            raise ToolError(
                f"reasoning-gym cannot be imported: {error}",
                "its datasets score their own answers",
                'install it: pip install "surefoot[tasks]"',
            ) from error
        limits = limits or WorldLimits()
        self.stuck = StuckThreads(limits.max_stuck)
        start = lambda: ThreadRunner(lambda: ReasoningGymWorld(attempts), self.stuck)  # noqa: E731 - two words of a sentence
        super().__init__({"reasoning_gym": start}, limits, routed=False)
