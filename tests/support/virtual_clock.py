"""An event loop whose clock jumps to the next event: hours of waiting take no time, and happen the same way twice."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class DeadlockError(AssertionError):
    """Everybody waits, and nothing will ever happen; or it takes longer than anything may."""


class _Jump(selectors.SelectSelector):
    """Nothing ever comes from outside: waiting means that it is later."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.deadline = 0.0, float("inf")

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise DeadlockError(f"everybody waits at {self.now:.3f}, and nothing is to come")
        self.now += max(0.0, timeout)
        if self.now > self.deadline:
            raise DeadlockError(f"it is {self.now:.0f}, and the end was due at {self.deadline:.0f}")
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`loop.time()` is the virtual clock."""

    def __init__(self, deadline: float) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)
        self.jump.deadline = deadline

    def time(self) -> float:
        return self.jump.now


def run_virtually(work: Coroutine[Any, Any, T], *, deadline: float = 1e9) -> T:
    """`asyncio.run` on a virtual clock; what is left when it ends, or dies, is cancelled and ended too."""
    loop = VirtualLoop(deadline)
    loop.set_exception_handler(lambda loop, context: None)  # who died in a task has said so by leaving the loop
    try:
        return loop.run_until_complete(work)
    finally:
        loop.jump.deadline = float("inf")
        rest = asyncio.all_tasks(loop)
        for task in rest:
            task.cancel()
        if rest:
            loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        loop.close()
