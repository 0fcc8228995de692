"""An event loop in a thread of its own, for callers that have none.

Promises   a wait of the caller ends when its work does, and can be interrupted by a signal at any moment: the work is
           then cancelled, and has ended when the exception goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_LOOK_S = 0.2
_LET_GO_S = 5.0


class FleetThread:
    """Runs coroutines; from any thread."""

    def __init__(self, name: str = "surefoot-fleet") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Begin; the future may be waited for, or cancelled, from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The result. Waits in short pieces, so that a signal handler of the main thread gets to run."""
        future = self.submit(work)
        try:
            while not concurrent.futures.wait([future], timeout=_LOOK_S).done:
                pass
        except BaseException:
            future.cancel()
            with contextlib.suppress(concurrent.futures.CancelledError, Exception):
                future.exception(_LET_GO_S)
            raise
        return future.result()

    def close(self) -> None:
        """Cancel what is left, then end the thread. May be called twice."""
        if self.loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):  # what does not let go ends with the process
            self.submit(_cancel_the_rest()).exception(_LET_GO_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


async def _cancel_the_rest() -> None:
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)
