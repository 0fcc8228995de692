"""Worlds in this process: one thread each, and a deadline for every question.

Owns       the thread that makes and runs one world, and the count of threads that are stuck.
Promises   a question is answered, or fails under one reason by its deadline; all code of one world runs in one thread,
           so that what it opened there it can use there; a stuck thread is counted until it comes back, and too many
           of them stop the run.
Never      ends a thread: Python cannot. Code that may hang for good belongs into a process (`foreign.py`).

Read next: `pool.py`, which asks.
"""

from __future__ import annotations

import copy
import difflib
import queue
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from surefoot.errors import ToolError, ToolFailedError
from surefoot.guards.reward_values import parse_reward
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.records import Task
from surefoot.tools.python.instances import EnvInstance, OverrunError, as_said, is_failure
from surefoot.tools.schema import wrong
from surefoot.tools.text import readable, refusal

CRASHED, TIMEOUT, UNAVAILABLE = "tool_crashed", "tool_timeout", "tool_unavailable"
RESET_FAILED, REWARD_FAILED = "reset_failed", "reward_failed"
REASONS = {"make": UNAVAILABLE, "reset": RESET_FAILED, "call": CRASHED, "reward": REWARD_FAILED}
"""What a question that ends in an exception is counted under."""
GRACE_S = 0.3
"""Beyond the deadline: what can be cancelled is cancelled in this time, and only the rest counts as stuck."""


class Runner(Protocol):
    """Where one world lives: asked one question at a time."""

    def ask(self, question: str, deadline_s: float, **words: Any) -> Any:
        """`make`, `reset`, `call` or `reward`; a `ToolFailedError` when there is no answer."""

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""

    def end(self) -> None:
        """Let go of it; never raises."""


class StuckThreads:
    """How many threads are stuck now. More than `limit` is the end of the run."""

    def __init__(self, limit: int) -> None:
        self.limit, self.now = limit, 0
        self._lock = threading.Lock()

    def add(self, what: str) -> None:
        """One more; a `ToolError` when that is one too many."""
        with self._lock:
            self.now += 1
            if self.now <= self.limit:
                return
        raise ToolError(
            f"{self.now} tool calls are stuck, the last one in {what}",
            "a thread cannot be ended, and each one keeps its memory and its locks",
            "give the tool a timeout of its own, or run it in a process of its own",
        )

    def remove(self) -> None:
        """One came back after all."""
        with self._lock:
            self.now -= 1


class _Job:
    """One question, its answer, and who was there first: the answer or the deadline."""

    def __init__(self, question: str, work: Callable[[], Any]) -> None:
        self.question, self._work = question, work
        self._done, self._lock = threading.Event(), threading.Lock()
        self.value: Any = None
        self.error: BaseException | None = None
        self.abandoned = False

    def run(self) -> bool:
        """Do it; whether somebody still waits for it."""
        try:
            self.value = self._work()
        except BaseException as error:  # noqa: BLE001 - kept, and raised again where the question was asked
            self.error = error
        with self._lock:
            self._done.set()
            return not self.abandoned

    def wait(self, seconds: float) -> bool:
        """Whether it was done in time; if not, nobody waits for it any more."""
        self._done.wait(seconds)
        with self._lock:
            self.abandoned = not self._done.is_set()
            return not self.abandoned


class ThreadRunner:
    """A world in a thread of its own.

    Args:
        make: builds the world; called in that thread, by the first question.
    """

    def __init__(self, make: Callable[[], EnvInstance], stuck: StuckThreads) -> None:
        self._make, self._stuck = make, stuck
        self._instance: EnvInstance | None = None
        self._dead = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="surefoot-world", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it can be asked again."""
        return not self._dead

    def ask(self, question: str, deadline_s: float, **words: Any) -> Any:
        """Ask and wait."""
        if self._dead:
            raise _failed(question, "its world is gone", CRASHED)
        job = _Job(question, lambda: self._answer(question, deadline_s, words))
        self._jobs.put(job)
        if not job.wait(deadline_s + GRACE_S):
            self._dead = True
            self._stuck.add(f"{question} {words.get('name', '')}".strip())
            raise _failed(question, f"no answer after {deadline_s:g} s, and a thread cannot be ended", TIMEOUT)
        if job.error is not None:
            self._dead = True
            raise _as_failure(question, job.error)
        return job.value

    def end(self) -> None:
        """Close the world in its own thread, and wait a moment for that; a stuck one is left behind."""
        self._dead = True
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _answer(self, question: str, deadline_s: float, words: dict[str, Any]) -> Any:
        if question == "make":
            self._instance = self._make()
            return list(self._instance.specs)
        assert self._instance is not None, "a world is made before it is asked"
        if question == "reset":
            return self._instance.reset(words["row"], words["extras"], deadline_s)
        if question == "reward":
            return self._instance.reward(deadline_s)
        return list(self._instance.call(words["name"], words["arguments"], deadline_s))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.run():
                self._stuck.remove()
                break
        if self._instance is not None:
            _Job("close", self._instance.close).run()  # what a world says on closing changes nothing any more


def _failed(question: str, what: str, reason: str) -> ToolFailedError:
    return ToolFailedError(
        f"a tool's world failed ({question}): {what}",
        "the attempt was not the model's to lose, so it gets no verdict",
        "repair the tool; what it wants to tell the model it may return or raise",
        reason,
    )


def _as_failure(question: str, error: BaseException) -> ToolFailedError:
    if isinstance(error, ToolFailedError):
        return error
    if isinstance(error, OverrunError):
        return _failed(question, str(error), TIMEOUT)
    reason = getattr(error, "reason", CRASHED) if is_failure(error) else REASONS[question]
    if isinstance(error, MemoryError) or not isinstance(error, Exception):
        reason = CRASHED
    failure = _failed(question, f"{as_said(error)}{_place(error)}", str(reason))
    failure.__cause__ = error
    return failure


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


# -- Tools of worlds: one world per rollout, used again after it was reset, and never by two at once
# Owns       which world serves which rollout, and the way of a call: arguments checked, asked, text made readable.
# Promises   what a rollout's world knows is seen by that rollout alone; a world that failed, hung or was left in the
# middle of something is never used again; task data is copied, so that no world can change it for others.
# Never      knows what a world is made of, or where it runs.


COLUMN = "environment"
"""The column that routes a task when there are several kinds of world, as in TRL."""


@dataclass(frozen=True, slots=True)
class EnvLimits:
    """What a world may take; a call's own deadline comes with the call."""

    start_timeout_s: float = 60.0
    """Making a world, and resetting it."""
    reward_timeout_s: float = 60.0
    max_chars: int = 4000
    """Of one answer; what is longer is cut, visibly."""
    max_stuck: int = 8
    """Calls in this process that hang at the same time, before the run is stopped."""


class EnvToolkit:
    """`protocols.Toolkit` over worlds.

    Args:
        starts: kind of world -> how to start one. One of each is started now, for its tools, and used later.
        routed: whether the task's column `environment` names the kind; else there is one kind.
    """

    def __init__(self, starts: Mapping[str, Callable[[], Runner]], limits: EnvLimits, *, routed: bool) -> None:
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

    def open(self, task: Task, rollout: str, seed: int) -> EnvToolbox:
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
        return EnvToolbox(self, kind, runner, self._by_kind[kind], opening)

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


class EnvToolbox:
    """`protocols.Toolbox`: one world, for as long as one rollout has it."""

    def __init__(
        self, toolkit: EnvToolkit, kind: str, runner: Runner, specs: Mapping[str, ToolSpec], opening: str | None
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
        mark = parse_reward(value)
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
