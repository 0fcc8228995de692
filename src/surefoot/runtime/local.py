"""One process: the engine and the learner take turns, or overlap.

Promises   weights go through the two phases and the proof of every other runtime: this process is one replica of it;
           a version counts only after the engine itself reports it.
Never      copies weights that the engine may share, or sums up tensors that are the same objects on both sides.

Read next: `weights.py`, who publishes; `base.py`, what is asked of the groups.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from surefoot.errors import EngineError
from surefoot.protocols import Completion, Request, ServingEngine, Weights
from surefoot.runtime.base import BaseRuntime
from surefoot.runtime.requests import CancellableEngine, RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.rollout import RolloutCollector
from surefoot.runtime.weights import Publisher, TwoPhase, run_here

TOLERANCE = 1e-3
"""Nats between the engine's log-probability of a probe token and the learner's, in float32."""


class LocalReplica:
    """`weights.Replica` in the learner's own process; no call of it waits.

    Args:
        shares_tensors: the engine serves the learner's own tensors. These are their own evidence: a sum of them would
            be compared with the same sum of the same objects. What is copied, or goes elsewhere, is summed up.
    """

    name = "the engine"

    def __init__(self, engine: ServingEngine, *, shares_tensors: bool) -> None:
        self.engine, self.shares_tensors = engine, shares_tensors
        self._staged: Weights = {}

    def sums(self, weights: Weights) -> Mapping[str, int]:
        """What the engine has to say of these weights when it has them."""
        if self.shares_tensors:
            return _identities(weights)
        from surefoot.maths.checksums import checksums

        return checksums(weights)

    async def prepare(self, weights: Weights, version: int) -> Mapping[str, int]:
        """Stage these weights; which tensors it holds, or their checksums."""
        if not self.shares_tensors:
            return self.engine.prepare(weights, version)
        self._staged = weights
        return _identities(weights)

    async def commit(self, version: int) -> Mapping[str, int]:
        """Serve them from the next token on; checksums, where the engine can read them back."""
        if self.shares_tensors:
            staged, self._staged = self._staged, {}
            self.engine.load_weights(staged, version)
            in_force: Mapping[str, int] = {}
        else:
            in_force = self.engine.commit(version)
        if self.engine.version != version:
            raise EngineError(
                f"published version {version}, the engine serves {self.engine.version}",
                "the next rollouts would come from old weights under a new name",
                "see the engine's log",
            )
        return in_force

    async def ask(self, requests: Sequence[Request]) -> list[Completion]:
        """Through the same path as rollouts."""
        return self.engine.generate(requests)


def _identities(weights: Weights) -> dict[str, int]:
    return {name: id(tensor) for name, tensor in weights.items()}


class LocalRuntime(BaseRuntime):
    """`protocols.Runtime` without a process boundary.

    Args:
        engine: the one that the collector asks.
        publisher: of replicas in this process; when left out, the engine's word is all there is.
        shares_tensors: whether the engine serves the learner's own tensors.
    """

    def __init__(
        self, engine: ServingEngine, collector: RolloutCollector, *, train: Sampling, evaluation: Sampling,
        max_failures: float, publisher: Publisher | None = None, shares_tensors: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(collector, train=train, evaluation=evaluation, max_failures=max_failures)
        self.engine, self.collector = engine, collector
        self.replica = LocalReplica(engine, shares_tensors=shares_tensors)
        self.publisher: TwoPhase = TwoPhase(deadline_s=None) if publisher is None else publisher
        self.canary = None if publisher is None else publisher.canary

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Hand the engine these weights and have it prove that it speaks with them."""
        sums = self.replica.sums(weights)
        metrics = run_here(self.publisher.publish([self.replica], weights, sums, version))
        if "timing/proof" in metrics:
            packing = self.engine.pack_seconds  # paid by whoever asks first; not a cost of the proof
            metrics |= {"timing/pack": packing, "timing/proof": metrics["timing/proof"] - packing}
        return metrics

    def close(self) -> None:
        """Stop engine and reward workers."""
        self.engine.close()
        self.collector.environment.close()


# -- Groups in this process, many at a time: one engine decodes for all, graders work beside it ---
# Promises   grading never holds up decoding; a cancelled group frees its rows at the next token; the tokens of a group
# are those that it would have alone.
# Never      runs a group on another engine, or changes weights.


class LocalRolloutRunner:
    """`runtime.requests.RolloutRunner` on threads of this process.

    Args:
        collector: asks and grades; its own engine is not used.
        capacity: groups in flight at once; as many threads, which mostly wait. Twice what fits the engine's rows keeps
            these full while others are graded.
    """

    def __init__(self, engine: ServingEngine, collector: RolloutCollector, *, capacity: int) -> None:
        self.engine, self.collector, self._capacity = engine, collector, capacity
        self._pool = ThreadPoolExecutor(capacity, thread_name_prefix="surefoot-rollouts")

    @property
    def capacity(self) -> int:
        """Groups that can be in flight at once and still be worked on."""
        return self._capacity

    async def run(self, request: RolloutRequest) -> RolloutResult:
        """Run one group and grade it; cancelled, it is taken out of the engine."""
        caller = CancellableEngine(self.engine.submit)
        collector = copy.copy(self.collector)
        collector.engine = caller
        try:
            (result,) = await asyncio.get_running_loop().run_in_executor(self._pool, collector.run_requests, [request])
        except asyncio.CancelledError:
            caller.cancel()
            raise
        return result

    def close(self) -> None:
        """End the threads; a grader that is at work is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)
