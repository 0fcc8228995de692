"""The nouns of the buffer, and their form as JSON data.

Promises   a state that does not add up, or is malformed in any way, is a `StateError` before a word of it is believed.

Read next: `buffer.py`, which moves these about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from surefoot.errors import ConfigError, InvariantError, StalledError, StateError
from surefoot.records import Group, Task
from surefoot.store.group_records import group_record, read_group
from surefoot.store.ledger_records import Balance, Item, count, read_item

FORMAT = 1
KEYS = {"format", "max_reads", "version", "done", "put", "reads", "fates", "waiting"}
FATES = ("used", "wasted", "filtered", "failed")

Put = Literal["kept", "full"]
"""What became of a group that was brought: taken in; or there is no room, and it is still the caller's."""

Fate = Literal["used", "filtered", "failed"]
"""What became of a group in hand: trained on; sorted out, as one without contrast is; refused, or its step was."""


class Waiting(NamedTuple):
    """A group, the visit to a task that it belongs to, and how often it may still be trained on."""

    item: Item
    version: int
    """The oldest weights that sampled a token of it."""
    reads_remaining: int
    group: Group
    read: int = 0
    """How often it was trained on before; the ledger hears `trained` of a first read only."""


@dataclass(frozen=True, slots=True)
class Aged:
    """What became too old and has left the buffer. Empty is false."""

    back: tuple[Item, ...] = ()
    """Never trained on: `ledger.requeue(aged.back, "stale")` puts them to the front of the queue, in this order."""
    spent: tuple[Item, ...] = ()
    """Trained on before, and too old for another read: they count as used, nothing is to be done."""

    def __bool__(self) -> bool:
        return bool(self.back or self.spent)

    @classmethod
    def of(cls, entries: Iterable[Waiting]) -> Aged:
        """These entries, by whether anybody trained on them."""
        named = list(entries)
        return cls(tuple(w.item for w in named if not w.read), tuple(w.item for w in named if w.read))


@dataclass(frozen=True, slots=True)
class Taken:
    """What `take` gives: a batch or none, and in both cases what had to leave."""

    batch: tuple[Waiting, ...]
    """Exactly as many as were asked for; fewer only if `partial`; none when there are not enough yet."""
    aged: Aged
    version: int
    """The trainer's version that the batch was looked at with."""
    partial: bool = False
    """Fewer than asked for, because no more will come: the end of an epoch. To be trained on like any other."""

    @property
    def mean_age(self) -> float | None:
        """Versions between sampling and now, on average; None for no batch."""
        return sum(self.version - w.version for w in self.batch) / len(self.batch) if self.batch else None


@dataclass(frozen=True, slots=True)
class Tally:
    """What became of everything that was put in this epoch, in groups.

    Example:
        >>> Tally(put=5, used=2, wasted=1, waiting=2).lost
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


def all_is_in(balance: Balance, tally: Tally) -> bool:
    """Whether nothing more can come: no item waits to be played, none is being played, none is on its way in.

    Delivered items that are here or in the consumer's hand do not count: who waits for those too waits for ever.
    """
    return balance.pending == 0 and balance.leased == balance.delivered == tally.unread


class Saved(NamedTuple):
    """A buffer's state as it is read back."""

    version: int
    done: bool
    put: int
    reads: int
    fates: dict[str, int]
    waiting: list[Waiting]


def waiting_row(entry: Waiting) -> list[Any]:
    """One entry as JSON."""
    return [list(entry.item), entry.version, entry.reads_remaining, group_record(entry.group)]


def read_state(state: Any, tasks: Mapping[str, Task], max_reads: int) -> Saved:
    """Back from `GroupBuffer.state_dict`; anything else is a `StateError`."""
    if not isinstance(state, Mapping) or set(state) != KEYS or state["format"] != FORMAT:
        raise refused(f"its keys are not those of format {FORMAT}")
    if state["max_reads"] != max_reads:
        raise refused(f"max_reads was {state['max_reads']!r} and is {max_reads}")
    try:
        saved = Saved(
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


def _read_row(row: Any, tasks: Mapping[str, Task], max_reads: int) -> Waiting:
    words, version, remaining, record = row
    item, group = read_item(words), read_group(record, tasks)
    require_own_group(item, version, group)
    if not 1 <= count(remaining) <= max_reads:
        raise ValueError(f"{item} has {remaining} reads left of {max_reads}")
    return Waiting(item, version, remaining, group, max_reads - remaining)


def _require_sums(saved: Saved, max_reads: int) -> None:
    gone, left = sum(saved.fates.values()), len(saved.waiting)
    if len({w.item for w in saved.waiting}) != left:
        raise refused("an item comes twice")
    if saved.put != gone + left:
        raise refused(f"{saved.put} put, {gone} gone and {left} left")
    reads_of_gone = saved.reads - sum(w.read for w in saved.waiting)
    if not saved.fates["used"] <= reads_of_gone <= saved.fates["used"] * max_reads:
        raise refused(f"{saved.reads} reads of {saved.fates['used']} used groups and {left} left")


def require_own_group(item: Item, version: int, group: Group) -> None:
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


def stalled(what: str, tally: Tally, max_size: int, version: int) -> StalledError:
    """A wait has come to its end."""
    return StalledError(
        f"waited in vain for {what}: {tally.waiting} wait, {tally.in_hand} are in hand, max_size is {max_size}, the "
        f"trainer is at version {version}",
        "the other side of the buffer has stopped, or is slower than it was given time for",
        "look at what it does; mark_done says that no more will come, settle makes room",
    )
