"""A whole batch or none, nothing too old, nothing lost, and no wait without an end."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from buffer_kit import fill, group_of, make, names
from forgetful_disk import ForgetfulFile

from surefoot.errors import ConfigError, InvariantError, StalledError
from surefoot.records import Group, Rollout, Task
from surefoot.runtime import buffer as buffer_module
from surefoot.runtime.buffer import BufferCounts, BufferedBatch, GroupBuffer, StaleGroups, all_is_in
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Balance, Ledger, Trained, Visit
from surefoot.system.journal import Header

LONG_S = 60.0
"""No test waits this long unless it is about to fail."""


# -- a batch is whole ---------------------------------------------------------------


def test_groups_come_in_the_order_in_which_they_were_put() -> None:
    buffer = make()
    fill(buffer, "abcde")
    assert names(buffer.take(2, 0)) == "ab"
    assert names(buffer.take(3, 0)) == "cde"


def test_fewer_than_asked_for_are_none_and_stay() -> None:
    buffer = make()
    fill(buffer, "ab")
    assert buffer.take(3, 0) == BufferedBatch((), StaleGroups(), 0)
    fill(buffer, "c")
    assert names(buffer.take(3, 0)) == "abc"


def test_the_last_batch_of_an_epoch_may_be_partial_and_then_it_is_over() -> None:
    buffer = make()
    fill(buffer, "abc")
    buffer.mark_done()
    assert names(buffer.take(2, 0)) == "ab"
    last = buffer.take(2, 0)
    assert names(last) == "c"
    assert last is not None
    assert last.partial
    assert buffer.take(2, 0) is None


def test_full_is_said_and_nothing_is_dropped() -> None:
    buffer = make(max_size=2)
    fill(buffer, "ab")
    assert buffer.put(Visit("c", 0), 0, group_of("c", 0)) == "full"
    assert names(buffer.take(2, 0)) == "ab"
    assert buffer.put(Visit("c", 0), 0, group_of("c", 0)) == "full", "what is in hand is still in memory"
    buffer.settle([Visit("a", 0)], "used")
    assert buffer.put(Visit("c", 0), 0, group_of("c", 0)) == "kept"
    assert buffer.tally().put == 3


def test_mean_age_is_of_the_batch_and_none_without_one() -> None:
    buffer = make(max_staleness=9)
    fill(buffer, "ab", version=2)
    fill(buffer, "c", version=5)
    taken = buffer.take(3, 5)
    assert taken is not None
    assert taken.mean_age == 2.0
    assert BufferedBatch((), StaleGroups(), 5).mean_age is None


# -- nothing too old ----------------------------------------------------------------


def test_exactly_max_staleness_is_fresh_and_one_more_is_not() -> None:
    buffer = make(max_staleness=2)
    fill(buffer, "ab", version=3)
    assert names(buffer.take(1, 5)) == "a"
    taken = buffer.take(1, 6)
    assert taken == BufferedBatch((), StaleGroups(back=(Visit("b", 0),)), 6)
    assert buffer.tally().wasted == 1


def test_what_aged_goes_to_the_front_of_the_ledgers_queue_in_its_order() -> None:
    ledger = Ledger.open(Journal(ForgetfulFile(random.Random(0), Header(bytes(16)).pack())))
    ledger.plan(Visit(name, 0) for name in "abcd")
    leases = ledger.lease(3, holder="w")
    ledger.complete(leases)
    buffer = make()
    fill(buffer, "abc")
    taken = buffer.take(2, 2)
    assert taken is not None
    ledger.requeue(taken.aged.back, "stale")
    assert "".join(lease.item.task for lease in ledger.lease(4, holder="w")) == "abcd"
    assert ledger.balance().requeued == {"stale": 3}


def test_a_batch_and_what_aged_come_together() -> None:
    buffer = make()
    fill(buffer, "ab", version=0)
    fill(buffer, "cd", version=1)
    taken = buffer.take(2, 2)
    assert names(taken) == "cd"
    assert taken is not None
    assert taken.aged.back == (Visit("a", 0), Visit("b", 0))


def test_what_ages_in_hand_leaves_it_before_the_learner_gets_it() -> None:
    buffer = make()
    fill(buffer, "a", version=0)
    fill(buffer, "b", version=1)
    buffer.take(2, 1)
    assert buffer.recheck(1) == StaleGroups()
    assert buffer.recheck(2) == StaleGroups(back=(Visit("a", 0),))
    with pytest.raises(InvariantError, match="a#0"):
        buffer.settle([Visit("a", 0)], "used")
    buffer.settle([Visit("b", 0)], "used")
    assert (buffer.tally().used, buffer.tally().wasted) == (1, 1)


class Watched(GroupBuffer):
    """Says when somebody waits; the lock is held then, and let go of by the wait itself."""

    def __init__(self, **keys: int) -> None:
        super().__init__(**{"max_size": 8, "max_staleness": 1} | keys)
        self.waits = threading.Semaphore(0)

    def _wait(self, deadline: float, what: str) -> None:
        self.waits.release()
        super()._wait(deadline, what)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start it; the result of calling what is returned is its result, or its error."""
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(work())
        except BaseException as error:
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(LONG_S)
        assert said, "it never ended"
        return said[0]

    return result


