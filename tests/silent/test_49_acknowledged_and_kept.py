"""Silent failure 49: an engine acknowledges every new version and goes on sampling with the weights it had."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from local_kit import publisher_here
from silent_kit import TASKS, make_engine, make_learner, prepare, tiny_net, weights_of
from silent_kit import make_runtime as make_plain_runtime
from sync_kit import World

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import NumericsError
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.weights import WeightProbe


class Deaf(EmbeddedEngine):
    """The planted bug: from the second load on, the number changes and the weights do not."""

    def load_weights(self, weights: Any, version: int) -> None:
        if self._version is None:
            super().load_weights(weights, version)
        self._version = version


def make_runtime(engine: EmbeddedEngine, learner: Any) -> LocalRuntime:
    plain = make_plain_runtime(engine)
    return LocalRuntime(
        engine, plain.collector, train=plain.train, evaluation=plain.evaluation, max_failures=0.0,
        publisher=publisher_here(plain, learner.score),
    )  # fmt: skip


def two_versions(engine: EmbeddedEngine) -> dict[str, float]:
    """Publish, step, publish; the numbers of the second publish."""
    learner = make_learner(tiny_net(), learning_rate=1e-3)
    runtime = make_runtime(engine, learner)
    runtime.publish(weights_of(learner.net), 0)
    learner.learn(prepare(runtime.collect(TASKS, 1)))
    return dict(runtime.publish(weights_of(learner.net), 1))


def test_an_honest_engine_proves_every_version() -> None:
    found = two_versions(make_engine(tiny_net()))
    assert found["sync/probe_gap"] < 1e-5 < found["sync/probe_move"]


def test_planted_engine_that_keeps_its_weights_is_refused_before_it_samples() -> None:
    spec = make_engine(tiny_net()).decoder.spec
    with pytest.raises(NumericsError, match=r"the engine does not serve version 1: .* It answers as version 0 did"):
        two_versions(Deaf(spec, rows=16, max_width=48))


def test_planted_replica_that_keeps_its_weights_is_named() -> None:
    async def play() -> None:
        world = World(learning_rate=1e-3, engines=3)
        await world.publish()
        await world.sync()
        await world.sync(lie="keeps_old_weights", liar=2)

    with pytest.raises(NumericsError, match=r"engine 2 does not serve version 2: .* It answers as version 1 did"):
        asyncio.run(play())


def test_planted_runtime_without_a_canary_samples_with_old_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: the number alone convinces."""
    monkeypatch.setattr(WeightProbe, "judge", lambda *_: {})
    two_versions(Deaf(make_engine(tiny_net()).decoder.spec, rows=16, max_width=48))
