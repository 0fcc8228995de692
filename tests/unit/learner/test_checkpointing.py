"""Layers that are computed again in the backward pass: the same numbers to the last bit, and less kept on the way."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from checkpoint_kit import Session
from checkpoint_kit import make_learner as make_adapted
from families import FAMILIES, make_family
from forward_kit import PlainKernels, gradients, packed
from learner_kit import SampleGroups, make, parameters, same
from torch import Tensor

from surefoot.learner import forward
from surefoot.learner.forward import recomputed_layers, score_batch
from surefoot.learner.fused_forward import score_batch_fused
from surefoot.learner.lora import LoraSettings
from surefoot.learner.memory import shape_of
from surefoot.maths.losses import LossSettings

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.config_key("gradient_checkpointing")]
KINDS = ["llama", "qwen2", "qwen3"]
REWARDS = [[1, 0, 0, 1], [0, 1, 0.5, 0]]


class Kept:
    """Bytes of what autograd keeps of a forward pass, each memory once; parameters are there anyway."""

    def __init__(self, net: Any) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in net.parameters()}
        self.found: dict[int, int] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.own:
            self.found[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.found.values())


def scored(net: Any, batch: Any, *, fused: bool, recomputes: bool) -> Any:
    if fused:
        return score_batch_fused(net, batch, temperature=0.7, use=PlainKernels(), recomputes=recomputes)
    with recomputed_layers(net, wanted=recomputes):
        return score_batch(net, batch, temperature=0.7, with_entropy=True)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", KINDS)
def test_logprobs_and_every_gradient_are_the_same_to_the_last_bit(name: str, fused: bool, make_net: Any) -> None:
    """With siblings that share a prompt, where a layer attends in our own way, and without."""
    net = make_net(name)
    for batch in (packed(), packed().rows([1, 3])):
        found = []
        for recomputes in (False, True):
            scores = scored(net, batch, fused=fused, recomputes=recomputes)
            found.append((scores.logprobs.detach(), gradients(net, scores, batch)))
        (logp, grads), (other_logp, other_grads) = found
        assert torch.equal(logp, other_logp)
        assert grads.keys() == other_grads.keys() == dict(net.named_parameters()).keys()
        assert [n for n, value in grads.items() if not torch.equal(value, other_grads[n])] == []


def test_planted_layer_that_attends_otherwise_the_second_time_is_seen(
    make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teeth: without putting the way to attend back, a layer is computed again as the network itself would."""

    def forgetful(config: Any, layer: Any, *args: Any, **words: Any) -> Any:
        return forward.recompute(lambda *again: layer(*again, **words), *args)

    monkeypatch.setattr(forward, "_recomputed", forgetful)
    with pytest.raises(Exception) as caught:
        test_logprobs_and_every_gradient_are_the_same_to_the_last_bit("llama", False, make_net)
    assert not isinstance(caught.value, KeyboardInterrupt)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_less_is_kept_the_deeper_the_network(fused: bool, make_net: Any) -> None:
    net, batch = make_net(num_hidden_layers=6), packed()
    sizes = []
    for recomputes in (False, True):
        kept = Kept(net)
        with kept.hooks:
            scores = scored(net, batch, fused=fused, recomputes=recomputes)
        sizes.append(kept.bytes)
        del scores
    assert sizes[1] < 0.4 * sizes[0], sizes
    assert not any("forward" in vars(layer) for layer in net.get_decoder().layers), "the block leaves nothing behind"


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_the_learner_steps_to_the_same_weights(beta: float, make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    ends = []
    for wanted in (False, True, "auto"):
        learner = make(net, LossSettings(beta=beta), gradient_checkpointing=wanted)
        reports = [learner.learn(samples, iteration=i) for i in range(3)]
        assert [report.metrics["memory/recomputes"] for report in reports] == [float(wanted is True)] * 3
        ends.append((parameters(learner), [dict(r.metrics) | {"memory/recomputes": 0.0} for r in reports]))
    assert all(same(ends[0][0], other[0]) for other in ends[1:])
    assert all(ends[0][1] == other[1] for other in ends[1:])


def test_an_adapter_and_its_reference_step_to_the_same_numbers() -> None:
    """The base with the adapter off is scored between a microbatch and its way back."""
    pytest.importorskip("peft")
    ends = []
    for wanted in (False, True):
        learner = make_adapted(lora=LoraSettings(2, 4.0, ("all-linear",)))
        learner.settings = dataclasses.replace(learner.settings, gradient_checkpointing=wanted)
        metrics = [m | {"memory/recomputes": 0.0, "timing/merge": 0.0} for m in Session(learner).train(2).metrics]
        assert learner.recomputes is wanted
        ends.append((metrics, {name: p.detach().clone() for name, p in learner.trained().items()}))
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])


def test_auto_computes_again_where_the_first_step_would_not_fit(
    make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    for free, wanted in ((1e9, 0.0), (2e5, 1.0)):
        monkeypatch.setattr("surefoot.learner.memory.unused_bytes", lambda device, free=free: free)
        report = make(net, gradient_checkpointing="auto").learn(samples)
        assert report.metrics["memory/recomputes"] == wanted, free


@pytest.mark.turns(10)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_architecture_is_computed_again_alike(name: str) -> None:
    """Layers have other names there, and models that are not plain are scored by their own modules."""
    net, batch = make_family(name), packed()
    assert shape_of(net).parameters == sum(p.numel() for p in net.parameters())
    found = []
    for recomputes in (False, True):
        with recomputed_layers(net, wanted=recomputes):
            scores = score_batch(net, batch, temperature=0.7, with_entropy=True)
        found.append((scores.logprobs.detach(), gradients(net, scores, batch)))
    (logp, grads), (other_logp, other_grads) = found
    assert torch.equal(logp, other_logp)
    for key, value in grads.items():
        torch.testing.assert_close(other_grads[key], value, rtol=1e-5, atol=1e-7, msg=key)
