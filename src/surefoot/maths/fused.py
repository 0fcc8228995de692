"""The small operations of a decoder between two matrix products, each as one call.

On a CPU, and wherever Triton is missing, each call is a few plain torch operations; on a GPU it is one kernel of
`fused_kernels.py`, which rounds in the same places. `ops_for` says which.

Axes: N rows (one token each), H hidden, D head size, S slots of the cache, W KV width.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name


class Ops(Protocol):
    """What a decoder needs between two products."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """(N, H) normed in float32, rounded, then weighed."""

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(N, H) the sum, rounded, and the sum normed."""

    def place(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor, heads: int,
        norms: tuple[Tensor, Tensor] | None, eps: float,
    ) -> Tensor:  # fmt: skip
        """Turn queries and keys to their positions, write keys and values into the cache; (N, heads, D) queries.

        Args:
            qkv: (N, (heads + 2 kv_heads) * D).
            tables: cos and sin, (W, D) each.
            positions: (N,) where each token stands.
            slots: (N,) whose token it is.
            cache: (2, S, kv_heads, W, D).
            norms: weights (D,) of the norms of queries and of keys, where the architecture has them.
        """

    def attend(self, q: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, width: int) -> Tensor:
        """(N, heads, D) queries over positions 0 to each row's own -> (N, heads * D); `width` is beyond them all."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """(N, 2 I) -> (N, I): silu of the first half times the second."""


class PlainOps:
    """`Ops` in plain torch: what the kernels have to say."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `Ops.rms_norm`."""
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See `Ops.add_rms_norm`."""
        summed = x + added
        return summed, self.rms_norm(summed, weight, eps)

    def place(
        self, qkv: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor, heads: int,
        norms: tuple[Tensor, Tensor] | None, eps: float,
    ) -> Tensor:  # fmt: skip
        """See `Ops.place`."""
        kv_heads = cache.shape[2]
        q, k, v = qkv.unflatten(-1, (-1, cache.shape[4])).split([heads, kv_heads, kv_heads], dim=1)
        if norms is not None:
            q, k = self.rms_norm(q, norms[0], eps), self.rms_norm(k, norms[1], eps)
        cos, sin = (table[positions, None] for table in tables)
        cache[0][slots, :, positions] = rotate(k, cos, sin)
        cache[1][slots, :, positions] = v
        return rotate(q, cos, sin)

    def attend(self, q: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, width: int) -> Tensor:
        """See `Ops.attend`."""
        keys, values = (part[slots, :, :width] for part in cache)
        hidden = torch.arange(width, device=q.device) > positions[:, None]  # (N, width)
        # What an earlier rollout left behind may be anything: 0 * NaN is NaN.
        values = values.masked_fill(hidden[:, None, :, None], 0.0)
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))
        keys = keys.masked_fill(hidden[:, None, :, None], 0.0)
        grouped = q.unflatten(1, (cache.shape[2], -1))
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=bias[:, None, None]).flatten(1)

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Ops.gate`."""
        first, second = gate_up.chunk(2, dim=-1)
        return F.silu(first) * second


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (N, heads, D) with tables (N, 1, D)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def has_kernels(device: torch.device) -> bool:
    """Whether the fused kernels run there."""
    return device.type == "cuda" and torch.version.hip is None and importlib.util.find_spec("triton") is not None


def ops_for(device: torch.device) -> Ops:
    """The kernels where they run, plain torch elsewhere."""
    if not has_kernels(device):
        return PlainOps()
    from surefoot.maths import fused_kernels

    return fused_kernels
