"""Where scored groups wait between sampling and training.

Owns       groups from "delivered" to "settled", oldest first, and the count of what became of them.
Promises   a batch has exactly the groups that were asked for, or it is the last of its epoch; none of them is more than
           `max_staleness` versions old, by a look after the last wait (the learner looks once more at versions); a
           group is read at most `max_reads` times; put = used + wasted + filtered + failed + left, always.
Never      drops a group in silence, waits without an end, scores, packs, or looks at the clock on the wall.

    put --> waiting --take(n, version)--> in hand --settle--> used, filtered, failed
     |       |   ^                         |   |
    full     |   +------ one more read ----|---+
             +---------- too old ----------+--> wasted: `StaleGroups.back` goes to the front of the ledger's queue

One consumer, any number of producers. The ledger hears of a delivery before `put`, and that an item is trained,
dropped or back after the buffer has let go of it. Whoever has told it one of these then says `end_if_all_is_in`: the
last one to say so is right.

A run uses `put`, `take`, `settle` and the tally, with one read per group. It calls none of `recheck`, `mark_done`,
`end_if_all_is_in`, `new_epoch`, `state_dict` and `load_state_dict`: its stream has no epochs, and the journal keeps it.

Read next: `storage/ledger.py`, whose items these are.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from surefoot.errors import ConfigError, InvariantError, StalledError, StateError
from surefoot.records import Group, Task
from surefoot.storage.batches import group_record, read_group
from surefoot.storage.ledger import Balance, Visit, count, read_visit

# -- The nouns of the buffer, and their form as JSON data -----------------------------------------
# Promises   a state that does not add up, or is malformed in any way, is a `StateError` before a word of it is
# believed.


FORMAT = 1
KEYS = {"format", "max_reads", "version", "done", "put", "reads", "fates", "waiting"}
FATES = ("used", "wasted", "filtered", "failed")

Put = Literal["kept", "full"]
"""What became of a group that was brought: taken in; or there is no room, and it is still the caller's."""

Fate = Literal["used", "filtered", "failed"]
"""What became of a group in hand: trained on; sorted out, as one without contrast is; refused, or its step was."""


class BufferedGroup(NamedTuple):
    """A group, the visit to a task that it belongs to, and how often it may still be trained on."""

    item: Visit
    version: int
    """The oldest weights that sampled a token of it."""
    reads_remaining: int
    group: Group
    read: int = 0
    """How often it was trained on before; the ledger hears `trained` of a first read only."""


@dataclass(frozen=True, slots=True)
class StaleGroups:
    """What became too old and has left the buffer. Empty is false."""

    back: tuple[Visit, ...] = ()
    """Never trained on: `ledger.requeue(aged.back, "stale")` puts them to the front of the queue, in this order."""
    spent: tuple[Visit, ...] = ()
    """Trained on before, and too old for another read: they count as used, nothing is to be done."""

    def __bool__(self) -> bool:
        return bool(self.back or self.spent)

    @classmethod
    def of(cls, entries: Iterable[BufferedGroup]) -> StaleGroups:
        """These entries, by whether anybody trained on them."""
        named = list(entries)
        return cls(tuple(w.item for w in named if not w.read), tuple(w.item for w in named if w.read))


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """What `take` gives: a batch or none, and in both cases what had to leave."""

    batch: tuple[BufferedGroup, ...]
    """Exactly as many as were asked for; fewer only if `partial`; none when there are not enough yet."""
    aged: StaleGroups
    version: int
    """The trainer's version that the batch was looked at with."""
    partial: bool = False
    """Fewer than asked for, because no more will come: the end of an epoch. To be trained on like any other."""

    @property
    def mean_age(self) -> float | None:
        """Versions between sampling and now, on average; None for no batch."""
        return sum(self.version - w.version for w in self.batch) / len(self.batch) if self.batch else None


