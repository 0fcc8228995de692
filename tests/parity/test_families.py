"""Any causal language model: a tiny one of every family takes a GRPO step, and is scored as it scores itself.

Two a day, all of them at night. The plants: a row that reaches its neighbour, and an output layer without its scaling.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, make_config, make_family, save_family, table, written
from transformers import AutoConfig, AutoModelForCausalLM

from surefoot.engines.transformers_engine import TransformersEngine
from surefoot.errors import ModelError, NumericsError
from surefoot.learner import any_forward
from surefoot.learner.architectures import (
    ALONE,
    PADDED,
    PLAIN,
    UNBOUNDED,
    attention_of,
    beyond_plain,
    context_of,
    rows_together,
    told,
)
from surefoot.learner.forward import score_batch
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.lora import Adapter, LoraSettings
from surefoot.learner.model import Policy, load_policy
from surefoot.maths.losses import LossSettings
from surefoot.maths.packing import make_batch
from surefoot.protocols import Request, StepReport
from surefoot.records import TrainSample

GAP = "sampling/sampling_logp_difference/max"
SETTINGS = LearnerSettings(
    loss=LossSettings(loss_type="dapo", beta=0.01), learning_rate=1e-3, max_steps=5, max_completion_length=12,
    temperature=0.9, pad_token_id=0,
)  # fmt: skip


def load(folder: Path) -> Policy:
    return load_policy(str(folder), base=Path("/"), device="cpu", dtype="float32")


def engine_of(net: Any) -> TransformersEngine:
    config = json.loads(net.config.to_json_string(use_diff=False))
    return TransformersEngine(config, rows=8, max_width=96, attention=attention_of(config))


def sampled(engine: TransformersEngine, learner: GRPOLearner, stop_ids: frozenset[int]) -> list[TrainSample]:
    """Two groups whose prompts have different lengths: rows of one microbatch are filled up."""
    engine.load_weights(learner.weights(), learner.version)
    asked = [
        Request(f"{p}/{i}", tuple(3 + (5 * p + 7 * k) % 90 for k in range(5 + 6 * p)), 12, 0.9, stop_ids, 10 * p + i)
        for p in range(2) for i in range(4)
    ]  # fmt: skip
    return [
        TrainSample(
            item_id=request.id, trainer_version=learner.version, group=request.id[0], index=i, reward=float(i % 2),
            prompt_ids=request.prompt_ids, completion_ids=said.token_ids, sampled=(True,) * len(said.token_ids),
            logprobs=said.logprobs, advantage=1.0 if i % 2 else -1.0, finish_reason=said.finish_reason,
        )
        for i, (request, said) in enumerate(zip(asked, engine.generate(asked), strict=True))
    ]  # fmt: skip


def step(engine: TransformersEngine, learner: GRPOLearner, policy: Policy) -> StepReport:
    report = learner.learn(sampled(engine, learner, policy.stop_ids))
    assert report.applied
    assert report.metrics[GAP] < 1e-4
    assert report.metrics["grad_norm"] > 0
    return report


def check_gradient(net: Any, samples: list[TrainSample]) -> None:
    """Scores and their gradient against the model's own loss over each row alone, by plain transformers."""
    batch = make_batch(samples, pad_token_id=0)[0]
    net.zero_grad(set_to_none=True)
    scores = score_batch(net, batch, temperature=0.9, with_entropy=False).logprobs
    (scores * batch.advantages[:, None]).sum().backward()
    found = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad(set_to_none=True)
    for row, sample in enumerate(samples):
        ids, said = torch.tensor([sample.prompt_ids + sample.completion_ids]), len(sample.completion_ids)
        logits = net(input_ids=ids, use_cache=False).logits[0, -said - 1 : -1].float() / 0.9
        own = logits.log_softmax(-1).gather(-1, ids[0, -said:, None])[:, 0]
        torch.testing.assert_close(scores[row, :said], own, rtol=0, atol=1e-4)
        (own * sample.advantage).sum().backward()
    scale = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
    for name, p in net.named_parameters():
        if p.grad is None:
            assert name not in found or not bool(found[name].any()), f"{name} has a gradient that the model has not"
        else:
            gap = float((found[name] - p.grad).abs().max())
            assert gap < 1e-4 * scale, f"{name}: the gradient is another one than that of the rows alone, by {gap}"
    net.zero_grad(set_to_none=True)


@pytest.mark.turns(27)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_a_step_that_is_its_own_and_is_kept(name: str, tmp_path: Path) -> None:
    policy = load(save_family(name, tmp_path / "model"))
    learner = GRPOLearner(policy.model, SETTINGS, tokenizer=policy.tokenizer)
    engine = engine_of(policy.model)
    check_gradient(policy.model, sampled(engine, learner, policy.stop_ids))
    step(engine, learner, policy)
    step(engine, learner, policy)
    learner.save(tmp_path / "step_2", step=2, extra={})
    again = GRPOLearner(load(tmp_path / "model").model, SETTINGS, tokenizer=policy.tokenizer)
    again.load(tmp_path / "step_2")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "step_2", dtype=torch.float32)
    for name_, value in learner.weights().items():
        assert torch.equal(value, again.weights()[name_]), f"{name_} is not restored"
    for name_, value in plain.named_parameters():
        assert torch.equal(value, learner.weights()[name_]), f"plain transformers loads another {name_}"
    step(engine, learner, policy)
    step(engine_of(again.net), again, policy)
    for name_, value in learner.weights().items():
        assert torch.equal(value, again.weights()[name_]), f"the next step makes another {name_}"


