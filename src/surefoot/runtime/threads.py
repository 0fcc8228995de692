"""Work that goes on beside the caller's, in one thread: everything that waits is handed over at once.

Promises   what is put in first is worked on first, and nothing twice; what comes while the thread is busy is handed
           over together, next: a slow disk makes larger pieces, not a longer queue; what the work raises is raised by
           the next `put` or by `close`, once; after `close` or `abandon` nothing more is begun.
Never      keeps the process alive: the thread is a daemon.

Read next: `task_queue.py`, groups on their way to the disk; `rollout.py`, groups on their way to the graders.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Generic, TypeVar

from surefoot.records import Group

T = TypeVar("T")
MOST = 1 << 30
"""How many are handed over at once, at most. Only a test has a reason to change it: one at a time can be counted."""


class BackgroundThread(Generic[T]):
    """One thread, begun by the first thing that is put in.

    Args:
        work: gets everything that waits, in order; never called by two threads at once.

    Example:
        >>> done = []
        >>> side = BackgroundThread(done.extend, "example")
        >>> side.put(1), side.put(2), side.close()
        (None, None, None)
        >>> done
        [1, 2]
    """

    def __init__(self, work: Callable[[Sequence[T]], object], name: str) -> None:
        self._work, self._name = work, name
        self._news = threading.Condition()
        self._waiting: list[T] = []
        self._open = True
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, item: T) -> None:
        """Hand over, from any thread; ignored once closed. Raises what the work raised before."""
        with self._news:
            self._raise_error()
            if not self._open:
                return
            self._waiting.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._news.notify()

    def close(self) -> None:
        """Everything that was put in is done when this returns; raises what the work raised."""
        self._end()
        with self._news:
            self._raise_error()

    def abandon(self) -> None:
        """Nothing more is begun; what is being worked on is not waited for."""
        with self._news:
            self._open, self._waiting = False, []
            self._news.notify()

    def _end(self) -> None:
        with self._news:
            self._open = False
            self._news.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                while self._open and not self._waiting:
                    self._news.wait()
                batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            if not batch:
                return
            try:
                self._work(batch)
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
                with self._news:
                    self._error, self._open, self._waiting = error, False, []
                return

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


# -- Groups on their way to the disk while the rest of their batch is still played ----------------


class BackgroundGroupWriter:
    """A `with` block during which graded groups are written to disk; all that it was given are durable at its end.

    Args:
        keep: makes groups durable, by their positions in the batch.
    """

    def __init__(self, keep: Callable[[Mapping[int, Group]], None]) -> None:
        self._keep = keep
        self._side = BackgroundThread[tuple[int, Group]](self._write, "surefoot-journal")
        self.waited_s = 0.0
        """How long the end of the block had to wait for the disk."""

    def __call__(self, position: int, group: Group) -> None:
        """This group is graded."""
        self._side.put((position, group))

    def __enter__(self) -> BackgroundGroupWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        began = time.perf_counter()
        try:
            if error is None:
                self._side.close()
            else:  # its own error matters more than a disk's
                with contextlib.suppress(Exception):
                    self._side.close()
        except KeyboardInterrupt:  # asked to stop while the disk was waited for: its thread ends first all the same
            with contextlib.suppress(Exception):
                self._side.close()
            raise
        finally:
            self.waited_s = time.perf_counter() - began

    def _write(self, groups: Sequence[tuple[int, Group]]) -> None:
        self._keep(dict(groups))


# -- An event loop in a thread of its own, for callers that have none -----------------------------


_LOOK_S = 0.2
_LET_GO_S = 5.0


class EventLoopThread:
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