@dataclass(frozen=True, slots=True)
class BufferCounts:
    """What became of everything that was put in this epoch, in groups.

    Example:
        >>> BufferCounts(put=5, used=2, wasted=1, waiting=2).lost
        0
    """

    put: int = 0
    used: int = 0
    """Trained on at least once, and gone."""
    wasted: int = 0
    """Became too old before anybody trained on them."""
    filtered: int = 0
    failed: int = 0
    waiting: int = 0
    in_hand: int = 0
    reads: int = 0
    """How often a group was trained on; with `max_reads` = 1 the same as used."""
    unread: int = 0
    """Of those that are left: nobody has trained on them yet."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Groups that are left, by the version that sampled them."""

    @property
    def left(self) -> int:
        """Still here: waiting or in hand."""
        return self.waiting + self.in_hand

    @property
    def lost(self) -> int:
        """Put, and nowhere; negative when something is counted twice. Zero, or something is broken."""
        return self.put - self.used - self.wasted - self.filtered - self.failed - self.left


def all_is_in(balance: Balance, tally: BufferCounts) -> bool:
    """Whether nothing more can come: no item waits to be played, none is being played, none is on its way in.

    Delivered items that are here or in the consumer's hand do not count: who waits for those too waits for ever.
    """
    return balance.pending == 0 and balance.leased == balance.delivered == tally.unread


class BufferState(NamedTuple):
    """A buffer's state as it is read back."""

    version: int
    done: bool
    put: int
    reads: int
    fates: dict[str, int]
    waiting: list[BufferedGroup]


def buffered_row(entry: BufferedGroup) -> list[Any]:
    """One entry as JSON."""
    return [list(entry.item), entry.version, entry.reads_remaining, group_record(entry.group)]


def read_state(state: Any, tasks: Mapping[str, Task], max_reads: int) -> BufferState:
    """Back from `GroupBuffer.state_dict`; anything else is a `StateError`."""
    if not isinstance(state, Mapping) or set(state) != KEYS or state["format"] != FORMAT:
        raise refused(f"its keys are not those of format {FORMAT}")
    if state["max_reads"] != max_reads:
        raise refused(f"max_reads was {state['max_reads']!r} and is {max_reads}")
    try:
        saved = BufferState(
            count(state["version"]), state["done"], count(state["put"]), count(state["reads"]),
            {fate: count(number) for fate, number in state["fates"].items()},
            [_read_row(row, tasks, max_reads) for row in state["waiting"]],
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, StateError, InvariantError) as error:
        raise refused(f"{type(error).__name__}: {error}") from error
    if set(saved.fates) != set(FATES) or not isinstance(saved.done, bool):
        raise refused(f"fates {list(saved.fates)}, done {saved.done!r}")
    _require_sums(saved, max_reads)
    return saved


def _read_row(row: Any, tasks: Mapping[str, Task], max_reads: int) -> BufferedGroup:
    words, version, remaining, record = row
    item, group = read_visit(words), read_group(record, tasks)
    require_own_group(item, version, group)
    if not 1 <= count(remaining) <= max_reads:
        raise ValueError(f"{item} has {remaining} reads left of {max_reads}")
    return BufferedGroup(item, version, remaining, group, max_reads - remaining)


def _require_sums(saved: BufferState, max_reads: int) -> None:
    gone, left = sum(saved.fates.values()), len(saved.waiting)
    if len({w.item for w in saved.waiting}) != left:
        raise refused("an item comes twice")
    if saved.put != gone + left:
        raise refused(f"{saved.put} put, {gone} gone and {left} left")
    reads_of_gone = saved.reads - sum(w.read for w in saved.waiting)
    if not saved.fates["used"] <= reads_of_gone <= saved.fates["used"] * max_reads:
        raise refused(f"{saved.reads} reads of {saved.fates['used']} used groups and {left} left")


def require_own_group(item: Visit, version: int, group: Group) -> None:
    """Refuse a group under another item's name, or under a newer version than its own tokens say."""
    require_whole("version", version, 0)
    if item.task != group.task.id:
        raise broken(f"{item} was put with a group of {group.task.id}")
    oldest = min((turn.version for rollout in group.rollouts for turn in rollout.turns), default=version)
    if version > oldest:
        raise broken(f"{item} was put under version {version}, and holds tokens of version {oldest}")


def require_whole(name: str, value: int, least: int) -> None:
    """Refuse what is no whole number from `least` on."""
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name} is {value!r}", "the buffer counts groups, versions and reads", f"a whole number from {least} on"
        )


