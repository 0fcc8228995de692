"""What a rollout acts on, in one form: functions, an environment class, or a Gymnasium environment.

Owns       how foreign code is called: `reset(**row)`, methods as tools, `get_reward()`; awaiting what is awaitable; and
           what its results look like as text.
Promises   an exception of a tool is that tool's answer, with type and message; what no answer can be made of (a
           `SystemExit`, no memory left, a world that says it failed) goes on to whoever asked.
Never      imports anything but the standard library and `function_schema`: it also runs inside foreign interpreters.

Read next: `tool_threads.py` and `foreign_host.py`, the two places where worlds live.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from surefoot.envs.sources.function_schema import SchemaError, describe, tool_name

OK, ERROR, REFUSED = "ok", "error", "refused"
MAX_CHARS = 1 << 18
"""Characters of one answer that leave a world; whoever asked cuts further, and says so."""
_RESERVED = ("reset", "get_reward")


class OverrunError(Exception):
    """What was awaited took too long and was cancelled."""


class World(Protocol):
    """One rollout's world at a time. All of it is called from one thread."""

    specs: Sequence[Mapping[str, Any]]
    """Name, description and parameters of every tool."""

    def reset(self, row: Mapping[str, Any], extras: Mapping[str, Any], deadline_s: float) -> str | None:
        """Begin anew; what the model is shown before its first turn. `extras` are given to who names them."""

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> Said:
        """Ask one tool."""

    def reward(self, deadline_s: float) -> Any:
        """What the world says of the attempt; None when it has no opinion."""

    def close(self) -> None:
        """Let go of everything."""


class FunctionsWorld:
    """Plain functions, sync or async, without state of ours."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._tools: dict[str, Callable[..., Any]] = {}
        for function in functions:
            if tool_name(function) in self._tools:
                raise SchemaError(f"there are two tools called {tool_name(function)!r}")
            self._tools[tool_name(function)] = function
        self.specs: Sequence[Mapping[str, Any]] = [describe(function) for function in self._tools.values()]
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, row: Mapping[str, Any], extras: Mapping[str, Any], deadline_s: float) -> str | None:
        """Nothing to begin."""
        return None

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> Said:
        """The function's result as text, or its exception."""
        try:
            value = self.settle(self._tools[name](**arguments), deadline_s)
            return Said.of(as_text(value), OK)
        except (MemoryError, OverrunError):
            raise
        except Exception as error:
            if is_failure(error):
                raise
            return Said.of(as_said(error), ERROR)

    def reward(self, deadline_s: float) -> Any:
        """Functions have no opinion."""
        return None

    def close(self) -> None:
        """Close the event loop, if async tools needed one."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def settle(self, value: Any, deadline_s: float) -> Any:
        """The value itself, or what it becomes when it is awaited. One loop for all calls: clients may be kept."""
        if not inspect.isawaitable(value):
            return value
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(_within(value, deadline_s))


async def _within(value: Any, deadline_s: float) -> Any:
    task = asyncio.ensure_future(value)
    await asyncio.wait({task}, timeout=deadline_s)
    if not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)
        raise OverrunError(f"cancelled after {deadline_s:g} s")
    return task.result()


class EnvironmentWorld(FunctionsWorld):
    """An environment class in TRL's form: `reset(**row)`, `get_reward()`, every other public method is a tool."""

    def __init__(self, instance: Any, functions: Sequence[Callable[..., Any]] = ()) -> None:
        # On the class: looking at the instance would evaluate its properties.
        names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
        if "reset" not in names:
            raise SchemaError(f"{type(instance).__name__} has no method reset: that is where a rollout begins")
        methods = [getattr(instance, n) for n in names if n not in _RESERVED and not n.startswith("_")]
        super().__init__([*functions, *methods])
        self._instance = instance
        self._has_reward = "get_reward" in names
        self._named = set(inspect.signature(instance.reset).parameters)

    def reset(self, row: Mapping[str, Any], extras: Mapping[str, Any], deadline_s: float) -> str | None:
        """`reset(**row)`, plus those extras that it names itself."""
        extra = {name: value for name, value in extras.items() if name in self._named and name not in row}
        opening = self.settle(self._instance.reset(**row, **extra), deadline_s)
        if opening is None or isinstance(opening, str):
            return opening
        raise TypeError(f"reset returned a {type(opening).__name__}; it returns text for the model, or None")

    def reward(self, deadline_s: float) -> Any:
        """`get_reward()`, if there is one."""
        return self.settle(self._instance.get_reward(), deadline_s) if self._has_reward else None


# -- text ---------------------------------------------------------------------


def as_text(value: Any) -> str:
    """A result for the model: text as it is, JSON for lists, objects and numbers, nothing for None.

    Example:
        >>> as_text("4"), as_text({"sum": 4}), as_text(None), as_text(True)
        ('4', '{"sum": 4}', '', 'True')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, (dict, list, tuple, int, float)) and not isinstance(value, bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def as_said(error: BaseException) -> str:
    """Type and message of an exception; no traceback, which is for people."""
    try:
        message = str(error)
    except Exception as again:  # noqa: BLE001 - somebody's __str__ failed, and that is all there is to say
        message = f"its message cannot be shown ({type(again).__name__})"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def is_failure(error: BaseException) -> bool:
    """Whether a tool says itself that its world has failed; by name, since a foreign interpreter has its own class."""
    return any(kind.__name__ == "ToolFailedError" for kind in type(error).__mro__)


class Said(NamedTuple):
    """What a call led to: text (its first characters), outcome, and how long the text really was.

    Example:
        >>> Said.of("abc", OK)
        Said(text='abc', outcome='ok', length=3)
    """

    text: str
    outcome: str
    length: int

    @classmethod
    def of(cls, text: str, outcome: str) -> Said:
        """Bounded."""
        return cls(text[:MAX_CHARS], outcome, len(text))
