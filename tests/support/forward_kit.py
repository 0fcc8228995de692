"""Rows for a forward pass, and the comparison of two ways to score them: logprobs, entropy and every gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