def require_wait(wait_s: float) -> float:
    """Refuse a wait that has no end."""
    if not 0 <= wait_s < math.inf:
        raise ConfigError(f"wait_s is {wait_s}", "every wait has an end", "seconds, from 0 (do not wait) on")
    return wait_s


def broken(what: str) -> InvariantError:
    """The buffer is used in a way that would lose or repeat work."""
    return InvariantError(what, "a group would be lost, or trained on twice or too late", "this is a bug of the caller")


def refused(why: str) -> StateError:
    """A state is not one of this buffer."""
    return StateError(
        f"the buffer's state cannot be read: {why}"[:600], "groups would be lost, or trained on twice",
        "use the state, the weights and the settings of one checkpoint",
    )  # fmt: skip


def stalled(what: str, tally: BufferCounts, max_size: int, version: int) -> StalledError:
    """A wait has come to its end."""
    return StalledError(
        f"waited in vain for {what}: {tally.waiting} wait, {tally.in_hand} are in hand, max_size is {max_size}, the "
        f"trainer is at version {version}",
        "the other side of the buffer has stopped, or is slower than it was given time for",
        "look at what it does; mark_done says that no more will come, settle makes room",
    )


# -- Where scored groups wait between sampling and training ---------------------------------------


_SLICE_S = 3600.0  # the longest single sleep of a wait: no platform's lock refuses it


