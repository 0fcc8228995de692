"""Rows for a forward pass, and the comparison of two ways to score them: logprobs, entropy and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name

from surefoot.maths.fused import PlainOps, rotate
from surefoot.maths.logprobs import TokenScores
from surefoot.maths.packing import Batch, make_batch
from surefoot.records import TrainSample

PROMPTS = {"short": (8, 30, 7), "long": tuple(3 + (k * 7) % 50 for k in range(33)), "other": (8, 30, 9)}
"""Unequal lengths; two of them differ in the last token only."""


def sample(prompt: str, index: int, length: int) -> TrainSample:
    """Some tokens in the middle were not sampled: provenance, not position, decides what is scored."""
    tokens = tuple(3 + (17 * index + 5 * k + len(prompt)) % 50 for k in range(length))
    return TrainSample(
        item_id=prompt, trainer_version=0, group=prompt, index=index, prompt_ids=PROMPTS[prompt], completion_ids=tokens,
        sampled=tuple(k % 4 != 2 for k in range(length)), logprobs=(0.0,) * length, reward=0.0, advantage=1.0,
    )  # fmt: skip


def packed(pad: int = 0) -> Batch:
    rows = [
        sample("long", 0, 9),
        sample("short", 1, 4),
        sample("long", 2, 1),
        sample("other", 3, 7),
        sample("long", 4, 6),
    ]
    return make_batch(rows, pad_token_id=pad)[0]


def gradients(net: Any, scores: TokenScores, batch: Batch) -> dict[str, Tensor]:
    """Of a sum with a different weight for every token, so that no two tokens can be swapped."""
    net.zero_grad(set_to_none=True)
    weights = torch.linspace(0.5, 2.0, batch.mask.numel()).view(batch.mask.shape)
    (scores.logprobs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def compare(net: Any, first: TokenScores, second: TokenScores, batch: Batch) -> None:
    torch.testing.assert_close(first.logprobs, second.logprobs, atol=1e-6, rtol=1e-5)
    assert first.entropy is not None
    torch.testing.assert_close(first.entropy, second.entropy, atol=1e-5, rtol=1e-5)
    left, right = gradients(net, first, batch), gradients(net, second, batch)
    assert left.keys() == right.keys() == dict(net.named_parameters()).keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], atol=1e-5, rtol=1e-4, msg=name)


class PlainKernels:
    """`Kernels` in plain torch: what the Triton kernels have to say; the way back is autograd's own."""

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        summed = x if added is None else x + added
        return summed, PlainOps().rms_norm(summed, weight, eps)

    def norm_back(
        self, grad: Tensor, grad_sum: Tensor | None, summed: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        dx, dw = back(lambda x, w: self.norm(x, None, w, eps)[1], [summed, weight], grad)
        return dx if grad_sum is None else dx + grad_sum, dw.float()

    def turn(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
        q, k, v = (each.unflatten(1, (-1, size)) for each in (q, k, v))
        return torch.cat([rotate(q, cos[:, None], sin[:, None]), rotate(k, cos[:, None], sin[:, None]), v], dim=1)

    def turn_back(
        self, grad: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = grad.shape[2]
        zeros = [grad.new_zeros(len(grad), n * size) for n in (heads, kv_heads, kv_heads)]
        q, k, v = back(lambda q, k, v: self.turn(q, k, v, cos, sin, size), zeros, grad)
        return q, k, v

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def gate_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        d_gate, d_up = back(self.gate, [gate, up], grad)
        return d_gate, d_up

    def score(self, logits: Tensor, ids: Tensor, heat: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z = logits.float() / heat
        top, log_total = z.amax(-1), (z - z.amax(-1, keepdim=True)).exp().sum(-1).log()
        logp = z - (top + log_total)[:, None]
        return logp.gather(1, ids[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1), top, log_total

    def score_back(
        self, logits: Tensor, ids: Tensor, grad: Tensor, top: Tensor, log_total: Tensor, heat: float
    ) -> None:
        p = (logits.float() / heat - (top + log_total)[:, None]).exp()
        pulls = (F.one_hot(ids, logits.shape[1]) - p) * (grad / heat)[:, None]
        logits.copy_(pulls.masked_fill(grad[:, None] == 0, 0.0))


def back(function: Any, inputs: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_(True) for each in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad)