def version_moves_while_the_batch_fills(buffer: Watched) -> BufferedBatch:
    fill(buffer, "ab", version=0)
    result = in_thread(lambda: buffer.take(3, 1, wait_s=LONG_S))
    buffer.waits.acquire()
    with buffer._changed:  # at once, as far as the one who waits can see
        buffer.advance(2)
        fill(buffer, "c", version=2)
    taken = result()
    assert isinstance(taken, BufferedBatch), taken
    return taken


def test_what_ages_while_the_batch_fills_is_not_handed_out_and_comes_back_at_once() -> None:
    buffer = Watched()
    taken = version_moves_while_the_batch_fills(buffer)
    assert taken == BufferedBatch((), StaleGroups(back=(Visit("a", 0), Visit("b", 0))), 2)
    assert buffer.tally().versions == {2: 1}


def test_planted_staleness_that_is_looked_at_only_on_entry_is_caught() -> None:
    """Teeth: one look before the wait, none after it."""

    class OnlyOnEntry(Watched):
        def take(self, n: int, version: int, *, wait_s: float = 0.0) -> BufferedBatch | None:
            self.looked = False
            return super().take(n, version, wait_s=wait_s)

        def _evict(self, where: Any) -> StaleGroups:
            first, self.looked = not self.looked, True
            return super()._evict(where) if first else StaleGroups()

    taken = version_moves_while_the_batch_fills(OnlyOnEntry())
    assert [entry.version for entry in taken.batch] == [0, 0, 2], "so it trains on groups two versions old"


def test_older_news_of_the_version_do_not_make_old_groups_fresh() -> None:
    buffer = make()
    fill(buffer, "a")
    buffer.advance(5)
    taken = buffer.take(1, 1)
    assert taken is not None
    assert (taken.batch, taken.version) == ((), 5)


def test_a_version_newer_than_the_groups_own_tokens_is_refused() -> None:
    with pytest.raises(InvariantError, match="tokens of version 3"):
        make().put(Visit("a", 0), 4, group_of("a", 3))


def test_a_group_without_a_token_has_the_version_that_the_caller_says() -> None:
    lost = Group(Task(id="a", prompt="?"), "g", (Rollout("a", "g", 0, (), failure="down"),))
    buffer = make()
    assert buffer.put(Visit("a", 0), 7, lost) == "kept"
    assert names(buffer.take(1, 8)) == "a"


# -- read more than once ------------------------------------------------------------


def test_a_group_is_read_max_reads_times_never_twice_in_a_batch() -> None:
    buffer = make(max_reads=3)
    items = fill(buffer, "ab")
    for read in range(3):
        taken = buffer.take(2, 0)
        assert names(taken) == "ab"
        assert taken is not None
        assert [(entry.read, entry.reads_remaining) for entry in taken.batch] == [(read, 3 - read)] * 2
        assert buffer.tally().used == 0, "it counts when it is gone"
        buffer.settle(items, "used")
    assert buffer.take(1, 0) == BufferedBatch((), StaleGroups(), 0)
    assert (buffer.tally().used, buffer.tally().reads, buffer.tally().lost) == (2, 6, 0)


def test_what_was_trained_on_once_is_never_played_again_when_it_ages() -> None:
    buffer = make(max_reads=2)
    items = fill(buffer, "ab")
    buffer.take(1, 0)
    buffer.settle(items[:1], "used")
    taken = buffer.take(2, 9)
    assert taken is not None
    assert taken.aged == StaleGroups(back=(Visit("b", 0),), spent=(Visit("a", 0),))
    assert (buffer.tally().used, buffer.tally().wasted) == (1, 1)


