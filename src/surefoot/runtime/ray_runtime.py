"""Many processes: engines, rollout workers and the learner, each where there is room for it.

Owns       a run's cluster with everything in it, from start to end.
Promises   the same groups, losses and evaluations as `local.py` where the engine is ours and sampling waits for
           learning; a version counts only when every engine that serves has proved it, and an engine that joins
           proves it before it serves; whatever happens, `close` leaves no process behind.

Read next: `fleet.py`, who plays; `weights.py`, the proof; `ray_cluster.py`, where it all lives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from surefoot.child_environment import withheld
from surefoot.config_tables import RuntimeConfig
from surefoot.protocols import Environment
from surefoot.runtime.fleet import Fleet
from surefoot.runtime.fleet_members import EngineMember, Limits, Transport
from surefoot.runtime.fleet_players import FleetPlayers
from surefoot.runtime.fleet_thread import FleetThread
from surefoot.runtime.judging import JudgingRuntime
from surefoot.runtime.orders import Sampling
from surefoot.runtime.ray_cluster import Cluster, room_for
from surefoot.runtime.ray_learner import RemoteLearner, RemoteWeights
from surefoot.runtime.recipes import EngineRecipe, LearnerRecipe, ProcessRecipe, WorkerRecipe
from surefoot.runtime.shared_weights import sweep
from surefoot.runtime.weights import Publisher

WORKER_SLOTS = 64
_CLOSE_S = 10.0


class RaySite:
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
        self.limits = Limits(
            start_timeout_s=keys.start_timeout_s, max_restarts=keys.max_restarts,
            restart_timeout_s=keys.restart_timeout_s, rollout_timeout_s=rollout_timeout_s,
        )  # fmt: skip
        self.process = ProcessRecipe(logs.absolute(), threads, deterministic, withheld=withheld(pass_env)).also(
            pass_env
        )
        self.learner: RemoteLearner | None = None
        self.fleet: Fleet | None = None
        self.cluster = Cluster(keys.address, processes=1 + keys.engines + keys.workers)
        self.thread = FleetThread()
        try:
            room_for({
                "CPU": 1.0 + keys.engines + keys.workers,
                "GPU": keys.learner_gpus + keys.engines * keys.engine_gpus,
            })  # fmt: skip
        except BaseException:
            self.close()
            raise

    def start_learner(self, recipe: LearnerRecipe) -> RemoteLearner:
        """Its process, with the model loaded; `learner.policy` tells of it."""
        from surefoot.runtime.ray_transport import start_learner  # ray: after the token is there

        member = start_learner(self.process, recipe, num_gpus=self.keys.learner_gpus)
        self.learner = RemoteLearner(member, self.thread, self.limits)
        self.learner.start()
        return self.learner

    def start_fleet(self, engine: EngineRecipe, worker: WorkerRecipe, *, engine_slots: int) -> Fleet:
        """Engines without weights, and workers; returns when all are there."""
        keys = self.keys
        spread = not self.cluster.is_private
        shared = worker.shared_by(keys.workers)

        async def make() -> Fleet:
            transport = make_transport(self.process, engine, shared, engine_gpus=keys.engine_gpus, spread=spread)
            self.fleet = Fleet(
                transport, engines=keys.engines, workers=keys.workers, engine_slots=engine_slots,
                worker_slots=WORKER_SLOTS, limits=self.limits,
            )  # fmt: skip
            await self.fleet.start()
            return self.fleet

        return self.thread.wait(make())

    def close(self) -> None:
        """End every process, then the cluster; each of them even if another does not end well. May be called twice."""
        with ExitStack() as ends:
            ends.callback(sweep)  # last: shared memory of a learner that was killed
            ends.callback(self.cluster.close)
            ends.callback(self.thread.close)
            if self.learner is not None:
                ends.callback(self.learner.close)
            if self.fleet is not None:
                ends.callback(self._close_fleet, self.fleet)
        self.fleet = self.learner = None

    def _close_fleet(self, fleet: Fleet) -> None:
        with suppress(TimeoutError):  # the reaper ends what does not end by itself
            self.thread.submit(fleet.close()).exception(_CLOSE_S)


def make_transport(
    process: ProcessRecipe, engine: EngineRecipe, worker: WorkerRecipe, *, engine_gpus: float, spread: bool
) -> Transport:
    """Actors in the cluster of this process; ray is imported here, after the token is in the environment."""
    from surefoot.runtime.ray_transport import RayTransport

    return RayTransport(process, engine, worker, engine_gpus=engine_gpus, spread=spread)


class Bundle:
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


class RayRuntime(JudgingRuntime):
    """`protocols.Runtime` over a site's fleet.

    Args:
        environment: graders in this process, for the audit.
        prompts: token ids of every task's prompt, by task id.
    """

    def __init__(
        self, site: RaySite, fleet: Fleet, environment: Environment, prompts: Mapping[str, tuple[int, ...]],
        *, train: Sampling, evaluation: Sampling, max_failures: float, publisher: Publisher,
    ) -> None:  # fmt: skip
        players = FleetPlayers(fleet, site.thread, environment, prompts)
        super().__init__(players, train=train, evaluation=evaluation, max_failures=max_failures)
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
        bundle = Bundle(learner, await learner.call("stage", version))

        async def spread(members: Sequence[EngineMember]) -> Mapping[str, float]:
            return await self.publisher.publish(members, bundle, bundle.sums, version)

        async def admit(member: EngineMember) -> None:
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
            self.players.environment.close()
