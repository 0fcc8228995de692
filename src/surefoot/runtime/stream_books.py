"""`protocols.Books` for a loop that is not asynchronous: the stream lives in an event loop's thread, this one asks it.

Promises   a wait for a batch ends when the batch is complete, when somebody asks to stop, or when the run cannot go on;
           it beats the pulse only while something happens, so that the watchdog can tell slow from stuck; what the
           stream raises is raised here.
Never      touches ledger, journal or buffer from another thread than the stream's.

Read next: `stream.py`, what is asked.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from surefoot.errors import ConfigError, InvariantError
from surefoot.protocols import Assignment, Delivering
from surefoot.pulse import beat
from surefoot.records import Group
from surefoot.runtime.fleet_thread import FleetThread
from surefoot.runtime.stream import Stream
from surefoot.stopping import StopRequested

T = TypeVar("T")
_LOOK_S = 0.1


class StreamBooks:
    """The stream, asked from the training loop's thread.

    Args:
        thread: whose event loop the stream's crew belongs to; made and closed by whoever made it.
        stop: whether somebody asked to stop.
    """

    def __init__(self, stream: Stream, thread: FleetThread, *, stop: Callable[[], bool] = lambda: False) -> None:
        self.stream, self.thread, self.stop = stream, thread, stop
        self._closed = False

    def draw(self, step: int, n: int) -> Assignment:
        """The batch of this step; waits for it."""
        future = self.thread.submit(self.stream.draw(step, n))
        seen = -1
        try:
            while not concurrent.futures.wait([future], timeout=_LOOK_S).done:
                if self.stop():
                    raise StopRequested("asked to stop while it waited for groups")
                if self.stream.progress != seen:
                    seen = self.stream.progress
                    beat("waiting for groups")
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def draw_more(self, assignment: Assignment, n: int) -> Assignment:
        """Not while sampling runs ahead: `config_rules` refuse it."""
        raise ConfigError(
            "dynamic sampling was asked of a stream", "its batches are whole before the step begins",
            "set max_staleness = 0",
        )  # fmt: skip

    def delivering(self, assignment: Assignment) -> Delivering:
        """Not here: a stream keeps its groups as they come, before it hands out a batch."""
        raise InvariantError(
            f"step {assignment.step}: a batch of a stream was to be played", "its groups are on the disk already",
            "report it with the run folder",
        )  # fmt: skip

    def give_back(self, assignment: Assignment, *, unless: Callable[[Group], bool] = lambda group: False) -> None:
        """Not here: a stream gives groups back before it hands out their batch."""
        raise InvariantError(
            f"step {assignment.step}: a batch of a stream was given back", "it was judged when it was composed",
            "report it with the run folder",
        )  # fmt: skip

    def keep(self, assignment: Assignment, groups: Sequence[Group]) -> None:
        """The composition of the batch is on the disk when this returns."""
        self._ask(lambda: self.stream.keep(assignment, groups))

    def settle(self, assignment: Assignment, step: int, fates: Sequence[str | None]) -> None:
        """The batch is done with."""
        self._ask(lambda: self.stream.settle(assignment, step, fates))

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
