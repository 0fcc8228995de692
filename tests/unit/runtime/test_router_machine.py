"""The router against a dict and a list: any order of acquires, releases, cancels, timeouts, deaths and returns.

The model looks through everything it knows each time; it has no heap, no futures and no memory of its own but lists.
Planted routers show that a difference is noticed, by the machine and by a crowd of a thousand callers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from surefoot.errors import InvariantError
from surefoot.runtime.router import LoadAwareRouter, Slot

REMEMBER = 2
PREFIXES = ("a", "b", "c", None)
Asked = asyncio.Task[Slot]


class RouterMachine(RuleBasedStateMachine):
    """The model: who holds what, who waits, who is open, what each replica was given last."""

    make: Any = LoadAwareRouter

    @initialize(replicas=st.integers(1, 4), capacity=st.none() | st.integers(1, 3))
    def begin(self, replicas: int, capacity: int | None) -> None:
        self.loop = asyncio.new_event_loop()
        self.router = self.make(replicas, capacity, remember=REMEMBER)
        self.replicas, self.capacity = replicas, capacity
        self.held: dict[Slot, Asked] = {}
        self.queue: list[tuple[Asked, str | None]] = []
        self.open = dict.fromkeys(range(replicas), True)
        self.recent: dict[int, list[str]] = {replica: [] for replica in range(replicas)}

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.run()
            self.loop.close()

    # -- what happens -------------------------------------------------------------------

    @rule(prefix=st.sampled_from(PREFIXES))
    def acquire(self, prefix: str | None) -> None:
        task = self.loop.create_task(self.router.acquire_slot(prefix))
        self.queue.append((task, prefix))
        self.run()
        self.expect()

    @rule(prefix=st.sampled_from(PREFIXES))
    def acquire_or_time_out(self, prefix: str | None) -> None:
        async def impatient() -> Slot:
            async with asyncio.timeout(0):
                slot: Slot = await self.router.acquire_slot(prefix)
                return slot

        task = self.loop.create_task(impatient())
        if self.best(prefix) is not None:
            self.queue.append((task, prefix))
        self.run()
        assert task.done(), "neither a slot nor a timeout"
        self.expect()
        if task not in self.held.values():
            with pytest.raises(TimeoutError):
                task.result()

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 11), cancelled=st.sampled_from(["nobody", "before", "after"]), also=st.booleans())
    def release(self, pick: int, cancelled: str, also: bool) -> None:
        """One slot comes back; the first caller in the queue may go away in the same tick, a second one too."""
        leaving = self.queue[: 1 + also] if cancelled != "nobody" else []
        slot = sorted(self.held)[pick % len(self.held)]
        del self.held[slot]
        acts: list[Callable[[], Any]] = [task.cancel for task, _ in leaving]
        acts.insert(0 if cancelled == "after" else len(acts), lambda: self.router.release_slot(*slot))
        for act in acts:
            act()
        if leaving and cancelled == "after" and (replica := self.best(leaving[0][1])) is not None:
            self.note(replica, leaving[0][1])  # it was granted: the replica was chosen, and chosen again for the next
        self.queue = self.queue[len(leaving) :]
        self.run()
        assert all(task.cancelled() for task, _ in leaving)
        self.expect()

    @precondition(lambda self: self.queue)
    @rule(pick=st.integers(0, 11))
    def cancel(self, pick: int) -> None:
        task, _ = self.queue.pop(pick % len(self.queue))
        task.cancel()
        self.run()
        assert task.cancelled()
        self.expect()

    @rule(pick=st.integers(0, 3))
    def close_replica(self, pick: int) -> None:
        replica = pick % self.replicas
        self.router.close_replica(replica)
        self.open[replica], self.recent[replica] = False, []

    @rule(pick=st.integers(0, 3))
    def open_replica(self, pick: int) -> None:
        self.open[pick % self.replicas] = True
        self.router.open_replica(pick % self.replicas)
        self.run()
        self.expect()

    @rule()
    def misuse(self) -> None:
        """Everything that is not held is refused, and changes nothing: the invariant looks afterwards."""
        for replica in range(-1, self.replicas + 1):
            for slot in range(-1, 5):
                if (replica, slot) not in self.held:
                    with pytest.raises(InvariantError):
                        self.router.release_slot(replica, slot)

    # -- the model ------------------------------------------------------------------------

    def run(self) -> None:
        """Whatever is ready runs; five rounds are more than the longest chain of wake-ups needs."""
        for _ in range(5 + len(self.queue)):
            self.loop.run_until_complete(asyncio.sleep(0))

    def load(self, replica: int) -> int:
        return sum(where == replica for where, _ in self.held)

    def best(self, prefix: str | None) -> int | None:
        able = [r for r in self.open if self.open[r] and (self.capacity is None or self.load(r) < self.capacity)]
        return min(able, key=lambda r: (self.load(r), prefix not in self.recent[r], r), default=None)

    def note(self, replica: int, prefix: str | None) -> None:
        if prefix is not None:
            self.recent[replica] = [*(p for p in self.recent[replica] if p != prefix), prefix][-REMEMBER:]

    def expect(self) -> None:
        """Whoever is first in the queue and can be served was served, with this slot; the others wait."""
        while self.queue and (replica := self.best(self.queue[0][1])) is not None:
            task, prefix = self.queue.pop(0)
            slot = next(s for s in range(1000) if (replica, s) not in self.held)
            self.note(replica, prefix)
            assert task.done(), f"slot {slot} of replica {replica} is free, and the first in the queue was not woken"
            assert task.result() == (replica, slot)
            self.held[replica, slot] = task
        assert not any(task.done() for task, _ in self.queue), "served out of turn, or beyond the capacity"

    @invariant()
    def both_agree(self) -> None:
        if hasattr(self, "router"):
            loads = self.router.loads
            assert loads == [self.load(replica) for replica in range(self.replicas)]
            assert min(loads) >= 0
            assert self.capacity is None or max(loads) <= self.capacity
            assert self.router.waiting == len(self.queue)
            assert self.router.is_open == list(self.open.values())


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True, database=None
)


# -- the same rules, drawn evenly, to the end of the day ---------------------------------------


def walk(seed: int, make: type[LoadAwareRouter] = LoadAwareRouter) -> None:
    """A hundred rules in a row; then everybody goes home, and nothing may be left."""
    dice, machine = random.Random(seed), RouterMachine()
    machine.make = make
    machine.begin(dice.choice([1, 2, 3, 3, 4]), dice.choice([None, 1, 1, 2, 3]))
    try:
        for _ in range(100):
            dice.choice(possible(machine, dice))()
            machine.both_agree()
        go_home(machine)
    finally:
        machine.teardown()


def possible(machine: RouterMachine, dice: random.Random) -> list[Callable[[], None]]:
    prefix, pick = dice.choice(PREFIXES), dice.randint(0, 11)
    when, also = dice.choice(["nobody", "before", "after"]), dice.random() < 0.5
    rules: list[Callable[[], None]] = [lambda: machine.acquire(prefix)] * 5
    rules += [machine.misuse, lambda: machine.acquire_or_time_out(prefix)]
    rules += [lambda: machine.close_replica(pick), lambda: machine.open_replica(pick)]
    rules += [lambda: machine.release(pick, when, also)] * 4 if machine.held else []
    rules += [lambda: machine.cancel(pick)] if machine.queue else []
    return rules


def go_home(machine: RouterMachine) -> None:
    for replica in range(machine.replicas):
        machine.open_replica(replica)
    while machine.held:
        machine.release(0, "nobody", False)
    assert machine.router.loads == [0] * machine.replicas
    assert not machine.queue, "callers wait for slots that are free"


def test_seeded_walks_agree_with_the_model() -> None:
    for seed in range(60):
        try:
            walk(seed)
        except BaseException:
            print(f"walk({seed}) repeats it")
            raise


# -- a crowd --------------------------------------------------------------------------


class Crowd:
    """Callers that come, work, go away and are cancelled at random, on replicas that close and open."""

    def __init__(self, make: type[LoadAwareRouter], seed: int, callers: int = 1000) -> None:
        self.dice = random.Random(seed)
        self.replicas, self.capacity, self.callers = self.dice.randint(1, 8), self.dice.randint(1, 4), callers
        self.router = make(self.replicas, self.capacity)
        self.asking: dict[asyncio.Task[None], None] = {}  # in order of arrival
        self.finished = 0

    async def caller(self) -> None:
        for _ in range(self.dice.randint(0, 6)):
            await asyncio.sleep(0)
        me = asyncio.current_task()
        assert me is not None, "a coroutine runs in a task"
        self.asking[me] = None
        try:
            slot = await self.router.acquire_slot(self.dice.choice(["a", "b", None]))
        finally:
            del self.asking[me]
        try:
            assert max(self.router.loads) <= self.capacity, "a replica has more than it can carry"
            assert slot[1] < self.capacity, "not the lowest free slot"
            for _ in range(self.dice.randint(0, 3)):
                await asyncio.sleep(0)
        finally:
            self.leave(slot)
        self.finished += 1

    def leave(self, slot: Slot) -> None:
        """Give the slot back; often whoever is first in the queue goes away in the same tick."""
        unlucky = next(iter(self.asking), None) if self.dice.random() < 0.2 else None
        before = self.dice.random() < 0.5
        if unlucky is not None and before:
            unlucky.cancel()
        self.router.release_slot(*slot)
        if unlucky is not None and not before:
            unlucky.cancel()

    def disturb(self, tasks: list[asyncio.Task[None]], round_: int) -> None:
        if self.dice.random() < 0.2:
            self.dice.choice(tasks).cancel()
        if self.dice.random() < 0.1:
            self.router.close_replica(self.dice.randrange(self.replicas))
        if round_ % 30 == 0:
            for replica in range(self.replicas):
                self.router.open_replica(replica)

    async def gather(self) -> None:
        """Until all have left; then nothing may be held or waited for."""
        tasks = [asyncio.create_task(self.caller()) for _ in range(self.callers)]
        for round_ in range(20_000):
            if all(task.done() for task in tasks):
                break
            if round_ <= 3_000:  # its last act opens every replica; from there on only wake-ups help
                self.disturb(tasks, round_)
            await asyncio.sleep(0)
        stuck = [task for task in tasks if not task.done()]
        for task in stuck:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert not stuck, f"{len(stuck)} callers were never woken up"
        assert [e for e in ended if isinstance(e, Exception)] == []
        assert (self.router.loads, self.router.waiting) == ([0] * self.replicas, 0)
        assert self.finished == sum(e is None for e in ended) > self.callers // 4


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_callers_with_random_cancels_leave_nothing_behind(seed: int) -> None:
    asyncio.run(Crowd(LoadAwareRouter, seed).gather())


# -- teeth ----------------------------------------------------------------------------------


class CountsBelowZero(LoadAwareRouter):
    """Planted: a release asks nobody whether the slot is held."""

    def release_slot(self, replica_idx: int, slot_idx: int) -> None:
        if slot_idx in self._seats[replica_idx].held:
            super().release_slot(replica_idx, slot_idx)


class LeaksOnCancel(LoadAwareRouter):
    """Planted: who is cancelled in the tick of its grant keeps the slot for ever."""

    def _give_up(self, waiter: asyncio.Future[Slot]) -> None:
        self._waiting.pop(waiter, None)


class LosesAWakeUp(LoadAwareRouter):
    """Planted: the slot of a caller that was cancelled in the tick of its grant is free, and nobody is told."""

    def _give_up(self, waiter: asyncio.Future[Slot]) -> None:
        self._waiting.pop(waiter, None)
        if waiter.done() and not waiter.cancelled():
            replica, slot = waiter.result()
            self._seats[replica].free(slot)


class WakesTheDead(LoadAwareRouter):
    """Planted: a release wakes the first in the queue, also when it has just been cancelled."""

    def _serve(self) -> None:
        if self._waiting:
            waiter = next(iter(self._waiting))
            if waiter.done():
                del self._waiting[waiter]
            else:
                super()._serve()


class ServesTheLastFirst(LoadAwareRouter):
    """Planted: the newest caller is served first."""

    def _serve(self) -> None:
        self._waiting = dict(reversed(self._waiting.items()))
        super()._serve()
        self._waiting = dict(reversed(self._waiting.items()))


class PrefersTheCacheToTheLoad(LoadAwareRouter):
    """Planted: a remembered prefix beats a smaller load."""

    def _best(self, prefix: Any) -> int | None:
        known = [r for r in range(self.replicas) if prefix is not None and self.remembers(r, prefix)]
        able = [r for r in known if self._is_open[r] and (self.capacity is None or self.loads[r] < self.capacity)]
        return able[0] if able else super()._best(prefix)


PLANTED = [
    CountsBelowZero, LeaksOnCancel, LosesAWakeUp, WakesTheDead, ServesTheLastFirst, PrefersTheCacheToTheLoad,
]  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_router_is_caught(planted: type[LoadAwareRouter]) -> None:
    found = sum(not survives(seed, planted) for seed in range(12))
    assert found >= 6, f"{planted.__doc__} {found} of 12 walks noticed"


def survives(seed: int, make: type[LoadAwareRouter]) -> bool:
    try:
        walk(seed, make)
    except (AssertionError, InvariantError, pytest.fail.Exception, IndexError):
        return False
    return True


@pytest.mark.parametrize("planted", [LeaksOnCancel, LosesAWakeUp, WakesTheDead])
def test_the_crowd_notices_a_leak_and_a_lost_wake_up(planted: type[LoadAwareRouter]) -> None:
    crowds = [Crowd(planted, seed) for seed in range(5)]
    with pytest.raises(AssertionError, match="never woken up"):
        asyncio.run(one_after_the_other(crowds))


async def one_after_the_other(crowds: list[Crowd]) -> None:
    for crowd in crowds:
        await crowd.gather()
