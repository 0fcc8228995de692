"""Worlds in this process: one thread each, and a deadline for every question.

Owns       the thread that makes and runs one world, and the count of threads that are stuck.
Promises   a question is answered, or fails under one reason by its deadline; all code of one world runs in one thread,
           so that what it opened there it can use there; a stuck thread is counted until it comes back, and too many
           of them stop the run.
Never      ends a thread: Python cannot. Code that may hang for good belongs into a process (`foreign.py`).

Read next: `world_pool.py`, which asks.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from surefoot.envs.sources.worlds import OverrunError, World, as_said, is_failure
from surefoot.errors import ToolError, ToolFailedError

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

    def __init__(self, make: Callable[[], World], stuck: StuckThreads) -> None:
        self._make, self._stuck = make, stuck
        self._world: World | None = None
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
            self._world = self._make()
            return list(self._world.specs)
        assert self._world is not None, "a world is made before it is asked"
        if question == "reset":
            return self._world.reset(words["row"], words["extras"], deadline_s)
        if question == "reward":
            return self._world.reward(deadline_s)
        return list(self._world.call(words["name"], words["arguments"], deadline_s))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.run():
                self._stuck.remove()
                break
        if self._world is not None:
            _Job("close", self._world.close).run()  # what a world says on closing changes nothing any more


def _failed(question: str, what: str, reason: str) -> ToolFailedError:
    return ToolFailedError(
        f"a tool's world failed ({question}): {what}",
        "the attempt was not the model's to lose, so it gets no verdict",
        "mend the tool; what it wants to tell the model it may return or raise",
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
