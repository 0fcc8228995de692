"""Plays groups in this process, many at a time: one engine decodes for all, graders work beside it.

Promises   grading never holds up decoding; a cancelled play frees its rows at the next token; what a group says is what
           it would say alone.
Never      plays a group on another engine, or changes weights.

Read next: `engines/serving.py`, where the groups meet.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from surefoot.errors import EngineError
from surefoot.protocols import Completion, Request, ServingEngine, Weights
from surefoot.runtime.orders import Order, Played
from surefoot.runtime.rollout import RolloutCollector


class LocalCrew:
    """`runtime.crew.Crew` on threads of this process.

    Args:
        collector: asks and grades; its own engine is not used.
        capacity: groups in flight at once; as many threads, which mostly wait. Twice what fits the engine's rows keeps
            these full while others are graded.
    """

    def __init__(self, engine: ServingEngine, collector: RolloutCollector, *, capacity: int) -> None:
        self.engine, self.collector, self._capacity = engine, collector, capacity
        self._pool = ThreadPoolExecutor(capacity, thread_name_prefix="surefoot-play")

    @property
    def capacity(self) -> int:
        """Groups that can be in flight at once and still be worked on."""
        return self._capacity

    async def play(self, order: Order) -> Played:
        """Play one group and grade it; cancelled, it is taken out of the engine."""
        caller = _Caller(self.engine)
        collector = copy.copy(self.collector)
        collector.engine = caller
        try:
            (played,) = await asyncio.get_running_loop().run_in_executor(self._pool, collector.play_orders, [order])
        except asyncio.CancelledError:
            caller.cancel()
            raise
        return played

    def close(self) -> None:
        """End the threads; a grader that is at work is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Caller:
    """One play's own way to the shared engine, which can be cut."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self._lock = threading.Lock()
        self._asked: Future[list[Completion]] | None = None
        self._cancelled = False

    @property
    def version(self) -> int:
        return self.engine.version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        with self._lock:
            if self._cancelled:
                raise EngineError("the play was cancelled", "nobody waits for it any more", "ask again")
            self._asked = self.engine.submit(requests)
        return self._asked.result()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            if self._asked is not None:
                self._asked.cancel()

    def load_weights(self, weights: Weights, version: int) -> None:
        raise EngineError("a play brought weights", "weights are published, not played", "use the engine itself")

    def close(self) -> None:
        raise EngineError("a play closed the engine", "others are in it", "close the engine itself")
