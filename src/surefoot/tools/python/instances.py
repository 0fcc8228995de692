"""What a rollout acts on, in one form: functions, an environment class, or a Gymnasium environment.

Owns       how foreign code is called: `reset(**row)`, methods as tools, `get_reward()`; awaiting what is awaitable; and
           what its results look like as text.
Promises   an exception of a tool is that tool's answer, with type and message; what no answer can be made of (a
           `SystemExit`, no memory left, a world that says it failed) goes on to whoever asked.
Never      imports anything but the standard library and `function_schema`: it also runs inside foreign interpreters.

Read next: `pool.py` and `foreign_host.py`, the two places where worlds live.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from surefoot.tools.python.function_schema import SchemaError, describe, tool_name

OK, ERROR, REFUSED = "ok", "error", "refused"
MAX_CHARS = 1 << 18
"""Characters of one answer that leave a world; whoever asked cuts further, and says so."""
_RESERVED = ("reset", "get_reward")


class OverrunError(Exception):
    """What was awaited took too long and was cancelled."""


class EnvInstance(Protocol):
    """One rollout's world at a time. All of it is called from one thread."""

    specs: Sequence[Mapping[str, Any]]
    """Name, description and parameters of every tool."""

    def reset(self, row: Mapping[str, Any], extras: Mapping[str, Any], deadline_s: float) -> str | None:
        """Begin anew; what the model is shown before its first turn. `extras` are given to who names them."""

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolResult:
        """Ask one tool."""

    def reward(self, deadline_s: float) -> Any:
        """What the world says of the attempt; None when it has no opinion."""

    def close(self) -> None:
        """Let go of everything."""


class FunctionsInstance:
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

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolResult:
        """The function's result as text, or its exception."""
        try:
            value = self.settle(self._tools[name](**arguments), deadline_s)
            return ToolResult.of(as_text(value), OK)
        except (MemoryError, OverrunError):
            raise
        except Exception as error:
            if is_failure(error):
                raise
            return ToolResult.of(as_said(error), ERROR)

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


class TrlInstance(FunctionsInstance):
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


class ToolResult(NamedTuple):
    """What a call led to: text (its first characters), outcome, and how long the text really was.

    Example:
        >>> Said.of("abc", OK)
        Said(text='abc', outcome='ok', length=3)
    """

    text: str
    outcome: str
    length: int

    @classmethod
    def of(cls, text: str, outcome: str) -> ToolResult:
        """Bounded."""
        return cls(text[:MAX_CHARS], outcome, len(text))


# -- A Gymnasium-style environment as a world: `reset(seed=)`, one tool that acts, rewards added up
# Owns       how an action space becomes a schema, how an action a model wrote becomes one of that space, and how an
# observation becomes text.
# Promises   the same seed for the same group; an action outside its space is refused and not played; after the end
# nothing is played; the reward is the sum of what the steps gave.
# Never      imports Gymnasium or numpy by itself: spaces are known by what they offer.


_ABOUT = "Take one step in the environment. The answer is what can be seen afterwards."


class GymInstance:
    """One environment with `reset(seed=...)` and `step(action)`.

    Args:
        parse: makes an action of what the model gave; when left out, the action space decides.
        show: makes text of an observation; when left out, JSON or `str`.
        options_column: a column of the task whose value is handed to `reset` as `options`.
    """

    def __init__(
        self, env: Any, *, tool: str = "step", about: str = _ABOUT, parse: Callable[[Any], Any] | None = None,
        show: Callable[[Any], str] | None = None, options_column: str | None = None,
    ) -> None:  # fmt: skip
        self._env, self._tool, self._parse, self._show = env, tool, parse, show or observation_text
        self._options_column = options_column
        self._space = None if parse is not None else getattr(env, "action_space", None)
        action = {**action_schema(self._space), "description": "what to do"}
        parameters = {"type": "object", "properties": {"action": action}, "required": ["action"]}
        self.specs: Sequence[Mapping[str, Any]] = [{"name": tool, "description": about, "parameters": parameters}]
        self._rewards: list[float] = []
        self._ended = "before reset"

    def reset(self, row: Mapping[str, Any], extras: Mapping[str, Any], deadline_s: float) -> str | None:
        """`reset(seed=...)`: all siblings of a group begin in the same place."""
        options = {} if self._options_column is None else {"options": row[self._options_column]}
        answer = self._env.reset(seed=extras["seed"], **options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise TypeError("reset returned something else than (observation, info), Gymnasium's form")
        self._rewards, self._ended = [], ""
        return self._show(answer[0])

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolResult:
        """Play one action."""
        if self._ended:
            return ToolResult.of(f"not played: the episode has ended ({self._ended})", REFUSED)
        try:
            action = self._action(arguments["action"])
            if self._space is not None and not self._space.contains(action):
                return ToolResult.of(f"not played: {arguments['action']!r} is not in {self._space}", REFUSED)
            text = self._step(action)
        except MemoryError:
            raise
        except Exception as error:
            if is_failure(error):
                raise
            return ToolResult.of(as_said(error), ERROR)
        return ToolResult.of(text, OK)

    def reward(self, deadline_s: float) -> Any:
        """The sum of the steps' rewards; 0 when no step was taken."""
        return math.fsum(self._rewards) if all(map(math.isfinite, self._rewards)) else math.nan

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self._env, "close", None)
        if callable(close):
            close()

    def _action(self, given: Any) -> Any:
        if self._parse is not None:
            return self._parse(given)
        return given if self._space is None else to_space(given, self._space)

    def _step(self, action: Any) -> str:
        answer = self._env.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            raise TypeError("step returned something else than (observation, reward, terminated, truncated, info)")
        observation, reward, terminated, truncated, _ = answer
        self._rewards.append(float(reward))
        self._ended = "terminated" if terminated else "truncated" if truncated else ""
        shown = self._show(observation)
        return f"{shown}\n[the episode has ended: {self._ended}]" if self._ended else shown


def action_schema(space: Any) -> dict[str, Any]:
    """The JSON schema of one action; text where the space says nothing."""
    kinds = {kind.__name__ for kind in type(space).__mro__}
    if "Discrete" in kinds:
        first = int(getattr(space, "start", 0))
        return {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
    if "MultiDiscrete" in kinds or "MultiBinary" in kinds:
        return _array("integer", tuple(space.shape))
    if "Box" in kinds:
        return _array("number", tuple(space.shape))
    return {"type": "string"}


def _array(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    for size in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": int(size), "maxItems": int(size)}
    return schema


def to_space(given: Any, space: Any) -> Any:
    """What a model wrote, in the form that the space holds: numbers become arrays of its type and shape."""
    shape, dtype = getattr(space, "shape", None), getattr(space, "dtype", None)
    if not shape or dtype is None:
        return given
    import numpy

    return numpy.asarray(given, dtype=dtype).reshape(shape)


def observation_text(observation: Any) -> str:
    """Arrays and numbers of numpy as JSON, everything else as any tool's result."""
    return as_text(_plain(observation))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array, or one number of an array's type
        return value.tolist()
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value
