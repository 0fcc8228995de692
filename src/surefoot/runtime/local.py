"""One process: the engine and the learner take turns, or overlap.

Promises   a version counts only after the engine itself reports it and, where the learner can be asked, after the
           canary's answers bear it out; weights that the learner goes on changing are never what the engine reads.

Read next: `probes.py`, the canary; `judging.py`, what is asked of the groups.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surefoot.errors import EngineError
from surefoot.protocols import Weights
from surefoot.pulse import beat
from surefoot.runtime.judging import JudgingRuntime
from surefoot.runtime.orders import Sampling
from surefoot.runtime.probes import Canary, Score, make_probes
from surefoot.runtime.rollout import RolloutCollector
from surefoot.tracking.timeline import span

TOLERANCE = 1e-3
"""Nats between the engine's log-probability of a probe token and the learner's, in float32."""


class LocalRuntime(JudgingRuntime):
    """`protocols.Runtime` without a process boundary.

    Args:
        score: the learner's, for the canary; without it the engine's word is all there is.
        tolerance: how far the two may be apart on one token.
        copy_weights: hand the engine copies: for rollouts that go on while the learner changes its own.
        probe_width: longest question plus answer that the engine takes; a long question fills its caches.
        probe_prompts: what questions are made of; all prompts when left out.
    """

    def __init__(
        self, collector: RolloutCollector, *, train: Sampling, evaluation: Sampling, max_failures: float,
        score: Score | None = None, tolerance: float = TOLERANCE, copy_weights: bool = False,
        probe_width: int | None = None, probe_prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(collector, train=train, evaluation=evaluation, max_failures=max_failures)
        self.collector, self.score, self.copy_weights = collector, score, copy_weights
        if score is not None:
            material = collector.prompts.values() if probe_prompts is None else probe_prompts
            probes = make_probes(
                material, temperature=train.temperature, max_width=probe_width or train.max_width,
                max_completion_length=train.max_completion_length,
            )  # fmt: skip
            self.canary = Canary(probes, tolerance=tolerance)
        self._in_force: dict[str, Tensor] = {}
        self._spare: dict[str, Tensor] = {}

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Hand the engine these weights and have it prove that it speaks with them."""
        engine = self.collector.engine
        started = time.perf_counter()
        with span("load", track="sync"):
            engine.load_weights(self._copied(weights) if self.copy_weights else weights, version)
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
        beat("publishing weights")
        with span("canary", track="sync"):
            metrics |= self.canary.prove("the engine", engine.generate, self.score, version)
        packing = float(getattr(engine, "pack_seconds", 0.0))  # paid by whoever asks first; not a cost of the proof
        metrics["sync/replicas"] = 1.0
        return metrics | {"timing/pack": packing, "timing/proof": time.perf_counter() - loaded - packing}

    @torch.no_grad()
    def _copied(self, weights: Weights) -> Weights:
        """These numbers in memory of our own; never in that of the version which the engine still reads."""
        self._in_force, self._spare = self._spare, self._in_force
        fits = {name: (value.shape, value.dtype, value.device) for name, value in self._in_force.items()}
        if fits != {name: (value.shape, value.dtype, value.device) for name, value in weights.items()}:
            self._in_force = {name: torch.empty_like(value) for name, value in weights.items()}
        for name, value in weights.items():
            self._in_force[name].copy_(value)
        return self._in_force

    def close(self) -> None:
        """Stop engine and reward workers."""
        self.collector.engine.close()
        self.collector.environment.close()
