"""Silent failure 43: a weight update fails half-way, and the engine goes on with a mixture under the new version."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import TASKS, make_engine, make_runtime, tiny_net, weights_of

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import EngineError


class Eager(EmbeddedEngine):
    """The planted bug: the version is set whether or not the transfer succeeded."""

    def load_weights(self, weights: Any, version: int) -> None:
        try:
            super().load_weights(weights, version)
        finally:
            self._version = version


def broken_update() -> dict[str, Any]:
    """New weights whose second layer lost a tensor on the way."""
    weights = weights_of(tiny_net(1))
    del weights["model.layers.1.mlp.down_proj.weight"]
    return weights


def check(engine: EmbeddedEngine) -> None:
    """A failed update leaves no version to claim, and nothing is generated until a whole one arrives."""
    engine.load_weights(weights_of(tiny_net(0)), 0)
    runtime = make_runtime(engine)
    with pytest.raises((KeyError, EngineError)):
        runtime.publish(broken_update(), 1)
    with pytest.raises(EngineError, match="no weights"):
        runtime.collect(TASKS, step=1)


def test_a_failed_update_takes_the_engine_out_of_service() -> None:
    check(make_engine(tiny_net()))


def test_a_whole_update_brings_it_back() -> None:
    engine = make_engine(tiny_net())
    check(engine)
    runtime = make_runtime(engine)
    runtime.publish(weights_of(tiny_net(1)), 1)
    assert runtime.collect(TASKS, step=1) == make_runtime(make_engine(tiny_net(1), version=1)).collect(TASKS, step=1)


def test_planted_version_that_counts_a_failed_update_is_seen() -> None:
    with pytest.raises(pytest.fail.Exception):
        check(Eager(make_engine(tiny_net()).decoder.spec, rows=16, max_width=48))
