"""Groups on their way to the disk while the rest of their batch is still played.

Promises   a group is written as soon as it is graded, by a thread that does nothing else, so that the disk holds up
           neither sampling nor grading; groups that come while it writes are written together, with one sync; when the
           block is left, for whatever reason, everything that was graded is on the disk, and nothing is written later.

    with Deliveries(keep) as finished:
        play(..., finished=finished)        finished(position, group), from any thread
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from surefoot.records import Group
from surefoot.runtime.side_thread import SideThread


class Deliveries:
    """`protocols.Delivering` on a disk.

    Args:
        keep: makes groups durable, by their positions in the batch.
    """

    def __init__(self, keep: Callable[[Mapping[int, Group]], None]) -> None:
        self._keep = keep
        self._side = SideThread[tuple[int, Group]](self._write, "surefoot-journal")
        self.waited_s = 0.0
        """How long the end of the block had to wait for the disk."""

    def __call__(self, position: int, group: Group) -> None:
        """This group is graded."""
        self._side.put((position, group))

    def __enter__(self) -> Deliveries:
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
