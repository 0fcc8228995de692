"""vLLM samples from the model that the learner has: measured, after real steps, and when it lies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from vllm_asking import END, ask, crowd, gaps, tokens

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.vllm_engine import VllmEngine
from surefoot.errors import EngineError, NumericsError
from surefoot.records import TrainSample

TOLERANCE = 1e-4


def stepped(learner: Any, engine: VllmEngine, steps: int = 1) -> None:
    """Real optimiser steps on what the engine says, synced after each."""
    for _ in range(steps):
        requests = crowd(8, seed=learner.version, stop_ids=END)
        samples = [
            TrainSample(
                item_id=r.id, trainer_version=a.version, group="g", index=i, prompt_ids=r.prompt_ids,
                completion_ids=a.token_ids, sampled=(True,) * len(a.token_ids), logprobs=a.logprobs,
                reward=float(i % 2), advantage=1.0 if i % 2 else -1.0, finish_reason=a.finish_reason,
            )
            for i, (r, a) in enumerate(zip(requests, engine.generate(requests), strict=True))
        ]  # fmt: skip
        report = learner.learn(samples)
        assert report.applied
        engine.load_weights(learner.weights(), learner.version)


def worst(learner: Any, engine: VllmEngine, temperature: float = 1.0) -> float:
    requests = crowd(12, temperature=temperature, length=70)
    return max(gaps(learner, requests, engine.generate(requests), temperature))


@pytest.mark.parametrize("temperature", [1.0, 0.7], ids=str)
def test_the_gap_over_thousands_of_tokens_stays_below_the_tolerance(
    engine: VllmEngine, learner: Any, temperature: float, record_property: Any
) -> None:
    requests = [ask(f"p{i}", length=5 + i, temperature=temperature, max_new_tokens=64) for i in range(64)]
    found = torch.tensor(gaps(learner, requests, engine.generate(requests), temperature), dtype=torch.float64)
    record_property("largest gap", float(found.max()))
    record_property("mean gap", float(found.mean()))
    assert found.numel() == 64 * 64
    assert float(found.max()) < TOLERANCE


def test_the_gap_does_not_grow_with_real_steps_and_syncs(engine: VllmEngine, learner: Any) -> None:
    before = {name: value.detach().clone() for name, value in learner.weights().items()}
    stepped(learner, engine, steps=5)
    assert all(not torch.equal(before[name], value) for name, value in learner.weights().items()), "nothing moved"
    assert engine.version == learner.version == 5
    assert worst(learner, engine) < TOLERANCE
    assert worst(learner, engine, 0.7) < TOLERANCE


def test_greedy_answers_equal_those_of_the_embedded_engine(engine: VllmEngine, policy: Any) -> None:
    """All of them, on this model; where two tokens are as likely as each other to the last bit they might differ."""
    ours = EmbeddedEngine(policy.spec, rows=16, max_width=160)
    ours.load_weights(dict(policy.model.named_parameters()), 0)
    requests = crowd(32, temperature=0.0, stop_ids=END, max_new_tokens=60)
    assert tokens(engine.generate(requests)) == tokens(ours.generate(requests))


# -- lies -------------------------------------------------------------------------------------


def test_a_stale_prefix_cache_is_seen_in_the_logprobs(
    engine: VllmEngine, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompts share whole blocks with what was asked before the sync."""
    worst(learner, engine)  # 70 tokens each: two whole blocks are cached
    monkeypatch.setattr(engine._inner.core, "_forget_prefixes", lambda: None)
    moved = {name: value.detach() * 1.3 for name, value in learner.weights().items()}
    with torch.no_grad():
        for name, value in learner.net.named_parameters():
            value.copy_(moved[name])
    engine.load_weights(moved, 1)
    assert worst(learner, engine) > 100 * TOLERANCE
    monkeypatch.undo()
    engine.load_weights(moved, 2)
    assert worst(learner, engine) < TOLERANCE


