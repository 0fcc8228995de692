"""The driver's end of the processes in a Ray cluster.

Owns       actor handles, and what their errors mean.
Promises   an error of ours arrives as itself, with its own words; a lost process is a `ReplicaLostError` with as much
           of the cause as can be known; `kill` ends a process that is stopped or hung as well; a start that fails or
           is cancelled leaves no actor behind. Actors never restart by themselves.

Read next: `actors.py`, the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError

from surefoot.errors import SurefootError
from surefoot.protocols import Completion, Request
from surefoot.runtime.ray.actors import EngineActor, ReplicaActor, WorkerActor
from surefoot.runtime.replicas import LOG_LINES, EngineGoneError, ReplicaLostError, RolloutReport, unexpected_error
from surefoot.runtime.requests import RolloutRequest
from surefoot.runtime.specs import EngineSpec, ProcessSpec, WorkerSpec
from surefoot.system.process import title
from surefoot.tracking.process_logs import safe_tail

_TAIL = 64 * 1024
_CRASHES = ("Fatal Python error: ", "MemoryError", "oom", "Killed")
CONCURRENT = 1000


@dataclass
class RayReplica:
    """One actor."""

    name: str
    handle: Any
    log: Path
    pid: int | None = None
    node: str | None = None

    @property
    def is_here(self) -> bool:
        """On the driver's own machine."""
        return bool(self.node == ray.get_runtime_context().get_node_id())

    async def call(self, method: str, *args: Any) -> Any:
        """The answer of one method. Cancelled, it asks the other side to stop, and ends when that has let go."""
        reference = getattr(self.handle, method).remote(*args)
        answer = asyncio.ensure_future(asyncio.wrap_future(reference.future()))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if not answer.done():
                with contextlib.suppress(RayError):
                    ray.cancel(reference)
            with contextlib.suppress(Exception):
                await answer
            raise
        except (RayError, SurefootError, EngineGoneError) as error:
            raise self._meaning(error) from None

    def wait(self, method: str, *args: Any, seconds: float) -> Any:
        """The same for a thread that may block; a TimeoutError when it takes longer."""
        try:
            return getattr(self.handle, method).remote(*args).future().result(seconds)
        except (RayError, SurefootError, EngineGoneError) as error:
            raise self._meaning(error) from None

    def _meaning(self, error: Exception) -> Exception:
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, SurefootError | EngineGoneError):
                return cause
            return unexpected_error(self.name, cause if isinstance(cause, Exception) else error)
        if isinstance(error, TaskCancelledError):
            return ReplicaLostError("its work was cancelled")
        if isinstance(error, RayActorError):
            return ReplicaLostError(self._how_it_ended(error))
        if isinstance(error, RayError):
            return ReplicaLostError(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")
        return error

    def _how_it_ended(self, error: RayActorError) -> str:
        """The last line that tells of a crash; without one, what silence means."""
        lines = self.last_lines().splitlines()
        mine = lines[max((i for i, line in enumerate(lines) if f"process {self.pid}" in line), default=0) :]
        telling = [line for line in mine if any(sign in line for sign in _CRASHES)]
        who = f"process {self.pid}" if self.pid else "its process"
        if telling:
            return f"{who} crashed: {telling[-1].strip()[:300]}"
        detail = " ".join(str(error).split())
        known = next(
            (
                text
                for text in ("INTENDED_USER_EXIT", "INTENDED_SYSTEM_EXIT", "NODE_OUT_OF_MEMORY", "USER_ERROR")
                if text in detail
            ),
            None,
        )
        if known:
            return f"{who} ended ({known}): {detail.partition('Worker exit detail:')[2].strip()[:300] or detail[:300]}"
        return f"{who} ended without a word, as after SIGKILL: somebody killed it, or the system ran out of memory"

    async def ping(self) -> Mapping[str, Any]:
        """A sign of life."""
        return dict(await self.call("ping"))

    def kill(self) -> None:
        """Through Ray, and on this machine by signal too: a stopped process does not read Ray's messages."""
        with contextlib.suppress(RayError, ValueError, RuntimeError):  # gone, or Ray itself is
            ray.kill(self.handle, no_restart=True)
        if self.pid is not None and ray.is_initialized() and self.is_here and _is_ours(self.pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def last_lines(self) -> str:
        """The end of its log."""
        return log_end(self.log)


def log_end(log: Path) -> str:
    """The last lines of a log, where this machine can read it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return "\n".join(safe_tail(file.read(), _TAIL).splitlines()[-LOG_LINES:])
    except OSError as error:
        return f"{log} cannot be read here: {error.strerror}"


class RayEngine(RayReplica):
    """`fleet_members.EngineMember`."""

    async def prepare(self, weights: Any, version: int) -> Mapping[str, int]:
        """Stage: views into shared memory, or a reference into the object store."""
        parcel = weights.for_engine(self.node) if hasattr(weights, "for_engine") else weights
        return dict(await self.call("prepare", parcel, version))

    async def commit(self, version: int) -> Mapping[str, int]:
        """Serve what was staged."""
        return dict(await self.call("commit", version))

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        """Through the same queue as rollouts."""
        return list(await self.call("generate", list(requests)))


class RayWorker(RayReplica):
    """`fleet_members.WorkerMember`."""

    async def run(self, request: RolloutRequest, engine: RayEngine, attempt: int) -> RolloutReport:
        """One group; the worker asks the engine directly."""
        report: RolloutReport = await self.call("run", request, engine.handle, attempt)
        return report


@dataclass(frozen=True)
class RayTransport:
    """Starts actors in the cluster that this process is connected to."""

    process: ProcessSpec
    engine: EngineSpec
    worker: WorkerSpec
    engine_gpus: float = 0.0
    spread: bool = False
    """Over several machines, not packed on one."""

    async def start_engine(self, index: int, life: int) -> RayEngine:
        """An engine without weights."""
        member: RayEngine = self._member(
            RayEngine, f"engine {index}", EngineActor, self.engine, num_gpus=self.engine_gpus
        )
        await start_replica(member)
        return member

    async def start_worker(self, index: int, life: int) -> RayWorker:
        """A worker that is ready to play."""
        member: RayWorker = self._member(RayWorker, f"worker {index}", WorkerActor, self.worker, num_gpus=0)
        await start_replica(member)
        return member

    def last_lines(self, name: str) -> str:
        """The end of the log of this post."""
        return log_end(self.process.log(name))

    def _member(
        self, kind: type[Any], name: str, host: type[ReplicaActor], recipe: EngineSpec | WorkerSpec, *, num_gpus: float
    ) -> Any:
        handle = make_actor(host, num_gpus=num_gpus, strategy="SPREAD" if self.spread else "DEFAULT").remote(
            name, self.process.also(recipe.variables), recipe
        )
        return kind(name, handle, self.process.log(name))


def make_actor(host: type[ReplicaActor], *, num_gpus: float, strategy: Any) -> Any:
    """An actor class of ours: never restarted by Ray, never retried, many calls at once.

    Args:
        strategy: where it runs, in Ray's words.
    """
    return ray.remote(host).options(
        num_cpus=1, num_gpus=num_gpus, max_restarts=0, max_task_retries=0, max_concurrency=CONCURRENT,
        scheduling_strategy=strategy,
    )  # fmt: skip


async def start_replica(member: RayReplica, *told: Any) -> Any:
    """Have it set itself up; what `setup` returned. A start that fails or is cancelled leaves no actor."""
    try:
        await find_replica(member)
        return await member.call("setup", *told)
    except BaseException:
        member.kill()
        raise


async def find_replica(member: RayReplica) -> None:
    """Wait until its process is there, and note which it is."""
    place = await member.call("whereabouts")
    member.pid, member.node = place["pid"], place["node"]


def _is_ours(pid: int) -> bool:
    """Whether this number still belongs to a Ray process, and not to a stranger that came after it."""
    return title(pid).startswith("ray::")
