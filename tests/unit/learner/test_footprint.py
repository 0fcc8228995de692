"""The arithmetic of memory, held to what is really there: tensors that autograd keeps, those that last, and the cut.

Bound: what a forward pass keeps is predicted within 10 % on two shapes, in two precisions, each way to compute it.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from forward_kit import PlainKernels
from torch import Tensor

from surefoot.config import MICROBATCH_TOKENS
from surefoot.learner import footprint, forward, memory, updates
from surefoot.learner.footprint import Microbatch, ModelShape, Work, activation_bytes, cut, decided, predict
from surefoot.learner.forward import score_batch
from surefoot.learner.fused_forward import score_batch_fused
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.lora import Adapter, LoraSettings
from surefoot.learner.model import made_up_net
from surefoot.learner.precision import split_precision
from surefoot.learner.samples import split_microbatches
from surefoot.maths import fused_training, logprobs
from surefoot.maths.losses import LossSettings
from surefoot.maths.packing import make_batch
from surefoot.records import TrainSample
from surefoot.run.build import MAX_AUTO_ROWS
from surefoot.run.memory_profile import MAX_ROWS, count_adapter, count_parameters

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.config_key("gradient_checkpointing")]
SHAPES = {
    "llama": ModelShape(0, 3, 192, 512, 3, 1, 64, 512),
    "qwen3": ModelShape(0, 3, 128, 384, 8, 4, 32, 512, qk_norm=True),
}
WORK = Work(groups=2, siblings=4, prompt=48, completion=64)


def made(shape: ModelShape, work: Work) -> Any:
    words = {
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab,
        "max_position_embeddings": 512,
    }  # fmt: skip
    net, _ = made_up_net(words, shape.layers, "cpu", "float32", tied=shape.tied, qk_norm=shape.qk_norm)
    if work.width == 2:
        split_precision(net, torch.bfloat16)
    return net


def samples(work: Work) -> list[TrainSample]:
    n = work.completion
    return [
        TrainSample(
            item_id=f"t/{g}", trainer_version=0, group=str(g), index=s, reward=0.0, advantage=1.0,
            prompt_ids=tuple((g + 3 * k) % 500 + 1 for k in range(work.prompt)),
            completion_ids=tuple((g + s + 5 * k) % 500 + 1 for k in range(n)), sampled=(True,) * n, logprobs=(0.0,) * n,
        )
        for g in range(work.groups) for s in range(work.siblings)
    ]  # fmt: skip


def kept_bytes(net: Any, work: Work) -> int:
    """Of one microbatch, with everything in it: each memory once, parameters aside."""
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = tensor  # kept alive, so that its place is not given to another
        return tensor

    batch = make_batch(samples(work), pad_token_id=0)[0]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if work.fused:
            score_batch_fused(net, batch, temperature=1.0, use=PlainKernels())
        else:
            score_batch(net, batch, temperature=1.0, with_entropy=True)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


WAYS = {"plain": {}, "fused": {"fused": True}, "adapter": {"adapter": 1}}


@pytest.mark.parametrize("width", [4, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", SHAPES)
def test_what_a_forward_pass_keeps_is_what_was_predicted(
    kind: str, way: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "LOGITS_BUDGET", 0)  # logits are counted elsewhere
    shape, work = SHAPES[kind], replace(WORK, width=width, **WAYS[way])
    net = made(shape, work)
    if way == "adapter":
        pytest.importorskip("peft")
        Adapter(net, LoraSettings(2, 4.0, ("all-linear",)))
    rows = work.groups * work.siblings
    piece = Microbatch(rows, work.groups, work.groups * work.prompt + rows * work.completion, 1)
    ratio = activation_bytes(shape, work, piece) / kept_bytes(net, work)
    assert 0.97 < ratio < 1.1, ratio


def test_planted_formula_without_the_gated_layer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: three intermediate rows of a token left out."""
    real = footprint._layer_of_token
    short = lambda shape, work: real(shape, work) - 3 * shape.intermediate * work.width  # noqa: E731
    monkeypatch.setattr(footprint, "_layer_of_token", short)
    with pytest.raises(AssertionError):
        test_what_a_forward_pass_keeps_is_what_was_predicted("llama", "fused", 2, monkeypatch)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("width", [4, 2])
