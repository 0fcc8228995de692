"""One private event loop in one thread, for everything that is asynchronous about tools.

Promises   work handed in from any thread is waited for with a hard limit, even if the loop itself is held up; after
           `close` neither the thread nor a task is left.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Start it, `run` coroutines in it from any thread, `close` it."""

    def __init__(self, name: str) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self.loop = self._started.result()

    def _live(self) -> None:
        asyncio.run(self._until_stopped())

    async def _until_stopped(self) -> None:
        self._stop = asyncio.Event()
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    @property
    def alive(self) -> bool:
        """Whether it takes work."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], patience_s: float) -> T:
        """The result; a TimeoutError when it is not there in time, and then the work is cancelled."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise
        try:
            return future.result(patience_s)
        except WaitedTooLong:
            if future.done():
                raise
            future.cancel()
            raise TimeoutError(f"not done after {patience_s:g} s") from None
        except CancelledError:
            raise RuntimeError("the loop was closed") from None

    def post(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Have it done some time soon, without waiting; whether the loop still takes work."""
        try:
            asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            return False
        return True

    def close(self, patience_s: float = 30.0) -> bool:
        """Cancel what is left, end the thread; False when something in it does not end."""
        if self._thread.is_alive() and self._stop is not None:
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(patience_s)
        return not self._thread.is_alive()
