"""The engine on transformers' own modules: any family, the same dice, no neighbours, weights where they lie."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import FAMILIES, WITHOUT_CACHE, make_family

from surefoot.engines import transformers_engine
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.transformers_engine import TransformersEngine
from surefoot.errors import EngineError
from surefoot.learner.checkpoint import weights_of
from surefoot.learner.model import decoder_spec
from surefoot.protocols import Completion, Request


def engine_of(net: Any, *, rows: int = 16, version: int = 0) -> TransformersEngine:
    engine = TransformersEngine(
        json.loads(net.config.to_json_string(use_diff=False)), rows=rows, max_width=96,
        attention=net.config._attn_implementation,
    )  # fmt: skip
    engine.load_weights(weights_of(net), version)
    return engine


def ask(name: str, *, prompt: int = 0, seed: int = 0, tokens: int = 10, stop: int = 2) -> Request:
    ids = tuple(3 + (5 * prompt + 7 * place) % 50 for place in range(7 + 6 * prompt))
    return Request(name, ids, tokens, 0.8, frozenset({stop}), seed=seed)


def questions() -> list[Request]:
    """Three prompts of different lengths, six siblings each: more than fit at once."""
    return [ask(f"{p}/{i}", prompt=p, seed=10 * p + i) for p in range(3) for i in range(6)]


def largest_gap(net: Any, asked: list[Request], answers: list[Completion], *, begin: int = 0) -> float:
    """Against one plain forward over each whole text."""
    gaps = [0.0]
    for request, said in zip(asked, answers, strict=True):
        with torch.no_grad():
            logits = net(input_ids=torch.tensor([request.prompt_ids + said.token_ids]), use_cache=False).logits[0]
        known = (logits.float() / request.temperature).log_softmax(-1)
        for place in range(begin, len(said.token_ids)):
            row = len(request.prompt_ids) - 1 + place
            gaps.append(abs(float(known[row, said.token_ids[place]]) - said.logprobs[place]))
    return max(gaps)


@pytest.mark.turns(27)
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_sampled_has_the_models_own_probability(name: str) -> None:
    net = make_family(name)
    engine, asked = engine_of(net), questions()
    answers = engine.generate(asked)
    assert engine.cached is (name not in WITHOUT_CACHE), "docs/models.md says otherwise"
    assert len({said.token_ids for said in answers}) > 12, "equal answers would show nothing"
    assert largest_gap(net, asked, answers) < 1e-4, "the engine reports other probabilities than the model has"


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_it_draws_what_the_embedded_engine_draws(make_net: Any, kind: str) -> None:
    net, asked = make_net(kind), questions()
    other = EmbeddedEngine(decoder_spec(net), rows=16, max_width=96)
    other.load_weights(dict(net.named_parameters()), 0)
    mine, theirs = engine_of(net).generate(asked), other.generate(asked)
    assert [said.token_ids for said in mine] == [said.token_ids for said in theirs], "another dice, or another model"
    gaps = [abs(a - b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)]
    assert max(gaps) < 1e-4, "the same tokens with other probabilities"


def test_a_rollout_says_the_same_in_any_company(make_net: Any) -> None:
    engine, asked = engine_of(make_net()), questions()
    together = engine.generate(asked)
    alone = [engine.generate([request])[0] for request in asked]
    turned = engine.generate(asked[::-1])[::-1]
    assert together == alone == turned, "somebody else's rows changed what a rollout says"


def test_planted_siblings_that_share_one_cache_are_seen(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first eight have said would be in the memory of the others."""
    engine, asked = engine_of(make_net()), [ask(str(i), seed=i, stop=200) for i in range(12)]
    alone = [engine.generate([request])[0] for request in asked]
    assert engine.generate(asked) == alone
    monkeypatch.setattr(transformers_engine, "copy", SimpleNamespace(deepcopy=lambda held: held))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert engine.generate(asked) == alone, "nobody reached anybody"


def test_new_weights_hold_for_the_next_token_of_everybody(make_net: Any) -> None:
    old, new = make_net(), make_net(seed=1)
    engine = engine_of(old)
    asked = [ask(str(i), prompt=i % 2, seed=i, stop=60) for i in range(4)]
    tickets = engine.enter(asked)
    done: dict[int, Completion] = {}
    for _ in range(4):
        done |= engine.advance()
    begun = max(len(row.tokens) for _, row in engine._occupied())
    engine.load_weights(weights_of(new), 1)
    while engine.busy:
        done |= engine.advance()
    answers = [done[ticket] for ticket in tickets]
    spread = [said for said in answers if (said.version, said.version_end) == (0, 1)]
    assert begun == 5, "they have not begun together"
    assert spread, "nobody was in flight"
    assert largest_gap(new, asked, answers, begin=begun) < 1e-4, "later tokens were not the new weights' alone"
    assert largest_gap(new, asked, answers) > 1e-2, "the two models say the same, which would show nothing"


def test_weights_that_changed_in_place_are_refused(make_net: Any) -> None:
    net = make_net()
    engine = engine_of(net)
    next(net.parameters()).data.add_(0.1)
    with pytest.raises(EngineError, match="changed in place"):
        engine.generate(questions()[:1])


def test_missing_weights_and_lasting_buffers_are_refused_by_name() -> None:
    net = make_family("deepseek_v3")
    engine = engine_of(net)
    weights = weights_of(net)
    buffers = dict(net.named_buffers())
    lasting = [name for name in weights if name in buffers]
    assert lasting, "deepseek's router has a bias that no optimiser sees"
    for name in (lasting[0], "model.norm.weight"):
        with pytest.raises(EngineError, match=f"first {name}"):
            engine.load_weights({key: value for key, value in weights.items() if key != name}, 1)


def test_no_memory_is_taken_for_parameters_and_tied_ones_stay_tied(make_net: Any) -> None:
    net = make_net()
    engine = engine_of(net)
    own, held = dict(net.named_parameters()), dict(engine.decoder.net.named_parameters(remove_duplicate=False))
    assert held["lm_head.weight"].data_ptr() == own["model.embed_tokens.weight"].data_ptr(), (
        "the output layer is a copy"
    )
    assert all(held[name].data_ptr() == value.data_ptr() for name, value in own.items()), "weights were copied"
    engine.close()
    assert {p.device.type for p in engine.decoder.net.parameters()} == {"meta"}, "the engine still holds the weights"


def test_a_cache_that_forgets_is_seen_and_not_used(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a library whose cache keeps the last token alone. Without the look it would be sampled from."""
    from transformers.cache_utils import DynamicLayer

    whole = DynamicLayer.update

    def forgets(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = whole(self, *args, **kwargs)
        self.keys, self.values = keys[:, :, -1:] * 0.5, values[:, :, -1:]
        return keys, values

    monkeypatch.setattr(DynamicLayer, "update", forgets)
    net, asked = make_net(), questions()
    engine = engine_of(net)
    assert engine.cached is False, "a cache that gives other probabilities than the whole text is used"
    assert largest_gap(net, asked, engine.generate(asked)) < 1e-4, "without a cache it is not exact either"
    monkeypatch.setattr(transformers_engine.ModuleDecoder, "_cache_holds", lambda _: True)
    blind = engine_of(net)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert largest_gap(net, asked, blind.generate(asked)) < 1e-4, "the planted cache changes nothing"
