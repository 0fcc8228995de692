"""Which replica plays next: the least loaded one that is open.

Owns       the slots of every replica, who holds them, and who waits for one, first come first served.
Promises   a slot goes to a replica with the smallest load there is, always: a remembered prefix only decides between
           equals, so by load this is never worse than plain least-loaded; no load exceeds the capacity; a caller that
           is cancelled, at any moment, leaves no slot behind and takes no wake-up with it.
Never      counts below zero, guesses which slot was meant, or talks to a replica.

    acquire_slot --> held --release_slot--> free
         |            ^
         +-> waiting -+   granted when a slot comes free or a replica opens; the slot is taken at that very moment

One event loop, no threads: nothing here waits between looking and taking, so nothing has to be locked.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from surefoot.errors import ConfigError, InvariantError

REMEMBERED = 1024
"""Prefixes remembered per replica; an engine's own cache seldom holds more prompts than this."""

Slot = tuple[int, int]
"""(replica_idx, slot_idx)"""


class LoadAwareRouter:
    """Hands out slots on replicas.

    Args:
        replicas: how many there are; all of them begin open.
        capacity: slots per replica; None for as many as are asked for.
        remember: prefixes remembered per replica, the most recent ones.

    Example:
        >>> async def three() -> list[int]:
        ...     router = LoadAwareRouter(3)
        ...     await router.acquire_slot()
        ...     await router.acquire_slot()
        ...     return router.loads
        >>> asyncio.run(three())
        [1, 1, 0]
    """

    def __init__(self, replicas: int, capacity: int | None = None, *, remember: int = REMEMBERED) -> None:
        _require_positive("replicas", replicas)
        _require_positive("remember", remember)
        if capacity is not None:
            _require_positive("capacity", capacity)
        self.replicas, self.capacity, self.remember = replicas, capacity, remember
        self._seats = [_Slots() for _ in range(replicas)]
        self._is_open = [True] * replicas
        self._prefixes: list[OrderedDict[Hashable, None]] = [OrderedDict() for _ in range(replicas)]
        self._waiting: dict[asyncio.Future[Slot], Hashable | None] = {}  # in order of arrival

    # -- slots ----------------------------------------------------------------------

    async def acquire_slot(self, prefix: Hashable | None = None) -> Slot:
        """(replica_idx, slot_idx): the least loaded open replica, and its lowest free slot.

        Between equals, a replica that was given this prefix before, then the lowest index. Waits when every open
        replica is full, or none is open.

        Args:
            prefix: what a replica may have cached, such as the name of a task. It is kept: pass something short.
        """
        hash(prefix)  # what cannot be remembered is refused here, not when another caller's release comes to it
        if (slot := self._take(prefix)) is not None:
            return slot  # where there is room nobody waits, so this overtakes nobody
        waiter: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = prefix
        try:
            return await waiter
        except BaseException:
            self._give_up(waiter)
            raise

    def release_slot(self, replica_idx: int, slot_idx: int) -> None:
        """Give a slot back; one that is not held is refused with an `InvariantError`, and nothing changes."""
        self._require_replica(replica_idx)
        seats = self._seats[replica_idx]
        if type(slot_idx) is not int or slot_idx not in seats.held:
            raise InvariantError(
                f"slot {slot_idx!r} of replica {replica_idx} is not held (held there: {sorted(seats.held)[:8]})",
                "a slot that is given back twice would be handed to two callers at once",
                "release each slot once, with the pair that acquire_slot returned; `async with router.slot()` does",
            )
        seats.free(slot_idx)
        self._serve()

    @asynccontextmanager
    async def slot(self, prefix: Hashable | None = None) -> AsyncIterator[Slot]:
        """`async with router.slot() as (replica, slot):` gives it back however the block ends."""
        held = await self.acquire_slot(prefix)
        try:
            yield held
        finally:
            self.release_slot(*held)

    # -- replicas -------------------------------------------------------------------

    def close_replica(self, replica_idx: int) -> None:
        """No new slots here until it is open again; those that are held may still be released. Twice is once."""
        self._require_replica(replica_idx)
        self._is_open[replica_idx] = False
        self._prefixes[replica_idx].clear()  # whoever takes its place begins with an empty cache

    def open_replica(self, replica_idx: int) -> None:
        """It may be given slots again; callers that wait get them at once. Twice is once."""
        self._require_replica(replica_idx)
        self._is_open[replica_idx] = True
        self._serve()

    def forget_prefixes(self) -> None:
        """Every cache was emptied, as new weights do."""
        for prefixes in self._prefixes:
            prefixes.clear()

    # -- questions ------------------------------------------------------------------

    @property
    def loads(self) -> list[int]:
        """Slots held on each replica, the closed ones included."""
        return [len(seats.held) for seats in self._seats]

    @property
    def is_open(self) -> list[bool]:
        """Per replica, whether it is given new slots."""
        return list(self._is_open)

    @property
    def waiting(self) -> int:
        """Callers that wait for a slot."""
        return sum(not waiter.done() for waiter in self._waiting)

    def remembers(self, replica_idx: int, prefix: Hashable) -> bool:
        """Whether this replica was given the prefix recently."""
        self._require_replica(replica_idx)
        return prefix in self._prefixes[replica_idx]

    # -- how ------------------------------------------------------------------------

    def _take(self, prefix: Hashable | None) -> Slot | None:
        """The best slot there is, now held; None when there is none."""
        replica = self._best(prefix)
        if replica is None:
            return None
        if prefix is not None:
            self._note(self._prefixes[replica], prefix)
        return replica, self._seats[replica].take()

    def _best(self, prefix: Hashable | None) -> int | None:
        """Smallest load, then a remembered prefix, then the lowest index."""
        best, best_rank = None, (0, False)
        for replica, seats in enumerate(self._seats):
            load = len(seats.held)
            if not self._is_open[replica] or (self.capacity is not None and load >= self.capacity):
                continue
            rank = (load, prefix is None or prefix not in self._prefixes[replica])
            if best is None or rank < best_rank:
                best, best_rank = replica, rank
        return best

    def _note(self, prefixes: OrderedDict[Hashable, None], prefix: Hashable) -> None:
        prefixes[prefix] = None
        prefixes.move_to_end(prefix)
        if len(prefixes) > self.remember:
            prefixes.popitem(last=False)

    def _serve(self) -> None:
        """Give free slots to those who wait, in order. The slot is theirs before they wake up."""
        while self._waiting:
            waiter, prefix = next(iter(self._waiting.items()))
            if not waiter.done():  # else it was cancelled, and has not woken up to leave the queue itself
                slot = self._take(prefix)
                if slot is None:
                    return
                waiter.set_result(slot)
            del self._waiting[waiter]

    def _give_up(self, waiter: asyncio.Future[Slot]) -> None:
        """A caller goes away. What it was granted in this same tick goes to the next."""
        self._waiting.pop(waiter, None)
        if waiter.done() and not waiter.cancelled():
            self.release_slot(*waiter.result())

    def _require_replica(self, replica_idx: int) -> None:
        if type(replica_idx) is not int or not 0 <= replica_idx < self.replicas:
            raise InvariantError(
                f"there is no replica {replica_idx!r}: there are {self.replicas}, counted from 0",
                "a slot would be booked on a replica that nobody meant",
                "pass the replica_idx that acquire_slot returned",
            )


class _Slots:
    """The slots of one replica: which are held, and the lowest that is free."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self._returned: list[int] = []  # a heap: free slots below `_next`
        self._next = 0

    def take(self) -> int:
        """The lowest free one."""
        if self._returned:
            slot = heapq.heappop(self._returned)
        else:
            slot, self._next = self._next, self._next + 1
        self.held.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """It is free again."""
        self.held.remove(slot)
        heapq.heappush(self._returned, slot)


def _require_positive(name: str, value: int) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(
            f"{name} = {value!r}: must be a whole number of at least 1",
            "a router without a place to send work to makes every caller wait for ever",
            f"give {name} a positive whole number" + ("; None is no limit" if name == "capacity" else ""),
        )
