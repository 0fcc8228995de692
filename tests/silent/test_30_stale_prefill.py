"""Silent failure 30: keys and values of a prompt, computed with old weights, are reused after an update."""

from __future__ import annotations

import math
from typing import Any

import pytest
from silent_kit import PROMPTS, STOP_ID, TASKS, make_engine, make_learner, make_runtime, prepare, tiny_net, weights_of

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import NumericsError
from surefoot.protocols import Completion, Request


class Keeping(EmbeddedEngine):
    """The planted bug: a weight update leaves the prompt cache as it is."""

    def load_weights(self, weights: Any, version: int) -> None:
        kept = self._last_prefill
        super().load_weights(weights, version)
        self._last_prefill = None if kept is None else ((version, kept[0][1]), kept[1])


def ask(engine: EmbeddedEngine) -> list[Completion]:
    """The same prompt each time: only then can a cache answer."""
    return engine.generate([Request(f"r{i}", PROMPTS["long"], 6, 1.0, frozenset({STOP_ID}), seed=i) for i in range(4)])


def check(engine: EmbeddedEngine) -> None:
    """After an update, the engine answers as a fresh one with the new weights."""
    engine.load_weights(weights_of(tiny_net(0)), 0)
    before = ask(engine)
    engine.load_weights(weights_of(tiny_net(1)), 1)
    after, fresh = ask(engine), ask(make_engine(tiny_net(1), version=1))
    assert after == fresh
    assert [c.token_ids for c in after] != [c.token_ids for c in before]


def test_an_updated_engine_answers_like_a_fresh_one() -> None:
    check(make_engine(tiny_net()))


def test_the_same_version_number_does_not_bring_the_cache_back() -> None:
    engine = make_engine(tiny_net(0))
    ask(engine)
    engine.load_weights(weights_of(tiny_net(1)), 0)
    assert ask(engine) == ask(make_engine(tiny_net(1)))


def test_planted_cache_that_survives_an_update_is_seen() -> None:
    with pytest.raises(AssertionError):
        check(Keeping(make_engine(tiny_net()).decoder.spec, rows=16, max_width=48))


def two_steps(engine: EmbeddedEngine) -> float:
    """A learner and its sampler, with an update between two steps on one prompt; their gap in the second."""
    net = tiny_net()
    learner, runtime = make_learner(net), make_runtime(engine, size=12)
    gap = math.nan
    for step in (1, 2):
        runtime.publish(weights_of(learner.net), learner.version)
        gap = learner.learn(prepare(runtime.collect(TASKS[:1], step))).metrics["sampling/sampling_logp_difference/max"]
    return gap


def test_two_steps_on_one_prompt_agree() -> None:
    assert two_steps(make_engine(tiny_net())) < 1e-4


def test_planted_cache_that_survives_an_update_stops_the_next_step() -> None:
    with pytest.raises(NumericsError, match="weights that never arrived"):
        two_steps(Keeping(make_engine(tiny_net()).decoder.spec, rows=16, max_width=48))
