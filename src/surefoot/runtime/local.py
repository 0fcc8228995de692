"""One process: the engine and the learner take turns, or overlap.

Promises   a version counts only after the engine itself reports it and, where the learner can be asked, after the
           canary's answers bear it out.

Read next: `probes.py`, the canary; `base.py`, what is asked of the groups.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from surefoot.errors import EngineError
from surefoot.protocols import ServingEngine, Weights
from surefoot.runtime.base import BaseRuntime
from surefoot.runtime.probes import Score, WeightProbe, make_probes
from surefoot.runtime.requests import CancellableEngine, RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.rollout import RolloutCollector
from surefoot.system.heartbeat import tick
from surefoot.tracking.timeline import span

TOLERANCE = 1e-3
"""Nats between the engine's log-probability of a probe token and the learner's, in float32."""


class LocalRuntime(BaseRuntime):
    """`protocols.Runtime` without a process boundary.

    Args:
        engine: the one that the collector asks.
        score: the learner's, for the canary; without it the engine's word is all there is.
        tolerance: how far the two may be apart on one token.
        probe_width: longest question plus answer that the engine takes; a long question fills its caches.
        probe_prompts: what questions are made of; all prompts when left out.
    """

    def __init__(
        self, engine: ServingEngine, collector: RolloutCollector, *, train: Sampling, evaluation: Sampling,
        max_failures: float, score: Score | None = None, tolerance: float = TOLERANCE,
        probe_width: int | None = None, probe_prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(collector, train=train, evaluation=evaluation, max_failures=max_failures)
        self.engine, self.collector, self.score = engine, collector, score
        if score is not None:
            material = collector.prompts.values() if probe_prompts is None else probe_prompts
            probes = make_probes(
                material, temperature=train.temperature, max_width=probe_width or train.max_width,
                max_completion_length=train.max_completion_length,
            )  # fmt: skip
            self.canary = WeightProbe(probes, tolerance=tolerance)

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Hand the engine these weights and have it prove that it speaks with them."""
        engine = self.engine
        started = time.perf_counter()
        with span("load", track="sync"):
            engine.load_weights(weights, version)
        loaded = time.perf_counter()
        if engine.version != version:
            raise EngineError(
                f"published version {version}, the engine serves {engine.version}",
                "the next rollouts would come from old weights under a new name",
                "see the engine's log",
            )
        metrics = {"timing/publish": loaded - started}
        if self.canary is None or self.score is None:
            return metrics
        tick("publishing weights")
        with span("canary", track="sync"):
            metrics |= self.canary.prove("the engine", engine.generate, self.score, version)
        packing = engine.pack_seconds  # paid by whoever asks first; not a cost of the proof
        metrics["sync/replicas"] = 1.0
        return metrics | {"timing/pack": packing, "timing/proof": time.perf_counter() - loaded - packing}

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
