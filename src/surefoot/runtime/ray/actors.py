"""What runs inside the processes of a Ray fleet: an engine, a rollout worker, the learner.

Owns       the outermost layer of each process: its log, its threads, its parts, and a sign of life at any time.
Promises   nothing heavy happens before `setup`, so that a start that fails says why; signs of life are given while
           work is under way; a worker's reward processes are forked first thing and hold none of Ray's connections.
Never      restarts itself, retries, or decides anything: the fleet does.

Read next: `transport.py`, the driver's end of these.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from surefoot.errors import EngineError, InvariantError
from surefoot.protocols import Completion, LearnerFacts, Request, Scored, ServingEngine, StepReport
from surefoot.records import TrainSample
from surefoot.runtime.replicas import EngineGoneError, RolloutReport
from surefoot.runtime.requests import CancellableEngine, RolloutRequest
from surefoot.runtime.specs import (
    EngineSpec,
    LearnerSpec,
    PolicyFacts,
    ProcessSpec,
    WorkerSpec,
    open_weights,
)
from surefoot.system.signals import last_heartbeat

if TYPE_CHECKING:
    from surefoot.learner.grpo import GRPOLearner
    from surefoot.learner.model import Policy
    from surefoot.runtime.learner_ranks import FollowingRank, LedLearner
    from surefoot.runtime.ray.transport import RayReplica


T = TypeVar("T")
THREADS = 64
"""Plays that one worker may have open; most of them wait."""


class ReplicaActor:
    """One process: enters its log, then builds when it is told to."""

    def __init__(self, name: str, process: ProcessSpec) -> None:
        process.enter(name)
        self.name, self.process = name, process
        self.in_flight = 0

    def ready(self) -> None:
        """Say so in the log: from here on it can work."""
        print(f"{self.name} is ready as process {os.getpid()}")

    async def whereabouts(self) -> dict[str, Any]:
        """Where this process is."""
        return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}

    async def ping(self) -> dict[str, Any]:
        """A sign of life, and how far the work is."""
        return {"in_flight": self.in_flight, "progress": last_heartbeat().moment}


class EngineActor(ReplicaActor):
    """An engine that many ask at once."""

    def __init__(self, name: str, process: ProcessSpec, recipe: EngineSpec) -> None:
        super().__init__(name, process)
        self.recipe = recipe
        self.engine: ServingEngine | None = None
        self.version: int | None = None
        self._one_sync = asyncio.Lock()

    async def setup(self) -> dict[str, Any]:
        """Build the engine."""
        await asyncio.to_thread(self._build)
        self.ready()
        return await self.whereabouts()

    def _build(self) -> None:
        self.process.set_torch()
        self.engine = self.recipe.build()

    async def ping(self) -> dict[str, Any]:
        """With the version it serves."""
        return {**await super().ping(), "version": self.version}

    async def prepare(self, parcel: Any, version: int) -> dict[str, int]:
        """Stage weights beside those in force; the checksums of what was staged."""
        async with self._one_sync:
            return await asyncio.to_thread(self._prepare, parcel, version)

    def _prepare(self, parcel: Any, version: int) -> dict[str, int]:
        return dict(self._built().prepare(open_weights(parcel), version))

    async def commit(self, version: int) -> dict[str, int]:
        """Serve what was staged."""
        async with self._one_sync:
            return await asyncio.to_thread(self._commit, version)

    def _commit(self, version: int) -> dict[str, int]:
        held = dict(self._built().commit(version))
        self.version = version
        return held

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer, beside everybody else's."""
        engine = self._built()
        self.in_flight += len(requests)
        try:
            return await asyncio.wrap_future(engine.submit(requests))
        finally:
            self.in_flight -= len(requests)

    def _built(self) -> ServingEngine:
        if self.engine is None:
            raise EngineError(f"{self.name} is not built yet", "it has nothing to answer with", "call setup first")
        return self.engine


class WorkerActor(ReplicaActor):
    """Asks engines and grades."""

    def __init__(self, name: str, process: ProcessSpec, recipe: WorkerSpec) -> None:
        _forget_connections_in_children()
        super().__init__(name, process)
        self.recipe = recipe
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rollouts")

    async def setup(self) -> dict[str, Any]:
        """Fork the reward processes, then import the rest."""
        pool = self.recipe.pool(self.process.logs / f"rewards-{self.name.replace(' ', '-')}.log")
        tools = self.recipe.tools
        kit = None if tools is None else await asyncio.to_thread(tools.build, self.process.logs)
        self.environment, self.tools = await asyncio.to_thread(self.recipe.environment, pool, kit)
        self.ready()
        return await self.whereabouts()

    async def run(self, request: RolloutRequest, engine: Any, attempt: int) -> RolloutReport:
        """One group, with completions of this engine; cancelled, it stops waiting for them."""
        from surefoot.runtime.rollout import RolloutCollector

        loop = asyncio.get_running_loop()
        recipe = self.recipe
        client = CancellableEngine(
            lambda requests: asyncio.run_coroutine_threadsafe(_completions_of(engine, requests), loop)
        )
        collector = RolloutCollector(
            client, self.environment, recipe.codec, {}, seed=recipe.seed, token_count=recipe.token_count,
            tools=self.tools,
            tool_threads=THREADS if recipe.tools is None else recipe.tools.concurrency,
        )  # fmt: skip
        self.in_flight += 1
        try:
            (played,) = await loop.run_in_executor(self._threads, collector.run_requests, [request])
        except asyncio.CancelledError:
            client.cancel()
            raise
        finally:
            self.in_flight -= 1
        failed = any(rollout.reward is None for rollout in played.group.rollouts)
        return RolloutReport(request.group, attempt, played, self.environment.explain_failures() if failed else "")


