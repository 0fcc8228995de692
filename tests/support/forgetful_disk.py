"""A file that lives in memory and forgets what was not synced, as a disk does when the power goes."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import Literal

SECTOR = 16
"""Small, so that every record spans several and any of them can be missing."""
Fault = Literal["crash", "full", "eio"] | None


class Crash(BaseException):
    """The process, or the whole machine, is gone at this instant."""


class ForgetfulFile:
    """What `Journal` needs of a file. `fault(call)` is asked before every call that changes something."""

    def __init__(
        self, rng: random.Random, content: bytes = b"", fault: Callable[[str], Fault] = lambda call: None
    ) -> None:
        self.rng, self.fault = rng, fault
        self.visible = bytearray(content)
        self.durable = bytes(content)
        self.unsynced: list[tuple[int, bytes] | int] = []
        """Writes as (offset, bytes) and cuts as a size, since the last sync, in order."""

    def size(self) -> int:
        return len(self.visible)

    def read(self, offset: int, count: int) -> bytes:
        return bytes(self.visible[offset : offset + count])

    def write(self, offset: int, data: bytes) -> None:
        fault = self.fault("write")
        if fault is not None:
            self._put(offset, data[: self.rng.randrange(len(data) + 1)])
        if fault == "crash":
            raise Crash
        if fault is not None:
            raise OSError(errno.ENOSPC if fault == "full" else errno.EIO, "no")
        self._put(offset, data)

    def truncate(self, size: int) -> None:
        if self.fault("truncate") == "crash":
            raise Crash
        del self.visible[size:]
        self.unsynced.append(size)

    def sync(self) -> None:
        fault = self.fault("sync")
        if fault == "crash" and self.rng.random() < 0.5:
            raise Crash
        if fault in ("full", "eio"):
            raise OSError(errno.EIO, "no")
        self.durable, self.unsynced = bytes(self.visible), []
        if fault == "crash":
            raise Crash

    def close(self) -> None:
        """Nothing to let go of."""

    def after_kill(self) -> ForgetfulFile:
        """What the next process finds: everything written, synced or not."""
        return self._next(bytes(self.visible), self.durable, list(self.unsynced))

    def after_power_loss(self) -> ForgetfulFile:
        """What the next start finds: what was synced, and any part of the rest, in any order."""
        found = bytearray(self.durable)
        for change in self.unsynced:
            if isinstance(change, int):
                if self.rng.random() < 0.7:
                    del found[change:]
                continue
            offset, data = change
            for at in range(0, len(data), SECTOR):
                piece = data[at : at + SECTOR]
                luck = self.rng.random()
                if luck < 0.75:
                    found.extend(bytes(max(0, offset + at + len(piece) - len(found))))
                if luck < 0.55:
                    found[offset + at : offset + at + len(piece)] = piece
        return self._next(bytes(found), bytes(found), [])

    def _next(self, visible: bytes, durable: bytes, unsynced: list[tuple[int, bytes] | int]) -> ForgetfulFile:
        file = ForgetfulFile(self.rng, visible, self.fault)
        file.durable, file.unsynced = durable, unsynced
        return file

    def _put(self, offset: int, data: bytes) -> None:
        self.visible.extend(bytes(max(0, offset + len(data) - len(self.visible))))
        self.visible[offset : offset + len(data)] = data
        self.unsynced.append((offset, data))
