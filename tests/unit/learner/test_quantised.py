"""A base in four bits: it comes back as NF4 says, everybody computes with what comes back, and nobody with the bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import Session, fingerprint, make_net
from checkpoint_kit import make_learner as kit_learner
from torch.nn import functional as F  # noqa: N812

from surefoot.errors import InvariantError, ModelError, StateError
from surefoot.learner import quantised
from surefoot.learner.checkpoint import capture, load_training_checkpoint
from surefoot.learner.fused_forward import why_not_fused
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.lora import Adapter, LoraSettings, plan_adapter
from surefoot.learner.model import Policy, load_policy
from surefoot.learner.quantised import BLOCK, BYTES_PER_WEIGHT, QuantisedLinear, chosen, quantise, weights_sha256
from surefoot.maths.checksums import checksums

pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
pytestmark = pytest.mark.usefixtures("one_thread")
QLORA = LoraSettings(4, 16.0, ("all-linear",), (), seed=7, quantization="nf4")
FEW = LoraSettings(2, 3.0, ("q_proj", "down_proj"), ("lm_head", "norm"), seed=7, quantization="nf4")
IDS = torch.tensor([[3, 9, 27, 11, 5, 40, 8]])
LEVELS = [
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
]  # fmt: skip
"""The quantiles of a normal distribution that the paper on NF4 gives."""


def learner_of(kind: str = "llama", settings: LoraSettings = QLORA) -> tuple[GRPOLearner, Adapter]:
    learner = kit_learner(kind, lora=settings)
    assert learner.adapter is not None
    return learner, learner.adapter


def nearest(weight: torch.Tensor) -> torch.Tensor:
    """NF4 from its definition: the level that is nearest, times the largest of its block of 64."""
    flat = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = flat.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS)
    places = (flat.div(scales.clamp(min=1e-38))[..., None] - levels).abs().argmin(-1)
    return (levels[places] * scales).flatten()[: weight.numel()].view(weight.shape)


def logits(net: Any) -> torch.Tensor:
    with torch.no_grad():
        return net(input_ids=IDS, use_cache=False).logits  # type: ignore[no-any-return]


# -- one layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (7, 9), (5, 100), (1, 1), (33, 65)], ids=str)
def test_a_weight_comes_back_as_the_nearest_level_of_its_block(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(shape[1], shape[0])
    layer = QuantisedLinear(linear, torch.float32)
    torch.testing.assert_close(layer.weight, nearest(linear.weight.detach()), rtol=1e-6, atol=1e-9)
    assert layer.weight.shape == shape
    assert torch.equal(layer.weight, layer.weight), "the same at each look"
    assert layer.packed.nbytes + layer.scales.nbytes == -(-layer.entries // 2) + 4 * -(-layer.entries // BLOCK)


def test_a_block_of_zeros_comes_back_as_zeros() -> None:
    linear = torch.nn.Linear(96, 1)
    linear.weight.data.zero_()
    layer = QuantisedLinear(linear, torch.float32)
    quantised._check("one", linear.weight.detach(), layer)
    assert not bool(layer.weight.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_and_gradients_are_those_of_a_linear_layer_with_that_weight(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = QuantisedLinear(torch.nn.Linear(70, 6).requires_grad_(False), dtype)
    layer.bias.data = layer.bias.data.to(dtype)
    given = torch.randn(2, 5, 70, dtype=dtype)
    ours, plain = given.clone().requires_grad_(), given.clone().requires_grad_()
    mine, theirs = layer(ours), F.linear(plain, layer.weight, layer.bias)
    assert torch.equal(mine, theirs)
    assert mine.dtype == layer.weight.dtype == dtype
    for found in (mine, theirs):
        (found * torch.arange(6, dtype=dtype)).sum().backward()
    torch.testing.assert_close(ours.grad, plain.grad)


def test_the_way_back_keeps_no_weight() -> None:
    layer = QuantisedLinear(torch.nn.Linear(128, 128).requires_grad_(False), torch.float32)
    kept: list[torch.Size] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        kept.append(value.shape)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        layer(torch.randn(3, 128, requires_grad=True))
        ours = list(kept)
        F.linear(torch.randn(3, 128, requires_grad=True), layer.weight)
    assert ours == []
    assert torch.Size((128, 128)) in kept, "a plain layer does"


def test_nobody_can_put_another_weight_into_its_place() -> None:
    layer = QuantisedLinear(torch.nn.Linear(64, 2), torch.float32)
    with pytest.raises((AttributeError, KeyError)):
        layer.weight = torch.nn.Parameter(torch.zeros(2, 64))
    assert "weight" not in dict(layer.named_parameters())


# -- a model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "untied", "qwen2", "qwen3", "mistral"])
def test_every_linear_layer_but_the_output_is_packed_and_what_comes_back_is_the_model(kind: str) -> None:
    net, plain = make_net(kind, seed=0), make_net(kind, seed=0)
    before = dict(plain.named_parameters())
    base = quantise(net, (), torch.float32)
    assert base.file_sha256 == weights_sha256(before)
    assert base.names == tuple(before)
    assert [f"{name}.weight" for name in base.layers] == [name for name in before if name.endswith("_proj.weight")]
    for name in base.layers:
        weight = plain.get_submodule(name).weight
        weight.data = nearest(weight.data)
    torch.testing.assert_close(logits(net), logits(plain), rtol=0, atol=1e-5)
    assert float((logits(net) - logits(make_net(kind, seed=0))).abs().max()) > 1e-3, "it is another model"
    held, full = sum(each.nbytes for each in base.held.values()), sum(each.entries for each in base.layers.values())
    assert held == pytest.approx(full * BYTES_PER_WEIGHT, rel=0.02)
    in_memory = sum(p.nbytes for p in net.parameters()) + sum(b.nbytes for b in net.buffers())
    assert in_memory < sum(p.nbytes for p in plain.parameters()) - 3 * full, "and the whole weights are gone"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_model_takes_the_memory_that_is_promised(dtype: str) -> None:
    """The loader that every run uses; what is left beside the packed bytes are embeddings and norms."""
    keys: dict[str, Any] = {"base": Path(), "device": "cpu", "dtype": dtype}
    packed, plain = load_policy("pebble", lora=QLORA, **keys), load_policy("pebble", **keys)
    assert packed.quantised is not None

    def held(policy: Policy) -> int:
        return sum(each.nbytes for each in (*policy.model.parameters(), *policy.model.buffers()))

    width = {"float32": 4, "bfloat16": 2}[dtype]
    entries = sum(each.entries for each in packed.quantised.layers.values())
    assert entries > 1_000_000
    assert held(plain) - held(packed) == pytest.approx(entries * (width - BYTES_PER_WEIGHT), rel=1e-3)
    assert next(iter(packed.quantised.layers.values())).weight.dtype == getattr(torch, dtype)
    names = [name for name in (packed.masters or {}) if name.endswith("_proj.weight")]
    assert names == [], "no float32 copy of what is packed is left either"


def test_what_is_trained_whole_is_not_packed() -> None:
    net = make_net("untied", seed=0)
    assert chosen(net, ("q_proj",)) == [name for name in chosen(net) if not name.endswith("q_proj")]
    assert chosen(net, ("self_attn",)) == [name for name in chosen(net) if ".mlp." in name], "all below it, too"
    assert not any("lm_head" in name for name in chosen(net))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_model_with_a_number_that_is_not_finite_is_refused(bad: float) -> None:
    net = make_net("llama", seed=0)
    net.model.layers[0].mlp.up_proj.weight.data[0, 3] = bad
    with pytest.raises(ModelError, match="up_proj of the model holds a number that is not finite"):
        quantise(net, (), torch.float32)


def test_planted_wrong_way_back_is_seen_when_the_model_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = quantised._unpack
    monkeypatch.setattr(quantised, "_unpack", lambda packed, scales: real((packed >> 4) | (packed << 4), scales))
    with pytest.raises(InvariantError, match="does not come back from four bits"):
        quantise(make_net("llama", seed=0), (), torch.float32)


def test_planted_device_with_other_bits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    base = quantise(make_net("llama", seed=0), (), torch.float32)
    base.move("cpu")
    layer = next(iter(base.layers.values()))
    monkeypatch.setattr(layer, "to", lambda device: layer.scales.mul_(1.0001))
    with pytest.raises(InvariantError, match="as another matrix than on the CPU"):
        base.move("cpu")


# -- an adapter beside it -----------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), [("llama", QLORA), ("untied", FEW), ("qwen2", QLORA)])
def test_engines_get_what_comes_back_and_later_the_adapter_in_it(kind: str, settings: LoraSettings) -> None:
    learner, _ = learner_of(kind, settings)
    plain = make_net(kind, seed=0)
    expected = {
        name: nearest(value.detach()) if name.endswith("_proj.weight") else value.detach()
        for name, value in plain.named_parameters()
    }
    published = dict(learner.published()[0])
    assert list(published) == list(expected), "plain names, in the model's order"
    for name, value in published.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)
    first = checksums(published)
    Session(learner).train(4)
    own = dict(plain.named_parameters())
    for name, value in learner.published()[0].items():
        own[name].data.copy_(value)
    torch.testing.assert_close(logits(plain), logits(learner.net), rtol=0, atol=2e-5)
    moved = {name for name, number in checksums(learner.published()[0]).items() if number != first[name]}
    ends = ("q_proj", "down_proj") if settings is FEW else ("_proj",)
    assert {name for name in moved if "_proj" in name} == {
        n for n in own if n.endswith(tuple(f"{e}.weight" for e in ends))
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planted_merge_into_the_files_weights_is_refused_before_a_version_is_published(dtype: str) -> None:
    """In any precision: parity's bound in bfloat16 is wider than what four bits lose of a large model."""
    learner = kit_learner(lora=QLORA, dtype=dtype)
    assert learner.adapter is not None
    real = learner.adapter._merged
    learner.adapter._merged = lambda: ((name, value * 1.01) for name, value in real())  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="merged with an adapter that is 0 yet"):
        learner.published()


