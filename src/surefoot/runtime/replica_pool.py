"""Engines and workers that run groups of rollouts, each of them replaceable.

Owns       which worker runs which request on which engine, and how often it was tried.
Promises   a request is run until it has a result: a lost engine or worker costs the groups it worked on, which are
           dispatched again with the same seeds; an answer to an attempt that was given up is not taken; a hung group
           holds up no other; a group may be cancelled at any moment and then holds nothing; when a replica cannot be
           replaced, every group ends with the `FleetError` that names it. A new engine serves only after it was
           brought to the current version, with proof.
Never      grades, trains, knows what carries the messages, or decides what is run next.

    run(request) -> slot on an engine -> slot on a worker -> the worker asks that engine -> Report
                      ^                                          |
                      +------ engine or worker lost, too slow ---+

One event loop, no threads.

Read next: `replicas.py`, how a post is kept; `replica_pool.py`, new weights; `threads.py`, for callers that have
no event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from surefoot.errors import FleetError, SurefootError
from surefoot.protocols import Environment, Grade, Graded, GroupFinished
from surefoot.records import Rollout, Task
from surefoot.runtime.replicas import (
    EngineGoneError,
    EngineProcess,
    ReplicaLimits,
    ReplicaLostError,
    ReplicaSlot,
    ReplicaSupervisor,
    ReplicaTransport,
    RolloutReport,
    WorkerProcess,
    rollout_kills_replicas,
    rollout_too_slow,
    slot_rows,
    unexpected_error,
)
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling, request_for
from surefoot.runtime.router import LoadAwareRouter
from surefoot.runtime.threads import EventLoopThread
from surefoot.system.signals import tick
from surefoot.tracking.live import span

# -- New weights for a fleet whose engines may die at any moment ----------------------------------


T = TypeVar("T")
Spread = Callable[[Sequence[EngineProcess]], Awaitable[T]]
Admit = Callable[[EngineProcess], Awaitable[object]]


class WeightSync:
    """Who is brought to which version, one sync at a time.

    Args:
        silence_s: without an answer for so long an engine counts as gone.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._one_at_a_time = asyncio.Lock()
        self._admit: Admit | None = None

    async def join(self, member: EngineProcess) -> None:
        """Bring one engine to the version of the others; nothing before the first sync."""
        async with self._one_at_a_time:
            if self._admit is not None:
                await self._admit(member)

    async def try_once(
        self, engines: Sequence[ReplicaSlot[EngineProcess]], spread: Spread[T], admit: Admit
    ) -> T | None:
        """One sync of those that serve; None when one of them died of it, or nobody serves any more."""
        async with self._one_at_a_time:
            posts = [post for post in engines if post.state == "serving" and not post.gone.done()]
            members = [post.member for post in posts if post.member is not None]
            if not members:
                await asyncio.sleep(0)
                return None
            try:
                found = await spread(members)
            except (SurefootError, ReplicaLostError) as error:
                if await self._someone_is_gone(posts, error):
                    return None
                raise
            self._admit = admit
            return found

    async def _someone_is_gone(self, posts: Sequence[ReplicaSlot[EngineProcess]], error: Exception) -> bool:
        """Whether a sync failed because an engine died, and not because one lied."""
        for post in posts:
            if post.member is not None and not post.gone.done():
                life = post.gone
                try:
                    await asyncio.wait_for(post.member.ping(), self.silence_s)
                except (ReplicaLostError, TimeoutError) as loss:
                    post.lose(str(loss) or f"no sign of life after a sync that failed: {error}", life)
        return any(post.gone.done() or post.state != "serving" for post in posts)


# -- Engines and workers that run groups, each of them replaceable --------------------------------


