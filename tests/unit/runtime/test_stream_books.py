"""The stream, asked by a loop that is not asynchronous: waits that end, and nobody left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import Config
from surefoot.errors import EngineError, FleetError
from surefoot.protocols import Grade, Request
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.async_queue import AsyncTaskQueue
from surefoot.runtime.local import LocalRolloutRunner
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling, request_for
from surefoot.runtime.rollout import RolloutCollector
from surefoot.runtime.sampler import AsyncSampler
from surefoot.runtime.threads import EventLoopThread
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger
from surefoot.system import signals
from surefoot.system.signals import StopRequested

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(8)]
SAMPLING = Sampling(4, 1.0, 6, 40)


class Crew:
    """Answers at once, or never, or with an error."""

    capacity = 16

    def __init__(self, answer: Exception | bool = True) -> None:
        self.answer, self.version = answer, 0

    async def run(self, order: RolloutRequest) -> RolloutResult:
        if isinstance(self.answer, Exception):
            raise self.answer
        if not self.answer:
            await asyncio.Event().wait()
        turn = Turn((1,), (2, 3), (-0.1, -0.2), self.version)
        return RolloutResult(
            Group(order.task, order.group, (Rollout(order.task.id, order.group, 0, (turn,), 1.0),)), (None,)
        )


def order(task: Task, visit: int, position: int) -> RolloutRequest:
    return RolloutRequest(task, (4, 9, 5), SAMPLING, "train", visit, position)


@pytest.fixture
def open_books(tmp_path: Path) -> Iterator[Callable[..., AsyncTaskQueue]]:
    """`open_books(crew, stop=...)`: books with their own thread; closed at the end."""
    made: list[AsyncTaskQueue] = []

    def make(crew: Any, **keys: Any) -> AsyncTaskQueue:
        config = Config(
            model="m", tasks="t", tasks_per_step=2, num_generations=4, max_staleness=1, max_steps=9,
            importance_sampling_correction=True,
        )  # fmt: skip
        ledger = Ledger.open(Journal.create(tmp_path / "ledger.journal"))
        stream = AsyncSampler(
            ledger, BatchLog(tmp_path), TASKS, crew, order, config=config, trained=lambda: made[0].version
        )  # type: ignore[attr-defined]
        made.append(AsyncTaskQueue(stream, EventLoopThread(), **keys))
        made[0].version = 0  # type: ignore[attr-defined]
        return made[0]

    yield make
    for queue in made:
        queue.close()
        queue.thread.close()


def test_the_loop_draws_keeps_and_settles_as_with_any_books(open_books: Any) -> None:
    queue = open_books(Crew())
    for step in range(1, 4):
        batch = queue.next_batch(step, 2)
        queue.record_rollouts(batch)
        assert queue.metrics()["async/staleness_max"] <= 1.0
        queue.version = queue.stream.runner.version = step
        queue.advance(step)
        queue.close_batch(batch, step, [None, "partial_group" if step == 2 else None])
    status = queue.status()
    assert status["groups"] >= 6
    queue.close()
    balance = queue.stream.ledger.balance()
    assert (balance.trained, balance.dropped, balance.lost) == (5, {"partial_group": 1}, 0)


def test_asked_to_stop_it_stops_waiting_and_no_batch_is_lost(open_books: Any) -> None:
    asked = threading.Event()
    queue = open_books(Crew(False), stop=asked.is_set)
    asked.set()
    with pytest.raises(StopRequested):
        queue.next_batch(1, 2)
    queue.close()
    balance = queue.stream.ledger.balance()
    assert (balance.leased, balance.requeued) == (0, {"stopped": 4})


def test_what_the_crew_raises_reaches_the_loop(open_books: Any) -> None:
    queue = open_books(Crew(FleetError("all gone", "so", "start again")))
    with pytest.raises(FleetError, match="all gone"):
        queue.next_batch(1, 2)


def test_the_pulse_beats_while_something_happens_and_not_otherwise(
    open_books: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at often, heard once: nothing has happened since."""
    beats, looks = [], []
    monkeypatch.setattr("surefoot.runtime.async_queue.tick", beats.append)
    queue = open_books(Crew(False), stop=lambda: looks.append(1) or len(looks) > 3)
    with pytest.raises(StopRequested):
        queue.next_batch(1, 2)
    assert len(looks) == 4
    assert beats == ["waiting for groups"]
    assert signals.last_heartbeat().stage != "never"


