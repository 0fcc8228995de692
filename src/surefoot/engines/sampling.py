"""Draw tokens from logits, one private random stream per rollout.

A token is drawn by inverting the cumulative distribution at one uniform number. Position t of
a rollout uses number t of that rollout's own stream, so what is drawn depends on the rollout's
seed and logits alone: not on the batch, the row, or the order of arrival.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Drawn(NamedTuple):
    """Tokens and the log-probability each was drawn with."""

    tokens: Tensor  # (R,) int64
    logprobs: Tensor  # (R,) float32, at the sampling temperature; at temperature 1 when greedy

    def pairs(self) -> list[tuple[int, float]]:
        """(token, logprob) per row, as Python numbers; float32 is exact in a Python float."""
        return list(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True))


def random_stream(seed: int, length: int) -> list[float]:
    """`length` uniform numbers in [0, 1), a function of `seed` alone."""
    # Philox takes the whole seed; torch's CPU generator looks at 32 bits of it, so 63-bit seeds would collide.
    numbers = np.random.Generator(np.random.Philox(key=seed)).random(length)
    return [float(number) for number in numbers]


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Drawn:
    """One token per row.

    Args:
        logits: (R, V).
        temperatures: (R,) float32; 0 means the most likely token.
        uniforms: (R,) float64 in [0, 1).
    """
    scaled, cumulative = _distribution(logits, temperatures)
    total = cumulative[:, -1]
    tokens = _invert(cumulative, (uniforms * total)[:, None]).squeeze(1)
    tokens = torch.where(temperatures == 0, scaled.argmax(dim=-1), tokens)
    return Drawn(tokens, scaled.gather(1, tokens[:, None]).squeeze(1) - total.log().float())


def draw_siblings(logits: Tensor, temperature: float, uniforms: Tensor) -> Drawn:
    """Several independent tokens from one distribution: the first tokens of a group.

    Args:
        logits: (V,).
        uniforms: (G,) float64 in [0, 1), one per sibling.
    """
    scaled, cumulative = _distribution(logits[None], torch.tensor([temperature], device=logits.device))
    total = cumulative[:, -1]
    if temperature == 0:
        tokens = scaled.argmax(dim=-1).expand(len(uniforms))
    else:
        tokens = _invert(cumulative, (uniforms * total)[None]).squeeze(0)
    return Drawn(tokens, scaled[0, tokens] - total.log().float())


def _distribution(logits: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Shifted logits (R, V) and the running sum of their exponentials (R, V)."""
    scaled = logits.float() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    scaled -= scaled.amax(dim=-1, keepdim=True)
    # float64: over a large vocabulary a float32 running sum would shift the tail's probabilities.
    wide = torch.float32 if logits.device.type == "mps" else torch.float64
    return scaled, scaled.exp().cumsum(dim=-1, dtype=wide)


def _invert(cumulative: Tensor, targets: Tensor) -> Tensor:
    """First entry strictly above each target: it has positive width, so a zero-probability token is never drawn."""
    return torch.searchsorted(cumulative, targets.to(cumulative.dtype), right=True).clamp_(max=cumulative.shape[-1] - 1)
