"""One process: the engine and the learner take turns.

Promises   a version counts only after the engine itself reports it.

Read next: `judging.py`, what is asked of the groups.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from surefoot.errors import EngineError
from surefoot.protocols import Weights
from surefoot.runtime.judging import JudgingRuntime
from surefoot.runtime.orders import Sampling
from surefoot.runtime.rollout import RolloutCollector


class LocalRuntime(JudgingRuntime):
    """`protocols.Runtime` without a process boundary."""

    def __init__(
        self, collector: RolloutCollector, *, train: Sampling, evaluation: Sampling, max_failures: float
    ) -> None:
        super().__init__(collector, train=train, evaluation=evaluation, max_failures=max_failures)
        self.collector = collector

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Hand the engine these weights and hear it say their version."""
        started = time.perf_counter()
        self.collector.engine.load_weights(weights, version)
        if self.collector.engine.version != version:
            raise EngineError(
                f"published version {version}, the engine serves {self.collector.engine.version}",
                "the next rollouts would come from old weights under a new name",
                "see the engine's log",
            )
        return {"timing/publish": time.perf_counter() - started}

    def close(self) -> None:
        """Stop engine and reward workers."""
        self.collector.engine.close()
        self.collector.environment.close()
