"""Silent failure 28: the sampler keeps its old weights, under the old version number or, worse, under the new one."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import TASKS, make_engine, make_learner, make_runtime, prepare, tiny_net, weights_of

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import EngineError, InvariantError, NumericsError
from surefoot.learner.grpo import GRPOLearner
from surefoot.runtime.local import LocalRuntime


class Deaf(EmbeddedEngine):
    """The planted bug: from the second load on, the number changes and the weights do not."""

    loads = 0

    def load_weights(self, weights: Any, version: int) -> None:
        self.loads += 1
        if self.loads == 1:
            super().load_weights(weights, version)
        self._version = version


def two_steps(engine: EmbeddedEngine) -> tuple[GRPOLearner, float]:
    """Publish, collect, learn, twice; returns the largest disagreement of step 2."""
    learner = make_learner(tiny_net(), learning_rate=1e-3)
    runtime: LocalRuntime = make_runtime(engine)
    gap = 0.0
    for step in (1, 2):
        runtime.publish(weights_of(learner.net), learner.version)
        gap = learner.learn(prepare(runtime.collect(TASKS, step))).metrics["sampling/sampling_logp_difference/max"]
    return learner, gap


def test_after_a_step_the_sampler_has_the_learners_weights() -> None:
    learner, gap = two_steps(make_engine(tiny_net()))
    assert learner.version == 2
    assert gap < 1e-4


def test_planted_engine_that_never_updates_is_refused_at_the_next_step() -> None:
    spec = make_engine(tiny_net()).decoder.spec
    with pytest.raises(NumericsError, match="weights that never arrived"):
        two_steps(Deaf(spec, rows=16, max_width=48))


def test_planted_publish_that_is_forgotten_is_refused_by_version() -> None:
    learner = make_learner(tiny_net())
    runtime = make_runtime(make_engine(learner.net))
    learner.learn(prepare(runtime.collect(TASKS, 1)))
    with pytest.raises(InvariantError, match="12 of 12 samples come from version 0, the learner is at 1"):
        learner.learn(prepare(runtime.collect(TASKS, 2)))


def test_planted_engine_that_drops_the_update_is_refused_by_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny_net())
    monkeypatch.setattr(engine, "load_weights", lambda weights, version: None)
    with pytest.raises(EngineError, match="published version 1, the engine serves 0"):
        make_runtime(engine).publish(weights_of(tiny_net()), 1)