def test_the_reference_is_what_comes_back_and_the_packed_bytes_never_change() -> None:
    learner, adapter = learner_of()
    before = checksums(adapter.quantised.held)  # type: ignore[union-attr]
    session = Session(learner).train(4)
    assert session.metrics[0]["kl"] == 0.0
    assert all(m["kl"] > 0 for m in session.metrics[1:])
    assert checksums(adapter.quantised.held) == before  # type: ignore[union-attr]
    adapter.check_base()
    adapter.quantised.held["model.layers.0.mlp.up_proj.packed"][5] ^= 1  # type: ignore[union-attr]
    with pytest.raises(InvariantError, match=r"frozen base have changed, first model\.layers\.0\.mlp\.up_proj\.packed"):
        adapter.check_base()


@pytest.mark.parametrize("packed", [True, False])
def test_planted_base_that_is_not_held_as_the_settings_say_is_refused(packed: bool) -> None:
    net = make_net("llama", seed=0)
    base = quantise(net, (), torch.float32) if packed else None
    with pytest.raises(InvariantError, match=f"the base is held {'packed' if packed else 'in full'}"):
        Adapter(net, dataclasses.replace(QLORA, quantization="none" if packed else "nf4"), quantised=base)


def test_fused_kernels_leave_such_a_network_to_its_own_modules() -> None:
    learner, _ = learner_of()
    assert any("lora" in reason for reason in why_not_fused(learner.net, on_cpu=True))


