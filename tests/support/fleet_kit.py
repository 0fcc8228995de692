"""A fleet without processes: members that die, fall silent, hang or lie when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from surefoot.protocols import Completion, Request
from surefoot.records import Group, Rollout, Task
from surefoot.runtime.replica_pool import ReplicaPool
from surefoot.runtime.replicas import EngineGoneError, ReplicaLimits, ReplicaLostError, RolloutReport
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling

T = TypeVar("T")
QUICK = ReplicaLimits(
    start_timeout_s=5.0, max_restarts=3, rollout_timeout_s=5.0, heartbeat_s=0.002, silence_s=1.0, backoff_s=0.0
)
LINES = "Traceback (most recent call last):\nMemoryError: 3 GiB"


def order(number: int = 0) -> RolloutRequest:
    return RolloutRequest(Task(id=f"t{number}", prompt="?"), (1, 2), Sampling(2, 1.0, 4, 8), "train", 1, number)


def played(asked: RolloutRequest) -> RolloutResult:
    rollouts = tuple(Rollout(asked.task.id, asked.group, i, (), failure="none:asked") for i in range(2))
    return RolloutResult(Group(asked.task, asked.group, rollouts), (None, None))


class FakeMember:
    def __init__(self, transport: FakeTransport, name: str, life: int) -> None:
        self.transport, self.name, self.life = transport, name, life
        self.died = asyncio.Event()
        self.silent = False
        self.kills = 0

    def die(self) -> None:
        """As by SIGKILL from outside."""
        self.died.set()

    async def ping(self) -> Mapping[str, Any]:
        if self.silent:
            await asyncio.Event().wait()
        if self.died.is_set():
            raise ReplicaLostError(f"{self.name} died of signal 9")
        return {"version": getattr(self, "version", None), "in_flight": 0, "progress": 0}

    def kill(self) -> None:
        self.kills += 1
        self.died.set()


class FakeEngine(FakeMember):
    version: int | None = None

    async def prepare(self, weights: Any, version: int) -> Mapping[str, int]:
        await self._answer()
        return {"w": version}

    async def commit(self, version: int) -> Mapping[str, int]:
        await self._answer()
        self.version = version
        return {}

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        await self._answer()
        return []

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.died.is_set():
            raise ReplicaLostError(f"{self.name} died of signal 9")


class FakeWorker(FakeMember):
    async def run(self, asked: RolloutRequest, engine: FakeEngine, attempt: int) -> RolloutReport:
        self.transport.tries.append((asked.group, attempt, self.name, self.life, engine.name, engine.version))
        play = asyncio.ensure_future(self.transport.act(self, asked, engine, attempt))
        ends = [play, *(asyncio.ensure_future(member.died.wait()) for member in (self, engine))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.died.is_set() and not self.silent:
                raise ReplicaLostError(f"{self.name} died of signal 9")
            if engine.died.is_set():
                raise EngineGoneError(f"{engine.name} is gone")
            return await play
        finally:
            for each in ends:
                each.cancel()


Act = Callable[[FakeWorker, RolloutRequest, FakeEngine, int], Awaitable[RolloutReport]]


class FakeTransport:
    """Starts fakes; `act` is what a play does, `refuse` what a start raises."""

    def __init__(self) -> None:
        self.engines: dict[int, FakeEngine] = {}
        self.workers: dict[int, FakeWorker] = {}
        self.everybody: list[FakeMember] = []
        self.tries: list[tuple[str, int, str, int, str, int | None]] = []
        self.refuse: dict[str, Exception] = {}
        self.dead_on_arrival: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.act: Act = self.answer

    async def answer(
        self, worker: FakeWorker, asked: RolloutRequest, engine: FakeEngine, attempt: int
    ) -> RolloutReport:
        await asyncio.sleep(0)
        await self.gate.wait()
        return RolloutReport(asked.group, attempt, played(asked))

    async def start_engine(self, index: int, life: int) -> FakeEngine:
        self.engines[index] = await self._started(FakeEngine(self, f"engine {index}", life))
        return self.engines[index]

    async def start_worker(self, index: int, life: int) -> FakeWorker:
        self.workers[index] = await self._started(FakeWorker(self, f"worker {index}", life))
        return self.workers[index]

    def last_lines(self, name: str) -> str:
        return LINES

    async def _started(self, member: Any) -> Any:
        await asyncio.sleep(0)
        self.everybody.append(member)
        if member.name in self.refuse:
            raise self.refuse[member.name]
        if member.name in self.dead_on_arrival:
            member.died.set()
        return member


async def fleet_of(
    transport: FakeTransport, *, engines: int = 2, workers: int = 2, limits: ReplicaLimits = QUICK
) -> ReplicaPool:
    """A fleet that is up; two groups at a time on each member."""
    fleet = ReplicaPool(transport, engines=engines, workers=workers, engine_slots=2, worker_slots=2, limits=limits)
    await fleet.start()
    return fleet


def running(scenario: Callable[[FakeTransport], Coroutine[Any, Any, T]], patience_s: float = 20.0) -> T:
    """Run one scenario; a wait without an end is a failure, not a hang."""

    async def within() -> T:
        return await asyncio.wait_for(scenario(FakeTransport()), patience_s)

    return asyncio.run(within())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.001)
