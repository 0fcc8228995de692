"""Orders are played whatever dies, no slot is kept, and the end of a fleet says who ended it."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from typing import Any

import pytest
from fleet_kit import LINES, QUICK, FakeEngine, FakeTransport, FakeWorker, fleet_of, order, played, running, until
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import EngineError, FleetError, ModelError, RewardError, StalledError
from surefoot.runtime.replica_pool import ReplicaPool
from surefoot.runtime.replicas import ReplicaLostError, ReplicaSlot, ReplicaSupervisor, RolloutReport
from surefoot.runtime.requests import RolloutRequest


def idle(fleet: ReplicaPool) -> bool:
    return not any((*fleet.engine_router.loads, *fleet.worker_router.loads)) and fleet.engine_router.waiting == 0


def test_more_orders_than_slots_are_all_played_and_no_slot_is_kept() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)
        found = await asyncio.gather(*(fleet.run(order(n)) for n in range(20)))
        assert [p.group.id for p in found] == [f"train/1/{n}" for n in range(20)]
        assert {(t[2], t[4]) for t in transport.tries} >= {("worker 0", "engine 0"), ("worker 1", "engine 1")}
        assert idle(fleet)
        assert fleet.capacity == 4
        await fleet.close()

    running(scenario)


@pytest.mark.parametrize("kind", ["engines", "workers"])
@pytest.mark.parametrize("count", [1, 2], ids=["the only one", "one of two"])
def test_a_member_that_dies_while_it_plays_is_replaced_and_its_plays_are_done_again(kind: str, count: int) -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=count, workers=count)
        transport.gate.clear()
        plays = [asyncio.create_task(fleet.run(order(n))) for n in range(2 * count)]
        await until(lambda: len(transport.tries) == 2 * count)
        first = getattr(transport, kind)[0]
        first.die()
        await until(lambda: getattr(transport, kind)[0] is not first)
        transport.gate.set()
        found = await asyncio.gather(*plays)
        assert [p.group.id for p in found] == [f"train/1/{n}" for n in range(2 * count)]
        assert first.kills >= 1
        assert getattr(fleet, kind)[0].restarts == 1
        assert max(attempt for _, attempt, *_ in transport.tries) == 2
        assert idle(fleet)
        await fleet.close()

    running(scenario)


@pytest.mark.parametrize("kind", ["engines", "workers"])
def test_a_member_that_dies_while_idle_is_replaced_before_anybody_asks(kind: str) -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)
        getattr(transport, kind)[0].die()
        await until(lambda: getattr(fleet, kind)[0].lives == 2 and getattr(fleet, kind)[0].state == "serving")
        await fleet.run(order())
        assert [attempt for _, attempt, *_ in transport.tries] == [1]
        await fleet.close()

    running(scenario)


@pytest.mark.parametrize("kind", ["engines", "workers"])
def test_a_member_that_falls_silent_is_ended_and_replaced(kind: str) -> None:
    """SIGSTOP: it neither answers nor dies, and whoever waits for it would wait for ever."""

    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1, limits=replace(QUICK, silence_s=0.05))
        stopped = getattr(transport, kind)[0]

        async def act(worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
            if stopped in (worker, engine):
                stopped.silent = True
                await asyncio.Event().wait()
            return RolloutReport(asked.group, attempt, played(asked))

        transport.act = act
        found = await fleet.run(order())
        assert found.group.id == "train/1/0"
        assert stopped.kills >= 1
        assert getattr(fleet, kind)[0].restarts == 1
        await fleet.close()

    running(scenario)


def test_what_a_lost_worker_says_late_is_not_taken() -> None:
    """SIGCONT after the replacement: the late answer is an answer to an attempt that was given up."""

    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1, limits=replace(QUICK, silence_s=0.05))
        late, forged = asyncio.Event(), replace(order(), step=99)
        stopped = transport.workers[0]

        async def act(worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
            if worker is stopped:
                stopped.silent = True
                await late.wait()
                return RolloutReport(asked.group, attempt, played(forged))
            late.set()
            await asyncio.sleep(0.01)
            return RolloutReport(asked.group, attempt, played(asked))

        transport.act = act
        found = await fleet.run(order())
        assert found.group.id == "train/1/0"
        assert fleet.counts["groups"] == 1
        await fleet.close()

    running(scenario)


def test_news_of_an_earlier_life_do_not_end_its_successor() -> None:
    async def scenario(transport: FakeTransport) -> None:
        post: ReplicaSlot[Any] = ReplicaSlot("engine", 0)
        post.begin()
        first = post.gone
        post.lose("it died")
        post.begin()
        post.lose("a worker heard late that it died", first)
        assert first.result() == "it died"
        assert not post.gone.done()

    running(scenario)


@pytest.mark.parametrize("wrong", [{"attempt": 7}, {"group": "train/1/8"}], ids=str)
def test_a_report_of_another_attempt_or_group_is_fenced(wrong: dict[str, Any]) -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)

        async def act(worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
            report = RolloutReport(asked.group, attempt, played(asked))
            return replace(report, **wrong) if len(transport.tries) == 1 else report

        transport.act = act
        assert (await fleet.run(order())).group.id == "train/1/0"
        assert (fleet.counts["fenced"], len(transport.tries)) == (1, 2)
        await fleet.close()

    running(scenario)


def test_a_crash_loop_ends_with_the_name_the_cause_and_the_last_lines() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)
        transport.dead_on_arrival.add("engine 1")
        transport.engines[1].die()
        await until(lambda: fleet.failed.done())
        with pytest.raises(FleetError) as caught:
            await fleet.run(order())
        said = str(caught.value)
        assert caught.value.exit_code == 77
        assert "engine 1 was lost 4 times in a row" in said
        assert "signal 9" in said
        assert all(line in said for line in LINES.splitlines())
        assert sum(member.name == "engine 1" for member in transport.everybody) == 1 + QUICK.max_restarts
        await fleet.close()

    running(scenario)


def test_only_the_last_fifty_lines_are_shown() -> None:
    from surefoot.runtime.replicas import restarts_exhausted

    said = str(restarts_exhausted("worker 0", 1, "it died", "\n".join(f"line {n}" for n in range(200))))
    assert "line 150" in said
    assert "line 149" not in said


def test_a_crash_loop_backs_off_and_the_first_loss_does_not() -> None:
    async def scenario(transport: FakeTransport) -> None:
        post: ReplicaSlot[Any] = ReplicaSlot("engine", 0)
        limits = replace(QUICK, backoff_s=0.25, longest_backoff_s=1.0)
        keeper = ReplicaSupervisor(post, limits, transport.start_engine, *([None] * 4))  # type: ignore[arg-type,list-item]
        pauses = []
        for losses in range(1, 6):
            post.in_a_row = losses
            pauses.append(keeper._pause())
        assert pauses == [0.0, 0.25, 0.5, 1.0, 1.0]

    running(scenario)


def test_the_budget_begins_anew_when_something_was_finished() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)
        for _ in range(3 * QUICK.max_restarts):
            dying = transport.workers[0]
            dying.die()
            await until(lambda dying=dying: transport.workers[0] is not dying)  # type: ignore[misc]
            await fleet.run(order())
        assert not fleet.failed.done()
        assert fleet.workers[0].restarts == 3 * QUICK.max_restarts
        await fleet.close()

    running(scenario)


@pytest.mark.parametrize(("start_s", "allowed"), [(0.0, False), (60.0, True)])
def test_the_time_for_replacements_is_never_less_than_two_whole_starts(start_s: float, allowed: bool) -> None:
    """An engine that takes a minute to start is not given up after thirty seconds."""

    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1, limits=replace(QUICK, restart_timeout_s=30.0))
        post = fleet.engines[0]
        post.start_s = start_s
        transport.engines[0].die()
        await until(lambda: post.in_a_row == 1 and post.state == "serving")
        post.unmanned_s += 90.0
        transport.engines[0].die()
        await until(lambda: fleet.failed.done() or (post.in_a_row == 2 and post.state == "serving"))
        assert fleet.failed.done() != allowed
        await fleet.close()

    running(scenario)


def test_the_time_that_a_process_served_is_no_time_of_replacing_it() -> None:
    """Lost twice in a minute in which nothing was finished, and back at once each time: the run goes on."""

    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)
        for _ in range(2):
            dying = transport.workers[0]
            dying.die()
            await until(lambda dying=dying: fleet.workers[0].member not in (None, dying))  # type: ignore[misc]
            await asyncio.sleep(0.5)
        assert fleet.workers[0].in_a_row == 2
        assert fleet.workers[0].unmanned_s < 0.5
        await fleet.close()

    running(scenario)


def test_max_restarts_zero_means_the_first_loss_is_the_end() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, limits=replace(QUICK, max_restarts=0))
        transport.workers[1].die()
        await until(lambda: fleet.failed.done())
        with pytest.raises(FleetError, match="worker 1 was lost once"):
            await fleet.run(order())
        await fleet.close()

    running(scenario)


def test_a_start_that_is_refused_for_good_is_not_tried_again() -> None:
    async def scenario(transport: FakeTransport) -> None:
        transport.refuse["engine 0"] = ModelError("model x does not load", "no such folder", "check the path")
        with pytest.raises(ModelError, match="model x does not load"):
            await fleet_of(transport)
        assert sum(member.name == "engine 0" for member in transport.everybody) == 1

    running(scenario)


def test_a_start_that_takes_too_long_counts_as_a_loss() -> None:
    class Slow(FakeTransport):
        async def start_worker(self, index: int, life: int) -> FakeWorker:
            if life == 1:
                await asyncio.Event().wait()
            return await super().start_worker(index, life)

    async def scenario(_: FakeTransport) -> None:
        transport = Slow()
        fleet = await fleet_of(transport, engines=1, workers=1, limits=replace(QUICK, start_timeout_s=0.02))
        assert fleet.workers[0].lives == 2
        await fleet.close()

    running(scenario)


def test_an_error_of_the_play_itself_is_the_callers() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)

        async def act(worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
            raise RewardError("reward score returned 3 numbers", "siblings", "return one each")

        transport.act = act
        with pytest.raises(RewardError, match="3 numbers"):
            await fleet.run(order())
        assert idle(fleet)
        assert not fleet.failed.done()
        await fleet.close()

    running(scenario)


def test_one_hung_play_is_done_again_and_holds_up_nobody() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, limits=replace(QUICK, rollout_timeout_s=0.05))

        async def act(worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
            if asked.position == 0 and attempt == 1:
                await asyncio.Event().wait()
            return RolloutReport(asked.group, attempt, played(asked))

        transport.act = act
        found = await asyncio.gather(*(fleet.run(order(n)) for n in range(8)))
        assert len({p.group.id for p in found}) == 8
        assert [t[1] for t in transport.tries if t[0] == "train/1/0"] == [1, 2]
        assert fleet.counts["groups"] == 8
        await fleet.close()

    running(scenario)


def test_a_play_that_always_hangs_ends_with_the_task_named() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, limits=replace(QUICK, rollout_timeout_s=0.01))
        transport.gate.clear()
        with pytest.raises(StalledError, match="task t5"):
            await fleet.run(order(5))
        assert idle(fleet)
        await fleet.close()

    running(scenario)


def test_a_task_that_takes_its_worker_with_it_every_time_ends_the_run_by_name() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=2, workers=2)

        async def act(worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
            if asked.position == 6:
                worker.die()
                await asyncio.Event().wait()
            return RolloutReport(asked.group, attempt, played(asked))

        transport.act = act

        async def others() -> None:
            while True:
                await fleet.run(order(1))

        busy = asyncio.create_task(others())
        with pytest.raises(FleetError, match=r"task t6|worker \d was lost"):
            await fleet.run(order(6))
        busy.cancel()
        await asyncio.gather(busy, return_exceptions=True)
        await fleet.close()

    running(scenario)


# -- weights ----------------------------------------------------------------------------------


async def spread_to(members: Any, version: int) -> dict[str, float]:
    for member in members:
        await member.prepare(None, version)
    for member in members:
        await member.commit(version)
    return {"sync/replicas": float(len(members))}


async def publish(fleet: ReplicaPool, version: int) -> dict[str, float]:
    async def admit(member: Any) -> None:
        await spread_to([member], version)

    return await fleet.publish(lambda members: spread_to(members, version), admit)


def test_a_new_engine_serves_only_after_it_was_brought_to_the_current_version() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)
        assert await publish(fleet, 6) == {"sync/replicas": 1.0}
        transport.engines[0].die()
        await fleet.run(order())
        assert transport.tries[-1][-1] == 6
        assert transport.engines[0].life == 2
        await fleet.close()

    running(scenario)


def test_planted_an_engine_that_joins_without_the_version_is_seen() -> None:
    """Teeth: skip the admission, and the successor answers with no version at all."""

    class Careless(ReplicaPool):
        async def _join(self, member: Any) -> None: ...

    async def scenario(transport: FakeTransport) -> None:
        fleet = Careless(transport, engines=1, workers=1, engine_slots=2, worker_slots=2, limits=QUICK)
        await fleet.start()
        await publish(fleet, 6)
        transport.engines[0].die()
        await fleet.run(order())
        assert transport.tries[-1][-1] is None
        await fleet.close()

    running(scenario)


def test_an_engine_that_dies_in_a_sync_is_left_out_and_its_successor_gets_the_new_version() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)
        await publish(fleet, 1)
        victims = [transport.engines[1]]

        async def spread(members: Any) -> dict[str, float]:
            if victims:
                victims.pop().die()
            return await spread_to(members, 2)

        async def admit(member: Any) -> None:
            await spread_to([member], 2)

        assert await fleet.publish(spread, admit) == {"sync/replicas": 1.0}
        await until(lambda: all(p.state == "serving" for p in fleet.engines))
        assert [transport.engines[i].version for i in (0, 1)] == [2, 2]
        await fleet.close()

    running(scenario)


def test_an_engine_that_lies_in_a_sync_is_no_accident() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)

        async def spread(members: Any) -> dict[str, float]:
            raise EngineError("engine 1 does not serve version 3", "old weights", "see its log")

        async def admit(member: Any) -> None: ...

        with pytest.raises(EngineError, match="engine 1 does not serve"):
            await fleet.publish(spread, admit)
        assert [p.restarts for p in fleet.engines] == [0, 0]
        await fleet.close()

    running(scenario)


def test_an_engine_that_cannot_be_admitted_is_replaced_until_the_budget_is_spent() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)

        async def admit(member: Any) -> None:
            raise EngineError("engine 0 answers as version 0 did", "old weights", "see its log")

        await fleet.publish(lambda members: spread_to(members, 4), admit)
        transport.engines[0].die()
        with pytest.raises(FleetError, match="answers as version 0"):
            await fleet.run(order())
        await fleet.close()

    running(scenario)


# -- the end, and interruptions ---------------------------------------------------------------


@pytest.mark.parametrize("deaf", [False, True], ids=["as it is", "planted: nobody hears it"])
def test_a_sign_of_life_that_is_under_way_when_the_fleet_is_closed_ends_without_a_word(
    deaf: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would print the traceback of an exception that nobody asked for, below the verdict of a run that passed."""
    complaints: list[str] = []
    if deaf:
        monkeypatch.setattr("surefoot.runtime.replicas._on_ping_done", lambda ping: None)

    async def scenario(transport: FakeTransport) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
        fleet = await fleet_of(transport, engines=1, workers=1)
        member = transport.engines[0]
        asked = asyncio.Event()

        async def ping() -> Any:
            asked.set()
            try:
                await member.died.wait()
            except asyncio.CancelledError:  # the answer was on its way
                await member.died.wait()
            raise ReplicaLostError("process 1 ended without a word")

        member.ping = ping  # type: ignore[method-assign]
        await asked.wait()
        await fleet.close()
        await asyncio.sleep(0.01)
        assert len(asyncio.all_tasks()) == 2, "the scenario and whoever waits for it"

    running(scenario)
    gc.collect()
    assert bool(complaints) == deaf, complaints


