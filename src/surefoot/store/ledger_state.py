"""What the ledger knows at one moment, and which events may follow.

Owns       every planned item's status, and the order of the queue.
Promises   `refuse` raises and changes nothing; `apply` does what the event says, the same way every time, so that the
           same events give the same state bit for bit. Returned items go to the front of the queue, oldest lease first.
Never      reads a clock, a file or a random number.

Read next: `ledger.py`, which writes events down before they are applied.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from surefoot.errors import InvariantError, StateError
from surefoot.store.ledger_records import (
    NEVER,
    Balance,
    Dropped,
    Epoch,
    Event,
    Item,
    Lease,
    Leased,
    Pending,
    Status,
    Trained,
    count,
    read_epoch,
    read_item,
    read_status,
    status_row,
)

FORMAT = 1
KEYS = {"format", "epoch", "step", "planned", "items", "queue", "fenced", "requeued"}


@dataclass(slots=True)
class LedgerState:
    """Every item exactly once; the queue and the list of leases are kept beside it to be fast, and `check`ed."""

    items: dict[Item, Status] = field(default_factory=dict)
    queue: OrderedDict[Item, None] = field(default_factory=OrderedDict)
    leased: dict[Item, None] = field(default_factory=dict)
    epoch: Epoch = NEVER
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
                if event.epoch != Epoch(self.epoch.driver, self.epoch.serial + 1) or not self.epoch.driver:
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
                open_kinds = Pending | Leased
                self._require(event, "not open", lambda item: isinstance(self.items.get(item), open_kinds))
            case "rewind":
                if event.step > self.step:
                    _broken(f"cannot rewind to step {event.step}", (), f"the last one was {self.step}")
        if event.kind in ("drop", "requeue", "fenced") and not event.reason.strip():
            _broken(f"cannot {event.kind}", event.items, "no reason is given")

    def _require(self, event: Event, what: str, holds: Any) -> None:
        if wrong := [item for item in event.items if not holds(item)]:
            _broken(f"cannot {event.kind}", wrong, what, self.items)

    def _is_leased(self, item: Item, delivered: bool | None = None) -> bool:
        status = self.items.get(item)
        return isinstance(status, Leased) and delivered in (None, status.delivered)

    # -- what then is ---------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Make it so. The event has passed `refuse`."""
        match event.kind:
            case "open":
                self.epoch = Epoch(self.epoch.driver + 1, 0)
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
            self.items[item] = Leased(Lease(item, event.epoch, place, event.holder, event.until))
            self.leased[item] = None
            del self.queue[item]

    def _change_leases(self, event: Event) -> None:
        for item in event.items:
            status = self.items[item]
            assert isinstance(status, Leased), "refuse() has looked"
            renewed = status.lease._replace(until=event.until) if event.kind == "renew" else status.lease
            self.items[item] = Leased(renewed, event.kind == "complete")

    def _return(self, items: Iterable[Item], reason: str) -> None:
        """To the front of the queue: the first of `items` will be the first to go out again."""
        returned = list(items)
        for item in reversed(returned):
            self.items[item] = Pending()
            self.leased.pop(item, None)
            self.queue[item] = None
            self.queue.move_to_end(item, last=False)
        if returned:
            self.requeued[reason] += len(returned)

    def _finish(self, statuses: Mapping[Item, Status]) -> None:
        for item, status in statuses.items():
            self.items[item] = status
            self.leased.pop(item, None)
            self.queue.pop(item, None)

    # -- questions ------------------------------------------------------------------

    def undelivered(self) -> list[Item]:
        """Items that somebody still works on, oldest lease first."""
        return [lease.item for lease in self.leases(delivered=False)]

    def leases(self, *, delivered: bool) -> list[Lease]:
        """Leases in the order in which they were given."""
        found = [self.items[item] for item in self.leased]
        wanted = [status.lease for status in found if isinstance(status, Leased) and status.delivered == delivered]
        return sorted(wanted, key=lambda lease: (lease.epoch, lease.place))

    def trained_after(self, step: int) -> list[Item]:
        """Items trained in later steps, in the order of training."""
        found = [(status, item) for item, status in self.items.items() if isinstance(status, Trained)]
        return [item for status, item in sorted(found) if status.step > step]

    def balance(self) -> Balance:
        """Where everything is, counted afresh."""
        kinds = Counter(type(status) for status in self.items.values())
        dropped = Counter(status.reason for status in self.items.values() if isinstance(status, Dropped))
        delivered = len(self.leases(delivered=True))
        return Balance(
            self.planned, kinds[Pending], kinds[Leased], delivered, kinds[Trained], dict(sorted(dropped.items())),
            dict(sorted(self.fenced.items())), dict(sorted(self.requeued.items())),
        )  # fmt: skip

    def check(self) -> None:
        """Raise an `InvariantError` that names the items unless everything adds up."""
        if self.planned != len(self.items):
            _broken("the ledger does not add up", (), f"{self.planned} planned, {len(self.items)} known")
        for kind, beside, word in ((Pending, self.queue, "queue"), (Leased, self.leased, "list of leases")):
            if wrong := [item for item, s in self.items.items() if isinstance(s, kind) != (item in beside)]:
                _broken("the ledger does not add up", wrong, f"wrongly in the {word} or wrongly not", self.items)
            if strange := [item for item in beside if item not in self.items]:
                _broken("the ledger does not add up", strange, f"in the {word}, never planned")
        for item, status in self.items.items():
            late = isinstance(status, Leased) and (status.lease.epoch > self.epoch or status.lease.item != item)
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
                epoch=read_epoch(data["epoch"]), step=count(data["step"]), planned=count(data["planned"]),
                fenced=Counter({str(k): count(n) for k, n in data["fenced"].items()}),
                requeued=Counter({str(k): count(n) for k, n in data["requeued"].items()}),
            )  # fmt: skip
            for *words, row in data["items"]:
                item = read_item(words)
                state.items[item] = read_status(item, row)
            state.queue.update(dict.fromkeys(read_item(row) for row in data["queue"]))
            state.leased.update({item: None for item, s in state.items.items() if isinstance(s, Leased)})
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


def _broken(what: str, items: Sequence[Item], why: str, known: Mapping[Item, Status] | None = None) -> NoReturn:
    shown = [
        f"{item} ({type(known[item]).__name__.lower()})" if known and item in known else str(item) for item in items
    ]
    names = ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")
    raise InvariantError(
        f"{what}{': ' + names if names else ''}: {why}",
        "an item would be lost, or trained on twice",
        "this is a bug of the caller or a damaged state; `Ledger.check` names what does not add up",
    )
