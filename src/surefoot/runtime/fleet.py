"""Engines and workers that play groups, each of them replaceable.

Owns       who plays which order, on which engine, for the how-many-eth time.
Promises   an order is played until somebody played it: a lost engine or worker costs its plays, which are dispatched
           again with the same seeds; an answer to an attempt that was given up is not taken; one hung play holds up
           nobody else; a play may be cancelled at any moment and then holds nothing; when a post cannot be kept, every
           play ends with the `FleetError` that names it. A new engine serves only after it was brought to the current
           version, with proof.
Never      grades, trains, knows what carries the messages, or decides what is played next.

    play(order) -> slot on an engine -> slot on a worker -> the worker asks that engine -> Report
                      ^                                          |
                      +------ engine or worker lost, too slow ---+

One event loop, no threads.

Read next: `fleet_keeper.py`, how a post is kept; `fleet_sync.py`, new weights; `fleet_thread.py`, for callers that have
no event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from surefoot.errors import FleetError, SurefootError
from surefoot.pulse import beat
from surefoot.runtime.fleet_keeper import Keeper, unexpected
from surefoot.runtime.fleet_members import (
    EngineGoneError,
    EngineMember,
    Limits,
    MemberLostError,
    Post,
    Report,
    Transport,
    WorkerMember,
    described,
    too_deadly,
    too_slow,
)
from surefoot.runtime.fleet_sync import Admit, Spread, WeightSync
from surefoot.runtime.orders import Order, Played
from surefoot.runtime.router import LoadAwareRouter
from surefoot.tracking.timeline import span

T = TypeVar("T")


class Fleet:
    """`runtime.crew.Crew` over processes. Made, used and closed inside one event loop.

    Args:
        engine_slots: groups that one engine works on at once.
        worker_slots: groups that one worker works on at once.
    """

    def __init__(
        self, transport: Transport, *, engines: int, workers: int, engine_slots: int, worker_slots: int, limits: Limits
    ) -> None:
        self.transport, self.limits = transport, limits
        self.engines: list[Post[EngineMember]] = [Post("engine", i) for i in range(engines)]
        self.workers: list[Post[WorkerMember]] = [Post("worker", i) for i in range(workers)]
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
        crews = (
            (self.engines, self.transport.start_engine, self._join, self.engine_router),
            (self.workers, self.transport.start_worker, _ready, self.worker_router),
        )
        posts: list[Post[Any]] = []
        for kept, start, admit, router in crews:
            posts += kept
            for post in kept:
                ends = partial(self._open, router), partial(_close, router)
                self._keep(Keeper(post, self.limits, start, admit, *ends, self.transport.last_lines))
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

    def _keep(self, keeper: Keeper[Any]) -> None:
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
            self._fail(unexpected(task.get_name(), error))

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

    async def play(self, order: Order) -> Played:
        """Play one group, on whoever is there; again when they are lost."""
        return await self._unless_failed(self._play(order))

    async def _play(self, order: Order) -> Played:
        losses = timeouts = 0
        while True:
            report, why = await self._attempt(order, losses + timeouts + 1)
            if report is not None:
                if report.complaint:
                    self.complaints[report.complaint] += 1
                return report.played
            losses, timeouts = losses + (why == "lost"), timeouts + (why == "slow")
            self.counts[f"again_{why}"] += 1
            if timeouts >= self.limits.max_timeouts:
                raise too_slow(order, timeouts, self.limits)
            if losses > self.limits.max_restarts:
                raise too_deadly(order, losses)

    async def _attempt(self, order: Order, attempt: int) -> tuple[Report | None, str]:
        """One try: the report, or (None, why there is none)."""
        async with (
            self.engine_router.slot(order.task.id) as (engine_index, _),
            self.worker_router.slot(order.task.id) as (worker_index, _),
        ):
            engine, worker = self.engines[engine_index], self.workers[worker_index]
            self._close_if_gone(engine, worker)
            if engine.gone.done() or worker.gone.done() or engine.member is None or worker.member is None:
                return None, "missed"  # lost while we waited for the other one
            lives = engine.gone, worker.gone
            call = asyncio.ensure_future(worker.member.play(order, engine.member, attempt))
            try:
                ends: set[asyncio.Future[Any]] = {call, *lives}
                with span("group", track=engine.name), span("group", track=worker.name):
                    await asyncio.wait(ends, timeout=self.limits.rollout_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not call.done():
                    self._abandon(call, engine, worker)
            heard = self._heard(call, order, attempt, engine, worker, lives) if call.done() else (None, "slow")
            self._close_if_gone(engine, worker)
            # Fenced: what a lost process still said is not taken.
            return (None, "lost") if lives[0].done() or lives[1].done() else heard

    def _heard(
        self, call: asyncio.Future[Report], order: Order, attempt: int, engine: Post[Any], worker: Post[Any],
        lives: tuple[asyncio.Future[str], asyncio.Future[str]],
    ) -> tuple[Report | None, str]:  # fmt: skip
        try:
            report = call.result()
        except MemberLostError as loss:
            worker.lose(str(loss), lives[1])
            return None, "lost"
        except EngineGoneError as loss:
            engine.lose(str(loss), lives[0])
            return None, "lost"
        if (report.group, report.attempt) != (order.group, attempt):
            self.counts["fenced"] += 1
            return None, "fenced"
        if lives[0].done() or lives[1].done():
            return None, "lost"
        engine.succeed()
        worker.succeed()
        self.counts["groups"] += 1
        self.counts["tokens"] += sum(rollout.sampled_tokens for rollout in report.played.group.rollouts)
        beat("waiting for groups")
        return report, ""

    def _abandon(self, call: asyncio.Future[Report], engine: Post[Any], worker: Post[Any]) -> None:
        """Nobody waits for it any more. Where such calls pile up, the process is stuck and is replaced."""
        held = [(post, post.lives) for post in (engine, worker)]

        def ended(done: asyncio.Future[Report]) -> None:
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

    async def _join(self, member: EngineMember) -> None:
        """Before an engine serves."""
        await self._sync.join(member)

    # -- posts --------------------------------------------------------------------------

    def _open(self, router: LoadAwareRouter, post: Post[Any]) -> None:
        router.open_replica(post.index)
        self._spawn(self._tell())

    def _close_if_gone(self, engine: Post[Any], worker: Post[Any]) -> None:
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
            "replicas": described(self.engines, self.engine_router.loads),
            "workers": described(self.workers, self.worker_router.loads),
            "in_flight": sum(self.engine_router.loads),
            "waiting": self.engine_router.waiting + self.worker_router.waiting,
            "groups_per_s": self.counts["groups"] / seconds,
            "tokens_per_s": self.counts["tokens"] / seconds,
        }


def _close(router: LoadAwareRouter, post: Post[Any]) -> None:
    router.close_replica(post.index)


async def _ready(member: WorkerMember) -> None:
    """A worker needs nothing more than to be there."""