@pytest.mark.parametrize("forgotten", ["model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.weight"])
def test_a_tensor_that_is_skipped_is_named_by_reading_back(
    engine: VllmEngine, learner: Any, monkeypatch: pytest.MonkeyPatch, forgotten: str
) -> None:
    model = engine._inner.core._model
    real = model.load_weights
    stepped(learner, engine)
    monkeypatch.setattr(
        model, "load_weights", lambda pairs: real((n, v) for n, v in pairs if n != forgotten) | {"everything"}
    )
    moved = {name: value.detach() + 0.1 for name, value in learner.weights().items()}
    with pytest.raises(EngineError, match=r"did not load|are not in vLLM's memory") as caught:
        engine.load_weights(moved, 9)
    assert forgotten.split(".")[-2] in caught.value.what or "qkv_proj" in caught.value.what
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate([ask()])


def test_a_head_of_its_own_that_keeps_old_weights_is_named(engine: VllmEngine, learner: Any) -> None:
    """As a tied head does that was copied once and never again."""
    head = engine._inner.core._model.lm_head
    old = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    stepped(learner, engine)
    tied = head.weight
    head.weight = old
    try:
        assert worst(learner, engine) > 10 * TOLERANCE, "the canary"
        with pytest.raises(EngineError, match=r"1 of \d+ tensors of version 7 are not in vLLM's memory, first lm_head"):
            engine.load_weights(learner.weights(), 7)
    finally:
        head.weight = tied


def test_old_weights_under_a_new_name_stop_the_learner_at_its_next_step(
    engine: VllmEngine, learner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that lies about its own memory too: nothing is loaded, and it reads back what it should have."""
    monkeypatch.setattr(engine._inner.core, "load", lambda weights: None)
    monkeypatch.setattr(
        engine._inner, "read_back", lambda: engine._inner.staged(learner.weights()) | {}
    )  # fmt: skip
    stepped(learner, engine)
    assert engine.version == 1
    with pytest.raises(NumericsError, match="sampler and learner disagree"):
        stepped(learner, engine)


def test_readback_names_every_tensor_and_agrees_with_what_was_handed_over(engine: VllmEngine, learner: Any) -> None:
    handed = engine.prepare(learner.weights(), 3)
    assert engine.commit(3) == handed
    in_force = engine.between_tokens(lambda inner: inner.read_back())
    assert handed.items() <= in_force.items()
    assert in_force.keys() - handed.keys() == {"lm_head.weight"}
    changed = {name: value.detach().clone() for name, value in learner.weights().items()}
    changed["model.layers.1.mlp.up_proj.weight"][3, 4] += 1e-6
    engine.load_weights(changed, 4)
    differing = {
        name
        for name, value in engine.between_tokens(lambda inner: inner.read_back()).items()
        if in_force[name] != value
    }
    assert differing == {"model.layers.1.mlp.up_proj.weight"}


def test_weights_that_do_not_fit_are_refused_and_nothing_changes(engine: VllmEngine, learner: Any) -> None:
    whole = {name: value.detach() for name, value in learner.weights().items()}
    request = ask()
    said = engine.generate([request])
    name = "model.layers.0.self_attn.k_proj.weight"
    bad = {
        "missing": {n: v for n, v in whole.items() if n != name},
        "has no place": whole | {"model.layers.9.self_attn.k_proj.weight": whole[name]},
        "shape": whole | {name: whole["model.layers.0.self_attn.q_proj.weight"]},
        "bfloat16": whole | {name: whole[name].bfloat16()},
        "adapters": whole | {"model.layers.0.self_attn.k_proj.lora_A.weight": whole[name]},
    }
    for weights in bad.values():
        with pytest.raises(EngineError, match="do not fit vLLM's model"):
            engine.load_weights(weights, 5)
        assert engine.version == 0
    assert engine.generate([request]) == said
    assert dataclasses.replace(said[0], version=0) == said[0]
