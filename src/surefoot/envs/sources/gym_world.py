"""A Gymnasium-style environment as a world: `reset(seed=)`, one tool that acts, rewards added up.

Owns       how an action space becomes a schema, how an action a model wrote becomes one of that space, and how an
           observation becomes text.
Promises   the same seed for the same group; an action outside its space is refused and not played; after the end
           nothing is played; the reward is the sum of what the steps gave.
Never      imports Gymnasium or numpy by itself: spaces are known by what they offer.

Read next: `gym_environment.py`, the tools in this process; `foreign_host.py`, the same in another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot.envs.sources.worlds import ERROR, OK, REFUSED, Said, as_said, as_text, is_failure

_ABOUT = "Take one step in the environment. The answer is what can be seen afterwards."


class GymWorld:
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

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> Said:
        """Play one action."""
        if self._ended:
            return Said.of(f"not played: the episode has ended ({self._ended})", REFUSED)
        try:
            action = self._action(arguments["action"])
            if self._space is not None and not self._space.contains(action):
                return Said.of(f"not played: {arguments['action']!r} is not in {self._space}", REFUSED)
            text = self._step(action)
        except MemoryError:
            raise
        except Exception as error:
            if is_failure(error):
                raise
            return Said.of(as_said(error), ERROR)
        return Said.of(text, OK)

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
