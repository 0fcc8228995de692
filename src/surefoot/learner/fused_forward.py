"""The learner's forward pass on a GPU: a whole batch as one row, with fused kernels between the matrix products.

Owns       the same forward as `forward.py`, written out over the network's own parameters.
Promises   what it does not know is named (`why_not_fused`), and the network's own modules compute; nothing waits for
           the device between the first kernel of a microbatch and the last of its backward pass; the first microbatch
           of a learner is also scored by the network's own modules, and a difference beyond parity stops the run
           (`grpo.py`).
Never      runs on a CPU in a run: tests hand in plain operations.

Axes: N tokens of the row, B completions, T completion width, U prompts, P prompt width, D head size, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name

from surefoot.learner.architectures import beyond_plain
from surefoot.learner.forward import (
    PackedIndex,
    build_packed_index,
    distinct_prompts,
    lay_out,
    mix,
    recompute,
    require_in_place,
)
from surefoot.maths.fused import has_kernels
from surefoot.maths.fused_training import Gate, Gather, Kernels, Norm, Rotation, kernels, score_tokens_fused
from surefoot.maths.logprobs import TokenScores, require_scorable
from surefoot.maths.packing import Batch

LAYER_PARTS = frozenset({
    "input_layernorm.weight", "post_attention_layernorm.weight", *(f"self_attn.{n}_proj.weight" for n in "qkvo"),
    *(f"self_attn.{n}_proj.bias" for n in "qkv"), *(f"self_attn.{n}_norm.weight" for n in "qk"),
    *(f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
})  # fmt: skip
"""Every parameter that a block may have; one that is not here would be left out of the forward pass."""
OTHER_PARTS = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


def why_not_fused(net: Any, *, on_cpu: bool = False) -> list[str]:
    """What stands in the way of the fused forward pass; empty when it may be taken.

    Args:
        on_cpu: tests run it there.
    """
    found = list(beyond_plain(net.config))
    parameters = dict(net.named_parameters())
    devices = {parameter.device for parameter in parameters.values()}
    if not on_cpu and not (len(devices) == 1 and has_kernels(next(iter(devices)))):
        found.append(f"device {', '.join(map(str, devices))}")
    if len({parameter.dtype for parameter in parameters.values()}) != 1:
        found.append("parameters of several dtypes")
    if net.training:
        found.append("train mode")
    found += [name for name in parameters if not _known(name)]
    return found


def _known(name: str) -> bool:
    if name in OTHER_PARTS:
        return True
    head, _, rest = name.removeprefix("model.layers.").partition(".")
    return name.startswith("model.layers.") and head.isdigit() and rest in LAYER_PARTS


def score_batch_fused(
    net: Any, batch: Batch, *, temperature: float, use: Kernels | None = None, recomputes: bool = False
) -> TokenScores:
    """As `forward.score_batch`, with entropy.

    Args:
        recomputes: see there.

    Returns:
        `TokenScores` of shape (B, T); positions outside `batch.mask` hold 0 and no gradient.
    """
    use = kernels() if use is None else use
    require_in_place(batch)
    prompts, owner = distinct_prompts(batch)
    layout = lay_out(batch, prompts, owner)
    places = batch.mask.flatten().nonzero().squeeze(-1)  # the last thing that is waited for
    ids = batch.completion_ids.flatten()[places]
    weight = net.get_output_embeddings().weight
    require_scorable(ids.shape, ids, weight.shape[0], temperature)
    queries = net.config.num_attention_heads // net.config.num_key_value_heads
    packed_index = build_packed_index([len(p) for p in prompts], layout.lengths, owner, queries, weight.dtype)
    states = _hidden(net, layout.ids, layout.positions, packed_index, use, recomputes)
    hidden = states.index_select(0, layout.where.flatten()[places])
    scores = score_tokens_fused(hidden, weight, ids, temperature=temperature, use=use)
    assert scores.entropy is not None, "it comes with every score"
    return TokenScores(
        _spread(scores.logprobs, places, batch.mask), _spread(scores.entropy.detach(), places, batch.mask)
    )


def _spread(values: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """(n,) values at their places in (B, T), zero elsewhere."""
    flat = torch.zeros(mask.numel(), dtype=values.dtype, device=values.device)
    return flat.index_copy(0, places, values).view(mask.shape)


def _hidden(
    net: Any, ids: Tensor, positions: Tensor, packed_index: PackedIndex, use: Kernels, recomputes: bool
) -> Tensor:
    """(N, H) the last hidden state of every token of the row."""
    decoder, eps = net.model, net.config.rms_norm_eps
    x = F.embedding(ids[0], decoder.embed_tokens.weight)
    cos, sin = decoder.rotary_emb(x[None], positions)
    tables = cos[0].contiguous(), sin[0].contiguous()
    places = torch.cat([packed_index.prompts, packed_index.completions])
    real = torch.zeros(len(places), dtype=torch.bool, device=places.device)
    real[packed_index.back] = True
    y = Norm.apply(x, None, decoder.layers[0].input_layernorm.weight, eps, use)  # type: ignore[no-untyped-call]
    norms = [*(layer.input_layernorm for layer in decoder.layers), decoder.norm][1:]
    for layer, following in zip(decoder.layers, norms, strict=True):

        def block(x: Tensor, y: Tensor, layer: Any = layer, following: Any = following) -> tuple[Tensor, Tensor]:
            mixed = _attention(layer.self_attn, y, tables, packed_index, places, real, eps, use)
            return _rest(layer, following, x, mixed, eps, use)

        x, y = recompute(block, x, y) if recomputes else block(x, y)
    hidden: Tensor = y
    return hidden


def _rest(layer: Any, following: Any, x: Tensor, mixed: Tensor, eps: float, use: Kernels) -> tuple[Tensor, Tensor]:
    """From attention to the next layer: the residual stream, and it normed."""
    x, y = Norm.apply(x, mixed, layer.post_attention_layernorm.weight, eps, use)  # type: ignore[no-untyped-call]
    mlp = layer.mlp
    opened = Gate.apply(mlp.gate_proj(y), mlp.up_proj(y), use)  # type: ignore[no-untyped-call]
    x, y = Norm.apply(x, mlp.down_proj(opened), following.weight, eps, use)  # type: ignore[no-untyped-call]
    return x, y


def _attention(
    part: Any, y: Tensor, tables: tuple[Tensor, Tensor], packed_index: PackedIndex, places: Tensor, real: Tensor,
    eps: float, use: Kernels,
) -> Tensor:  # fmt: skip
    """(N, H) -> (N, H): each completion attends to [its prompt, itself]."""
    size = tables[0].shape[-1]
    q, k, v = part.q_proj(y), part.k_proj(y), part.v_proj(y)
    heads, kv_heads = q.shape[-1] // size, k.shape[-1] // size
    if hasattr(part, "q_norm"):
        q = Norm.apply(q.view(-1, size), None, part.q_norm.weight, eps, use).view(q.shape)  # type: ignore[no-untyped-call]
        k = Norm.apply(k.view(-1, size), None, part.k_norm.weight, eps, use).view(k.shape)  # type: ignore[no-untyped-call]
    packed = Rotation.apply(q, k, v, tables, use)  # type: ignore[no-untyped-call]
    picked = Gather.apply(packed, places, packed_index.back, None)  # type: ignore[no-untyped-call]
    p = packed_index.prompt_bias.shape[-1]
    first, rest = picked.split([len(packed_index.prompts), len(packed_index.completions)])
    first, rest = first.unflatten(0, (-1, p)), rest.unflatten(0, (len(packed_index.prompt_of), -1))
    parts = [heads, kv_heads, kv_heads]
    q, k, v = first.split(parts, dim=2)
    one = mix(q, k, v, packed_index.prompt_bias, kv_heads, part.scaling, 0.0)
    asked = first[:, :, heads:]
    asked = asked.expand(len(rest), -1, -1, -1) if len(first) == 1 else asked.index_select(0, packed_index.prompt_of)
    keys, values = torch.cat([asked, rest[:, :, heads:]], dim=1).split([kv_heads, kv_heads], dim=2)
    two = mix(rest[:, :, :heads], keys, values, packed_index.bias, kv_heads, part.scaling, 0.0)
    joined = torch.cat([one.flatten(0, 1), two.flatten(0, 1)])
    mixed = Gather.apply(joined, packed_index.back, places, real)  # type: ignore[no-untyped-call]
    out: Tensor = part.o_proj(mixed.flatten(1))
    return out
