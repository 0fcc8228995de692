"""Tools of worlds: one world per rollout, used again after it was reset, and never by two at once.

Owns       which world serves which rollout, and the way of a call: arguments checked, asked, text made readable.
Promises   what a rollout's world knows is seen by that rollout alone; a world that failed, hung or was left in the
           middle of something is never used again; task data is copied, so that no world can change it for others.
Never      knows what a world is made of, or where it runs.

Read next: `trl_environment.py`, `python_tools.py`, `gym_environment.py`, `foreign.py`: what the worlds are.
"""

from __future__ import annotations

import copy
import difflib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.envs.rewards.marks import judge
from surefoot.envs.servers.tool_text import readable, refusal
from surefoot.envs.sources.argument_check import wrong
from surefoot.envs.sources.tool_threads import REWARD_FAILED, Runner
from surefoot.errors import ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.records import Task

COLUMN = "environment"
"""The column that routes a task when there are several kinds of world, as in TRL."""


@dataclass(frozen=True, slots=True)
class WorldLimits:
    """What a world may take; a call's own deadline comes with the call."""

    start_timeout_s: float = 60.0
    """Making a world, and resetting it."""
    reward_timeout_s: float = 60.0
    max_chars: int = 4000
    """Of one answer; what is longer is cut, visibly."""
    max_stuck: int = 8
    """Calls in this process that hang at the same time, before the run is stopped."""


class WorldToolkit:
    """`protocols.Toolkit` over worlds.

    Args:
        starts: kind of world -> how to start one. One of each is started now, for its tools, and used later.
        routed: whether the task's column `environment` names the kind; else there is one kind.
    """

    def __init__(self, starts: Mapping[str, Callable[[], Runner]], limits: WorldLimits, *, routed: bool) -> None:
        if not starts:
            raise ToolError("no tools were given", "there is nothing to call", "give at least one")
        self.limits, self._starts, self._routed = limits, dict(starts), routed
        self._lock = threading.Lock()
        self._idle: dict[str, list[Runner]] = {kind: [] for kind in starts}
        self._all: set[Runner] = set()
        self._by_kind: dict[str, dict[str, ToolSpec]] = {}
        try:
            for kind in self._starts:
                runner, specs = self._start_first(kind)
                self._by_kind[kind] = {spec.name: spec for spec in specs}
                self._idle[kind].append(runner)
            self._specs = _merged(self._by_kind)
        except BaseException:
            self.close()
            raise

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """Every tool of every kind."""
        return self._specs

    @property
    def routes(self) -> Mapping[str, Sequence[str]]:
        """With several kinds of world: the tools of each. Empty otherwise."""
        return {kind: tuple(specs) for kind, specs in self._by_kind.items()} if self._routed else {}

    def open(self, task: Task, rollout: str, seed: int) -> WorldToolbox:
        """A world of the task's kind, reset for it."""
        kind = self._kind(task)
        runner = self._take(kind)
        try:
            row = _row(task, without=COLUMN if self._routed else None)
            extras = {"seed": seed, "id": task.id}
            opening = runner.ask("reset", self.limits.start_timeout_s, row=row, extras=extras)
        except BaseException:
            self.give_back(kind, runner, usable=False)
            raise
        return WorldToolbox(self, kind, runner, self._by_kind[kind], opening)

    def give_back(self, kind: str, runner: Runner, *, usable: bool) -> None:
        """A rollout is done with its world."""
        with self._lock:
            keep = usable and runner.alive and runner in self._all
            if keep:
                self._idle[kind].append(runner)
            else:
                self._all.discard(runner)
        if not keep:
            runner.end()

    def close(self) -> None:
        """End every world."""
        with self._lock:
            ended, self._all = self._all, set()
            self._idle = {kind: [] for kind in self._starts}
        for runner in ended:
            runner.end()

    def _kind(self, task: Task) -> str:
        if not self._routed:
            return next(iter(self._starts))
        kind = task.columns.get(COLUMN)
        if not isinstance(kind, str) or kind not in self._starts:
            raise ToolError(
                f"task {task.id}: its column {COLUMN!r} is {kind!r}",
                f"it names the environment of the task; there are {', '.join(self._starts)}",
                "correct the task, or add the environment",
            )
        return kind

    def _take(self, kind: str) -> Runner:
        dead = []
        with self._lock:
            while self._idle[kind]:
                runner = self._idle[kind].pop()
                if runner.alive:
                    break
                self._all.discard(runner)
                dead.append(runner)
            else:
                runner = None
        for each in dead:
            each.end()
        return runner or self._start_another(kind)

    def _start_another(self, kind: str) -> Runner:
        """One more, which has to offer what the first one did: that is what the model was told."""
        runner, specs = self._start(kind)
        if {spec.name: spec for spec in specs} != self._by_kind[kind]:
            self.give_back(kind, runner, usable=False)
            raise ToolError(
                f"a new world offers {', '.join(spec.name for spec in specs)}, in other words than the first one did",
                "the model would call tools that are not the ones it was shown",
                "let what an environment offers depend on nothing",
            )
        return runner

    def _start(self, kind: str) -> tuple[Runner, list[ToolSpec]]:
        runner = self._starts[kind]()
        try:
            made = runner.ask("make", self.limits.start_timeout_s)
        except BaseException:
            runner.end()
            raise
        with self._lock:
            self._all.add(runner)
        return runner, [ToolSpec(spec["name"], spec["description"], spec["parameters"]) for spec in made]

    def _start_first(self, kind: str) -> tuple[Runner, list[ToolSpec]]:
        """At the start of a run nothing is excused: what cannot be started once is refused."""
        try:
            return self._start(kind)
        except ToolFailedError as error:
            which = f"the environment {kind!r}" if self._routed else "a tool"
            raise ToolError(
                f"{which} cannot be used: {error.what}", "without it no rollout can begin", error.fix
            ) from (error)