class ReplicaPool:
    """`runtime.requests.RolloutRunner` over processes. Made, used and closed inside one event loop.

    Args:
        engine_slots: groups that one engine works on at once.
        worker_slots: groups that one worker works on at once.
    """

    def __init__(
        self,
        transport: ReplicaTransport,
        *,
        engines: int,
        workers: int,
        engine_slots: int,
        worker_slots: int,
        limits: ReplicaLimits,
    ) -> None:
        self.transport, self.limits = transport, limits
        self.engines: list[ReplicaSlot[EngineProcess]] = [ReplicaSlot("engine", i) for i in range(engines)]
        self.workers: list[ReplicaSlot[WorkerProcess]] = [ReplicaSlot("worker", i) for i in range(workers)]
        self.engine_router = LoadAwareRouter(engines, engine_slots)
        self.worker_router = LoadAwareRouter(workers, worker_slots)
        for router in (self.engine_router, self.worker_router):
            for index in range(router.replicas):
                router.close_replica(index)  # until somebody is there
        self.failed: asyncio.Future[SurefootError] = asyncio.get_running_loop().create_future()
        self.complaints: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._sync = WeightSync(limits.silence_s)
        self._opened = asyncio.Condition()
        self._keepers: list[asyncio.Task[None]] = []
        self._background: set[asyncio.Task[Any]] = set()
        self._began = time.monotonic()

    # -- life ---------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when every post is manned for the first time."""
        kinds = (
            (self.engines, self.transport.start_engine, self._join, self.engine_router),
            (self.workers, self.transport.start_worker, _ready, self.worker_router),
        )
        posts: list[ReplicaSlot[Any]] = []
        for kept, start, admit, router in kinds:
            posts += kept
            for post in kept:
                ends = partial(self._open, router), partial(_close, router)
                self._keep(ReplicaSupervisor(post, self.limits, start, admit, *ends, self.transport.last_lines))
        await self._until(lambda: all(post.state == "serving" for post in posts))

    async def close(self) -> None:
        """End every process; plays that are under way end with a `FleetError`."""
        self._fail(FleetError("the fleet was closed", "nobody plays any more", "start a new one"))
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    def _keep(self, keeper: ReplicaSupervisor[Any]) -> None:
        task = asyncio.create_task(keeper.run(), name=f"keep {keeper.post.name}")
        task.add_done_callback(self._keeper_ended)
        self._keepers.append(task)

    def _keeper_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, SurefootError):
            self._fail(error)
        elif isinstance(error, Exception):
            self._fail(unexpected_error(task.get_name(), error))

    def _fail(self, error: SurefootError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
            self._spawn(self._tell())

    # -- playing ------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Groups that can be in flight at once and still be worked on."""
        engine, worker = self.engine_router.capacity or 1, self.worker_router.capacity or 1
        return min(len(self.engines) * engine, len(self.workers) * worker)

    async def run(self, request: RolloutRequest) -> RolloutResult:
        """Run one group on the replicas that are there; again when they are lost."""
        return await self._unless_failed(self._run(request))

    async def _run(self, request: RolloutRequest) -> RolloutResult:
        losses = timeouts = 0
        while True:
            report, why = await self._attempt(request, losses + timeouts + 1)
            if report is not None:
                if report.complaint:
                    self.complaints[report.complaint] += 1
                return report.played
            losses, timeouts = losses + (why == "lost"), timeouts + (why == "slow")
            self.counts[f"again_{why}"] += 1
            if timeouts >= self.limits.max_timeouts:
                raise rollout_too_slow(request, timeouts, self.limits)
            if losses > self.limits.max_restarts:
                raise rollout_kills_replicas(request, losses)

    async def _attempt(self, request: RolloutRequest, attempt: int) -> tuple[RolloutReport | None, str]:
        """One try: the report, or (None, why there is none)."""
        async with (
            self.engine_router.slot(request.task.id) as (engine_index, _),
            self.worker_router.slot(request.task.id) as (worker_index, _),
        ):
            engine, worker = self.engines[engine_index], self.workers[worker_index]
            self._close_if_gone(engine, worker)
            if engine.gone.done() or worker.gone.done() or engine.member is None or worker.member is None:
                return None, "missed"  # lost while we waited for the other one
            lives = engine.gone, worker.gone
            call = asyncio.ensure_future(worker.member.run(request, engine.member, attempt))
            try:
                ends: set[asyncio.Future[Any]] = {call, *lives}
                with span("group", track=engine.name), span("group", track=worker.name):
                    await asyncio.wait(ends, timeout=self.limits.rollout_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not call.done():
                    self._abandon(call, engine, worker)
            heard = self._heard(call, request, attempt, engine, worker, lives) if call.done() else (None, "slow")
            self._close_if_gone(engine, worker)
            # Fenced: what a lost process still said is not taken.
            return (None, "lost") if lives[0].done() or lives[1].done() else heard

    def _heard(
        self, call: asyncio.Future[RolloutReport], request: RolloutRequest, attempt: int, engine: ReplicaSlot[Any],
        worker: ReplicaSlot[Any],
        lives: tuple[asyncio.Future[str], asyncio.Future[str]],
    ) -> tuple[RolloutReport | None, str]:  # fmt: skip
        try:
            report = call.result()
        except ReplicaLostError as loss:
            worker.lose(str(loss), lives[1])
            return None, "lost"
        except EngineGoneError as loss:
            engine.lose(str(loss), lives[0])
            return None, "lost"
        if (report.group, report.attempt) != (request.group, attempt):
            self.counts["fenced"] += 1
            return None, "fenced"
        if lives[0].done() or lives[1].done():
            return None, "lost"
        engine.succeed()
        worker.succeed()
        self.counts["groups"] += 1
        self.counts["tokens"] += sum(rollout.sampled_tokens for rollout in report.played.group.rollouts)
        tick("waiting for groups")
        return report, ""

    def _abandon(self, call: asyncio.Future[RolloutReport], engine: ReplicaSlot[Any], worker: ReplicaSlot[Any]) -> None:
        """Nobody waits for it any more. Where such calls pile up, the process is stuck and is replaced."""
        held = [(post, post.lives) for post in (engine, worker)]

        def ended(done: asyncio.Future[RolloutReport]) -> None:
            if not done.cancelled():
                done.exception()  # looked at, so that nobody complains that it was not
            for post, life in held:
                post.abandoned -= post.lives == life

        for post, router in ((engine, self.engine_router), (worker, self.worker_router)):
            post.abandoned += 1
            if post.abandoned > (router.capacity or 1):
                post.lose(f"{post.abandoned} plays that were given up have not ended")
        call.add_done_callback(ended)
        call.cancel()  # ends when the other side has let go

    # -- weights ------------------------------------------------------------------------

    async def publish(self, spread: Spread[T], admit: Admit) -> T:
        """`spread` a version to all engines that serve; from then on `admit` brings newcomers to it.

        An engine that is lost on the way is left out: its successor is admitted instead.
        """

        async def all_of_them() -> T:
            while True:
                await self._until(lambda: any(post.state == "serving" for post in self.engines))
                if (found := await self._sync.try_once(self.engines, spread, admit)) is not None:
                    self.engine_router.forget_prefixes()
                    return found

        return await self._unless_failed(all_of_them())

    async def _join(self, member: EngineProcess) -> None:
        """Before an engine serves."""
        await self._sync.join(member)

    # -- posts --------------------------------------------------------------------------

    def _open(self, router: LoadAwareRouter, post: ReplicaSlot[Any]) -> None:
        router.open_replica(post.index)
        self._spawn(self._tell())

    def _close_if_gone(self, engine: ReplicaSlot[Any], worker: ReplicaSlot[Any]) -> None:
        """At once, before its keeper has heard of it: nobody else is to be sent there."""
        if engine.gone.done():
            self.engine_router.close_replica(engine.index)
        if worker.gone.done():
            self.worker_router.close_replica(worker.index)

    async def _tell(self) -> None:
        async with self._opened:
            self._opened.notify_all()

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Until it holds; raises when the fleet has failed."""
        async with self._opened:
            await self._opened.wait_for(lambda: self.failed.done() or holds())
        if self.failed.done():
            raise self.failed.result()

    async def _unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result, or the fleet's error as soon as there is one. Cancelled, it cancels the work."""
        task = asyncio.create_task(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self.failed}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if task.cancelled():
            raise self.failed.result() if self.failed.done() else asyncio.CancelledError
        return task.result()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- questions ----------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """For `surefoot status`: who is there, and how fast they are."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        return {
            "replicas": slot_rows(self.engines, self.engine_router.loads),
            "workers": slot_rows(self.workers, self.worker_router.loads),
            "in_flight": sum(self.engine_router.loads),
            "waiting": self.engine_router.waiting + self.worker_router.waiting,
            "groups_per_s": self.counts["groups"] / seconds,
            "tokens_per_s": self.counts["tokens"] / seconds,
        }


def _close(router: LoadAwareRouter, post: ReplicaSlot[Any]) -> None:
    router.close_replica(post.index)


async def _ready(member: WorkerProcess) -> None:
    """A worker needs nothing more than to be there."""


# -- Groups of a pool, for callers that wait for all of them: one step's batch, an evaluation, the preflight
# Promises   the groups come in the order of their tasks, wherever they ran and however often; the first error ends the
# wait and cancels the rest; an interrupted wait leaves nothing under way.


class PoolEnvironment:
    """Graders of the driver for a second look, with the complaints of the fleet's own."""

    def __init__(self, own: Environment, fleet: ReplicaPool) -> None:
        self.own, self.fleet = own, fleet

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout], each: Graded | None = None) -> list[Grade]:
        """In this process."""
        return self.own.grade(tasks, rollouts, each)

    def explain_failures(self) -> str:
        """What the workers' graders complained of; each complaint counts its own failures."""
        newest = list(self.fleet.complaints)[-3:]
        return "".join(newest) or self.own.explain_failures()

    def close(self) -> None:
        """End the driver's own."""
        self.own.close()