def test_the_end_is_not_announced_while_the_rest_is_in_hand_and_may_come_back() -> None:
    buffer = make(max_reads=2)
    items = fill(buffer, "a")
    buffer.mark_done()
    assert names(buffer.take(3, 0)) == "a"
    with pytest.raises(InvariantError, match="settle them first"):
        buffer.take(3, 0, wait_s=LONG_S)
    buffer.settle(items, "used")
    assert names(buffer.take(3, 0)) == "a"
    buffer.settle(items, "used")
    assert buffer.take(3, 0) is None


# -- fates and epochs ---------------------------------------------------------------


def test_every_fate_is_counted_once_and_adds_up() -> None:
    buffer = make()
    a, b, c, _, _ = fill(buffer, "abcde")
    buffer.take(4, 0)
    buffer.settle([a], "used")
    buffer.settle([b], "filtered")
    buffer.settle([c], "failed")
    assert buffer.tally() == BufferCounts(
        put=5, used=1, filtered=1, failed=1, waiting=1, in_hand=1, reads=1, unread=2, versions={0: 2}
    )
    assert buffer.recheck(2).back == (Visit("d", 0),)
    assert buffer.tally().wasted == 1
    assert buffer.tally().left == 1


def test_a_new_epoch_begins_at_nothing_and_returns_what_waited() -> None:
    buffer = make(max_reads=2)
    a, b, c = fill(buffer, "abc")
    buffer.take(2, 0)
    buffer.settle([a, b], "used")
    buffer.mark_done()
    tally, left = buffer.new_epoch()
    assert (tally.put, tally.reads, tally.left, tally.lost) == (3, 2, 3, 0)
    assert left == StaleGroups(back=(c,), spent=(a, b))
    assert buffer.tally() == BufferCounts()
    fill(buffer, "d")
    assert buffer.take(2, 0) == BufferedBatch((), StaleGroups(), 0), (
        "the end of the former epoch is not the end of this one"
    )


def test_a_new_epoch_waits_for_nobodys_hand() -> None:
    buffer = make()
    fill(buffer, "a")
    buffer.take(1, 0)
    with pytest.raises(InvariantError, match="1 groups in hand"):
        buffer.new_epoch()


def test_a_tally_that_does_not_add_up_is_an_error() -> None:
    """Teeth: lose one behind the buffer's back."""
    buffer = make()
    fill(buffer, "ab")
    buffer._waiting.popitem()
    with pytest.raises(InvariantError, match="1 lost"):
        buffer.tally()


