"""Every visit to a task is exactly one of pending, leased, trained, dropped; and the journal can tell it all again."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from forgetful_disk import ForgetfulFile

from surefoot.errors import InvariantError, StateError, StorageError
from surefoot.storage import ledger as ledger_state
from surefoot.storage import ledger as module
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Dropped, Event, Lease, LeaseToken, Ledger, Pending, Trained, Visit
from surefoot.system.journal import Header

A, B, C, D = (Visit(name, 0) for name in "abcd")


class Books:
    """A ledger on a disk in memory."""

    def __init__(self) -> None:
        self.file = ForgetfulFile(random.Random(0), Header(bytes(16)).pack())
        self.journal = Journal(self.file)
        self.ledger = Ledger.open(self.journal)
        self.ledger.plan([A, B, C, D])

    def again(self, snapshot: Any = None) -> Ledger:
        """What another reader makes of the journal."""
        return Ledger.read(Journal(self.file.after_kill()), snapshot)

    def next_driver(self) -> Ledger:
        """The same after a crash."""
        return Ledger.open(Journal(self.file.after_kill()))


@pytest.fixture
def queue() -> Books:
    return Books()


def lease_one(ledger: Ledger, until: float | None = None) -> Lease:
    (lease,) = ledger.lease(1, holder="w", until=until)
    return lease


def train(ledger: Ledger, step: int) -> Visit:
    lease = lease_one(ledger)
    ledger.complete([lease])
    ledger.trained(step, [lease.item])
    return lease.item


# -- the way of an item -----------------------------------------------------------


def test_an_item_goes_from_planned_to_trained(queue: Books) -> None:
    ledger = queue.ledger
    assert ledger.status(A) == Pending()
    lease = lease_one(ledger, until=5)
    assert (lease.item, lease.holder, lease.until) == (A, "w", 5.0)
    assert ledger.status(A) == lease
    assert ledger.complete([lease]) == ["accepted"]
    assert ledger.delivered() == [lease._replace(delivered=True)]
    ledger.trained(1, [A])
    assert ledger.status(A) == Trained(1, 0)
    assert (ledger.step, ledger.pending) == (1, 3)
    assert str(ledger.balance()) == "4 planned = 3 pending + 0 leased (0 delivered) + 1 trained + 0 dropped"


def test_the_same_task_in_the_next_epoch_is_another_item(queue: Books) -> None:
    queue.ledger.plan([Visit("a", 1)])
    assert queue.ledger.balance().planned == 5
    with pytest.raises(InvariantError, match=r"a#1.*already planned"):
        queue.ledger.plan([Visit("a", 1)])


def test_dropped_items_keep_their_reason_and_never_come_back(queue: Books) -> None:
    ledger = queue.ledger
    lease = lease_one(ledger)
    ledger.drop([A, B], "stale")
    assert ledger.status(B) == Dropped("stale")
    assert ledger.complete([lease]) == ["done"]
    assert [lease.item for lease in ledger.lease(9, holder="w")] == [C, D]
    assert dict(ledger.balance().dropped) == {"stale": 2}


def test_returned_items_go_first_and_in_order(queue: Books) -> None:
    ledger = queue.ledger
    ledger.lease(3, holder="w")
    ledger.requeue([C, A], "stale")
    assert [lease.item for lease in ledger.lease(9, holder="w")] == [C, A, D]


def test_a_delivered_result_does_not_expire_and_an_overdue_lease_does(queue: Books) -> None:
    ledger = queue.ledger
    first, second, third = lease_one(ledger, 10), lease_one(ledger, 10), lease_one(ledger, None)
    ledger.complete([first])
    assert ledger.expire(9.99) == []
    assert ledger.expire(10) == [second.item]
    assert [type(ledger.status(x.item)) for x in (first, second, third)] == [Lease, Pending, Lease]
    assert ledger.balance().requeued == {"expired": 1}


def test_a_renewed_lease_lives_on(queue: Books) -> None:
    lease = lease_one(queue.ledger, 10)
    assert queue.ledger.renew([lease], until=20) == ["accepted"]
    assert queue.ledger.expire(15) == []
    assert queue.ledger.complete([lease]) == ["accepted"]
    assert queue.ledger.renew([lease], until=30) == ["duplicate"]


# -- fencing ----------------------------------------------------------------------


def test_late_duplicate_and_foreign_results_are_refused_and_counted(queue: Books) -> None:
    ledger = queue.ledger
    old = lease_one(ledger, 1)
    ledger.expire(1)
    assert ledger.complete([old]) == ["late"]
    new = lease_one(ledger)
    assert new.item == old.item
    assert ledger.outcome(old) == "late"
    assert ledger.complete([old, new, new]) == ["late", "accepted", "duplicate"]
    assert ledger.complete([new]) == ["duplicate"]
    ledger.trained(1, [new.item])
    assert ledger.complete([old, new]) == ["done", "done"]
    assert ledger.complete([new._replace(item=Visit("x", 0))]) == ["unknown"]
    assert ledger.balance().fenced == {"done": 2, "duplicate": 2, "late": 2, "unknown": 1}
    assert ledger.balance().lost == 0


def test_a_result_of_the_driver_before_is_late_even_if_its_lease_was_never_synced(queue: Books) -> None:
    lease = lease_one(queue.ledger)
    after = Ledger.open(Journal(queue.file.after_power_loss()))
    again = lease_one(after)
    assert again.item == lease.item
    assert again.epoch > lease.epoch
    assert after.complete([lease]) == ["late"]


def test_planted_ledger_that_believes_old_leases_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.outcome

    def believing(self: Ledger, lease: Lease) -> Any:
        status = self.status(lease.item)
        return "accepted" if isinstance(status, Lease) and not status.delivered else real(self, lease)

    monkeypatch.setattr(Ledger, "outcome", believing)
    for test in (
        test_late_duplicate_and_foreign_results_are_refused_and_counted,
        test_a_result_of_the_driver_before_is_late_even_if_its_lease_was_never_synced,
    ):
        with pytest.raises((AssertionError, InvariantError)):
            test(Books())


# -- what may not happen ----------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda ledger: ledger.trained(1, [A]), r"a#0 \(pending\): not leased and delivered"),
        (lambda ledger: ledger.trained(1, [Visit("x", 0)]), "x#0"),
        (lambda ledger: ledger.plan([Visit("x", 0), Visit("x", 0)]), "named twice"),
        (lambda ledger: ledger.requeue([A], "x"), "not leased"),
        (lambda ledger: ledger.drop([A], "  "), "no reason"),
        (lambda ledger: ledger.drop([Visit("x", 0)], "stale"), "not open"),
        (lambda ledger: ledger.rewind(1), "rewind"),
    ],
)
def test_what_may_not_happen_is_refused_by_name_and_changes_nothing(
    queue: Books, act: Callable[[Ledger], None], words: str
) -> None:
    before, size = queue.ledger.digest(), queue.file.size()
    with pytest.raises(InvariantError, match=words):
        act(queue.ledger)
    assert (queue.ledger.digest(), queue.file.size()) == (before, size)


def test_nothing_is_trained_twice_and_no_step_is_used_twice(queue: Books) -> None:
    first = train(queue.ledger, 1)
    for step, items in ((2, [first]), (1, []), (0, [])):
        with pytest.raises(InvariantError):
            queue.ledger.trained(step, items)


@pytest.mark.parametrize("item", [("a", -1), ("a", True), ("a", 1.0), (1, 0), ("a",), ("a", 0, 0), (None, 0)])
def test_an_item_that_is_none_is_refused(queue: Books, item: Any) -> None:
    with pytest.raises(StateError):
        queue.ledger.plan([item])


def test_odd_names_and_moments_are_kept_or_refused(queue: Books) -> None:
    odd = Visit("ü \ud800 #\n\x00", 3)
    queue.ledger.plan([odd, Visit("", 0)])
    assert queue.again().status(odd) == Pending()
    for until in (float("nan"), float("inf"), "5", True):
        with pytest.raises(StateError):
            queue.ledger.lease(1, holder="w", until=until)  # type: ignore[arg-type]


# -- the next driver --------------------------------------------------------------


def test_a_new_driver_takes_back_what_was_not_delivered_and_keeps_what_was(queue: Books) -> None:
    ledger = queue.ledger
    kept, lost, third = lease_one(ledger), lease_one(ledger), lease_one(ledger)
    ledger.complete([kept])
    after = queue.next_driver()
    assert after.delivered() == [kept._replace(delivered=True)]
    assert [lease.item for lease in after.lease(9, holder="w")] == [lost.item, third.item, D]
    assert after.balance().requeued == {"restart": 2}


def test_taken_back_items_go_out_in_their_old_order(queue: Books) -> None:
    """Else the batch after a crash is not the batch without it."""
    ledger = queue.ledger
    ledger.lease(4, holder="w")
    ledger.requeue([C, A], "stale")
    ledger.lease(2, holder="w")
    after = queue.next_driver()
    assert [lease.item for lease in after.lease(9, holder="w")] == [B, D, C, A]


def test_rewinding_makes_later_steps_pending_again_in_their_order(queue: Books) -> None:
    ledger = queue.ledger
    trained = [train(ledger, step) for step in (1, 2, 3)]
    assert ledger.rewind(1) == trained[1:]
    assert ledger.step == 1
    assert [lease.item for lease in ledger.lease(9, holder="w")] == [*trained[1:], D]
    assert isinstance(ledger.status(trained[0]), Trained)


# -- telling it again -------------------------------------------------------------


def busy(queue: Books, rng: random.Random, moves: int) -> list[Any]:
    """Random allowed moves; returns snapshots taken on the way."""
    ledger, held, snapshots = queue.ledger, [], []
    for move in range(moves):
        match rng.randrange(8):
            case 0:
                ledger.plan([Visit(f"t{rng.randrange(3)}", move + 10)])
            case 1 | 2:
                held += ledger.lease(
                    rng.randint(1, 3), holder=f"w{rng.randrange(3)}", until=rng.choice([None, move + 5])
                )
            case 3 if held:
                ledger.complete(rng.sample(held, rng.randint(1, min(3, len(held)))))
            case 4:
                ledger.expire(move)
            case 5 if ledger.delivered():
                ledger.trained(ledger.step + 1, [lease.item for lease in ledger.delivered()[:2]])
            case 6 if ledger.delivered():
                item = ledger.delivered()[-1].item
                ledger.drop([item], "stale") if rng.random() < 0.5 else ledger.requeue([item], "stale")
            case 7 if rng.random() < 0.3:
                ledger.rewind(rng.randint(0, ledger.step))
        queue.journal.append({"event": "group", "n": move}, durable=False)
        snapshots.append(json.loads(json.dumps(ledger.snapshot())))
    return snapshots


@pytest.mark.parametrize("seed", range(6))
def test_the_journal_and_any_snapshot_with_the_rest_of_it_give_the_same_ledger(seed: int) -> None:
    queue, rng = Books(), random.Random(seed)
    snapshots = busy(queue, rng, 60)
    expected = queue.ledger.digest()
    queue.ledger.check()
    assert queue.ledger.balance().lost == 0
    assert queue.again().digest() == expected
    for snapshot in rng.sample(snapshots, 8):
        assert queue.again(snapshot).digest() == expected


def test_planted_order_that_depends_on_the_process_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a driver that returns leases in some other order on replay."""
    queue = Books()
    queue.ledger.lease(3, holder="w")
    after = queue.next_driver()
    monkeypatch.setattr(ledger_state.LedgerState, "undelivered", lambda self: sorted(self.leased, reverse=True))
    assert Ledger.read(after._journal).digest() != after.digest()


