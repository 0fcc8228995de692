"""Plain Python functions as tools: `tools=[fn, async fn]`, in TRL's form.

Owns       nothing but the choice: functions without state, called in this process.
Promises   type hints and docstring become the schema; a function that cannot be described is refused at the start.
Never      keeps anything between two calls; a function that does so shares it with every rollout.

Read next: `world_pool.py`, which does the work; `trl_environment.py`, for tools with state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from surefoot.envs.sources.tool_threads import StuckThreads, ThreadRunner
from surefoot.envs.sources.world_pool import WorldLimits, WorldToolkit
from surefoot.envs.sources.worlds import FunctionsWorld


class FunctionToolkit(WorldToolkit):
    """Functions for every rollout.

    Example:
        >>> def double(number: int) -> int:
        ...     '''Twice as much.
        ...
        ...     Args:
        ...         number: what to double.
        ...     '''
        ...     return 2 * number
        >>> from surefoot.records import Task
        >>> toolkit = FunctionToolkit([double])
        >>> toolbox = toolkit.open(Task(id="t", prompt="?"), "train/0/0/0", seed=0)
        >>> toolbox.call("double", {"number": 21}, deadline_s=10)
        ToolAnswer(text='42', outcome='ok')
        >>> toolkit.close()
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], limits: WorldLimits | None = None) -> None:
        limits = limits or WorldLimits()
        self.stuck = StuckThreads(limits.max_stuck)
        start = lambda: ThreadRunner(lambda: FunctionsWorld(functions), self.stuck)  # noqa: E731 - two words of a sentence
        super().__init__({"functions": start} if functions else {}, limits, routed=False)