class GroupBuffer:
    """The queue between those who sample and the one who trains.

    Args:
        max_size: groups that may be here at once, waiting or in hand; at least the size of a batch, and twice that
            for sampling to go on while a batch is trained on.
        max_staleness: versions that may lie between sampling and training; 0 trains on the newest weights' work only.
        max_reads: how often one group may be trained on; 1 in every run.
        oldest_version_first: a batch takes the oldest weights' work first, whenever it came; else first come, first
            taken. With it a slow group is not overtaken by quicker ones until it is too old.

    Example:
        >>> from surefoot.records import Rollout, Turn
        >>> task = Task(id="sums/1+1", prompt="1+1=")
        >>> group = Group(task, "0", (Rollout(task.id, "0", 0, (Turn((1, 5), (9, 2), (-0.1, -0.2), 3),), 1.0),))
        >>> buffer = GroupBuffer(max_size=4, max_staleness=1)
        >>> buffer.put(Visit("sums/1+1", 0), 3, group)
        'kept'
        >>> buffer.take(1, version=5).aged.back  # two versions old: it goes back to the queue
        (Visit(task='sums/1+1', occurrence=0),)
    """

    def __init__(
        self, *, max_size: int, max_staleness: int, max_reads: int = 1, oldest_version_first: bool = False
    ) -> None:
        require_whole("max_size", max_size, 1)
        require_whole("max_staleness", max_staleness, 0)
        require_whole("max_reads", max_reads, 1)
        self.max_size, self.max_staleness, self.max_reads = max_size, max_staleness, max_reads
        self.oldest_version_first = oldest_version_first
        self._changed = threading.Condition()
        self._waiting: OrderedDict[Visit, BufferedGroup] = OrderedDict()
        self._hand: OrderedDict[Visit, BufferedGroup] = OrderedDict()
        self._version = 0
        self._begin()

    def _begin(self) -> None:
        """Everything that is counted per epoch, at nothing."""
        self._done, self._put, self._reads = False, 0, 0
        self._fates: Counter[str] = Counter()

    # -- producers ------------------------------------------------------------------

    def put(self, item: Visit, version: int, group: Group, *, wait_s: float = 0.0) -> Put:
        """Bring one scored group; with `wait_s`, wait that long for room, then raise a `StalledError`.

        Args:
            version: the oldest weights that took part; newer than the group's own tokens say is refused.
        """
        require_own_group(item, version, group)
        deadline = time.monotonic() + require_wait(wait_s)
        with self._changed:
            while True:
                self._refuse_put(item)
                if len(self._waiting) + len(self._hand) < self.max_size:
                    break
                if not wait_s:
                    return "full"
                self._wait(deadline, f"room for {item}")
            self._waiting[item] = BufferedGroup(item, version, self.max_reads, group)
            self._put += 1
            self._changed.notify_all()
        return "kept"

    def mark_done(self) -> None:
        """No more will come in this epoch; a group that ages after this takes it back, for it will be played again.

        No run calls this.
        """
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def end_if_all_is_in(self, balance: Balance) -> bool:
        """`mark_done` if the ledger and the buffer agree that nothing more can come; no run calls this.

        Nobody may change the ledger between `balance()` and the return of this: hold its lock around both. Nothing
        ages in between either, which is why this is not left to the caller.
        """
        with self._changed:
            if ended := all_is_in(balance, self._tally()):
                self.mark_done()
            return ended

    # -- the consumer ---------------------------------------------------------------

    def take(self, n: int, version: int, *, wait_s: float = 0.0) -> BufferedBatch | None:
        """The `n` oldest groups that are fresh enough, or none of them; None at the end of the epoch.

        It returns as soon as something has aged, with or without a batch: the item has to go back to the queue before
        anybody can bring it again. With `wait_s` it waits that long for enough, then raises a `StalledError`.
        """
        require_whole("n", n, 1)
        deadline = time.monotonic() + require_wait(wait_s)
        with self._changed:
            self._refuse_take(n)
            self._advance(version)
            while True:
                aged = self._evict(self._waiting)  # after every wait: the version moves while the batch fills
                enough = len(self._waiting) >= n
                if enough or self._done or aged or not wait_s:
                    return self._form(n, enough, aged)
                self._wait(deadline, f"{n} groups")

    def evict(self, version: int) -> StaleGroups:
        """Let go of groups that are too old by now, without taking any."""
        with self._changed:
            self._advance(version)
            return self._evict(self._waiting)

    def recheck(self, version: int) -> StaleGroups:
        """Look at the groups in hand once more, when their batch goes to the learner; what aged is no longer in hand.

        No run calls this: there `guards.invariants.check_fresh` refuses what is too old.
        Call it whenever the version may have moved since `take`: before each step, when one take feeds several.
        """
        with self._changed:
            self._advance(version)
            return self._evict(self._hand)

    def settle(self, items: Iterable[Visit], fate: Fate) -> None:
        """Say what became of groups in hand. One that was used and may be read again goes to the end of the queue."""
        named = tuple(items)
        if fate not in get_args(Fate):
            raise ConfigError(f"no fate is called {fate!r}", "it would be counted nowhere", f"one of {get_args(Fate)}")
        with self._changed:
            strange = [str(item) for item, times in Counter(named).items() if times > 1 or item not in self._hand]
            if strange:
                raise broken(f"cannot settle {', '.join(strange[:5])}: not in hand, or named twice")
            for item in named:
                self._settle(self._hand.pop(item), fate)
            self._changed.notify_all()

    def advance(self, version: int) -> None:
        """The trainer has a new version; for a trainer that does not itself take."""
        with self._changed:
            self._advance(version)
            self._changed.notify_all()

    def new_epoch(self) -> tuple[BufferCounts, StaleGroups]:
        """Begin again from nothing: the former epoch's tally, and what was left waiting, which is the caller's now.

        No run calls this.
        """
        with self._changed:
            if self._hand:
                raise broken(f"a new epoch with {len(self._hand)} groups in hand: they would count in the wrong one")
            tally, left = self._tally(), StaleGroups.of(self._waiting.values())
            self._waiting.clear()
            self._begin()
            self._changed.notify_all()
        return tally, left

    # -- questions ------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The newest version of the trainer that the buffer was told of."""
        return self._version

    def items(self) -> list[Visit]:
        """Whose groups are here, waiting or in hand."""
        with self._changed:
            return [*self._waiting, *self._hand]

    def tally(self) -> BufferCounts:
        """What became of everything so far in this epoch; raises an `InvariantError` unless it adds up."""
        with self._changed:
            tally = self._tally()
        if tally.lost:
            raise broken(f"{tally} does not add up: {tally.lost} lost")
        return tally

    # -- as data --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything as JSON data. What is in hand is not settled, so it waits again, in front, when this is loaded.

        No run calls this: the journal keeps groups.
        """
        with self._changed:
            entries = (*self._hand.values(), *self._waiting.values())
            counts = {
                "format": FORMAT, "max_reads": self.max_reads, "version": self._version, "done": self._done,
                "put": self._put, "reads": self._reads, "fates": {fate: self._fates[fate] for fate in FATES},
            }  # fmt: skip
        return counts | {"waiting": [buffered_row(w) for w in entries]}  # long, so without the lock: they never change

    def load_state_dict(self, state: Mapping[str, Any], tasks: Mapping[str, Task], version: int) -> StaleGroups:
        """Go on from `state_dict`; what is too old for `version` is returned. Anything odd is a `StateError`.

        No run calls this.
        More groups than `max_size` are all kept: there is no room for new ones until they are trained on.
        """
        with self._changed:
            if self._put or self._waiting or self._hand:
                raise broken("cannot load a state into a buffer that is in use")
            require_whole("version", version, 0)
            loaded = read_state(state, tasks, self.max_reads)
            if version < loaded.version:
                raise refused(f"it has seen version {loaded.version}, and the weights are of version {version}")
            self._waiting.update((w.item, w) for w in loaded.waiting)
            self._done, self._put, self._reads = loaded.done, loaded.put, loaded.reads
            self._fates = Counter(loaded.fates)
            self._version = version
            self._changed.notify_all()
            return self._evict(self._waiting)

    # -- how; the lock is held ------------------------------------------------------

    def _refuse_put(self, item: Visit) -> None:
        if self._done:
            raise broken(f"{item} was put after mark_done")
        if item in self._waiting or item in self._hand:
            raise broken(f"{item} is here already")

    def _refuse_take(self, n: int) -> None:
        """More than can ever be here at once is refused now, not when the wait has ended."""
        if n + len(self._hand) > self.max_size:
            raise broken(f"max_size is {self.max_size}: with {len(self._hand)} in hand, {n} more can never be here")

    def _advance(self, version: int) -> None:
        """An older version than the newest is old news, not a step back."""
        require_whole("version", version, 0)
        self._version = max(self._version, version)

    def _evict(self, where: OrderedDict[Visit, BufferedGroup]) -> StaleGroups:
        oldest = self._version - self.max_staleness
        aged = StaleGroups.of(w for w in where.values() if w.version < oldest)
        for item in (*aged.back, *aged.spent):
            del where[item]
        self._fates["wasted"] += len(aged.back)
        self._fates["used"] += len(aged.spent)
        self._done = self._done and not aged.back  # they will be played again, so more will come
        if aged:
            self._changed.notify_all()
        return aged

    def _form(self, n: int, enough: bool, aged: StaleGroups) -> BufferedBatch | None:
        size = n if enough else len(self._waiting) if self._done else 0
        batch = tuple(self._waiting.pop(item) for item in self._queue()[:size])
        self._hand.update((w.item, w) for w in batch)
        if self._done and not batch and not aged:
            if any(w.reads_remaining > 1 for w in self._hand.values()):
                raise broken(f"the last {len(self._hand)} groups are in hand and may be read again: settle them first")
            return None
        return BufferedBatch(batch, aged, self._version, partial=0 < size < n)

    def _queue(self) -> list[Visit]:
        """Who is next, and next after that."""
        if not self.oldest_version_first:
            return list(self._waiting)
        return sorted(self._waiting, key=lambda item: self._waiting[item].version)

    def _settle(self, entry: BufferedGroup, fate: Fate) -> None:
        used = fate == "used"
        self._reads += used
        if used and entry.reads_remaining > 1:
            left = entry.reads_remaining - 1
            self._waiting[entry.item] = entry._replace(reads_remaining=left, read=entry.read + 1)
        else:
            self._fates["used" if entry.read else fate] += 1

    def _tally(self) -> BufferCounts:
        left = [*self._waiting.values(), *self._hand.values()]
        fates = {fate: self._fates[fate] for fate in FATES}
        versions = dict(sorted(Counter(w.version for w in left).items()))
        return BufferCounts(
            put=self._put, **fates, waiting=len(self._waiting), in_hand=len(self._hand), reads=self._reads,
            unread=sum(not w.read for w in left), versions=versions,
        )  # fmt: skip

    def _wait(self, deadline: float, what: str) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise stalled(what, self._tally(), self.max_size, self._version)
        self._changed.wait(min(left, _SLICE_S))


__all__ = ["BufferCounts", "BufferedBatch", "BufferedGroup", "Fate", "GroupBuffer", "Put", "StaleGroups", "all_is_in"]