def test_a_snapshot_of_another_journal_or_from_the_future_is_refused(queue: Books) -> None:
    snapshot = queue.ledger.snapshot()
    for wrong in (
        {**snapshot, "journal": "0" * 30},
        {**snapshot, "number": 99},
        {**snapshot, "number": "1"},
        {},
        {**snapshot, "ledger": []},
    ):
        with pytest.raises(StateError):
            queue.again(wrong)


@pytest.mark.parametrize(
    "change",
    [
        {"planned": 5}, {"format": 2}, {"queue": []}, {"queue": [["a", 0]] * 4}, {"items": []}, {"items": 3}, {"epoch": [1]},
        {"step": -1}, {"step": True}, {"fenced": []}, {"fenced": {"late": -1}}, {"more": 1}, {"queue": [["zz", 0], ["b", 0], ["c", 0], ["d", 0]]},
        {"items": [["a", 0, ["gone"]], ["b", 0, ["pending"]], ["c", 0, ["pending"]], ["d", 0, ["pending"]]]},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_snapshot_is_a_typed_refusal(queue: Books, change: dict[str, Any]) -> None:
    snapshot = json.loads(json.dumps(queue.ledger.snapshot()))
    snapshot["ledger"] |= change
    with pytest.raises(StateError):
        queue.again(snapshot)


@pytest.mark.parametrize(
    "record",
    [
        {"event": "ledger.train", "items": [["a", 0]], "step": 1},
        {"event": "ledger.teleport", "items": [["a", 0]]},
        {"event": "ledger.drop", "items": [["a", 0]], "reason": "x", "mood": "bad"},
        {"event": "ledger.plan", "items": "abc"},
        {"event": "ledger.plan", "items": [["e"]]},
        {"event": "ledger.lease", "items": [["a", 0]], "epoch": [7, 1], "holder": "w"},
        {"event": "ledger.lease", "items": [["a", 0]], "epoch": [1, 1], "holder": 3},
    ],
    ids=str,
)
def test_a_journal_that_tells_what_cannot_have_happened_is_refused(queue: Books, record: dict[str, Any]) -> None:
    queue.journal.append(record)
    with pytest.raises(StateError):
        queue.again()


def test_records_of_others_are_passed_over(queue: Books) -> None:
    before = queue.ledger.digest()
    for record in ({"event": "group"}, {"event": 3}, {}, {"event": "ledgerish.plan"}):
        queue.journal.append(record)
    assert queue.again().digest() == before


def test_events_survive_their_journal_form() -> None:
    event = Event(kind="lease", items=(A, B), epoch=LeaseToken(2, 7), holder="w", until=1.5, step=0, reason="")
    assert Event.of(json.loads(json.dumps(event.record()))) == event


# -- when the disk says no ----------------------------------------------------------


def test_an_event_that_could_not_be_written_did_not_happen(queue: Books) -> None:
    before = queue.ledger.digest()
    queue.file.fault = lambda call: "full" if call == "write" else None
    with pytest.raises(StorageError):
        queue.ledger.plan([Visit("x", 0)])
    queue.file.fault = lambda call: None
    assert queue.ledger.digest() == before == queue.again().digest()
    queue.ledger.plan([Visit("x", 0)])


def test_after_an_interrupted_event_the_ledger_refuses_until_it_is_opened_again(
    queue: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event is in the journal and not in memory: going on from memory would tell a second story."""

    def interrupted(name: str) -> None:
        if name == "ledger.after_event":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "failpoint", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.ledger.plan([Visit("x", 0)])
    for act in (lambda: queue.ledger.plan([Visit("y", 0)]), queue.ledger.snapshot):
        with pytest.raises(StateError, match="does not know"):
            act()
    assert queue.again().status(Visit("x", 0)) == Pending()


def test_looking_only_writes_nothing(queue: Books) -> None:
    size = queue.file.size()
    journal = Journal(queue.file, readonly=True)
    ledger = Ledger.read(journal)
    assert ledger.balance() == queue.ledger.balance()
    with pytest.raises(StateError, match="reading"):
        ledger.plan([Visit("x", 0)])
    assert queue.file.size() == size


# -- the check --------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.items.pop(A),
        lambda state: state.queue.pop(A),
        lambda state: state.queue.update({C: None, Visit("ghost", 0): None}),
        lambda state: state.leased.update({A: None}),
        lambda state: state.items.update({A: Trained(1, 0)}),
        lambda state: state.items.update({B: Pending()}),
        lambda state: setattr(state, "planned", 6),
        lambda state: setattr(state, "epoch", LeaseToken(1, 0)),
    ],
)
def test_a_lost_doubled_or_misplaced_item_is_named(queue: Books, damage: Callable[[Any], None]) -> None:
    queue.ledger.lease(1, holder="w")
    queue.ledger.requeue([A], "x")
    queue.ledger.drop([A], "x")
    queue.ledger.plan([Visit("a", 1)])
    queue.ledger.lease(1, holder="w")  # b: leased, the others pending
    queue.ledger.check()
    state = queue.ledger._state
    state.items[A], state.queue[A] = Pending(), None
    queue.ledger.check()
    damage(state)
    with pytest.raises(InvariantError, match="does not add up"):
        queue.ledger.check()
