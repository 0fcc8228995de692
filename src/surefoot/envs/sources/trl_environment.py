"""Environment classes in TRL's form, unchanged: `environment_factory=Class | {"name": Class}`.

Owns       the contract of TRL 1.16: one instance per rollout, made once and used again across steps after `reset`;
           `reset(**row) -> str | None`; optional `get_reward() -> float`, sync or async; every other public method is a
           tool; with several classes, the column `environment` says which one and is not handed to `reset`.
Promises   that, and what TRL leaves open: a `reset` that names `seed` gets the group's seed, the same for all siblings
           (one that names `id` gets the task's id); calls have deadlines; an instance that failed is not used again.
Never      shares an instance between two rollouts that are under way.

Read next: `worlds.py`, where the methods are called.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from surefoot.envs.sources.function_schema import SchemaError
from surefoot.envs.sources.tool_threads import Runner, StuckThreads, ThreadRunner
from surefoot.envs.sources.world_pool import WorldLimits, WorldToolkit
from surefoot.envs.sources.worlds import EnvironmentWorld, World
from surefoot.protocols import Toolkit

Factory = Callable[[], Any]
"""A class, or any callable, that returns a new environment."""


class EnvironmentToolkit(WorldToolkit):
    """The methods of an environment, one instance per rollout.

    Args:
        factory: one class for every task, or several by name.
        functions: tools that every environment offers besides its own (TRL's `tools`).

    Example:
        >>> class Counter:
        ...     def reset(self, **row):
        ...         self.count = 0
        ...     def press(self) -> int:
        ...         '''Press the button.'''
        ...         self.count += 1
        ...         return self.count
        ...     def get_reward(self) -> float:
        ...         return float(self.count == 1)
        >>> from surefoot.records import Task
        >>> toolkit = EnvironmentToolkit(Counter)
        >>> toolbox = toolkit.open(Task(id="t", prompt="?"), "train/0/0/0", seed=0)
        >>> toolbox.call("press", {}, deadline_s=10).text, toolbox.reward()
        ('1', 1.0)
        >>> toolkit.close()
    """

    def __init__(
        self, factory: Factory | Mapping[str, Factory], functions: Sequence[Callable[..., Any]] = (),
        limits: WorldLimits | None = None,
    ) -> None:  # fmt: skip
        limits = limits or WorldLimits()
        self.stuck = StuckThreads(limits.max_stuck)
        routed = isinstance(factory, Mapping)
        factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
        once = _Once()
        starts = {name: partial(self._started, once, each, tuple(functions)) for name, each in factories.items()}
        super().__init__(starts, limits, routed=routed)

    def _started(self, once: _Once, factory: Factory, functions: Sequence[Callable[..., Any]]) -> Runner:
        def make() -> World:
            return EnvironmentWorld(once.checked(factory()), functions)

        return ThreadRunner(make, self.stuck)


class _Once:
    """Sees an instance that is handed out a second time: two rollouts would share its state."""

    def __init__(self) -> None:
        self._given: set[int] = set()
        self._lock = threading.Lock()

    def checked(self, instance: Any) -> Any:
        """The instance, if it is a new one."""
        with self._lock:
            if id(instance) in self._given:
                raise SchemaError(f"the factory gave one {type(instance).__name__} twice: two rollouts would share it")
            try:
                weakref.finalize(instance, self._given.discard, id(instance)).atexit = False
            except TypeError:
                return instance  # cannot be watched, and its number may come again
            self._given.add(id(instance))
        return instance


def environment_toolkit(source: Any, limits: WorldLimits | None = None) -> Toolkit:
    """The tools that `file.py:NAME` stands for: a toolkit, a function that makes one, or what TRL takes."""
    if _is_toolkit(source):
        return source  # type: ignore[no-any-return]
    if isinstance(source, Mapping | type):
        return EnvironmentToolkit(source, limits=limits)
    if inspect.isfunction(source):
        made = source()
        if _is_toolkit(made):
            return made  # type: ignore[no-any-return]
    return EnvironmentToolkit(source, limits=limits)


def _is_toolkit(thing: Any) -> bool:
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in ("specs", "open", "close"))
