"""The account of a run: every visit to a task is pending, leased, trained or dropped(reason). Exactly one, always.

Owns       the events `ledger.*` of a journal, and what they add up to.
Promises   an event is in the journal before it counts; replaying the journal, or a snapshot and the rest of it, gives
           the same ledger bit for bit; a result under an old lease is refused and counted; the numbers add up.
Never      trains an item twice, forgets one, believes a late result, or reads a clock.

    plan --> pending --lease--> leased --complete--> leased, delivered --trained(step)--> trained
                ^                 |                        |
                +--- requeue, expire, a new driver --------+------- drop(reason) -------> dropped

Read next: `ledger_state.py` for the rules, `ledger_records.py` for the nouns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from surefoot.errors import InvariantError, StateError
from surefoot.store.failpoints import failpoint
from surefoot.store.journal import Journal
from surefoot.store.ledger_records import (
    Balance,
    Epoch,
    Event,
    Item,
    Lease,
    Leased,
    Pending,
    Status,
    count,
    read_item,
    read_moment,
    read_text,
)
from surefoot.store.ledger_state import LedgerState

__all__ = ["Balance", "Epoch", "Item", "Lease", "Ledger", "Outcome", "Status"]

Outcome = Literal["accepted", "duplicate", "late", "done", "unknown"]
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

    def plan(self, items: Iterable[Item]) -> None:
        """Add items at the end of the queue. One that was planned before is an `InvariantError`."""
        self._tell(Event(kind="plan", items=tuple(read_item(list(item)) for item in items)))

    def lease(self, n: int, *, holder: str, until: float | None = None) -> list[Lease]:
        """Give out up to `n` items from the front, until a moment of the caller's clock; [] when none is pending."""
        queue = iter(self._state.queue)
        items = tuple(item for item, _ in zip(queue, range(n), strict=False))
        if not items:
            return []
        now = self._state.epoch
        epoch, until = Epoch(now.driver, now.serial + 1), read_moment(until)
        self._tell(Event(kind="lease", items=items, epoch=epoch, holder=read_text(holder), until=until))
        return [Lease(item, epoch, place, holder, until) for place, item in enumerate(items)]

    def renew(self, leases: Sequence[Lease], *, until: float | None) -> list[Outcome]:
        """Longer for those that still hold; the others are fenced, like a late result."""
        return self._fence(leases, "renew", read_moment(until))

    def expire(self, now: float) -> list[Item]:
        """Take back what is overdue and not delivered; it goes to the front. No run calls this: none sets `until`."""
        live = self._state.leases(delivered=False)
        overdue = [lease.item for lease in live if lease.until is not None and lease.until <= now]
        self.requeue(overdue, "expired")
        return overdue

    def complete(self, leases: Sequence[Lease], *, durable: bool = True) -> list[Outcome]:
        """Results have come in; one outcome each. Only "accepted" ones may be used, and they are on the disk now.

        Args:
            durable: False when the results are on the disk elsewhere: then a power cut may take this event back.
        """
        return self._fence(leases, "complete", None, durable=durable)

    def trained(self, step: int, items: Iterable[Item]) -> None:
        """These delivered items are in the weights, since this step. A step number is used once."""
        self._tell(Event(kind="train", items=tuple(items), step=count(step)))

    def drop(self, items: Iterable[Item], reason: str) -> None:
        """These will not be trained on, and this is why."""
        self._tell_of(Event(kind="drop", items=tuple(items), reason=reason))

    def requeue(self, items: Iterable[Item], reason: str, *, durable: bool = False) -> None:
        """Leased items, delivered or not, go back to the front of the queue in this order."""
        self._tell_of(Event(kind="requeue", items=tuple(items), reason=reason), durable=durable)

    def rewind(self, step: int) -> list[Item]:
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

    def status(self, item: Item) -> Status | None:
        """What one item is; None if it was never planned."""
        return self._state.items.get(item)

    def items(self) -> Mapping[Item, Status]:
        """Every item, in the order of planning."""
        return dict(self._state.items)

    def delivered(self) -> list[Lease]:
        """Leases whose results wait to be trained on, oldest first."""
        return self._state.leases(delivered=True)

    def outcome(self, lease: Lease) -> Outcome:
        """What `complete` would say of this lease now. Ask before keeping a result."""
        status = self._state.items.get(lease.item)
        if status is None:
            return "unknown"
        if isinstance(status, Pending):
            return "late"
        if not isinstance(status, Leased):
            return "done"
        if status.lease.epoch != lease.epoch:
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
        return hashlib.sha256(json.dumps(self._state.as_data()).encode()).hexdigest()

    # -- how ------------------------------------------------------------------------

    def _fence(
        self, leases: Sequence[Lease], kind: Literal["renew", "complete"], until: float | None,
        *, durable: bool | None = None,
    ) -> list[Outcome]:  # fmt: skip
        outcomes: list[Outcome] = []
        good: dict[Item, None] = {}
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