class PoolBatchRunner:
    """`base.BatchRunner` over a pool of replicas.

    Args:
        prompts: token ids of every task's prompt, by task id.
    """

    def __init__(
        self,
        fleet: ReplicaPool,
        thread: EventLoopThread,
        environment: Environment,
        prompts: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.fleet, self.thread, self.prompts = fleet, thread, prompts
        self.environment: Environment = PoolEnvironment(environment, fleet)

    def run_rollouts(
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int,
        positions: Sequence[int] | None = None, finished: GroupFinished | None = None,
    ) -> list[RolloutResult]:  # fmt: skip
        """One scored group per task, in order; `positions` in the step, from 0 on when left out."""
        places = range(len(tasks)) if positions is None else positions
        requests = [
            request_for(task, self.prompts, sampling, purpose=purpose, step=step, position=place)
            for place, task in zip(places, tasks, strict=True)
        ]
        return self.thread.wait(self._run_all(requests, finished))

    async def _run_all(self, requests: Sequence[RolloutRequest], finished: GroupFinished | None) -> list[RolloutResult]:
        running = [asyncio.create_task(self._run_one(request, finished)) for request in requests]
        try:
            return list(await asyncio.gather(*running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _run_one(self, request: RolloutRequest, finished: GroupFinished | None) -> RolloutResult:
        """A worker runs and grades the whole group."""
        played = await self.fleet.run(request)
        if finished is not None:
            finished(request.position, played.group)
        return played