async def _completions_of(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    """What the engine's process answers; cancelled, it is asked to stop."""
    asked = engine.generate.remote(list(requests))
    try:
        return list(await asked)
    except asyncio.CancelledError:
        ray.cancel(asked)
        raise
    except RayActorError as error:
        raise EngineGoneError(f"a worker lost the connection: {type(error).__name__}") from None
    except RayTaskError as error:
        raise error.cause from None


def _forget_connections_in_children() -> None:
    """A forked reward process must not hold Ray's sockets open: the end of this process would not be noticed."""
    inherited: list[tuple[int, int]] = []
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                inherited.append((int(name), os.fstat(int(name)).st_ino))
            except OSError:
                continue  # the listing's own

    def close_once() -> None:
        while inherited:
            descriptor, inode = inherited.pop()
            try:
                if os.fstat(descriptor).st_ino == inode:
                    os.close(descriptor)
            except OSError:
                continue

    os.register_at_fork(after_in_child=close_once)


# -- The learner's processes: the policy, its optimiser, and the memory that engines read its weights from
# Owns       the one thread that touches them, in each.
# Promises   what is staged is the version that was asked for, and stays as it is while the learner goes on; checkpoints
# are written and read here, on a disk that the driver sees too.


class RankActor(ReplicaActor):
    """One rank of a learner: the policy and its optimiser; one thread touches them. Does what rank 0 asks."""

    def __init__(self, name: str, process: ProcessSpec, recipe: LearnerSpec) -> None:
        super().__init__(name, process)
        self.recipe = recipe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self._rank: FollowingRank | None = None

    async def answer(self, question: bytes) -> bytes:
        """A line of JSON there, one back: `runtime/learner_ranks.py` knows what they say."""
        return await self._do(lambda: self._answer(question))

    def _answer(self, question: bytes) -> bytes:
        if self._rank is None:
            from surefoot.runtime.ray.learner_group import follower

            self._rank = follower(self.process, self.recipe)
        return self._rank.reply(question)

    async def _do(self, work: Callable[[], T]) -> T:
        self.in_flight += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self.in_flight -= 1


class LearnerActor(RankActor):
    """Rank 0, or the only one: the learner of the loop."""

    policy: Policy
    learner: GRPOLearner | LedLearner
    _shared: Any = None

    async def setup(self, others: Sequence[RayReplica] = ()) -> tuple[dict[str, Any], PolicyFacts]:
        """Load the model; where there are other ranks, have them load it too, and meet them."""
        return await self.whereabouts(), await self._do(lambda: self._build(others))

    def _build(self, others: Sequence[RayReplica]) -> PolicyFacts:
        from surefoot.runtime.ray.learner_group import make_led

        self.process.set_torch()
        self.policy, self.learner = make_led(self.recipe, others)
        policy = self.policy
        self.ready()
        shape = json.loads(policy.model.config.to_json_string(use_diff=False))
        return PolicyFacts(policy.name, policy.tokenizer, policy.stop_ids, policy.spec, shape)

    async def facts(self) -> LearnerFacts:
        """What the loop asks the learner between two steps."""
        return await self._do(lambda: self.learner.facts)

    async def learn(self, samples: Sequence[TrainSample], iteration: int) -> tuple[StepReport, LearnerFacts]:
        """One optimiser step."""
        return await self._do(lambda: (self.learner.learn(samples, iteration=iteration), self.learner.facts))

    async def score(self, texts: Sequence[Scored], temperature: float) -> list[tuple[float, ...]]:
        """Log-probabilities under the current weights."""
        return await self._do(lambda: self.learner.score(texts, temperature=temperature))

    async def stage(self, version: int) -> Any:
        """The current weights where engines on this machine can read them, while the learner goes on."""
        return await self._do(lambda: self._stage(version))

    def _stage(self, version: int) -> Any:
        from surefoot.runtime.shared_weights import SharedWeights, specs_of

        if version != (held := self.learner.facts.version):
            raise InvariantError(
                f"version {version} is to be published, and the learner has version {held}",
                "weights would be served under another version's name", "publish learner.version",
            )  # fmt: skip
        weights, _ = self.learner.published()
        if self._shared is None:
            self._shared = SharedWeights.create(specs_of(weights))
        return self._shared.write(weights, version)

    async def ship(self, staged: Any) -> dict[str, Any]:
        """What was staged, by value, for engines elsewhere; not the current weights, which may have moved on."""
        return await asyncio.to_thread(lambda: {name: w.clone() for name, w in open_weights(staged).items()})

    async def save(self, folder: Path, step: int, extra: Mapping[str, Any]) -> LearnerFacts:
        """A whole checkpoint, on the disk that this process and the driver share."""

        def save() -> LearnerFacts:
            self.learner.save(folder, step=step, extra=extra)
            return self.learner.facts

        return await self._do(save)

    async def load(self, folder: Path) -> tuple[Mapping[str, Any], LearnerFacts]:
        """Go back to a checkpoint."""
        return await self._do(lambda: (self.learner.load(folder), self.learner.facts))

    async def inspect(self, look: Callable[[Any, Any], T]) -> T:
        """What `look(policy, learner)` returns, here where they are."""
        return await self._do(lambda: look(self.policy, self.learner))

    async def close(self) -> None:
        """Unlink shared memory."""
        if self._shared is not None:
            await self._do(self._shared.close)
