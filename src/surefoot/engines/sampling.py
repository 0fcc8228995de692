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

BLOCK = 128
"""Tokens that are summed as one before a block is chosen; short enough for a float32 sum to be exact to a few ulp."""


class Drawn(NamedTuple):
    """Tokens and the log-probability each was drawn with."""

    tokens: Tensor  # (R,) int64
    logprobs: Tensor  # (R,) float32, at the sampling temperature; at temperature 1 when greedy

    def pairs(self) -> list[tuple[int, float]]:
        """(token, logprob) per row, as Python numbers; float32 is exact in a Python float."""
        return list(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True))


def random_stream(seed: int, length: int) -> list[float]:
    """`length` uniform numbers in [0, 1), a function of `seed` alone."""
    return [float(number) for number in random_numbers(seed, length)]


def random_numbers(seed: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`random_stream` as one array."""
    # Philox takes the whole seed; torch's CPU generator looks at 32 bits of it, so 63-bit seeds would collide.
    return np.random.Generator(np.random.Philox(key=seed)).random(length)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Drawn:
    """One token per row.

    Args:
        logits: (R, V).
        temperatures: (R,) float32; 0 means the most likely token.
        uniforms: (R,) float64 in [0, 1).
    """
    dice = _Distribution(logits, temperatures)
    tokens = torch.where(temperatures == 0, dice.shifted.argmax(dim=-1), dice.invert(uniforms[:, None]).squeeze(1))
    return Drawn(tokens, dice.shifted.gather(1, tokens[:, None]).squeeze(1) - dice.log_total)


def draw_siblings(logits: Tensor, temperature: float, uniforms: Tensor) -> Drawn:
    """Several independent tokens from one distribution: the first tokens of a group.

    Args:
        logits: (V,).
        uniforms: (G,) float64 in [0, 1), one per sibling.
    """
    dice = _Distribution(logits[None], torch.tensor([temperature], device=logits.device))
    if temperature == 0:
        tokens = dice.shifted.argmax(dim=-1).expand(len(uniforms))
    else:
        tokens = dice.invert(uniforms[None]).squeeze(0)
    return Drawn(tokens, dice.shifted[0, tokens] - dice.log_total)


class _Distribution:
    """The cumulative distribution of each row in two levels: whole blocks of the vocabulary, then one block's tokens.

    Only the chosen block is summed token by token: a running sum over the whole vocabulary, in the float64 that it
    needs (in float32 it would shift the tail's probabilities), costs more than the rest of the draw.
    """

    def __init__(self, logits: Tensor, temperatures: Tensor) -> None:
        self.wide = torch.float32 if logits.device.type == "mps" else torch.float64
        shifted = logits.float() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
        self.shifted = shifted.sub_(shifted.amax(dim=-1, keepdim=True))  # (R, V)
        short = -shifted.shape[-1] % BLOCK
        whole = torch.nn.functional.pad(shifted, (0, short), value=-torch.inf) if short else shifted
        self.parts = whole.exp().unflatten(-1, (-1, BLOCK))  # (R, blocks, BLOCK)
        self.sums = self.parts.sum(dim=-1).to(self.wide)  # (R, blocks)
        self.running = self.sums.cumsum(dim=-1)
        self.log_total = self.running[:, -1].log().float()  # (R,)

    def invert(self, uniforms: Tensor) -> Tensor:
        """(R, G) numbers in [0, 1) -> (R, G) tokens."""
        targets = uniforms.to(self.wide) * self.running[:, -1:]
        block = _first_above(self.running, targets)
        rest = targets - (self.running.gather(1, block) - self.sums.gather(1, block))
        rows = torch.arange(len(block), device=block.device)[:, None]
        inner = self.parts[rows, block].to(self.wide).cumsum(dim=-1)  # (R, G, BLOCK)
        # The block was summed in another order: what is left may lie a rounding error outside of it.
        below = inner[..., -1] * (1 - torch.finfo(self.wide).eps)
        rest = torch.minimum(rest.clamp(min=0), below)
        tokens = block * BLOCK + _first_above(inner, rest[..., None]).squeeze(-1)
        return tokens.clamp_(max=self.shifted.shape[-1] - 1)  # only NaN gets here; its logprob will tell


def _first_above(running: Tensor, targets: Tensor) -> Tensor:
    """First entry strictly above each target: it has positive width, so a zero-probability token is never drawn."""
    return torch.searchsorted(running, targets, right=True).clamp_(max=running.shape[-1] - 1)