def test_close_may_be_said_twice_and_leaves_no_thread(open_books: Any) -> None:
    queue = open_books(Crew(False))
    queue.close()
    queue.close()
    queue.thread.close()
    assert "surefoot-fleet" not in {thread.name for thread in threading.enumerate() if thread is queue.thread._thread}


# -- the crew of this process ---------------------------------------------------------------


class Codec:
    stop_ids: frozenset[int] = frozenset()
    pad_token_id = 0
    vocab_size = 61

    def encode_prompt(self, messages: Any) -> tuple[int, ...]:
        return (4,)

    def decode(self, token_ids: Any) -> str:
        return "-".join(map(str, token_ids))


class Grader:
    """Grades by length; may be held up by a test."""

    def __init__(self) -> None:
        self.hold: threading.Event | None = None
        self.began = threading.Event()

    def grade(self, tasks: Any, rollouts: Any) -> list[Grade]:
        self.began.set()
        if self.hold is not None:
            assert self.hold.wait(60), "the test has forgotten to let it go"
        return [Grade(float(len(r.text)), {}, None, correct=1.0) for r in rollouts]

    def explain_failures(self) -> str:
        return ""

    def close(self) -> None: ...


@pytest.fixture
def crew(make_net: Any, make_engine: Any) -> Iterator[Any]:
    """(crew, collector alone, grader)"""
    from surefoot.engines.serving import EngineLoop

    prompts = {task.id: (4, 9 + i, 5) for i, task in enumerate(TASKS)}
    grader = Grader()
    engine = EngineLoop(make_engine(make_net()))
    alone = RolloutCollector(make_engine(make_net()), grader, Codec(), prompts, seed=0, token_count=61)
    collector = RolloutCollector(engine, grader, Codec(), prompts, seed=0, token_count=61)
    made = LocalRolloutRunner(engine, collector, capacity=4)
    yield made, alone, grader
    made.close()
    engine.close()


def orders(alone: RolloutCollector) -> list[RolloutRequest]:
    return [
        request_for(task, alone.prompts, SAMPLING, purpose="train", step=0, position=i) for i, task in enumerate(TASKS)
    ]


def test_groups_that_are_played_side_by_side_are_those_that_are_played_alone(crew: Any) -> None:
    made, alone, _ = crew

    async def all_at_once() -> list[RolloutResult]:
        return list(await asyncio.gather(*(made.run(o) for o in reversed(orders(alone)))))

    assert asyncio.run(all_at_once())[::-1] == alone.run_requests(orders(alone))


def test_a_slow_grader_does_not_hold_up_decoding(crew: Any) -> None:
    made, alone, grader = crew
    grader.hold = threading.Event()

    async def test() -> None:
        play = asyncio.ensure_future(made.run(orders(alone)[0]))
        while not grader.began.is_set():
            await asyncio.sleep(0)
        request = Request("q", (4, 9), 3, 1.0, frozenset(), 1)
        assert len((await asyncio.wrap_future(made.engine.submit([request])))[0].token_ids) == 3
        assert not play.done()
        grader.hold.set()
        assert (await play).group.rollouts[0].reward is not None

    asyncio.run(test())


def test_a_cancelled_play_leaves_the_engine(crew: Any) -> None:
    made, alone, grader = crew
    made.engine.pause("keep")

    async def test() -> None:
        play = asyncio.ensure_future(made.run(orders(alone)[0]))
        while not made.engine.in_flight:
            await asyncio.sleep(0)
        play.cancel()
        with pytest.raises(asyncio.CancelledError):
            await play
        while made.engine.in_flight:
            await asyncio.sleep(0)
        made.engine.resume()

    asyncio.run(test())
    assert not grader.began.is_set(), "nobody grades what nobody waits for"


def test_a_cancelled_way_to_the_engine_withdraws_all_that_was_asked_and_asks_nothing_more() -> None:
    from surefoot.runtime.requests import CancellableEngine

    asked: list[Future[Any]] = []

    def submit(requests: Sequence[Request]) -> Future[Any]:
        asked.append(Future())
        return asked[-1]

    caller = CancellableEngine(submit)
    first, second = caller.submit([]), caller.submit([])
    first.set_result([])
    caller.cancel()
    assert (first.cancelled(), second.cancelled()) == (False, True)
    for ask in (caller.submit, caller.generate):
        with pytest.raises(EngineError, match="cancelled"):
            ask([])
    assert len(asked) == 2
    held = {"load_weights", "close", "pause"} & set(dir(caller))
    assert not held, "whoever runs one group may neither bring weights nor close the engine"