def test_close_ends_every_process_and_every_play() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)
        transport.gate.clear()
        plays = [asyncio.create_task(fleet.run(order(n))) for n in range(9)]
        await until(lambda: len(transport.tries) == 4)
        await fleet.close()
        ends = await asyncio.gather(*plays, return_exceptions=True)
        assert all(isinstance(end, FleetError) for end in ends)
        assert all(member.kills >= 1 for member in transport.everybody)
        assert idle(fleet)
        assert len(asyncio.all_tasks()) == 2, "the scenario and whoever waits for it"

    running(scenario)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(0, 3))
def test_a_play_that_is_cancelled_at_any_moment_holds_nothing(ticks: list[int], deaths: int) -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=1, workers=1)
        plays = []
        for number, wait in enumerate(ticks):
            plays.append(asyncio.create_task(fleet.run(order(number))))
            for _ in range(wait):
                await asyncio.sleep(0)
            if number < deaths:
                transport.workers[0].die()
            plays[number // 2].cancel()
        await asyncio.gather(*plays, return_exceptions=True)
        await until(lambda: idle(fleet))
        assert (await fleet.run(order(99))).group.id == "train/1/99"
        await until(lambda: fleet.engines[0].abandoned == fleet.workers[0].abandoned == 0)
        await fleet.close()

    running(scenario)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ewsSp"), st.integers(0, 2), st.integers(0, 4)), max_size=14))
def test_whatever_dies_in_whatever_order_every_group_is_played_once(events: list[tuple[str, int, int]]) -> None:
    """e, w: an engine or a worker dies; s, S: it falls silent; p: another version is published."""

    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport, engines=3, workers=3, limits=replace(QUICK, max_restarts=50, silence_s=0.03))
        await publish(fleet, 0)
        plays = [asyncio.create_task(fleet.run(order(n))) for n in range(30)]
        for version, (what, index, wait) in enumerate(events, start=1):
            if what == "p":
                await publish(fleet, version)
            else:
                member = (transport.engines if what in "es" else transport.workers)[index]
                member.silent = what in "sS"
                member.died.set() if what in "ew" else None
            for _ in range(wait):
                await asyncio.sleep(0)
        found = await asyncio.gather(*plays)
        assert [p.group.id for p in found] == [f"train/1/{n}" for n in range(30)]
        assert fleet.counts["groups"] == 30
        await until(lambda: idle(fleet))
        await until(lambda: all(p.state == "serving" for p in (*fleet.engines, *fleet.workers)))
        assert len({engine.version for engine in transport.engines.values()}) == 1
        await fleet.close()

    running(scenario)


def test_status_tells_who_is_there_and_how_often_they_were_replaced() -> None:
    async def scenario(transport: FakeTransport) -> None:
        fleet = await fleet_of(transport)
        await publish(fleet, 3)
        transport.workers[1].die()
        await until(lambda: fleet.workers[1].restarts == 1 and fleet.workers[1].state == "serving")
        await until(lambda: fleet.engines[0].version == 3)
        status = fleet.status()
        assert status["replicas"][0] == {"name": "engine 0", "state": "serving", "version": 3, "load": 0, "restarts": 0}
        assert status["workers"][1]["restarts"] == 1
        assert status["in_flight"] == 0
        await fleet.close()

    running(scenario)
