"""The account of a run: every visit to a task is pending, leased, trained or dropped(reason). Exactly one, always.

Owns       the events `ledger.*` of a journal, and what they add up to.
Promises   an event is in the journal before it counts; replaying the journal, or a snapshot and the rest of it, gives
           the same ledger bit for bit; a result under an old lease is refused and counted; the numbers add up.
Never      trains an item twice, forgets one, believes a late result, or reads a clock.

    plan --> pending --lease--> leased --complete--> leased, delivered --trained(step)--> trained
                ^                 |                        |
                +--- requeue, expire, a new driver --------+------- drop(reason) -------> dropped
"""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as repr_of
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from surefoot.errors import InvariantError, StateError
from surefoot.storage.files import Journal, failpoint
from surefoot.system.files import sha256_of

# -- The nouns: visits, leases, what a visit can be, what can happen to it -------------------------
# All of it is plain data with one JSON form, so that a journal can tell it again and a snapshot can keep it.


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
    """The right to work on an item until a moment of the driver's clock (None: no deadline). Travels to the holder.

    It is what the item then is. Once delivered, its result waits to be trained on, and the lease never expires.
    """

    item: Visit
    epoch: LeaseToken
    place: int
    """Position among the items that were leased at once."""
    holder: str
    until: float | None
    delivered: bool = False


class Pending(NamedTuple):
    """Waits in the queue."""


class Trained(NamedTuple):
    """Part of the weights since this step."""

    step: int
    place: int


class Dropped(NamedTuple):
    """Will not be trained on."""

    reason: str


Status = Pending | Lease | Trained | Dropped


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
    if isinstance(status, Lease):
        return ["leased", list(status.epoch), status.place, status.holder, status.until, status.delivered]
    if isinstance(status, Trained | Dropped):
        return [type(status).__name__.lower(), *status]
    return ["pending"]


def read_status(item: Visit, row: object) -> Status:
    """Back from `status_row`; anything else is a `StateError`."""
    match row:
        case ["pending"]:
            return Pending()
        case ["leased", epoch, place, holder, until, bool(delivered)]:
            token = read_lease_token(epoch)
            return Lease(item, token, count(place), read_text(holder), read_moment(until), delivered)
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


# -- What the ledger knows at one moment, and which events may follow -----------------------------
# Owns       every planned item's status, and the order of the queue.
# Promises   `refuse` raises and changes nothing; `apply` does what the event says, the same way every time, so that the
# same events give the same state bit for bit. Returned items go to the front of the queue, oldest lease first.
# Never      reads a clock, a file or a random number.


FORMAT = 1
KEYS = {"format", "epoch", "step", "planned", "items", "queue", "fenced", "requeued"}