def test_what_lasts_is_what_a_learner_has_after_its_step(width: int, optim: str) -> None:
    shape = SHAPES["qwen3"]
    net = made(shape, replace(WORK, width=width))
    learner = GRPOLearner(
        net,
        LearnerSettings(
            LossSettings(beta=0.1), learning_rate=1e-2, max_steps=9, max_completion_length=64, temperature=1.0,
            pad_token_id=0, optim=optim, parity_tolerance=1e9,
        ),
    )  # fmt: skip
    learner.learn(samples(WORK))
    shape, work = memory.shape_of(net), memory.work_of(learner, samples(WORK))
    found = predict(shape, work).lasting
    assert found["weights"] == found["reference policy"] == size_of(net.parameters())
    masters = [] if learner.masters is None else learner.masters.tensors.values()
    assert found.get("float32 masters", 0.0) == size_of(masters)
    states = [v for kept in learner.optimiser.state.values() for v in kept.values() if v.dim()]
    assert found.get("optimiser states", 0.0) == size_of(states)
    assert predict(shape, work).passing["gradients"] == size_of(p.grad for p in learner.trained().values())


def size_of(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_step_is_cut_as_the_learner_cuts_it() -> None:
    """Two hundred steps of any size, by tokens and by rows, below the usual budget and above it."""
    dice = random.Random(0)
    for _ in range(200):
        work = Work(
            groups=dice.randint(1, 12), siblings=dice.randint(2, 8), prompt=dice.randint(1, 90),
            completion=dice.randint(1, 400), microbatch_size=dice.choice([0, 0, dice.randint(1, 40)]),
            fused=dice.random() < 0.5,
        )  # fmt: skip
        unused = dice.choice([1e6, 3e8, 1e9])
        budget = footprint.microbatch_budget(SHAPES["llama"], work, unused) if work.fused else MICROBATCH_TOKENS
        pieces = list(split_microbatches(samples(work), work.microbatch_size, tokens=budget))
        found = cut(SHAPES["llama"], work, unused=unused)
        assert (found.rows, found.count) == (max(map(len, pieces)), len(pieces)), work
        tokens = max(
            sum({s.group: len(s.prompt_ids) for s in piece}.values()) + sum(len(s.completion_ids) for s in piece)
            for piece in pieces
        )
        assert tokens <= found.tokens + work.prompt, work


def test_constants_are_those_of_the_places_they_are_taken_from() -> None:
    assert footprint.BASE_TOKENS == MICROBATCH_TOKENS
    assert footprint.LOGITS_CHUNK == fused_training.CHUNK_BYTES
    assert footprint.LOGITS_KEPT == forward.LOGITS_BUDGET
    assert footprint.PLAIN_CHUNK == logprobs.CHUNK_TOKENS
    assert footprint.COUNTED == {"cpu": updates.PIECE_ENTRIES, "cuda": updates.GPU_PIECE_ENTRIES}
    assert MAX_ROWS == MAX_AUTO_ROWS


@pytest.mark.parametrize("kind", SHAPES)
def test_parameters_of_a_shape_are_counted_as_its_network_has_them(kind: str) -> None:
    shape = SHAPES[kind]
    net = made(shape, WORK)
    assert count_parameters(shape) == sum(p.numel() for p in net.parameters())
    pytest.importorskip("peft")
    adapter = Adapter(net, LoraSettings(2, 4.0, ("all-linear",)))
    assert count_adapter(shape, 2)["adapter"] == sum(p.numel() for p in adapter.trained.values())


def test_each_way_to_save_memory_saves_it_and_auto_takes_it_where_it_has_to() -> None:
    """A shape of 1.7 billion parameters on a device of 110 GB."""
    shape = ModelShape(1_720_574_976, 28, 2048, 6144, 16, 8, 128, 151_936, qk_norm=True)
    work = Work(
        device="cuda", width=2, groups=8, siblings=8, prompt=256, completion=2048, rows=64, fused=True, free=110e9,
        microbatch_size=64,
    )  # fmt: skip
    plain = predict(shape, work)
    again, coded = predict(shape, replace(work, recomputes=True)), predict(shape, replace(work, optim="adamw_8bit"))
    assert again.passing["activations"] < 0.2 * plain.passing["activations"]
    assert plain.peak - coded.peak > 5 * shape.parameters
    assert plain.peak > 110e9 > again.peak
    assert decided(shape, work, "auto")
    assert not decided(shape, replace(work, free=None), "auto"), "nobody knows what is free: nothing is slowed down"
    assert not decided(shape, replace(work, microbatch_size=8), "auto")
    assert decided(shape, work, wanted=True)
    assert not decided(shape, work, wanted=False)
