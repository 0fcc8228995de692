"""Many processes: engines, rollout workers and the learner, each where there is room for it.

Owns       a run's cluster with everything in it, from start to end.
Promises   the same groups, losses and evaluations as `runtime/local.py` where the engine is ours and sampling waits for
           learning; a version counts only when every engine that serves has proved it, and an engine that joins
           proves it before it serves; whatever happens, `close` leaves no process behind.

Read next: `runtime/replica_pool.py`, who plays; `runtime/weights.py`, the proof; `cluster.py`, where it all lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefoot.config import RuntimeConfig
from surefoot.errors import LearnerLostError, LearnerStartError, SurefootError
from surefoot.protocols import Environment, LearnerFacts, Scored, StepReport
from surefoot.records import TrainSample
from surefoot.runtime.base import BaseRuntime
from surefoot.runtime.ray.cluster import Cluster, room_for
from surefoot.runtime.replica_pool import PoolBatchRunner, ReplicaPool
from surefoot.runtime.replicas import EngineProcess, ReplicaLimits, ReplicaLostError, ReplicaTransport
from surefoot.runtime.requests import Sampling
from surefoot.runtime.shared_weights import sweep_segments
from surefoot.runtime.specs import EngineSpec, LearnerSpec, PolicyFacts, ProcessSpec, WorkerSpec
from surefoot.runtime.threads import EventLoopThread
from surefoot.runtime.weights import Publisher
from surefoot.system.environment import withheld
from surefoot.system.signals import tick

if TYPE_CHECKING:
    from surefoot.runtime.ray.learner_group import LearnerProcesses


# -- The learner as the loop sees it, when it lives in processes of its own -----------------------
# Owns       the wait for the learner's process, and what is remembered of it between two calls.
# Promises   errors of the learner arrive as themselves; a lost or hung learner is a `LearnerLostError` with the cause
# and its last lines: what it held in memory is gone, and a resume from the journal repeats it; while it
# works the watchdog hears its pulse.
# Never      holds a tensor: weights cross by name (shared memory) or by reference.


T = TypeVar("T")
_LEARNER_CLOSE_S = 5.0


@dataclass(frozen=True)
class RemoteWeights:
    """The weights of a learner elsewhere, at one version; nothing has moved yet."""

    learner: RemoteLearner
    version: int


class RemoteLearner:
    """`protocols.Learner`, whose work is done in another process."""

    def __init__(self, processes: LearnerProcesses, thread: EventLoopThread, limits: ReplicaLimits) -> None:
        self.processes, self.thread, self.limits = processes, thread, limits
        self.member = processes.first
        self._facts = LearnerFacts()
        self._progress: object = None
        self._open_calls = 0
        self.policy: PolicyFacts

    def start(self) -> PolicyFacts:
        """Have it load the model."""
        self.policy = self.thread.wait(self._start())
        return self.policy

    async def _start(self) -> PolicyFacts:
        try:
            async with asyncio.timeout(self.limits.start_timeout_s):
                return await self.processes.start()
        except TimeoutError:
            limit_s = self.limits.start_timeout_s
            raise LearnerStartError(
                f"the learner did not start: it was not ready within runtime.start_timeout_s = {limit_s:g} s"
                f"{self._last_lines()}",
                "its process has to come up, load the model and make the optimiser in that time",
                "raise runtime.start_timeout_s if that takes longer here; if not, its last lines say what it waits for",
            ) from None
        except ReplicaLostError as loss:
            raise LearnerStartError(
                f"the learner did not start: {loss}{self._last_lines()}",
                "without its process nothing can be trained", "mend what its last lines say, then start again",
            ) from None  # fmt: skip

    # -- what the loop asks -------------------------------------------------------------

    @property
    def version(self) -> int:
        """How many optimiser steps were applied."""
        return self._facts.version

    @property
    def facts(self) -> LearnerFacts:
        """As they came with the last answer."""
        return self._facts

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        """One optimiser step on these samples."""
        report, self._facts = self._wait(self.call("learn", list(samples), iteration))
        return report  # type: ignore[no-any-return]

    def published(self) -> tuple[Any, int]:
        """A name for the current weights, and their version; `RayRuntime.publish` has them moved."""
        return RemoteWeights(self, self.version), self.version

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        """Log-probabilities of given completions under the current weights."""
        return self._wait(self.ascore(texts, temperature))

    async def ascore(self, texts: Sequence[Scored], temperature: float) -> list[tuple[float, ...]]:
        """The same, inside the event loop."""
        return list(await self.call("score", list(texts), temperature))

    @property
    def is_busy(self) -> bool:
        """Whether it works on something, so that its weights may be changing."""
        return self._open_calls > 0

    # -- checkpoints --------------------------------------------------------------------

    def save(self, folder: Path, *, step: int, extra: Mapping[str, Any]) -> None:
        """A checkpoint, written in the learner's process into a folder that both can see."""
        self._facts = self._wait(self.call("save", folder.absolute(), step, dict(extra)))

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Go back to a checkpoint, in the learner's process; returns what was given as `extra`."""
        extra, self._facts = self._wait(self.call("load", folder.absolute()))
        return extra  # type: ignore[no-any-return]

    def inspect(self, look: Callable[[Any, Any], T]) -> T:
        """What `look(policy, learner)` returns there; a function that can be pickled."""
        return self._wait(self.call("inspect", look))  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let it unlink its shared memory, then end it. Never raises: it may be gone."""
        with contextlib.suppress(SurefootError, TimeoutError):
            self.thread.wait(asyncio.wait_for(self.call("close"), _LEARNER_CLOSE_S))
        self.processes.kill()

    # -- how ----------------------------------------------------------------------------

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.thread.wait(work)

    async def call(self, method: str, *args: Any) -> Any:
        """One answer; raises `LearnerLostError` when there will be none."""
        answer = asyncio.ensure_future(self.member.call(method, *args))
        self._open_calls += 1
        try:
            while not (await asyncio.wait({answer}, timeout=1.0))[0]:
                await self._listen(answer)
            return answer.result()
        except ReplicaLostError as loss:
            raise self._lost(str(loss)) from None
        finally:
            self._open_calls -= 1
            answer.cancel()

    async def _listen(self, answer: asyncio.Future[Any]) -> None:
        """A learner at work gives signs of life; what it works on is not for us to limit, the watchdog does."""
        ping = asyncio.ensure_future(self.member.ping())
        both: set[asyncio.Future[Any]] = {ping, answer}
        await asyncio.wait(both, timeout=self.limits.silence_s, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            ping.cancel()
        elif not ping.done():
            ping.cancel()
            self.member.kill()
            raise ReplicaLostError(f"no sign of life for {self.limits.silence_s:g} s: it hangs, or was stopped")
        elif (progress := ping.result().get("progress")) != self._progress:
            self._progress = progress
            tick("waiting for the learner, which works")

    def _last_lines(self) -> str:
        lines = "\n".join(f"    | {line}" for line in self.member.last_lines().splitlines())
        return f"\n  its last lines:\n{lines}"

    def _lost(self, cause: str) -> LearnerLostError:
        return LearnerLostError(
            f"the learner was lost: {cause}{self._last_lines()}",
            "weights and optimiser live in its memory; what was not saved is in the journal",
            "resume the run: it goes on from the last checkpoint and repeats the journaled steps",
        )


# -- Many processes: engines, rollout workers and the learner, each where there is room for it ----


WORKER_SLOTS = 64
_CLOSE_S = 10.0


class RayDeployment:
    """A cluster for one run: first the learner, then the fleet, at last `close`.

    Args:
        keys: `[runtime]`.
        logs: folder for the processes' logs, on a disk that all machines see.
        threads: torch threads of each process, whatever Ray sets.
        deterministic: only kernels whose results repeat bit by bit.
        pass_env: names of variables that the processes get besides the usual ones.
    """

    def __init__(
        self, keys: RuntimeConfig, *, logs: Path, threads: int, deterministic: bool, rollout_timeout_s: float,
        pass_env: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.keys = keys
        self.limits = ReplicaLimits(
            start_timeout_s=keys.start_timeout_s, max_restarts=keys.max_restarts,
            restart_timeout_s=keys.restart_timeout_s, rollout_timeout_s=rollout_timeout_s,
        )  # fmt: skip
        self.process = ProcessSpec(logs.absolute(), threads, deterministic, withheld=withheld(pass_env)).also(pass_env)
        self.learner: RemoteLearner | None = None
        self.fleet: ReplicaPool | None = None
        processes = keys.learner_ranks + keys.engines + keys.workers
        self.cluster = Cluster(keys.address, processes=processes)
        self.thread = EventLoopThread()
        try:
            room_for({
                "CPU": float(processes),
                "GPU": keys.learner_ranks * keys.learner_gpus + keys.engines * keys.engine_gpus,
            })  # fmt: skip
        except BaseException:
            self.close()
            raise

    def start_learner(self, recipe: LearnerSpec) -> RemoteLearner:
        """Its processes, with the model loaded; `learner.policy` tells of it."""
        from surefoot.runtime.ray.learner_group import place_learner  # ray: after the token is there

        processes = place_learner(self.process, recipe, num_gpus=self.keys.learner_gpus)
        self.learner = RemoteLearner(processes, self.thread, self.limits)
        self.learner.start()
        return self.learner

    def start_replicas(self, engine: EngineSpec, worker: WorkerSpec, *, engine_slots: int) -> ReplicaPool:
        """Engines without weights, and workers; returns when all are there."""
        keys = self.keys
        spread = not self.cluster.is_private
        shared = worker.shared_by(keys.workers)

        async def make() -> ReplicaPool:
            transport = make_transport(self.process, engine, shared, engine_gpus=keys.engine_gpus, spread=spread)
            self.fleet = ReplicaPool(
                transport, engines=keys.engines, workers=keys.workers, engine_slots=engine_slots,
                worker_slots=WORKER_SLOTS, limits=self.limits,
            )  # fmt: skip
            await self.fleet.start()
            return self.fleet

        return self.thread.wait(make())

    def close(self) -> None:
        """End every process, then the cluster; each of them even if another does not end well. May be called twice."""
        with ExitStack() as ends:
            ends.callback(sweep_segments)  # last: shared memory of a learner that was killed
            ends.callback(self.cluster.close)
            ends.callback(self.thread.close)
            if self.learner is not None:
                ends.callback(self.learner.close)
            if self.fleet is not None:
                ends.callback(self._close_fleet, self.fleet)
        self.fleet = self.learner = None

    def _close_fleet(self, fleet: ReplicaPool) -> None:
        with suppress(TimeoutError):  # the reaper ends what does not end by itself
            self.thread.submit(fleet.close()).exception(_CLOSE_S)


def make_transport(
    process: ProcessSpec, engine: EngineSpec, worker: WorkerSpec, *, engine_gpus: float, spread: bool
) -> ReplicaTransport:
    """Actors in the cluster of this process; ray is imported here, after the token is in the environment."""
    from surefoot.runtime.ray.transport import RayTransport

    return RayTransport(process, engine, worker, engine_gpus=engine_gpus, spread=spread)


class WeightHandle:
    """One version of the weights in the forms that engines need: shared memory beside the learner, else by value.

    Made at once: the learner goes on, and an engine that joins later gets this version all the same.
    """

    def __init__(self, learner: RemoteLearner, staged: Any) -> None:
        self.learner, self.staged = learner, staged
        self.nbytes = staged.nbytes
        self.sums: Mapping[str, int] = staged.sums
        self._shipped: Any = None

    def for_engine(self, node: str | None) -> Any:
        """What this engine is sent; by value it goes from machine to machine, and never through the driver."""
        if node == self.learner.member.node:
            return self.staged
        if self._shipped is None:
            self._shipped = self.learner.member.handle.ship.remote(self.staged)
        return self._shipped


class RayRuntime(BaseRuntime):
    """`protocols.Runtime` over a site's fleet.

    Args:
        environment: graders in this process, for the audit.
        prompts: token ids of every task's prompt, by task id.
    """

    def __init__(
        self, site: RayDeployment, fleet: ReplicaPool, environment: Environment, prompts: Mapping[str, tuple[int, ...]],
        *, train: Sampling, evaluation: Sampling, max_failures: float, publisher: Publisher,
    ) -> None:  # fmt: skip
        runner = PoolBatchRunner(fleet, site.thread, environment, prompts)
        super().__init__(runner, train=train, evaluation=evaluation, max_failures=max_failures)
        self.site, self.fleet, self.publisher = site, fleet, publisher
        self.canary = publisher.canary

    def publish(self, weights: Any, version: int) -> Mapping[str, float]:
        """Move the learner's weights to every engine, with proof."""
        assert isinstance(weights, RemoteWeights), "the weights of a run on Ray are in the learner's process"
        started = time.perf_counter()
        metrics = self.site.thread.wait(self._publish(weights, version))
        proof = metrics.get("timing/proof", 0.0)
        return {**metrics, "timing/publish": time.perf_counter() - started - proof}

    async def _publish(self, weights: RemoteWeights, version: int) -> Mapping[str, float]:
        learner = weights.learner
        bundle = WeightHandle(learner, await learner.call("stage", version))

        async def spread(members: Sequence[EngineProcess]) -> Mapping[str, float]:
            return await self.publisher.publish(members, bundle, bundle.sums, version)

        async def admit(member: EngineProcess) -> None:
            moved_on = learner.is_busy or learner.version != version
            await self.publisher.admit(member, bundle, bundle.sums, moved_on=moved_on)

        return await self.fleet.publish(spread, admit)

    def status(self) -> dict[str, Any]:
        """For `surefoot status`."""
        return self.fleet.status()

    def close(self) -> None:
        """End the fleet, the learner, the cluster and the driver's own graders."""
        try:
            self.site.close()
        finally:
            self.runner.environment.close()