# -- misuse is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    "keys", [{"max_size": 0}, {"max_size": -1}, {"max_size": True}, {"max_staleness": -1}, {"max_reads": 0}, {"max_reads": 1.5}]
)  # fmt: skip
def test_sizes_that_are_none_are_refused(keys: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        make(**keys)


@pytest.mark.parametrize("wait_s", [-1.0, math.inf, math.nan])
def test_a_wait_without_an_end_is_refused(wait_s: float) -> None:
    with pytest.raises(ConfigError, match="wait_s"):
        make().take(1, 0, wait_s=wait_s)
    with pytest.raises(ConfigError, match="wait_s"):
        make().put(Visit("a", 0), 0, group_of("a", 0), wait_s=wait_s)


@pytest.mark.parametrize(("n", "version"), [(0, 0), (-1, 0), (True, 0), (1, -1), (1, 0.5)])
def test_odd_numbers_are_refused(n: Any, version: Any) -> None:
    with pytest.raises(ConfigError):
        make().take(n, version)


def test_a_batch_that_can_never_be_there_is_refused_at_once() -> None:
    buffer = make(max_size=3)
    fill(buffer, "ab")
    with pytest.raises(InvariantError, match="max_size is 3"):
        buffer.take(4, 0, wait_s=LONG_S)
    buffer.take(1, 0)
    with pytest.raises(InvariantError, match="1 in hand"):
        buffer.take(3, 0, wait_s=LONG_S)


def test_an_item_cannot_be_here_twice_or_under_another_name() -> None:
    buffer = make()
    fill(buffer, "a")
    for _ in range(2):
        with pytest.raises(InvariantError, match="here already"):
            buffer.put(Visit("a", 0), 0, group_of("a", 0))
        buffer.take(1, 0)
    with pytest.raises(InvariantError, match="group of b"):
        buffer.put(Visit("c", 0), 0, group_of("b", 0))
    assert buffer.put(Visit("a", 1), 0, group_of("a", 0)) == "kept", "another visit is another item"


def test_nothing_comes_after_the_end() -> None:
    buffer = make()
    buffer.mark_done()
    with pytest.raises(InvariantError, match="after mark_done"):
        buffer.put(Visit("a", 0), 0, group_of("a", 0))


@pytest.mark.parametrize("items", [[Visit("a", 0), Visit("a", 0)], [Visit("a", 0), Visit("z", 0)]])
def test_a_wrong_settlement_changes_nothing(items: list[Visit]) -> None:
    buffer = make()
    fill(buffer, "ab")
    buffer.take(2, 0)
    before = buffer.tally()
    with pytest.raises(InvariantError):
        buffer.settle(items, "used")
    with pytest.raises(ConfigError, match="lost"):
        buffer.settle([Visit("a", 0)], "lost")  # type: ignore[arg-type]
    assert buffer.tally() == before


# -- waits end ----------------------------------------------------------------------


def test_a_wait_in_vain_names_what_it_waited_for() -> None:
    buffer = make(max_size=3)
    fill(buffer, "abc", version=4)
    with pytest.raises(StalledError, match=r"room for d#0: 3 wait, 0 are in hand"):
        buffer.put(Visit("d", 0), 4, group_of("d", 4), wait_s=0.01)
    buffer.take(2, 5)
    buffer.settle([Visit("a", 0), Visit("b", 0)], "used")
    with pytest.raises(StalledError, match=r"2 groups: 1 wait, 0 are in hand.* version 5"):
        buffer.take(2, 5, wait_s=0.01)
    assert buffer.tally().waiting == 1, "what was there still is"


def test_who_waits_for_room_gets_it_when_a_batch_is_settled() -> None:
    buffer = Watched(max_size=1)
    (a,) = fill(buffer, "a")
    result = in_thread(lambda: buffer.put(Visit("b", 0), 0, group_of("b", 0), wait_s=LONG_S))
    buffer.waits.acquire()
    buffer.take(1, 0)
    buffer.settle([a], "used")
    assert result() == "kept"


def test_the_end_wakes_the_one_who_waits() -> None:
    buffer = Watched()
    fill(buffer, "a")
    result = in_thread(lambda: buffer.take(3, 0, wait_s=LONG_S))
    buffer.waits.acquire()
    buffer.mark_done()
    assert names(result()) == "a"


def test_the_end_is_told_to_a_producer_that_waits_for_room() -> None:
    buffer = Watched(max_size=1)
    fill(buffer, "a")
    result = in_thread(lambda: buffer.put(Visit("b", 0), 0, group_of("b", 0), wait_s=LONG_S))
    buffer.waits.acquire()
    buffer.mark_done()
    assert isinstance(result(), InvariantError)


# -- the whole way, with a ledger and several producers ------------------------------


class Epoch:
    """Workers lease, play and put; one consumer trains. The ledger says in the end what became of every item."""

    def __init__(self, items: int, batch: int, *, workers: int, patience_s: float = LONG_S, **keys: int) -> None:
        self.ledger = Ledger.open(Journal(ForgetfulFile(random.Random(0), Header(bytes(16)).pack())))
        self.ledger.plan(Visit(f"t{i}", 0) for i in range(items))
        self.queue = threading.Condition()
        self.buffer = GroupBuffer(**{"max_size": 2 * batch, "max_staleness": 1} | keys)
        self.batch, self.patience_s, self.version, self.stopped = batch, patience_s, 0, False
        self.oldest_trained = 0
        self.workers = [in_thread(lambda i=i: self.work(random.Random(i))) for i in range(workers)]  # type: ignore[misc]

    def work(self, dice: random.Random) -> None:
        while True:
            with self.queue:
                self.queue.wait_for(lambda: self.stopped or self.ledger.pending, LONG_S)
                if self.stopped:
                    return
                version = max(0, self.version - dice.choice([0, 0, 1]))
                (lease,) = self.ledger.lease(1, holder="w")
            group = group_of(lease.item.task, version)
            with self.queue:
                assert self.ledger.complete([lease]) == ["accepted"]
            self.buffer.put(lease.item, version, group, wait_s=LONG_S)
            self.announce_the_end()

    def announce_the_end(self) -> None:
        with self.queue:
            self.buffer.end_if_all_is_in(self.ledger.balance())

    def train(self) -> None:
        try:
            while taken := self.buffer.take(self.batch, self.version, wait_s=self.patience_s):
                self.give_back(taken.aged)
                if taken.batch:
                    self.step(taken)
                self.announce_the_end()
        finally:
            with self.queue:
                self.stopped = True
                self.queue.notify_all()
        assert [result() for result in self.workers] == [None] * len(self.workers)

    def step(self, taken: BufferedBatch) -> None:
        self.oldest_trained = max(self.oldest_trained, *(self.version - w.version for w in taken.batch))
        self.buffer.settle([w.item for w in taken.batch], "used")
        with self.queue:
            self.version += 1
            self.ledger.trained(self.version, [w.item for w in taken.batch if w.read == 0])

    def give_back(self, aged: StaleGroups) -> None:
        if aged.back:
            with self.queue:
                self.ledger.requeue(aged.back, "stale")
                self.queue.notify_all()


@pytest.mark.parametrize(
    ("items", "batch", "workers", "keys"),
    [
        (40, 4, 3, {}), (41, 4, 4, {}), (3, 4, 2, {}), (30, 7, 5, {"max_staleness": 0}),
        (25, 3, 4, {"max_reads": 2, "max_staleness": 2}), (10, 5, 2, {"max_size": 5}), (1, 1, 3, {"max_size": 1}),
    ],
)  # fmt: skip
def test_every_item_is_trained_once_whatever_the_batch_and_the_threads(
    items: int, batch: int, workers: int, keys: Any
) -> None:
    epoch = Epoch(items, batch, workers=workers, **keys)
    epoch.train()
    epoch.ledger.check()
    assert all(isinstance(status, Trained) for status in epoch.ledger.items().values())
    assert epoch.ledger.balance().trained == items
    assert epoch.oldest_trained <= epoch.buffer.max_staleness
    tally = epoch.buffer.tally()
    assert (tally.used, tally.left) == (items, 0)
    assert tally.put == items + tally.wasted
    assert tally.wasted == epoch.ledger.balance().requeued.get("stale", 0)


def test_planted_wait_for_what_is_in_ones_own_hand_is_a_named_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: who counts delivered items as still to come waits for itself; the deadline says so."""
    monkeypatch.setattr(buffer_module, "all_is_in", lambda balance, tally: balance.pending + balance.leased == 0)
    epoch = Epoch(5, 3, workers=2, patience_s=0.2)
    with pytest.raises(StalledError, match="waited in vain for 3 groups"):
        epoch.train()


def test_what_is_delivered_and_not_yet_here_is_waited_for() -> None:
    delivered = Balance(planned=2, pending=0, leased=2, delivered=2, trained=0, dropped={})
    assert not all_is_in(delivered, BufferCounts(put=1, waiting=1, unread=1))
    assert all_is_in(delivered, BufferCounts(put=2, waiting=1, in_hand=1, unread=2))
    played = Balance(planned=2, pending=0, leased=2, delivered=1, trained=0, dropped={})
    assert not all_is_in(played, BufferCounts(put=1, waiting=1, unread=1))
    read_before = Balance(planned=2, pending=0, leased=1, delivered=1, trained=1, dropped={})
    assert all_is_in(read_before, BufferCounts(put=2, waiting=2, unread=1))


def test_what_ages_between_the_count_and_the_end_keeps_the_end_away() -> None:
    buffer = make()
    fill(buffer, "ab")
    balance = Balance(planned=2, pending=0, leased=2, delivered=2, trained=0, dropped={})
    buffer.take(3, 2)
    assert not buffer.end_if_all_is_in(balance), "two are on their way back to the queue"
    fill(buffer, "ab", version=2)
    assert buffer.end_if_all_is_in(balance)
    assert names(buffer.take(3, 2)) == "ab"


def test_what_ages_after_the_end_takes_the_end_back() -> None:
    buffer = make()
    fill(buffer, "ab")
    buffer.mark_done()
    taken = buffer.take(3, 2)
    assert taken == BufferedBatch((), StaleGroups(back=(Visit("a", 0), Visit("b", 0))), 2)
    fill(buffer, "ab", version=2)
    assert buffer.take(3, 2) == BufferedBatch((), StaleGroups(), 2), "played again, and no longer the end"
    buffer.mark_done()
    assert names(buffer.take(3, 2)) == "ab"
