"""`protocols.TaskQueue` for a loop without an event loop: the stream lives in a thread that has one, this asks it.

Promises   a wait for a batch ends when the batch is complete, when somebody asks to stop, or when the run cannot go on;
           it beats the pulse only while something happens, so that the watchdog can tell slow from stuck; what the
           stream raises is raised here.
Never      touches ledger, journal or buffer from another thread than the stream's.

Read next: `sampler.py`, what is asked.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from surefoot.protocols import StepBatch
from surefoot.runtime.sampler import AsyncSampler
from surefoot.runtime.threads import EventLoopThread
from surefoot.storage.files import failpoint
from surefoot.system.signals import StopRequested, tick

T = TypeVar("T")
_LOOK_S = 0.1


class AsyncTaskQueue:
    """The stream, asked from the training loop's thread.

    Args:
        thread: whose event loop the stream's runner belongs to; made and closed by whoever made it.
        stop: whether somebody asked to stop.
    """

    def __init__(
        self, stream: AsyncSampler, thread: EventLoopThread, *, stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.stream, self.thread, self.stop = stream, thread, stop
        self._closed = False

    def next_batch(self, step: int, n: int) -> StepBatch:
        """The batch of this step; waits for it."""
        future = self.thread.submit(self.stream.next_batch(step, n))
        seen = -1
        try:
            while not concurrent.futures.wait([future], timeout=_LOOK_S).done:
                if self.stop():
                    raise StopRequested("asked to stop while it waited for groups")
                if self.stream.progress != seen:
                    seen = self.stream.progress
                    tick("waiting for groups")
        except BaseException:
            future.cancel()
            raise
        failpoint("loop.before_collect")
        return future.result()

    def record_rollouts(self, batch: StepBatch) -> None:
        """The composition of the batch is on the disk when this returns."""
        self._ask(lambda: self.stream.record_rollouts(batch))

    def close_batch(self, batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None:
        """The batch is done with."""
        self._ask(lambda: self.stream.close_batch(batch, step, drop_reasons))

    def advance(self, version: int) -> None:
        """Engines serve this version from now on."""
        self._ask(lambda: self.stream.advance(version))

    def metrics(self) -> dict[str, float]:
        """Of the batch that was drawn last."""
        return self._ask(self.stream.metrics)

    def status(self) -> dict[str, Any]:
        """Where everything is, as plain data for people."""
        return self._ask(self.stream.status)

    def graders_failed(self) -> None:
        """The run ends because graders failed: what waits without a verdict is asked for again when it goes on."""
        self._ask(self.stream.graders_failed)

    def close(self) -> None:
        """Stop asking; what was in flight goes back to the queue. The ledger is anybody's after this."""
        if not self._closed:
            self._closed = True
            self.thread.wait(self.stream.close())

    def _ask(self, act: Callable[[], T]) -> T:
        return self.thread.wait(_later(act))


async def _later(act: Callable[[], T]) -> T:
    return act()
