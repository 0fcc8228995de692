"""Silent failure 31: the output layer shares its weights with the embedding, its name is never sent, and it goes stale."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from silent_kit import PROMPTS, STOP_ID, TASKS, make_learner, make_runtime, prepare, tiny_net, weights_of

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import NumericsError
from surefoot.learner.model import decoder_spec
from surefoot.protocols import Request


class StaleHead(EmbeddedEngine):
    """The planted bug: no parameter is called lm_head, so the packed head of the first load stays."""

    def load_weights(self, weights: Any, version: int) -> None:
        head = self.decoder.head
        super().load_weights(weights, version)
        self.decoder.head = head or self.decoder.head


def check(engine: EmbeddedEngine, net: Any) -> None:
    """After changing only the embedding, engine and model agree on every sampled token."""
    engine.load_weights(weights_of(net), 0)
    with torch.no_grad():
        net.get_input_embeddings().weight[5:15] *= 0.5
    engine.load_weights(weights_of(net), 1)
    (said,) = engine.generate([Request("r", PROMPTS["long"], 8, 1.0, frozenset({STOP_ID}), seed=3)])
    with torch.no_grad():
        logits = net(torch.tensor([[*PROMPTS["long"], *said.token_ids]])).logits[0]
    logp = torch.log_softmax(logits[len(PROMPTS["long"]) - 1 : -1], -1)
    ours = logp.gather(1, torch.tensor(said.token_ids)[:, None]).squeeze(1)
    torch.testing.assert_close(torch.tensor(said.logprobs), ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
def test_an_update_reaches_the_output_layer(tied: bool) -> None:
    net = tiny_net(tie_word_embeddings=tied)
    assert ("lm_head.weight" in weights_of(net)) is not tied
    check(EmbeddedEngine(decoder_spec(net), rows=16, max_width=48), net)


def test_planted_stale_head_is_seen() -> None:
    net = tiny_net()
    with pytest.raises(AssertionError):
        check(StaleHead(decoder_spec(net), rows=16, max_width=48), net)


def two_steps(kind: type[EmbeddedEngine]) -> float:
    """A learner and its sampler, with an update between two steps; their largest gap in the second."""
    net = tiny_net()
    learner, runtime = make_learner(net), make_runtime(kind(decoder_spec(net), rows=16, max_width=48))
    gap = math.nan
    for step in (1, 2):
        runtime.publish(weights_of(learner.net), learner.version)
        gap = learner.learn(prepare(runtime.collect(TASKS, step))).metrics["sampling/sampling_logp_difference/max"]
    return gap


def test_after_an_update_sampler_and_learner_agree() -> None:
    assert two_steps(EmbeddedEngine) < 1e-4


def test_planted_stale_head_stops_the_next_step() -> None:
    with pytest.raises(NumericsError, match="weights that never arrived"):
        two_steps(StaleHead)