def test_a_plan_counts_what_is_packed_before_there_are_weights() -> None:
    with torch.device("meta"):
        empty = make_net("llama", seed=0)
    plan = plan_adapter(QLORA, empty)
    base = quantise(make_net("llama", seed=0), (), torch.float32)
    assert plan.packed == plan.merged == sum(each.entries for each in base.layers.values())
    assert f"{plan.packed:,} of them in four bits (nf4)" in plan.line()


# -- checkpoints ---------------------------------------------------------------------------------------


def test_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    whole = Session(learner_of()[0]).train(5)
    first = Session(learner_of()[0]).train(3)
    again = Session.load(first.save(tmp_path / "step_3"), learner_of()[0]).train(2)
    assert fingerprint(capture(again.learner)) == fingerprint(capture(whole.learner))
    assert _timeless(again) == _timeless(whole)[3:]


def _timeless(session: Session) -> list[dict[str, float]]:
    return [{k: v for k, v in m.items() if not k.startswith("timing/")} for m in session.metrics]


@pytest.mark.parametrize("saved_in", ["nf4", "none"])
def test_a_checkpoint_of_a_base_that_was_held_otherwise_is_refused(saved_in: str, tmp_path: Path) -> None:
    other = dataclasses.replace(QLORA, quantization="none" if saved_in == "nf4" else "nf4")
    folder = (
        Session(learner_of(settings=dataclasses.replace(QLORA, quantization=saved_in))[0])
        .train(1)
        .save(tmp_path / "step_1")
    )
    learner, adapter = learner_of(settings=other)
    before = fingerprint(capture(learner))
    for load in (lambda: load_training_checkpoint(learner, folder), lambda: adapter.load(folder)):
        with pytest.raises(StateError, match=f"beside quantization = {saved_in}, this is {other.quantization}"):
            load()
    assert fingerprint(capture(learner)) == before


def test_a_checkpoint_beside_other_bits_of_the_same_file_is_refused(tmp_path: Path) -> None:
    folder = Session(learner_of()[0]).train(1).save(tmp_path / "step_1")
    learner, adapter = learner_of()
    adapter.quantised.held["model.layers.0.mlp.up_proj.packed"][5] ^= 1  # type: ignore[union-attr]
    with pytest.raises(StateError, match="of other bits than are made of that file here"):
        load_training_checkpoint(learner, folder)
