"""Asynchronous books: what is asked for when, what a batch is made of, and what becomes of everything else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest
from virtual_clock import run_virtually

from surefoot.config import Config
from surefoot.errors import EngineError, FleetError, RewardError, StalledError, StateError
from surefoot.protocols import StepBatch
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.sampler import AsyncSampler
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Dropped, Ledger, Visit

Answer = tuple[int, int] | Exception
"""(version at the first token, version at the last), or what goes wrong."""


class Crew:
    """Plays what the test says, when the test says."""

    def __init__(self, capacity: int = 100) -> None:
        self.capacity = capacity
        self.asked: list[RolloutRequest] = []
        self.open: dict[str, asyncio.Future[Answer]] = {}
        self.cancelled: list[str] = []

    async def run(self, order: RolloutRequest) -> RolloutResult:
        self.asked.append(order)
        self.open[order.task.id] = asyncio.get_running_loop().create_future()
        try:
            answer = await self.open[order.task.id]
        except asyncio.CancelledError:
            self.cancelled.append(order.task.id)
            raise
        finally:
            del self.open[order.task.id]
        if isinstance(answer, Exception):
            raise answer
        return RolloutResult(group(order.task, order.group, *answer), (None,))

    async def answer(self, name: str, version: int = 0, end: int | None = None, error: Exception | None = None) -> None:
        self.open[name].set_result(error or (version, version if end is None else end))
        await settled()

    async def answer_all(self, version: int = 0) -> None:
        for name in list(self.open):
            await self.answer(name, version)

    @property
    def names(self) -> list[str]:
        return list(self.open)


async def settled() -> None:
    """Everything that can happen without waiting has happened."""
    for _ in range(12):
        await asyncio.sleep(0)


def group(task: Task, name: str, version: int, end: int) -> Group:
    turn = Turn((1,), (2, 3), (-0.1, -0.2), version, version_end=end)
    return Group(task, name, (Rollout(task.id, name, 0, (turn,), 1.0),))


class Desk:
    """A stream with everything around it, and the learner's version to move."""

    def __init__(self, folder: Path, *, tasks: int = 12, judge: Any = None, capacity: int = 100, **keys: Any) -> None:
        settings: dict[str, Any] = dict(
            model="m", tasks="t", tasks_per_step=2, num_generations=2, max_staleness=1, max_steps=50,
            importance_sampling_correction=True,
        )  # fmt: skip
        self.config = Config(**(settings | keys))
        path = folder / "ledger.journal"
        self.journal = Journal.open(path) if path.exists() else Journal.create(path)
        self.ledger, self.batches = Ledger.open(self.journal), BatchLog(folder)
        self.crew, self.version = Crew(capacity), 0
        known = [Task(id=f"t{i}", prompt="?") for i in range(tasks)]
        self.stream = AsyncSampler(
            self.ledger, self.batches, known, self.crew, self.order, config=self.config, trained=lambda: self.version,
            judge=judge,
        )  # fmt: skip

    def order(self, task: Task, visit: int, position: int) -> RolloutRequest:
        return RolloutRequest(task, (1,), Sampling(2, 1.0, 4, 8), "train", visit, position)

    async def next_batch(self, step: int) -> asyncio.Task[StepBatch]:
        task = asyncio.ensure_future(self.stream.next_batch(step, self.config.tasks_per_step))
        await settled()
        return task

    async def two_are_quick(self) -> tuple[str, list[str]]:
        """The second and third group asked for come back. The name of the first, and those of all others."""
        slow, *others = self.crew.names
        for name in others[:2]:
            await self.crew.answer(name)
        return slow, others

    def learn(self, batch: StepBatch, step: int, *, publish: bool = True) -> None:
        """The rest of a step, as the loop does it."""
        self.stream.record_rollouts(batch)
        self.version = step
        if publish:
            self.stream.advance(step)
        self.stream.close_batch(batch, step, [None] * len(batch.tasks))


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On a clock that jumps: what would wait for ever fails at once."""
    run_virtually(test(), deadline=1e5)


def ids(batch: StepBatch) -> list[str]:
    return [task.id for task in batch.tasks]


# -- asking -------------------------------------------------------------------------------


@pytest.mark.parametrize(("staleness", "before", "after"), [(0, 2, 0), (1, 4, 4), (2, 6, 6)])
def test_no_more_is_asked_for_than_can_be_used_in_time(staleness: int, before: int, after: int, tmp_path: Path) -> None:
    """After a draw the batch in hand counts too: with no staleness nothing may be asked for until the next version."""

    async def test() -> None:
        desk = Desk(tmp_path, max_staleness=staleness)
        drawing = await desk.next_batch(1)
        assert len(desk.crew.open) == before
        await desk.crew.answer_all()
        batch = await drawing
        await settled()
        tally = desk.stream.buffer.tally()
        assert len(desk.crew.open) + tally.waiting + 2 == (after or 2)
        desk.learn(batch, 1)
        await settled()
        tally = desk.stream.buffer.tally()
        assert len(desk.crew.open) + tally.waiting == before, "the next version makes room"

    run(test)


def test_no_more_is_asked_for_than_the_crew_can_play(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, max_staleness=4, capacity=3)
        await desk.next_batch(1)
        assert len(desk.crew.open) == 3

    run(test)


def test_no_more_is_asked_for_than_the_rest_of_the_run_needs(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, max_staleness=3, max_steps=2)
        drawing = await desk.next_batch(1)
        assert len(desk.crew.open) == 4
        await desk.crew.answer_all()
        desk.learn(await drawing, 1)
        drawing = await desk.next_batch(2)
        desk.learn(await drawing, 2)
        await settled()
        assert desk.crew.open == {}
        assert str(desk.ledger.balance()).startswith("12 planned = 8 pending + 0 leased (0 delivered) + 4 trained")

    run(test)


def test_a_task_that_is_asked_for_again_gets_the_same_random_numbers_and_the_next_visit_others(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, tasks=2, max_staleness=0)
        drawing = await desk.next_batch(1)
        first = {order.task.id: order for order in desk.crew.asked}
        name = desk.crew.names[0]
        await desk.crew.answer(name, error=EngineError("a", "b", "c"))
        again = desk.crew.asked[-1]
        assert again == first[name]
        await desk.crew.answer_all()
        desk.learn(await drawing, 1)
        await desk.next_batch(2)
        visit = next(order for order in desk.crew.asked[3:] if order.task.id == name)
        assert visit.group != again.group
        assert visit.requests(0, frozenset())[0].seed != again.requests(0, frozenset())[0].seed

    run(test)


def test_groups_that_come_together_cost_one_sync_each_of_journal_and_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, tasks_per_step=8, tasks=20)
        drawing = await desk.next_batch(1)
        syncs: list[str] = []
        real = Journal.sync
        monkeypatch.setattr(Journal, "sync", lambda self: (syncs.append(Path(self.name).name), real(self))[1])
        for future in list(desk.crew.open.values())[:8]:
            future.set_result((0, 0))
        await drawing
        assert sorted(syncs) == ["batches_0.journal", "ledger.journal"]
        await desk.stream.close()

    run(test)


# -- batches ------------------------------------------------------------------------------


def test_a_quick_group_does_not_wait_for_a_slow_one_that_has_time_left(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        slow, quick = await desk.two_are_quick()
        assert ids(await drawing) == quick[:2]
        assert slow in desk.crew.open

    run(test)


def test_a_group_that_would_be_too_old_for_the_next_step_holds_this_one(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        slow, quick = await desk.two_are_quick()
        desk.learn(await drawing, 1)
        drawing = await desk.next_batch(2)
        for name in [name for name in desk.crew.names if name != slow]:
            await desk.crew.answer(name, 1 if name not in quick else 0)
        assert not drawing.done(), "one version old now, too old after this update"
        await desk.crew.answer(slow, 0)
        assert slow in ids(await drawing), "and it is part of the batch, however long it took"

    run(test)


def test_the_oldest_weights_come_first_also_when_they_came_last(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, max_staleness=2)
        drawing = await desk.next_batch(1)
        old, rest = await desk.two_are_quick()
        desk.learn(await drawing, 1)
        await settled()
        new = [order.task.id for order in desk.crew.asked[6:]]
        for name in (*new, rest[2]):
            await desk.crew.answer(name, 0 if name in rest else 1)
        drawing = await desk.next_batch(2)
        assert not drawing.done(), "four of version 0 are left, and the next batch has room for two"
        await desk.crew.answer(old, 0)
        assert ids(await drawing) == [rest[2], old]

    run(test)


def test_with_no_staleness_everything_was_asked_with_this_version(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, max_staleness=0)
        for step in range(1, 5):
            drawing = await desk.next_batch(step)
            await desk.crew.answer_all(version=step - 1)
            batch = await drawing
            assert {t.version for g in batch.groups or () for r in g.rollouts for t in r.turns} == {step - 1}
            desk.learn(batch, step)
        assert desk.stream.figures.wasted == 0

    run(test)


def test_what_is_too_old_goes_back_to_the_front_and_is_counted(tmp_path: Path) -> None:
    """An engine that missed an update answers with old weights."""

    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        await desk.crew.answer_all()
        desk.learn(await drawing, 1)
        desk.learn(await (await desk.next_batch(2)), 2)
        drawing = await desk.next_batch(3)
        name = desk.crew.names[0]
        await desk.crew.answer(name, 0)
        assert name in desk.crew.open, "asked for again at once"
        assert desk.stream.figures.wasted == 1
        assert desk.ledger.balance().requeued == {"stale": 1}
        await desk.crew.answer_all(2)
        batch = await drawing
        assert desk.stream.metrics()["async/wasted"] == 1.0
        desk.learn(batch, 3)
        assert desk.ledger.balance().lost == 0

    run(test)


def test_a_group_ages_while_the_batch_fills(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, max_staleness=1)
        drawing = await desk.next_batch(1)
        first, second, *_ = desk.crew.names
        await desk.crew.answer(first, 0)
        desk.version = 2
        desk.stream.advance(2)
        await desk.crew.answer(second, 2)
        assert not drawing.done()
        assert desk.stream.figures.wasted == 1

    run(test)


def test_engines_that_only_ever_answer_with_old_weights_are_not_asked_for_ever(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        desk.version = 7
        desk.stream.advance(7)
        drawing = await desk.next_batch(8)
        while not drawing.done():
            await desk.crew.answer(desk.crew.names[0], 3)
        with pytest.raises(StalledError, match="groups came too old"):
            await drawing
        await desk.stream.close()

    run(test)


# -- failures -----------------------------------------------------------------------------


def test_a_slow_group_is_given_up_and_after_the_third_time_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, rollout_timeout_s=20.0, tasks_per_step=4, max_staleness=0, tasks=5)
        drawing = await desk.next_batch(1)
        stuck = desk.crew.names[0]
        while not drawing.done():
            for name in [name for name in desk.crew.names if name != stuck]:
                await desk.crew.answer(name)
            await asyncio.sleep(1.0)
        batch = await drawing
        assert stuck not in ids(batch)
        assert len(ids(batch)) == 4
        assert isinstance(desk.ledger.status(Visit(stuck, 0)), Dropped)
        balance = desk.ledger.balance()
        assert balance.dropped == {"timeout": 1}
        assert balance.requeued == {"timeout": 2}
        assert desk.crew.cancelled == [stuck] * 3
        assert desk.stream.metrics()["async/given_up"] == 3.0

    run(test)


def test_a_failed_group_costs_itself_and_the_step_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        bad, *_ = desk.crew.names
        await desk.crew.answer(bad, error=EngineError("died", "so", "ask again"))
        assert bad in desk.crew.open
        await desk.crew.answer_all()
        await drawing
        assert desk.ledger.balance().requeued == {"engine_error": 1}

    run(test)


@pytest.mark.parametrize("error", [FleetError("nobody left", "gone", "restart"), ZeroDivisionError("a bug")])
def test_what_cannot_be_mended_ends_the_wait_at_once(error: Exception, tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        await desk.crew.answer(desk.crew.names[0], error=error)
        assert drawing.done()
        with pytest.raises(type(error)):
            await drawing
        with pytest.raises(type(error)):
            await (await desk.next_batch(1))
        await desk.stream.close()

    run(test)


@pytest.mark.parametrize("error", [EngineError("dead engine", "it", "is"), TimeoutError()])
def test_when_nothing_works_it_ends_with_the_cause_instead_of_going_round(error: Exception, tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path, tasks=3)
        drawing = await desk.next_batch(1)
        while not drawing.done():
            await desk.crew.answer(desk.crew.names[0], error=error)
        with pytest.raises(StalledError if isinstance(error, TimeoutError) else EngineError):
            await drawing

    run(test)


def test_a_crew_that_does_not_even_let_go_ends_in_a_stall_that_says_what_was_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)

        async def deaf(order: RolloutRequest) -> RolloutResult:
            while True:
                try:
                    await asyncio.sleep(3600)
                except asyncio.CancelledError:
                    if desk.version:
                        raise

        monkeypatch.setattr(desk.crew, "run", deaf)
        with pytest.raises(StalledError, match=r"2 groups and nothing happened: 0 are here, 4 in flight"):
            await desk.stream.next_batch(1, 2)
        desk.version = 1
        await desk.stream.close()

    run(test)


def test_a_batch_that_too_few_could_grade_is_refused_and_played_again_later(tmp_path: Path) -> None:
    def judge(rollouts: Sequence[Rollout], when: str) -> None:
        raise RewardError(f"{len(rollouts)} in {when}", "no verdict", "mend it")

    async def test() -> None:
        desk = Desk(tmp_path, judge=judge)
        drawing = await desk.next_batch(1)
        await desk.crew.answer_all()
        with pytest.raises(RewardError, match="2 in step 1"):
            await drawing
        await desk.stream.close()
        assert desk.ledger.balance().requeued["no_verdict"] == 2
        assert desk.ledger.balance().lost == 0
        assert len(desk.batches.delivered()) == 2, "the other two are not part of it"

    run(test)


def test_close_gives_back_what_was_in_flight_and_holds_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        front = desk.crew.names
        drawing.cancel()
        await desk.stream.close()
        assert sorted(desk.crew.cancelled) == sorted(front)
        balance = desk.ledger.balance()
        assert (balance.leased, balance.requeued) == (0, {"stopped": 4})
        assert [lease.item.task for lease in desk.ledger.lease(4, holder="next")] == front

    run(test)


# -- going on -----------------------------------------------------------------------------


async def two_steps_and_two_groups(desk: Desk) -> list[StepBatch]:
    """Steps 1 and 2 are done, two groups of version 1 wait, two are in flight."""
    done = []
    for step in (1, 2):
        drawing = await desk.next_batch(step)
        await desk.crew.answer_all(step - 1)
        done.append(await drawing)
        desk.learn(done[-1], step)
        await settled()
    await desk.crew.answer(desk.crew.names[0], 2)
    assert desk.stream.buffer.tally().waiting == 3
    return done


def test_after_a_crash_batches_are_repeated_and_finished_groups_come_back(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        before = await two_steps_and_two_groups(desk)
        waiting = [w.task for w in desk.stream.buffer.items()]
        for flight in list(desk.stream._flights.values()):
            flight.task.cancel()  # type: ignore[union-attr]

        again = Desk(tmp_path)
        again.ledger.rewind(0)
        for step in (1, 2):
            batch = await (await again.next_batch(step))
            assert batch == before[step - 1]
            assert again.crew.asked == [], "nothing is sampled while journaled steps are repeated"
            again.learn(batch, step)
        batch = await (await again.next_batch(3))
        assert ids(batch) == waiting[:2]
        assert not {order.task.id for order in again.crew.asked} & set(waiting), "what is finished is not played again"
        again.learn(batch, 3)
        assert again.ledger.balance().lost == 0
        await again.stream.close()

    run(test)


def test_a_group_on_the_disk_that_the_ledger_never_heard_of_counts(tmp_path: Path) -> None:
    """Killed between the two writes: it was finished, so it is used."""

    async def test() -> None:
        desk = Desk(tmp_path)
        await desk.next_batch(1)
        asked = desk.crew.names
        orphan = asked[2]
        order = next(o for o in desk.crew.asked if o.task.id == orphan)
        desk.batches.deliver({Visit(orphan, 0): group(order.task, order.group, 0, 0)})
        for flight in list(desk.stream._flights.values()):
            flight.task.cancel()  # type: ignore[union-attr]

        again = Desk(tmp_path)
        drawing = await again.next_batch(1)
        assert again.crew.names == [asked[0], asked[1], asked[3]], "in the order in which they were asked for before"
        await again.crew.answer_all()
        assert orphan in ids(await drawing)
        await again.stream.close()
        again.ledger.check()

    run(test)


@pytest.mark.parametrize(("version", "reason"), [(0, "too old"), (9, "from weights that are not there yet")])
def test_a_finished_group_that_does_not_fit_the_weights_is_asked_for_again(
    version: int, reason: str, tmp_path: Path
) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        await desk.next_batch(1)
        name = desk.crew.names[0]
        await desk.crew.answer(name, version)
        for flight in list(desk.stream._flights.values()):
            flight.task.cancel()  # type: ignore[union-attr]

        again = Desk(tmp_path)
        again.version = 4
        again.stream.advance(4)
        await again.next_batch(5)
        assert name in again.crew.open, reason
        assert again.batches.delivered() == []
        await again.stream.close()

    run(test)


def test_a_journal_without_a_group_that_was_delivered_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        desk.stream.queue.plan_epoch(needed=2)
        desk.ledger.complete(desk.ledger.lease(1, holder="x"))
        with pytest.raises(StateError, match="its group is not in the journal"):
            await desk.stream.next_batch(1, 2)

    run(test)


# -- numbers ------------------------------------------------------------------------------


def test_metrics_tell_age_waiting_and_mixed_weights(tmp_path: Path) -> None:
    async def test() -> None:
        desk = Desk(tmp_path)
        drawing = await desk.next_batch(1)
        for name in desk.crew.names:
            await desk.crew.answer(name, 0, end=1 if name == desk.crew.asked[2].task.id else 0)
        desk.learn(await drawing, 1)
        await (await desk.next_batch(2))
        await settled()
        metrics = desk.stream.metrics()
        assert metrics["async/staleness_mean"] == metrics["async/staleness_max"] == 1.0
        assert (metrics["off_policy/mean"], metrics["off_policy/max"]) == (1.0, 1.0)
        assert metrics["off_policy/mixed_share"] == 0.5
        assert (metrics["async/queue"], metrics["async/in_flight"]) == (0.0, 2.0)
        assert 0.0 <= metrics["async/idle_share"] <= 1.0
        status = desk.stream.status()
        assert Counter({k: status[k] for k in ("groups", "tokens", "in_flight", "queue", "in_hand")}) == Counter(
            groups=4, tokens=8, in_flight=2, queue=0, in_hand=2
        )
        assert (status["version"], status["published"], status["pending"]) == (1, 1, 6)
        await desk.stream.close()

    run(test)
