"""The buffer against plain lists: any order of puts, takes, versions, ends, epochs and restarts.

The model knows nothing of locks, fates by name or JSON: it looks through its lists one entry at a time. Three planted
buffers show that a difference is noticed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from surefoot.errors import InvariantError
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.buffer import BufferCounts, BufferedBatch, GroupBuffer, StaleGroups
from surefoot.storage.ledger import Visit

TASKS = {name: Task(id=name, prompt="?") for name in ("a", "b c/ü")}
EVERYTHING = set(range(10))
VERSIONS = st.sampled_from([0, 0, 1, 2])


def group_of(item: Visit, version: int) -> Group:
    turns = (Turn((1,), (2, 3), (-0.5, -0.1), version + 1), Turn((1,), (4,), (-0.25,), version))
    return Group(TASKS[item.task], str(item), (Rollout(item.task, str(item), 0, turns, 1.0),))


@dataclass
class Entry:
    """One group as the model sees it."""

    item: Visit
    version: int
    left: int
    read: int = 0


class BufferMachine(RuleBasedStateMachine):
    """The model: what waits, what is in hand, what is over, each a plain list."""

    make: Any = GroupBuffer

    @initialize(size=st.integers(1, 8), staleness=st.integers(0, 2), reads=st.integers(1, 3))
    def begin(self, size: int, staleness: int, reads: int) -> None:
        self.options = dict(max_size=size, max_staleness=staleness, max_reads=reads)
        self.size, self.staleness, self.reads = size, staleness, reads
        self.buffer = self.make(**self.options)
        self.waiting: list[Entry] = []
        self.hand: list[Entry] = []
        self.over: dict[str, int] = dict(used=0, wasted=0, filtered=0, failed=0)
        self.count, self.brought, self.trainings, self.version, self.done = 0, 0, 0, 0, False

    # -- what happens -----------------------------------------------------------------

    @precondition(lambda self: not self.done and len(self.waiting) < self.room)
    @rule(behind=st.lists(VERSIONS, min_size=1, max_size=4), task=st.sampled_from(sorted(TASKS)))
    def put(self, behind: list[int], task: str) -> None:
        for versions in behind:
            item, version = Visit(task, self.count), max(0, self.version + 1 - versions)
            said = self.buffer.put(item, version, group_of(item, version))
            assert said == ("kept" if len(self.waiting) + len(self.hand) < self.size else "full")
            if said == "kept":
                self.waiting.append(Entry(item, version, self.reads))
                self.brought, self.count = self.brought + 1, self.count + 1

    @precondition(lambda self: self.room > 0)
    @rule(pick=st.integers(0, 7), ahead=VERSIONS)
    def take(self, pick: int, ahead: int) -> None:
        n = 1 + pick % self.room
        self.version += ahead
        aged = self.age(self.waiting)
        at_the_end = self.done and not self.waiting and not aged
        if at_the_end and any(entry.left > 1 for entry in self.hand):
            with pytest.raises(InvariantError, match="settle them first"):
                self.buffer.take(n, self.version)
            return
        taken = self.buffer.take(n, self.version)
        if at_the_end:
            assert taken is None
            return
        assert isinstance(taken, BufferedBatch)
        assert taken.aged == aged
        self.check_batch(n, taken)

    def check_batch(self, n: int, taken: BufferedBatch) -> None:
        whole = len(self.waiting) >= n
        size = n if whole else len(self.waiting) if self.done else 0
        batch, self.waiting = self.waiting[:size], self.waiting[size:]
        assert [(w.item, w.version, w.reads_remaining, w.read) for w in taken.batch] == [
            (entry.item, entry.version, entry.left, entry.read) for entry in batch
        ]
        assert all(w.version >= self.version - self.staleness for w in taken.batch), "too old to be trained on"
        assert all(w.group == group_of(w.item, w.version) for w in taken.batch)
        assert taken.partial == (0 < len(taken.batch) < n)
        self.hand += batch

    @rule(ahead=VERSIONS)
    def recheck(self, ahead: int) -> None:
        self.version += ahead
        assert self.buffer.recheck(self.version) == self.age(self.hand)
        assert all(entry.version >= self.version - self.staleness for entry in self.hand)

    @rule(ahead=VERSIONS, old_news=st.booleans())
    def advance(self, ahead: int, old_news: bool) -> None:
        self.version += ahead
        self.buffer.advance(self.version)
        if old_news and self.version:
            self.buffer.advance(self.version - 1)

    @precondition(lambda self: self.hand)
    @rule(
        picks=st.just(EVERYTHING) | st.sets(st.integers(0, 5), min_size=1),
        fate=st.sampled_from(["used", "filtered", "failed"]),
    )
    def settle(self, picks: set[int], fate: Any) -> None:
        chosen = [entry for place, entry in enumerate(self.hand) if place in picks]
        self.buffer.settle([entry.item for entry in chosen], fate)
        self.hand = [entry for entry in self.hand if entry not in chosen]
        self.trainings += len(chosen) if fate == "used" else 0
        for entry in chosen:
            if fate == "used" and entry.left > 1:
                self.waiting.append(replace(entry, left=entry.left - 1, read=entry.read + 1))
            else:
                self.over["used" if entry.read else fate] += 1

    @precondition(lambda self: self.waiting and not self.done)
    @rule()
    def mark_done(self) -> None:
        self.buffer.mark_done()
        self.done = True

    @precondition(lambda self: self.brought and not self.hand)
    @rule()
    def new_epoch(self) -> None:
        before = self.expected()
        tally, left = self.buffer.new_epoch()
        assert tally == before
        assert left == returned(self.waiting)
        self.waiting, self.over = [], dict.fromkeys(self.over, 0)
        self.brought, self.trainings, self.done = 0, 0, False

    @rule()
    def misuse(self) -> None:
        """Everything that is not allowed now is refused, and changes nothing: the invariant looks afterwards."""
        stranger = Visit("a", 10**9)
        with pytest.raises(InvariantError, match="not in hand"):
            self.buffer.settle([*(entry.item for entry in self.hand), stranger], "used")
        with pytest.raises(InvariantError, match="can never be here"):
            self.buffer.take(max(self.room, 0) + 1, self.version)
        for entry in self.waiting + self.hand:
            with pytest.raises(InvariantError, match=r"here already|after mark_done"):
                self.buffer.put(entry.item, entry.version, group_of(entry.item, entry.version))
        if self.done:
            with pytest.raises(InvariantError, match="after mark_done"):
                self.buffer.put(stranger, 0, group_of(stranger, 0))
        if self.hand:
            with pytest.raises(InvariantError, match="wrong one"):
                self.buffer.new_epoch()

    @rule(ahead=VERSIONS, smaller=st.booleans())
    def save_and_restore(self, ahead: int, smaller: bool) -> None:
        """What is in hand waits again, in front; a smaller buffer keeps everything; what has aged comes back."""
        state = json.loads(json.dumps(self.buffer.state_dict()))
        if smaller:
            self.size = max(1, self.size - 1)
        self.buffer = self.make(**self.options | dict(max_size=self.size))
        self.version += ahead
        self.waiting, self.hand = self.hand + self.waiting, []
        assert self.buffer.load_state_dict(state, TASKS, self.version) == self.age(self.waiting)

    # -- the model ----------------------------------------------------------------------

    @property
    def room(self) -> int:
        """What one take may ask for."""
        return self.size - len(self.hand)

    def age(self, entries: list[Entry]) -> StaleGroups:
        """Take out what is too old; an end that was announced is none when something has to be played again."""
        old = [entry for entry in entries if entry.version < self.version - self.staleness]
        for entry in old:
            entries.remove(entry)
            self.over["used" if entry.read else "wasted"] += 1
        aged = returned(old)
        self.done = self.done and not aged.back
        return aged

    def expected(self) -> BufferCounts:
        left = self.waiting + self.hand
        versions = sorted({entry.version for entry in left})
        return BufferCounts(
            put=self.brought, **self.over, waiting=len(self.waiting), in_hand=len(self.hand), reads=self.trainings,
            unread=sum(entry.read == 0 for entry in left),
            versions={version: sum(entry.version == version for entry in left) for version in versions},
        )  # fmt: skip

    @invariant()
    def nothing_is_lost_and_both_agree(self) -> None:
        if hasattr(self, "buffer"):
            tally = self.buffer.tally()
            assert tally == self.expected()
            assert tally.put == tally.used + tally.wasted + tally.filtered + tally.failed + tally.left
            assert self.buffer.version == self.version


def returned(entries: list[Entry]) -> StaleGroups:
    """Who goes back to the queue, and who has been trained on."""
    return StaleGroups(tuple(e.item for e in entries if not e.read), tuple(e.item for e in entries if e.read))


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None
)


# -- the same rules, drawn evenly: Hypothesis likes to repeat itself, and long stories are then rare --


SEEDS = 120


def walk(seed: int, make: type[GroupBuffer] = GroupBuffer) -> None:
    """Sixty rules in a row."""
    dice = random.Random(seed)
    machine = BufferMachine()
    machine.make = make
    machine.begin(dice.randint(1, 8), dice.randint(0, 2), dice.randint(1, 3))
    for _ in range(60):
        dice.choice(possible(machine, dice))()
        machine.nothing_is_lost_and_both_agree()


def possible(machine: BufferMachine, dice: random.Random) -> list[Callable[[], None]]:
    """Every rule that may come next; what moves groups is three times as likely."""
    ahead, fate = dice.choice([0, 0, 1, 2]), dice.choice(["used", "used", "used", "filtered", "failed"])
    rules: list[Callable[[], None]] = [
        machine.misuse, lambda: machine.advance(ahead, True), lambda: machine.recheck(ahead),
        lambda: machine.save_and_restore(ahead, ahead == 1),
    ]  # fmt: skip
    if not machine.done:
        rules += [lambda: machine.put([dice.randint(0, 2) for _ in range(3)], dice.choice(sorted(TASKS)))] * 3
    if machine.room > 0:
        rules += [lambda: machine.take(dice.randint(0, 7), ahead)] * 3
    if machine.hand:
        rules += [lambda: machine.settle(dice.choice([EVERYTHING, {0}, {1, 3}]), fate)] * 3
    rules += [machine.mark_done] if machine.waiting and not machine.done else []
    rules += [machine.new_epoch] if machine.brought and not machine.hand else []
    return rules


def test_seeded_walks_agree_with_the_model() -> None:
    for seed in range(SEEDS):
        try:
            walk(seed)
        except BaseException:
            print(f"walk({seed}) repeats it")
            raise


# -- teeth -------------------------------------------------------------------------------


class LooksOnlyWhenPopped(GroupBuffer):
    """Planted: what is in hand is never looked at again, however far the version moves."""

    def recheck(self, version: int) -> StaleGroups:
        self.advance(version)
        return StaleGroups()


class DropsThePartialBatch(GroupBuffer):
    """Planted: at the end of an epoch, fewer than a batch are thrown away."""

    def take(self, n: int, version: int, *, wait_s: float = 0.0) -> BufferedBatch | None:
        taken = super().take(n, version, wait_s=wait_s)
        if taken is not None and taken.partial:
            for entry in taken.batch:
                del self._hand[entry.item]
            return None
        return taken


class LeaksOverTheEpoch(GroupBuffer):
    """Planted: one counter goes on counting."""

    def new_epoch(self) -> tuple[BufferCounts, StaleGroups]:
        reads = self._reads
        ended = super().new_epoch()
        self._reads = reads
        return ended


@pytest.mark.parametrize("planted", [LooksOnlyWhenPopped, DropsThePartialBatch, LeaksOverTheEpoch])
def test_planted_buffer_is_caught(planted: type[GroupBuffer]) -> None:
    found = sum(not survives(seed, planted) for seed in range(40))
    assert found >= 4, f"{planted.__doc__} {found} of 40 walks noticed"


def survives(seed: int, make: type[GroupBuffer]) -> bool:
    try:
        walk(seed, make)
    except (AssertionError, InvariantError, pytest.fail.Exception):
        return False
    return True
