"""Plain Python functions as tools: `tools=[fn, async fn]`, in TRL's form.

Owns       nothing but the choice: functions without state, called in this process.
Promises   type hints and docstring become the schema; a function that cannot be described is refused at the start.
Never      keeps anything between two calls; a function that does so shares it with every rollout.

Read next: `pool.py`, which does the work; `environments.py`, for tools with state.
"""

from __future__ import annotations

import importlib
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from surefoot.config.choices import ENVIRONMENTS
from surefoot.errors import ToolError
from surefoot.protocols import Toolkit
from surefoot.tools.python.function_schema import SchemaError
from surefoot.tools.python.instances import (
    OK,
    REFUSED,
    EnvInstance,
    FunctionsInstance,
    GymInstance,
    ToolResult,
    TrlInstance,
)
from surefoot.tools.python.pool import EnvLimits, EnvToolkit, Runner, StuckThreads, ThreadRunner


class FunctionToolkit(EnvToolkit):
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

    def __init__(self, functions: Sequence[Callable[..., Any]], limits: EnvLimits | None = None) -> None:
        limits = limits or EnvLimits()
        self.stuck = StuckThreads(limits.max_stuck)
        start = lambda: ThreadRunner(lambda: FunctionsInstance(functions), self.stuck)  # noqa: E731 - two words of a sentence
        super().__init__({"functions": start} if functions else {}, limits, routed=False)


# -- Environment classes in TRL's form, unchanged: `environment_factory=Class | {"name": Class}` --
# Owns       the contract of TRL 1.16: one instance per rollout, made once and used again across steps after `reset`;
# `reset(**row) -> str | None`; optional `get_reward() -> float`, sync or async; every other public method is a
# tool; with several classes, the column `environment` says which one and is not handed to `reset`.
# Promises   that, and what TRL leaves open: a `reset` that names `seed` gets the group's seed, the same for all
# siblings
# (one that names `id` gets the task's id); calls have deadlines; an instance that failed is not used again.
# Never      shares an instance between two rollouts that are under way.


Factory = Callable[[], Any]
"""A class, or any callable, that returns a new environment."""


class EnvironmentToolkit(EnvToolkit):
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
        limits: EnvLimits | None = None,
    ) -> None:  # fmt: skip
        limits = limits or EnvLimits()
        self.stuck = StuckThreads(limits.max_stuck)
        routed = isinstance(factory, Mapping)
        factories = dict(factory) if isinstance(factory, Mapping) else {"": factory}
        once = _Once()
        starts = {name: partial(self._started, once, each, tuple(functions)) for name, each in factories.items()}
        super().__init__(starts, limits, routed=routed)

    def _started(self, once: _Once, factory: Factory, functions: Sequence[Callable[..., Any]]) -> Runner:
        def make() -> EnvInstance:
            return TrlInstance(once.checked(factory()), functions)

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


def environment_toolkit(source: Any, limits: EnvLimits | None = None) -> Toolkit:
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


def named_toolkit(kind: str, argument: str) -> Toolkit:
    """The toolkit of a kind of environment that has a name in `choices.ENVIRONMENTS`."""
    module, _, name = ENVIRONMENTS[kind].makes.partition(":")
    make: Callable[[str], Toolkit] = getattr(importlib.import_module(module), name)
    return make(argument)


def _is_toolkit(thing: Any) -> bool:
    return not isinstance(thing, type) and all(hasattr(thing, name) for name in ("specs", "open", "close"))


# -- Gymnasium-style environments as tools: one tool that takes a step, the sum of rewards as verdict


class GymToolkit(EnvToolkit):
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
        about: str | None = None, limits: EnvLimits | None = None,
    ) -> None:  # fmt: skip
        limits = limits or EnvLimits()
        self.stuck = StuckThreads(limits.max_stuck)

        def make() -> GymInstance:
            words = {} if about is None else {"about": about}
            return GymInstance(factory(), parse=parse, show=show, options_column=options_column, tool=tool, **words)

        super().__init__({"gym": lambda: ThreadRunner(make, self.stuck)}, limits, routed=False)


def gymnasium_toolkit(name: str) -> Toolkit:
    """`tools.environment = "gymnasium:ID"`: an environment of Gymnasium's registry, played step by step."""
    try:
        import gymnasium
    except ImportError as error:
        raise ToolError(
            f"Gymnasium cannot be imported: {error}", f"tools.environment names its {name}",
            'install it: pip install "surefoot[gymnasium]"',
        ) from error  # fmt: skip
    try:
        gymnasium.make(name).close()
    except (gymnasium.error.Error, ImportError) as error:
        raise ToolError(
            f"tools.environment: Gymnasium does not make {name!r}: {str(error)[:300]}",
            "every rollout would get one of its own",
            "correct its id, or install what it needs; gymnasium.pprint_registry() lists those that are there",
        ) from error
    return GymToolkit(lambda: gymnasium.make(name))


def reasoning_gym_toolkit(_: str = "") -> Toolkit:
    """`tools.environment = "reasoning_gym"`: tasks of reasoning-gym, answered with a tool."""
    return ReasoningGymToolkit()


# -- Tasks of reasoning-gym as a world: the model hands in an answer with a tool, the dataset's own scorer judges it
# Owns       the tool `submit_answer`, and where the task's entry comes from: the columns `reasoning_gym` and `entry` of
# `tasks = "reasoning_gym:NAME"`, or the column `reasoning_gym` alone, and a new entry from the group's seed.
# Promises   one answer per rollout, unless more are allowed, and then the last one counts; no answer is scored as the
# dataset scores it; whether an answer was right is not said to the model.
# Never      changes an entry.


_SUBMIT: Mapping[str, Any] = {
    "name": "submit_answer",
    "description": "Hand in the final answer. It is not told whether it is right.",
    "parameters": {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "the answer, and nothing else"}},
        "required": ["answer"],
    },
}


class ReasoningGymInstance:
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

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolResult:
        """Take an answer."""
        if len(self._given) >= self._attempts:
            return ToolResult.of(f"not taken: {self._attempts} answer(s) were handed in already", REFUSED)
        self._given.append(arguments["answer"])
        return ToolResult.of("taken", OK)

    def reward(self, deadline_s: float) -> Any:
        """The dataset's own score of the last answer."""
        from reasoning_gym import get_score_answer_fn

        answer = self._given[-1].strip() if self._given else None
        return get_score_answer_fn(self._dataset)(answer, self._entry)

    def close(self) -> None:
        """Nothing to let go of."""


class ReasoningGymToolkit(EnvToolkit):
    """`submit_answer` for tasks of reasoning-gym.

    Args:
        attempts: answers that a rollout may hand in.
    """

    def __init__(self, attempts: int = 1, limits: EnvLimits | None = None) -> None:
        try:
            importlib.import_module("reasoning_gym")  # here: its two seconds are not one rollout's
        except ImportError as error:
            raise ToolError(
                f"reasoning-gym cannot be imported: {error}",
                "its datasets score their own answers",
                'install it: pip install "surefoot[tasks]"',
            ) from error
        limits = limits or EnvLimits()
        self.stuck = StuckThreads(limits.max_stuck)
        start = lambda: ThreadRunner(lambda: ReasoningGymInstance(attempts), self.stuck)  # noqa: E731 - two words of a sentence
        super().__init__({"reasoning_gym": start}, limits, routed=False)
