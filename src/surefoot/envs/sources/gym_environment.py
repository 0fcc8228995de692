"""Gymnasium-style environments as tools: one tool that takes a step, the sum of rewards as verdict.

Owns       nothing but the choice: environments with `reset(seed=)` and `step(action)`, run in this process.
Promises   all siblings of a group begin with the same seed; see `gym_world.py` for the rest.
Never      imports Gymnasium: whoever has such an environment has it already.

Read next: `gym_world.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from surefoot.envs.sources.gym_world import GymWorld
from surefoot.envs.sources.tool_threads import StuckThreads, ThreadRunner
from surefoot.envs.sources.world_pool import WorldLimits, WorldToolkit


class GymToolkit(WorldToolkit):
    """One environment per rollout, used again after `reset`.

    Args:
        factory: returns a new environment, such as `lambda: gymnasium.make("FrozenLake-v1")`.
        parse: makes an action of what the model gave; when left out, the action space decides, text without one.
        show: makes text of an observation; when left out, JSON or `str`.
        options_column: a column of the task whose value is handed to `reset` as `options`.
        tool: what the tool is called.
        about: what the model is told of it.
    """

    def __init__(
        self, factory: Callable[[], Any], *, parse: Callable[[Any], Any] | None = None,
        show: Callable[[Any], str] | None = None, options_column: str | None = None, tool: str = "step",
        about: str | None = None, limits: WorldLimits | None = None,
    ) -> None:  # fmt: skip
        limits = limits or WorldLimits()
        self.stuck = StuckThreads(limits.max_stuck)

        def make() -> GymWorld:
            words = {} if about is None else {"about": about}
            return GymWorld(factory(), parse=parse, show=show, options_column=options_column, tool=tool, **words)

        super().__init__({"gym": lambda: ThreadRunner(make, self.stuck)}, limits, routed=False)