@dataclass(slots=True)
class LedgerState:
    """Every item exactly once; the queue and the list of leases are kept beside it to be fast, and `check`ed."""

    items: dict[Visit, Status] = field(default_factory=dict)
    queue: OrderedDict[Visit, None] = field(default_factory=OrderedDict)
    leased: dict[Visit, None] = field(default_factory=dict)
    epoch: LeaseToken = NEVER
    step: int = 0
    planned: int = 0
    fenced: Counter[str] = field(default_factory=Counter)
    requeued: Counter[str] = field(default_factory=Counter)

    # -- what may happen ------------------------------------------------------------

    def refuse(self, event: Event) -> None:
        """Raise an `InvariantError` that names the items, unless the event may happen now."""
        if twice := [item for item, n in Counter(event.items).items() if n > 1]:
            _broken(f"cannot {event.kind}", twice, "named twice in one event")
        match event.kind:
            case "plan":
                self._require(event, "already planned", lambda item: item not in self.items)
            case "lease":
                self._require(event, "not pending", lambda item: isinstance(self.items.get(item), Pending))
                if event.epoch != LeaseToken(self.epoch.driver, self.epoch.serial + 1) or not self.epoch.driver:
                    _broken(f"cannot lease in epoch {event.epoch}", event.items, f"the last one was {self.epoch}")
            case "renew" | "complete":
                self._require(event, "not leased, or delivered already", lambda item: self._is_leased(item, False))
            case "requeue":
                self._require(event, "not leased", self._is_leased)
            case "train":
                self._require(event, "not leased and delivered", lambda item: self._is_leased(item, True))
                if event.step <= self.step:
                    _broken(f"cannot train step {event.step}", event.items, f"step {self.step} is done already")
            case "drop":
                self._require(event, "not open", lambda item: isinstance(self.items.get(item), Pending | Lease))
            case "rewind":
                if event.step > self.step:
                    _broken(f"cannot rewind to step {event.step}", (), f"the last one was {self.step}")
        if event.kind in ("drop", "requeue", "fenced") and not event.reason.strip():
            _broken(f"cannot {event.kind}", event.items, "no reason is given")

    def _require(self, event: Event, what: str, holds: Any) -> None:
        if wrong := [item for item in event.items if not holds(item)]:
            _broken(f"cannot {event.kind}", wrong, what, self.items)

    def _is_leased(self, item: Visit, delivered: bool | None = None) -> bool:
        status = self.items.get(item)
        return isinstance(status, Lease) and delivered in (None, status.delivered)

    # -- what then is ---------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Make it so. The event has passed `refuse`."""
        match event.kind:
            case "open":
                self.epoch = LeaseToken(self.epoch.driver + 1, 0)
                self._return(self.undelivered(), "restart")
            case "plan":
                self.planned += len(event.items)
                self.items.update(dict.fromkeys(event.items, Pending()))
                self.queue.update(dict.fromkeys(event.items))
            case "lease":
                self._lease(event)
            case "renew" | "complete":
                self._change_leases(event)
            case "fenced":
                self.fenced[event.reason] += len(event.items)
            case "requeue":
                self._return(event.items, event.reason)
            case "train":
                self.step = event.step
                self._finish({item: Trained(event.step, place) for place, item in enumerate(event.items)})
            case "drop":
                self._finish(dict.fromkeys(event.items, Dropped(event.reason)))
            case "rewind":
                self._return(self.trained_after(event.step), "rewind")
                self.step = event.step

    def _lease(self, event: Event) -> None:
        self.epoch = event.epoch
        for place, item in enumerate(event.items):
            self.items[item] = Lease(item, event.epoch, place, event.holder, event.until)
            self.leased[item] = None
            del self.queue[item]

    def _change_leases(self, event: Event) -> None:
        for item in event.items:
            lease = self.items[item]
            assert isinstance(lease, Lease), "refuse() has looked"
            renew = event.kind == "renew"
            self.items[item] = lease._replace(until=event.until) if renew else lease._replace(delivered=True)

    def _return(self, items: Iterable[Visit], reason: str) -> None:
        """To the front of the queue: the first of `items` will be the first to go out again."""
        returned = list(items)
        for item in reversed(returned):
            self.items[item] = Pending()
            self.leased.pop(item, None)
            self.queue[item] = None
            self.queue.move_to_end(item, last=False)
        if returned:
            self.requeued[reason] += len(returned)

    def _finish(self, statuses: Mapping[Visit, Status]) -> None:
        for item, status in statuses.items():
            self.items[item] = status
            self.leased.pop(item, None)
            self.queue.pop(item, None)

    # -- questions ------------------------------------------------------------------

    def undelivered(self) -> list[Visit]:
        """Items that somebody still works on, oldest lease first."""
        return [lease.item for lease in self.leases(delivered=False)]

    def leases(self, *, delivered: bool) -> list[Lease]:
        """Leases in the order in which they were given."""
        found = [self.items[item] for item in self.leased]
        wanted = [status for status in found if isinstance(status, Lease) and status.delivered == delivered]
        return sorted(wanted, key=lambda lease: (lease.epoch, lease.place))

    def trained_after(self, step: int) -> list[Visit]:
        """Items trained in later steps, in the order of training."""
        found = [(status, item) for item, status in self.items.items() if isinstance(status, Trained)]
        return [item for status, item in sorted(found) if status.step > step]

    def balance(self) -> Balance:
        """Where everything is, counted afresh."""
        kinds = Counter(type(status) for status in self.items.values())
        dropped = Counter(status.reason for status in self.items.values() if isinstance(status, Dropped))
        delivered = len(self.leases(delivered=True))
        return Balance(
            self.planned, kinds[Pending], kinds[Lease], delivered, kinds[Trained], dict(sorted(dropped.items())),
            dict(sorted(self.fenced.items())), dict(sorted(self.requeued.items())),
        )  # fmt: skip

    def check(self) -> None:
        """Raise an `InvariantError` that names the items unless everything adds up."""
        if self.planned != len(self.items):
            _broken("the ledger does not add up", (), f"{self.planned} planned, {len(self.items)} known")
        for kind, beside, word in ((Pending, self.queue, "queue"), (Lease, self.leased, "list of leases")):
            if wrong := [item for item, s in self.items.items() if isinstance(s, kind) != (item in beside)]:
                _broken("the ledger does not add up", wrong, f"wrongly in the {word} or wrongly not", self.items)
            if strange := [item for item in beside if item not in self.items]:
                _broken("the ledger does not add up", strange, f"in the {word}, never planned")
        for item, status in self.items.items():
            late = isinstance(status, Lease) and (status.epoch > self.epoch or status.item != item)
            if late or (isinstance(status, Trained) and status.step > self.step):
                _broken("the ledger does not add up", [item], f"ahead of epoch {self.epoch}, step {self.step}")

    # -- as data --------------------------------------------------------------------

    def as_data(self) -> dict[str, Any]:
        """Everything, as plain JSON data; the same state gives the same text."""
        return {
            "format": FORMAT, "epoch": list(self.epoch), "step": self.step, "planned": self.planned,
            "items": [[*item, status_row(status)] for item, status in self.items.items()],
            "queue": [list(item) for item in self.queue],
            "fenced": dict(sorted(self.fenced.items())), "requeued": dict(sorted(self.requeued.items())),
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> LedgerState:
        """Back from `as_data`; what is malformed or does not add up is a `StateError`."""
        if set(data) != KEYS or data["format"] != FORMAT:
            raise _snapshot_refused(f"keys {sorted(data)}, format {data.get('format')!r} instead of {FORMAT}")
        try:
            state = cls(
                epoch=read_lease_token(data["epoch"]), step=count(data["step"]), planned=count(data["planned"]),
                fenced=Counter({str(k): count(n) for k, n in data["fenced"].items()}),
                requeued=Counter({str(k): count(n) for k, n in data["requeued"].items()}),
            )  # fmt: skip
            for *words, row in data["items"]:
                item = read_visit(words)
                state.items[item] = read_status(item, row)
            state.queue.update(dict.fromkeys(read_visit(row) for row in data["queue"]))
            state.leased.update({item: None for item, s in state.items.items() if isinstance(s, Lease)})
            state.check()
        except (TypeError, ValueError, AttributeError, InvariantError) as error:
            raise _snapshot_refused(str(error)) from error
        if len(state.queue) != len(data["queue"]) or len(state.items) != len(data["items"]):
            raise _snapshot_refused("an item comes twice")
        return state


def _snapshot_refused(why: str) -> StateError:
    return StateError(
        f"the ledger's snapshot cannot be read: {why}"[:600], "going on would lose or repeat work without a trace",
        "open the ledger from its journal alone",
    )  # fmt: skip


def _broken(what: str, items: Sequence[Visit], why: str, known: Mapping[Visit, Status] | None = None) -> NoReturn:
    shown = [f"{item} ({status_row(known[item])[0]})" if known and item in known else str(item) for item in items]
    names = ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
    raise InvariantError(
        f"{what}{': ' + names if names else ''}: {why}",
        "an item would be lost, or trained on twice",
        "this is a bug of the caller or a damaged state; `Ledger.check` names what does not add up",
    )


# -- The account, open for writing -----------------------------------------------------------------


LeaseOutcome = Literal["accepted", "duplicate", "late", "done", "unknown"]
"""What became of a result: taken; a second time; under an older lease; its item is finished; nobody planned it."""

SYNCED = ("open", "plan", "complete", "train", "drop", "rewind")
"""Events that somebody outside acts on. The others a crash may take back: the item is then simply leased anew."""


class Ledger:
    """The account, open for writing.

    Example:
        >>> import tempfile, pathlib
        >>> journal = Journal.create(pathlib.Path(tempfile.mkdtemp()) / "a.journal")
        >>> ledger = Ledger.open(journal)
        >>> ledger.plan([Item("a", 0), Item("b", 0)])
        >>> (lease,) = ledger.lease(1, holder="worker 1")
        >>> ledger.complete([lease]), ledger.complete([lease])
        (['accepted'], ['duplicate'])
        >>> ledger.trained(1, [lease.item])
        >>> print(ledger.balance())
        2 planned = 1 pending + 0 leased (0 delivered) + 1 trained + 0 dropped
    """

    def __init__(self, journal: Journal, state: LedgerState, number: int) -> None:
        """Use `open` or `read`: they bring the state and the number of the last frame that is in it."""
        self._journal, self._state, self._number = journal, state, number
        self._stale = False
        """The journal holds an event that this object does not know: an append was interrupted."""

    @classmethod
    def open(cls, journal: Journal, snapshot: Mapping[str, Any] | None = None) -> Ledger:
        """Take over as the driver: undelivered leases of the one before end here, their items go to the front."""
        ledger = cls.read(journal, snapshot)
        ledger._tell(Event(kind="open"))
        failpoint("ledger.opened")
        return ledger

    @classmethod
    def read(cls, journal: Journal, snapshot: Mapping[str, Any] | None = None) -> Ledger:
        """The account as the journal tells it, for looking only; a snapshot saves reading its part again."""
        state, number = (LedgerState(), 0) if snapshot is None else _from_snapshot(snapshot, journal)
        for entry in journal.records(after=number):
            event = Event.of(entry.record)
            try:
                if event is not None:
                    state.refuse(event)
                    state.apply(event)
            except InvariantError as error:
                raise StateError(
                    f"{journal.name} does not add up at byte {entry.offset} (record {entry.number}): {error.what}",
                    "a journal tells only what was allowed, so this is not the whole journal of one run",
                    "bring the file back from a copy",
                ) from error
        state.check()
        return cls(journal, state, journal.last_number)

    # -- what happens ---------------------------------------------------------------

    def plan(self, items: Iterable[Visit]) -> None:
        """Add items at the end of the queue. One that was planned before is an `InvariantError`."""
        self._tell(Event(kind="plan", items=tuple(read_visit(list(item)) for item in items)))

    def lease(self, n: int, *, holder: str, until: float | None = None) -> list[Lease]:
        """Give out up to `n` items from the front, until a moment of the caller's clock; [] when none is pending."""
        queue = iter(self._state.queue)
        items = tuple(item for item, _ in zip(queue, range(n), strict=False))
        if not items:
            return []
        now = self._state.epoch
        epoch, until = LeaseToken(now.driver, now.serial + 1), read_moment(until)
        self._tell(Event(kind="lease", items=items, epoch=epoch, holder=read_text(holder), until=until))
        return [Lease(item, epoch, place, holder, until) for place, item in enumerate(items)]

    def renew(self, leases: Sequence[Lease], *, until: float | None) -> list[LeaseOutcome]:
        """Longer for those that still hold; the others are fenced, like a late result."""
        return self._fence(leases, "renew", read_moment(until))

    def expire(self, now: float) -> list[Visit]:
        """Take back what is overdue and not delivered; it goes to the front. No run calls this: none sets `until`."""
        live = self._state.leases(delivered=False)
        overdue = [lease.item for lease in live if lease.until is not None and lease.until <= now]
        self.requeue(overdue, "expired")
        return overdue

    def complete(self, leases: Sequence[Lease], *, durable: bool = True) -> list[LeaseOutcome]:
        """Results have come in; one outcome each. Only "accepted" ones may be used, and they are on the disk now.

        Args:
            durable: False when the results are on the disk elsewhere: then a power cut may take this event back.
        """
        return self._fence(leases, "complete", None, durable=durable)

    def trained(self, step: int, items: Iterable[Visit]) -> None:
        """These delivered items are in the weights, since this step. A step number is used once."""
        self._tell(Event(kind="train", items=tuple(items), step=count(step)))

    def drop(self, items: Iterable[Visit], reason: str) -> None:
        """These will not be trained on, and this is why."""
        self._tell_of(Event(kind="drop", items=tuple(items), reason=reason))

    def requeue(self, items: Iterable[Visit], reason: str, *, durable: bool = False) -> None:
        """Leased items, delivered or not, go back to the front of the queue in this order."""
        self._tell_of(Event(kind="requeue", items=tuple(items), reason=reason), durable=durable)

    def rewind(self, step: int) -> list[Visit]:
        """The weights are those of an earlier step: what was trained later is pending again, in that order.

        Checkpoints of later steps have to be gone before: a crash in between must not find weights that are ahead.
        """
        items = self._state.trained_after(step)
        self._tell(Event(kind="rewind", step=count(step)))
        return items

    # -- questions ------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The last step that was trained."""
        return self._state.step

    @property
    def pending(self) -> int:
        """Items in the queue."""
        return len(self._state.queue)

    def status(self, item: Visit) -> Status | None:
        """What one item is; None if it was never planned."""
        return self._state.items.get(item)

    def items(self) -> Mapping[Visit, Status]:
        """Every item, in the order of planning."""
        return dict(self._state.items)

    def delivered(self) -> list[Lease]:
        """Leases whose results wait to be trained on, oldest first."""
        return self._state.leases(delivered=True)

    def outcome(self, lease: Lease) -> LeaseOutcome:
        """What `complete` would say of this lease now. Ask before keeping a result."""
        status = self._state.items.get(lease.item)
        if status is None:
            return "unknown"
        if isinstance(status, Pending):
            return "late"
        if not isinstance(status, Lease):
            return "done"
        if status.epoch != lease.epoch:
            return "late"
        return "duplicate" if status.delivered else "accepted"

    def balance(self) -> Balance:
        """Where everything is, counted afresh."""
        return self._state.balance()

    def check(self) -> None:
        """Raise an `InvariantError` that names the items, unless everything adds up."""
        self._state.check()

    def snapshot(self) -> dict[str, Any]:
        """Everything as JSON data, with the place in the journal that it stands for."""
        self._require_in_step()
        return {"journal": self._journal.id, "number": self._number, "ledger": self._state.as_data()}

    def digest(self) -> str:
        """SHA-256 of everything in the account: equal digests, equal ledgers."""
        return sha256_of(json.dumps(self._state.as_data()))

    # -- how ------------------------------------------------------------------------

    def _fence(
        self, leases: Sequence[Lease], kind: Literal["renew", "complete"], until: float | None,
        *, durable: bool | None = None,
    ) -> list[LeaseOutcome]:  # fmt: skip
        outcomes: list[LeaseOutcome] = []
        good: dict[Visit, None] = {}
        for lease in leases:
            outcome = "duplicate" if kind == "complete" and lease.item in good else self.outcome(lease)
            outcomes.append(outcome)
            if outcome == "accepted":
                good[lease.item] = None
        refused = [(lease.item, word) for lease, word in zip(leases, outcomes, strict=True) if word != "accepted"]
        for item, word in refused:
            self._tell(Event(kind="fenced", items=(item,), reason=word))
        self._tell_of(Event(kind=kind, items=tuple(good), until=until), durable=durable)
        return outcomes

    def _tell_of(self, event: Event, *, durable: bool | None = None) -> None:
        """`_tell`, unless it is about nothing."""
        if event.items:
            self._tell(event, durable=durable)

    def _tell(self, event: Event, *, durable: bool | None = None) -> None:
        """Refuse what may not happen; write it down; then make it so. `durable` overrides what `SYNCED` says."""
        self._require_in_step()
        self._state.refuse(event)
        failpoint("ledger.before_event")
        before = self._journal.last_number
        try:
            number = self._journal.append(event.record(), durable=event.kind in SYNCED if durable is None else durable)
            failpoint("ledger.after_event")
        except BaseException:
            self._stale = self._journal.last_number != before
            raise
        self._state.apply(event)
        self._number = number

    def _require_in_step(self) -> None:
        if self._stale:
            raise StateError(
                "the ledger does not know what its journal holds", "an append to it was interrupted half-way",
                "open journal and ledger again",
            )  # fmt: skip


def _from_snapshot(snapshot: Mapping[str, Any], journal: Journal) -> tuple[LedgerState, int]:
    data, number = snapshot.get("ledger"), snapshot.get("number")
    if not isinstance(data, Mapping) or type(number) is not int or snapshot.get("journal") != journal.id:
        raise StateError(
            f"the snapshot is not one of {journal.name}", f"it names journal {snapshot.get('journal')!r}",
            "use snapshot and journal of one run",
        )  # fmt: skip
    if not 0 <= number <= journal.last_number:
        raise StateError(
            f"{journal.name} ends at record {journal.last_number}, and the snapshot has seen record {number}",
            "records that were safe are missing", "bring the journal back from a copy",
        )  # fmt: skip
    return LedgerState.from_data(data), number