class WorldToolbox:
    """`protocols.Toolbox`: one world, for as long as one rollout has it."""

    def __init__(
        self, toolkit: WorldToolkit, kind: str, runner: Runner, specs: Mapping[str, ToolSpec], opening: str | None
    ) -> None:
        self._toolkit, self._kind, self._runner, self._specs = toolkit, kind, runner, specs
        self.opening = opening
        self._lock = threading.Lock()
        self._failed: ToolFailedError | None = None
        self._closed, self._asking = False, 0

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """Check, ask, and make readable."""
        spec = self._specs.get(name)
        if spec is None:
            near = difflib.get_close_matches(name, list(self._specs), n=3, cutoff=0.0)
            return ToolAnswer(refusal("unknown_tool", name=name[:80], tools=near), "refused")
        problem = wrong(arguments, spec.parameters)
        if problem is not None:
            return ToolAnswer(refusal("wrong_arguments", problem=problem), "refused")
        text, outcome, length = self._ask("call", deadline_s, name=name, arguments=copy.deepcopy(dict(arguments)))
        size = f"{length} characters" if length > len(text) else ""
        return ToolAnswer(readable(text, self._toolkit.limits.max_chars, size=size), outcome)

    def reward(self) -> float | None:
        """What the world says, if that is a number; a `ToolFailedError` if it is anything else but None."""
        value = self._ask("reward", self._toolkit.limits.reward_timeout_s)
        if value is None:
            return None
        mark = judge(value)
        if mark.value is None:
            raise ToolFailedError(
                f"get_reward returned {str(value)[:80]!r}, which is no reward ({mark.reason})",
                "what is not a finite number cannot be compared with its siblings",
                "return a float, or None for no opinion",
                REWARD_FAILED,
            )
        return mark.value

    def close(self) -> None:
        """Give the world back, or let it go if it failed or is still busy."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            usable = self._failed is None and not self._asking
        self._toolkit.give_back(self._kind, self._runner, usable=usable)

    def _ask(self, question: str, deadline_s: float, **words: Any) -> Any:
        with self._lock:
            if self._closed:
                raise ToolError(
                    "a toolbox was asked after it was closed", "its world may be another rollout's", "open one"
                )
            if self._failed is not None:
                raise self._failed
            self._asking += 1
        try:
            return self._runner.ask(question, deadline_s, **words)
        except ToolFailedError as error:
            self._failed = error
            raise
        finally:
            with self._lock:
                self._asking -= 1


def _row(task: Task, without: str | None) -> dict[str, Any]:
    """The task as the row it came from; a copy, deep down."""
    prompt: Any = task.prompt if isinstance(task.prompt, str) else [dict(message) for message in task.prompt]
    columns = {name: value for name, value in task.columns.items() if name != without}
    return copy.deepcopy({"prompt": prompt, **columns})


def _merged(by_kind: Mapping[str, Mapping[str, ToolSpec]]) -> list[ToolSpec]:
    merged: dict[str, tuple[str, ToolSpec]] = {}
    for kind, specs in by_kind.items():
        for name, spec in specs.items():
            other, known = merged.setdefault(name, (kind, spec))
            if known != spec:
                raise ToolError(
                    f"the environments {other!r} and {kind!r} both have a tool {name!r}, and they differ",
                    "a tool's name stands for one description in the whole run",
                    "rename one of them",
                )
    return [spec for _, spec in merged.values()]