@pytest.mark.turns(2)
@pytest.mark.parametrize("name", ["arcee", "rwkv"])
def test_what_nobody_tested_is_scored_one_by_one(name: str, tmp_path: Path) -> None:
    policy = load(save_family(name, tmp_path / "model"))
    assert rows_together(policy.model.config) == ALONE
    assert "one by one" in (told(policy.spec.model_type, policy.spec.beyond) or "")
    learner, engine = GRPOLearner(policy.model, SETTINGS, tokenizer=policy.tokenizer), engine_of(policy.model)
    check_gradient(policy.model, sampled(engine, learner, policy.stop_ids))
    step(engine, learner, policy)


def test_a_context_ends_where_frequencies_would_change() -> None:
    """Beyond it a token's position would be another one for the length of the whole text, the answer included."""
    assert (context_of(make_config("phi3")), context_of(make_config("phi3_long"))) == (256, 128)
    llama = make_config("llama")
    llama.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert beyond_plain(llama) == (f"rope_parameters = {llama.rope_parameters}",)
    assert context_of(llama) == 256
    assert context_of(AutoConfig.for_model("mamba")) == UNBOUNDED


def test_what_sees_the_tokens_after_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"architecture 'bert'.* other probabilities in a batch than alone"):
        load(save_family("bert", tmp_path / "model"))


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_an_adapter_that_would_pass_matrices_by_is_refused(family: str) -> None:
    named = LoraSettings(4, 8.0, ("q_proj", "v_proj"))
    with pytest.raises(ModelError, match=f"architecture '{family}'"):
        Adapter(make_family(family), replace(named, target_modules=("all-linear",)))
    if family != "gpt2":
        Adapter(make_family(family), named)


def test_the_table_of_architectures_names_what_was_tested_and_nothing_else() -> None:
    assert table() == written(), "run: python tests/support/families.py"
    made = {AutoConfig.for_model(family.model_type).model_type for family in FAMILIES.values()}
    assert made == PADDED | set(PLAIN)


# -- plants ----------------------------------------------------------------------------------------


def leak(net: Any) -> None:
    """A tenth of the row before reaches each row, in one layer; a single row has no neighbour."""
    layer = net.get_decoder().layers[0]
    plain = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        said = plain(*args, **kwargs)
        states = said[0] if isinstance(said, tuple) else said
        mixed = states + 0.1 * (states.roll(1, dims=0) - states)
        return (mixed, *said[1:]) if isinstance(said, tuple) else mixed

    layer.forward = forward


@pytest.mark.parametrize("name", ["gemma2"])
def test_a_planted_leak_between_rows_is_refused_before_a_run_and_by_parity(name: str) -> None:
    net = make_family(name)
    engine, learner = engine_of(net), GRPOLearner(net, SETTINGS)
    any_forward.prove("tiny", net)
    leak(net)
    with pytest.raises(ModelError, match="other probabilities in a batch than alone"):
        any_forward.prove("tiny", net)
    with pytest.raises(NumericsError, match="sampler and learner"):
        learner.learn(sampled(engine, learner, frozenset({2})))


def test_one_by_one_the_same_model_has_no_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_family("gemma2")
    leak(net)
    monkeypatch.setattr(any_forward, "rows_together", lambda _: ALONE)
    any_forward.prove("tiny", net)
    engine, learner = engine_of(net), GRPOLearner(net, SETTINGS)
    check_gradient(net, sampled(engine, learner, frozenset({2})))
    assert learner.learn(sampled(engine, learner, frozenset({2}))).metrics[GAP] < 1e-4


@pytest.mark.parametrize("name", ["gemma2", "granite", "cohere"])
def test_a_planted_output_layer_without_its_scaling_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_family(name)
    engine, learner = engine_of(net), GRPOLearner(net, SETTINGS)
    monkeypatch.setattr(any_forward, "_head_of", lambda net: net.get_output_embeddings())
    with pytest.raises(ModelError, match="other probabilities in a batch than alone"):
        any_forward.prove("tiny", net)
    with pytest.raises(NumericsError, match="sampler and learner"):
        learner.learn(sampled(engine, learner, frozenset({2})))


def test_an_attention_that_leaves_out_the_soft_cap_is_refused() -> None:
    """torch's fused attention has none, says nothing, and engine and learner would agree with each other."""
    net = make_family("gemma2")
    with torch.no_grad():
        for name, p in net.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.mul_(4.0)
    any_forward.prove("tiny", net)
    net.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="by 'sdpa' attention than written out"):
        any_forward.prove("tiny", net)


@pytest.mark.parametrize("budget", [0, 1 << 30])
def test_logits_in_pieces_are_the_logits(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_family("gemma2")
    monkeypatch.setattr(any_forward, "CHUNK_TOKENS", 3)
    states = torch.randn(11, 32, requires_grad=True)
    ids = torch.arange(11) + 4
    scores = any_forward.score_states(net, states, ids, 0.7, with_entropy=True, budget=budget)
    scores.logprobs.sum().backward()
    own, found = states.grad, states.detach().clone().requires_grad_()
    logits = net.lm_head(found)
    cap = net.config.final_logit_softcapping
    (torch.tanh(logits / cap) * cap / 0.7).log_softmax(-1).gather(-1, ids[:, None]).sum().backward()
    torch.testing.assert_close(own, found.grad, rtol=1e-4, atol=1e-6)
    assert scores.entropy is not None
    assert scores.entropy.shape == (11,)
