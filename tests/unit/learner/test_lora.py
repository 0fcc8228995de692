"""An adapter is trained, and only it; engines get the sum, the reference is the base, and the files are PEFT's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import Session, draw, fingerprint, make_learner, make_net
from peft import PeftModel
from transformers import AutoModelForCausalLM

from surefoot.errors import ConfigError, InvariantError, ModelError, StateError
from surefoot.learner import lora
from surefoot.learner.checkpoint import capture, load_training_checkpoint
from surefoot.learner.forward import score_batch
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.lora import Adapter, LoraSettings, plan_adapter
from surefoot.maths.checksums import checksums
from surefoot.maths.packing import make_batch

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = LoraSettings(4, 16.0, ("all-linear",), (), seed=7)
HALF = LoraSettings(2, 3.0, ("q_proj", "down_proj"), ("lm_head", "norm"), seed=7)
"""Of an untied model: two kinds of layers, the output layer and every norm whole."""
IDS = torch.tensor([[3, 9, 27, 11, 5, 40, 8]])


def learner_of(kind: str = "llama", settings: LoraSettings = LORA, **changes: Any) -> tuple[GRPOLearner, Adapter]:
    learner = make_learner(kind, lora=settings, **changes)
    assert learner.adapter is not None
    return learner, learner.adapter


def plain_net(weights: Any, kind: str = "llama") -> Any:
    """A model without PEFT that has been handed published weights."""
    net = make_net(kind, seed=5)
    own = dict(net.named_parameters())
    assert list(own) == list(weights), "the names are those of the plain model, in its order"
    for name, value in weights.items():
        own[name].data.copy_(value)
    return net


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


# -- engines get the sum ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"), [("llama", LORA), ("untied", HALF), ("qwen2", LORA), ("qwen3", LORA), ("mistral", LORA)]
)
def test_published_is_the_base_bit_for_bit_at_first_and_computes_what_the_learner_does_later(
    kind: str, settings: LoraSettings
) -> None:
    learner, _ = learner_of(kind, settings)
    base = checksums(dict(make_net(kind, seed=0).named_parameters()))
    assert checksums(learner.published()[0]) == base
    session = Session(learner).train(4)
    weights, version = learner.published()
    assert version == 4
    moved = [name for name, number in checksums(weights).items() if number != base[name]]
    ends = ("q_proj", "down_proj") if settings is HALF else ("_proj",)
    saved = [name for name in base if settings is HALF and ("norm" in name or "lm_head" in name)]
    assert moved == [name for name in base if name.endswith(tuple(f"{end}.weight" for end in ends)) or name in saved]
    torch.testing.assert_close(logits(plain_net(weights, kind)), logits(learner.net), rtol=0, atol=2e-5)
    assert float((logits(learner.net) - logits(make_net(kind, seed=0))).abs().max()) > 1e-2, "it moved at all"
    assert session.metrics[-1]["updates/published_share"] > 0.3


def test_the_sum_is_the_one_that_peft_makes() -> None:
    learner, adapter = learner_of()
    Session(learner).train(3)
    mine = {name: value.clone() for name, value in learner.published()[0].items()}
    theirs = adapter._model.merge_and_unload().state_dict()
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)


def test_a_version_is_merged_once_and_in_the_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    merged: list[int] = []
    real = Adapter.merge

    def merge(self: Adapter, version: int) -> lora.Merged:
        merged.append(version)
        return real(self, version)

    monkeypatch.setattr(Adapter, "merge", merge)
    learner, _ = learner_of()
    places = {name: value.data_ptr() for name, value in learner.published()[0].items()}
    session = Session(learner).train(2)
    assert {name: value.data_ptr() for name, value in learner.published()[0].items()} == places
    learner.published()
    assert merged == [0, 1, 2]
    assert all(m["timing/merge"] > 0 for m in session.metrics)


def test_planted_published_that_hands_out_the_base_is_seen_by_the_share_of_entries() -> None:
    """Teeth of the metric; the run that stops for it is in tests/runs/test_lora.py."""
    learner, adapter = learner_of()
    adapter._merged = lambda: iter(())  # type: ignore[method-assign,return-value]
    assert Session(learner).train(1).metrics[0]["updates/published_share"] == 0.0


# -- the base stays, and is the reference ---------------------------------------------------------


def test_reference_logprobs_are_those_of_the_base_model_bit_for_bit_however_far_the_adapter_went() -> None:
    learner, adapter = learner_of()
    assert learner.reference is None, "there is no second copy"
    Session(learner).train(3)
    batch, _ = make_batch(draw(learner, 9), pad_token_id=0)
    found = learner._reference_logprobs(batch)
    with torch.no_grad():
        base = score_batch(make_net("llama", seed=0), batch, temperature=1.0, with_entropy=False).logprobs
        own = score_batch(learner.net, batch, temperature=1.0, with_entropy=False).logprobs
    assert found is not None
    assert torch.equal(found, base)
    assert not torch.equal(own, base)
    assert {n for n, p in learner.net.named_parameters() if p.requires_grad} == adapter.trained.keys(), "on again"


def test_the_kl_of_a_run_is_to_the_base() -> None:
    session = Session(learner_of()[0]).train(4)
    assert session.metrics[0]["kl"] == 0.0
    assert all(m["kl"] > 0 for m in session.metrics[1:])


def test_the_optimiser_has_the_adapter_alone_and_the_base_is_what_it_was() -> None:
    learner, adapter = learner_of("untied", HALF)
    before = checksums(adapter._frozen)
    session = Session(learner).train(4)
    stepped = {id(p) for group in learner.optimiser.param_groups for p in group["params"]}
    assert stepped == {id(p) for p in adapter.trained.values()}
    assert all(p.dtype == torch.float32 for p in adapter.trained.values())
    assert checksums(adapter._frozen) == before
    assert all(p.grad is None for p in adapter._frozen.values())
    entries = sum(p.numel() for p in adapter.trained.values())
    assert 0 < learner.changed_entries <= 4 * entries
    assert session.metrics[-1]["updates/changed_share"] > 0.9


def test_every_tensor_of_the_adapter_is_seen_to_move_within_two_steps() -> None:
    """In the first step the first half of a pair has no gradient, because the second half is 0: it is not missed."""
    learner, adapter = learner_of()
    session = Session(learner).train(1)
    first = learner.parameter_updates
    assert first is not None
    assert (first.total, first.with_gradient, first.moved, first.still) == (14, 14, 14, ())
    session.train(1)
    second = learner.parameter_updates
    assert second is not None
    assert (second.total, second.moved) == (28, 28) == (len(adapter.trained), len(adapter.trained))


def step_the_base(learner: GRPOLearner) -> None:
    """The planted bug: the optimiser gets every parameter, and the base is let go."""
    for p in learner.net.parameters():
        p.requires_grad_(True)
    learner.optimiser.param_groups[0]["params"] = [p for p in learner.net.parameters() if p.dim() > 1]


def one_of_the_base(learner: GRPOLearner) -> None:
    learner.optimiser.param_groups[0]["params"].append(learner.net.model.embed_tokens.weight)


def half_of_the_adapter(learner: GRPOLearner) -> None:
    del learner.optimiser.param_groups[0]["params"][::2]


@pytest.mark.parametrize("bug", [step_the_base, one_of_the_base, half_of_the_adapter])
def test_planted_optimiser_over_something_else_than_the_adapter_is_refused(bug: Callable[[GRPOLearner], None]) -> None:
    learner, _ = learner_of()
    bug(learner)
    before = checksums(learner.published()[0])
    with pytest.raises(InvariantError, match="the optimiser of an adapter would step"):
        Session(learner).train(1)
    learner.adapter.restored()  # type: ignore[union-attr]
    assert checksums(learner.published()[0]) == before, "nothing was stepped"


def test_planted_merge_into_the_base_itself_is_refused_at_the_first_step_and_at_a_save(tmp_path: Path) -> None:
    learner, _ = learner_of()
    session = Session(learner).train(2)
    with torch.no_grad():
        learner.net.model.layers[0].mlp.up_proj.base_layer.weight[0, 0] += 1e-3
    with pytest.raises(InvariantError, match=r"1 tensors of the frozen base have changed, first .*up_proj"):
        session.save(tmp_path / "step_2")
    assert not (tmp_path / "step_2").exists()
    fresh, _ = learner_of()
    with torch.no_grad():
        fresh.net.model.norm.weight[0] += 1e-3
    with pytest.raises(InvariantError, match="frozen base"):
        Session(fresh).train(1)


def test_in_bfloat16_the_adapter_is_float32_and_engines_get_the_rounded_sum() -> None:
    learner, adapter = learner_of(dtype="bfloat16")
    assert learner.masters is None
    assert {p.dtype for p in adapter.trained.values()} == {torch.float32}
    base = dict(make_net("llama", seed=0).to(torch.bfloat16).named_parameters())
    assert checksums(learner.published()[0]) == checksums(base)
    session = Session(learner).train(3)
    assert {value.dtype for value in learner.published()[0].values()} == {torch.bfloat16}
    assert session.metrics[-1]["updates/changed_share"] > 0.9
    assert 0 < session.metrics[-1]["updates/published_share"] < 1


# -- files ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), [("llama", LORA), ("untied", HALF)])
def test_a_checkpoint_loads_with_peft_alone_and_computes_the_same_to_the_last_bit(
    kind: str, settings: LoraSettings, tmp_path: Path
) -> None:
    learner, _ = learner_of(kind, settings)
    folder = Session(learner).train(3).save(tmp_path / "step_3")
    assert not (folder / "model.safetensors").exists(), "the base is not saved again"
    again = PeftModel.from_pretrained(make_net(kind, seed=0), str(folder)).eval()
    assert torch.equal(logits(again), logits(learner.net))
    make_net(kind, seed=0).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(folder)).eval()), logits(learner.net))


@pytest.mark.parametrize("at", range(6))
def test_saved_and_loaded_at_any_step_a_run_ends_the_same(at: int, tmp_path: Path) -> None:
    whole = Session(learner_of()[0]).train(5)
    folder = Session(learner_of()[0]).train(at).save(tmp_path / f"step_{at}")
    other = learner_of(settings=dataclasses.replace(LORA, seed=99))[0]
    other.published()  # what was merged before the load is not what engines get after it
    session = Session.load(folder, other)
    session.train(5 - at)
    assert [without_time(m) for m in session.metrics] == [without_time(m) for m in whole.metrics[at:]]
    assert fingerprint(capture(session.learner)) == fingerprint(capture(whole.learner))
    assert checksums(session.learner.published()[0]) == checksums(whole.learner.published()[0])


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("timing/")}


def test_planted_load_that_forgets_what_was_merged_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Session(learner_of()[0]).save(tmp_path / "step_0")
    monkeypatch.setattr(Adapter, "restored", lambda self: None)
    other = learner_of(settings=dataclasses.replace(LORA, seed=99))[0]
    Session(other).train(2)
    old = checksums(other.published()[0])
    other._version = 0
    load_training_checkpoint(other, folder)
    other._version = 2
    assert checksums(other.published()[0]) == old, "without the wire engines would keep the adapter of before"


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 1}, "is an adapter of another model"),
        ({"settings": dataclasses.replace(LORA, rank=8)}, "this model has F32"),
        (
            {"settings": dataclasses.replace(LORA, target_modules=("q_proj",))},
            "parameters are not in this model|have no place in this model",
        ),
        ({"kind": "qwen2"}, "is an adapter of another model"),
    ],
    ids=["other weights", "other rank", "other layers", "other architecture"],
)
def test_an_adapter_of_another_model_is_refused_and_nothing_changes(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    folder = Session(learner_of()[0]).train(2).save(tmp_path / "step_2")
    learner, adapter = learner_of(**other)
    before = fingerprint(capture(learner))
    for load in (lambda: load_training_checkpoint(learner, folder), lambda: adapter.load(folder)):
        with pytest.raises(StateError, match=said):
            load()
    assert fingerprint(capture(learner)) == before


def test_another_alpha_is_another_policy_and_refused(tmp_path: Path) -> None:
    folder = Session(learner_of()[0]).train(1).save(tmp_path / "step_1")
    _, adapter = learner_of(settings=dataclasses.replace(LORA, alpha=8.0))
    with pytest.raises(StateError, match="lora_alpha is 16, this run has 8"):
        adapter.load(folder)


def test_a_checkpoint_of_every_weight_is_no_adapter_nor_the_other_way_round(tmp_path: Path) -> None:
    whole = Session(make_learner()).save(tmp_path / "whole" / "step_0")
    part = Session(learner_of()[0]).save(tmp_path / "part" / "step_0")
    with pytest.raises(StateError, match="it holds every weight, and no adapter"):
        load_training_checkpoint(learner_of()[0], whole)
    with pytest.raises(StateError, match="it holds an adapter, and this run trains every weight"):
        load_training_checkpoint(make_learner(), part)


# -- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"target_modules": ("q_proj", "c_attn")}, "names 'c_attn', and the model has no such linear layer"),
        ("llama", {"target_modules": ("proj",)}, "names 'proj'"),
        ("llama", {"target_modules": ("embed_tokens",)}, "names 'embed_tokens'"),
        ("untied", {"target_modules": ("lm_head",)}, "no such linear layer but its output layer"),
        ("llama", {"modules_to_save": ("score",)}, "names 'score', and the model has no such module"),
        ("llama", {"modules_to_save": ("lm_head",)}, "whose weight is shared"),
        ("llama", {"modules_to_save": ("embed_tokens",)}, "lm_head.weight and model.embed_tokens.weight"),
    ],
)
def test_a_module_that_is_not_there_or_would_be_gone_around_is_refused_by_name(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        plan_adapter(dataclasses.replace(LORA, **changes), make_net(kind, seed=0))


def test_without_peft_an_adapter_is_refused_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package peft") as refused:
        lora.require_peft()
    assert "surefoot[peft]" in refused.value.fix


def test_the_plan_counts_what_the_adapter_will_be() -> None:
    with torch.device("meta"):
        from transformers import LlamaForCausalLM

        empty = LlamaForCausalLM(make_net("untied", seed=0).config)
    plan = plan_adapter(HALF, empty)
    learner, adapter = learner_of("untied", HALF)
    learner.published()
    assert plan.parameters == sum(p.numel() for p in adapter.trained.values())
    assert plan.merged == sum(value.numel() for value in adapter._copies.values())
    assert plan.total == sum(p.numel() for p in make_net("untied", seed=0).parameters())
    assert plan.layers == 4
    assert {name: spec.shape for name, spec in plan.specs.items()} == {
        name: tuple(value.shape) for name, value in adapter.tensors().items()
    }
