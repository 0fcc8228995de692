"""The nouns of the ledger: items, leases, what an item can be, what can happen to it.

Everything here is plain data with one JSON form, so that a journal can tell it again and a snapshot can keep it.

Read next: `ledger.py`, what may happen when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as repr_of
from typing import Any, Literal, NamedTuple, get_args

from surefoot.errors import StateError

EventKind = Literal["open", "plan", "lease", "renew", "complete", "fenced", "requeue", "train", "drop", "rewind"]
KINDS: tuple[str, ...] = get_args(EventKind)
PREFIX = "ledger."
"""How the `event` of a journal record begins when it is one of ours; all other records are somebody else's."""


class Visit(NamedTuple):
    """One visit to a task: the task's id, and the how-manieth visit it is, from 0.

    Example:
        >>> str(Item("sums/1+1", 2))
        'sums/1+1#2'
    """

    task: str
    occurrence: int

    def __str__(self) -> str:
        return f"{self.task}#{self.occurrence}"


class LeaseToken(NamedTuple):
    """When a lease was given: by which driver (counted from 1), as its how-manieth. Later ones compare greater."""

    driver: int
    serial: int

    def __str__(self) -> str:
        return f"{self.driver}.{self.serial}"


NEVER = LeaseToken(0, 0)


class Lease(NamedTuple):
    """The right to work on an item until a moment of the driver's clock (None: no deadline). Travels to the holder."""

    item: Visit
    epoch: LeaseToken
    place: int
    """Position among the items that were leased at once."""
    holder: str
    until: float | None


class Pending(NamedTuple):
    """Waits in the queue."""


class Leased(NamedTuple):
    """Somebody works on it; once delivered, its result waits here to be trained on, and the lease never expires."""

    lease: Lease
    delivered: bool = False


class Trained(NamedTuple):
    """Part of the weights since this step."""

    step: int
    place: int


class Dropped(NamedTuple):
    """Will not be trained on."""

    reason: str


Status = Pending | Leased | Trained | Dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened. Which fields count depends on the kind; the others keep their defaults.

    Example:
        >>> Event(kind="drop", items=(Item("a", 0),), reason="stale").record()
        {'event': 'ledger.drop', 'items': [['a', 0]], 'reason': 'stale'}
    """

    kind: EventKind
    items: tuple[Visit, ...] = ()
    epoch: LeaseToken = NEVER
    holder: str = ""
    until: float | None = None
    step: int = 0
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """As the journal keeps it: fields at their default are left out."""
        shown = {
            "items": [list(item) for item in self.items], "epoch": list(self.epoch), "holder": self.holder,
            "until": self.until, "step": self.step, "reason": self.reason,
        }  # fmt: skip
        empty: dict[str, Any] = {"items": [], "epoch": [0, 0], "holder": "", "until": None, "step": 0, "reason": ""}
        return {"event": PREFIX + self.kind} | {name: v for name, v in shown.items() if v != empty[name]}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Event | None:
        """Back from a journal record; None for somebody else's, a `StateError` for one that is no event of ours."""
        word = record.get("event")
        if not isinstance(word, str) or not word.startswith(PREFIX):
            return None
        kind = word.removeprefix(PREFIX)
        unknown = set(record) - {"event", "items", "epoch", "holder", "until", "step", "reason"}
        if kind not in KINDS or unknown:
            raise _refusal(f"an event {word[:60]!r}, or a field of it ({', '.join(sorted(unknown))[:60] or 'none'}),")
        return cls(
            kind=kind,  # type: ignore[arg-type]  # one of KINDS
            items=tuple(read_visit(row) for row in _sequence(record.get("items", []))),
            epoch=read_lease_token(record.get("epoch", [0, 0])), holder=read_text(record.get("holder", "")),
            until=read_moment(record.get("until")), step=count(record.get("step", 0)),
            reason=read_text(record.get("reason", "")),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Balance:
    """Where everything that was planned is now. `leased` counts delivered ones too.

    Example:
        >>> print(Balance(planned=5, pending=1, leased=1, delivered=1, trained=2, dropped={"stale": 1}))
        5 planned = 1 pending + 1 leased (1 delivered) + 2 trained + 1 dropped (stale 1)
    """

    planned: int
    pending: int
    leased: int
    delivered: int
    trained: int
    dropped: Mapping[str, int]
    fenced: Mapping[str, int] = field(default_factory=dict)
    """Results that came under a lease which was no longer, or not, the item's own: by reason."""
    requeued: Mapping[str, int] = field(default_factory=dict)
    """How often an item went back to the front of the queue: by reason."""

    @property
    def lost(self) -> int:
        """Planned, and nowhere; negative when something is counted twice. Zero, or something is broken."""
        return self.planned - self.pending - self.leased - self.trained - sum(self.dropped.values())

    def __str__(self) -> str:
        total = sum(self.dropped.values())
        reasons = f" ({', '.join(f'{k} {n}' for k, n in sorted(self.dropped.items()))})" if total else ""
        kinds = f"{self.pending} pending + {self.leased} leased ({self.delivered} delivered) + {self.trained} trained"
        lost = f"; {self.lost} LOST" if self.lost else ""
        return f"{self.planned} planned = {kinds} + {total} dropped{reasons}{lost}"


def status_row(status: Status) -> list[Any]:
    """One status as JSON."""
    if isinstance(status, Leased):
        lease = status.lease
        return ["leased", list(lease.epoch), lease.place, lease.holder, lease.until, status.delivered]
    if isinstance(status, Trained | Dropped):
        return [type(status).__name__.lower(), *status]
    return ["pending"]


def read_status(item: Visit, row: object) -> Status:
    """Back from `status_row`; anything else is a `StateError`."""
    match row:
        case ["pending"]:
            return Pending()
        case ["leased", epoch, place, holder, until, bool(delivered)]:
            lease = Lease(item, read_lease_token(epoch), count(place), read_text(holder), read_moment(until))
            return Leased(lease, delivered)
        case ["trained", step, place]:
            return Trained(count(step), count(place))
        case ["dropped", str(reason)]:
            return Dropped(reason)
        case _:
            raise _refusal(f"a status {repr_of(row)}")


def read_visit(row: object) -> Visit:
    """Back from JSON."""
    match row:
        case [str(task), occurrence]:
            return Visit(task, count(occurrence))
        case _:
            raise _refusal(f"an item {repr_of(row)}")


def read_lease_token(row: object) -> LeaseToken:
    """Back from JSON."""
    match row:
        case [driver, serial]:
            return LeaseToken(count(driver), count(serial))
        case _:
            raise _refusal(f"a lease epoch {repr_of(row)}")


def read_moment(value: object) -> float | None:
    """A finite moment, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _refusal(f"a moment {repr_of(value)}")
    return float(value)


def count(value: object) -> int:
    """A whole number from 0 on."""
    if type(value) is not int or value < 0:
        raise _refusal(f"a count {repr_of(value)}")
    return value


def read_text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise _refusal(f"a text {repr_of(value)}")
    return value


def _sequence(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise _refusal(f"a list {repr_of(value)}")
    return value


def _refusal(what: str) -> StateError:
    return StateError(
        f"the ledger holds {what}, which it cannot", "it was written by another version, or by something else",
        "use the version that wrote it",
    )  # fmt: skip
