"""Forward and backward of a decoder's small operations, each as one kernel; for a learner on a GPU.

Owns       autograd functions over `fused_training_kernels.py`, and the logits of a step, a chunk at a time.
Promises   values are rounded where the model's own modules round them; gradients are those of the same formulas,
           summed in float32; no logit outlives its chunk.
Never      is used on a CPU: there the model's own modules and `logprobs.score_tokens_chunked` compute. A test may hand
           in other `Kernels`.

Axes: N tokens, H hidden, V vocabulary, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812 - the community's name

from surefoot.maths.logprobs import TokenScores

CHUNK_BYTES = 512 << 20
"""Logits that exist at one time."""


class Kernels(Protocol):
    """The kernels, forward and backward."""

    def norm(self, x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(N, H) the sum (x itself without `added`), and the sum normed."""

    def norm_back(
        self, grad: Tensor, grad_sum: Tensor | None, summed: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Gradients of the sum (N, H) and of the weight (H,)."""

    def turn(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
        """(N, heads * D) queries, keys, values -> (N, all heads, D), queries and keys turned to their positions."""

    def turn_back(
        self, grad: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""

    def gate_back(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of both."""

    def score(self, logits: Tensor, ids: Tensor, heat: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(n,) logprob, entropy, largest logit, and log of the sum above it; all in float32."""

    def score_back(
        self, logits: Tensor, ids: Tensor, grad: Tensor, top: Tensor, log_total: Tensor, heat: float
    ) -> None:
        """Overwrite logits (n, V) with the gradient of them; zero where `grad` is."""


def kernels() -> Kernels:
    """Those that run on a GPU; needs Triton."""
    from surefoot.maths import fused_training_kernels

    return fused_training_kernels


class Norm(torch.autograd.Function):
    """(sum, normed) = `Kernels.norm`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, added: Tensor | None, weight: Tensor, eps: float, use: Kernels
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Called by `apply`."""
        summed, normed = use.norm(x, added, weight, eps)
        ctx.save_for_backward(summed, weight)
        ctx.eps, ctx.use, ctx.adds = eps, use, added is not None
        return (summed, normed) if added is not None else normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Called by autograd."""
        summed, weight = ctx.saved_tensors
        grad_sum, grad = grads if ctx.adds else (None, grads[0])
        dx, dw = ctx.use.norm_back(
            grad.contiguous(), None if grad_sum is None else grad_sum.contiguous(), summed, weight, ctx.eps
        )
        return dx, (dx if ctx.adds else None), dw.to(weight.dtype), None, None


class Rotation(torch.autograd.Function):
    """`Kernels.turn`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], use: Kernels) -> Tensor:
        """Called by `apply`."""
        size = tables[0].shape[-1]
        ctx.tables, ctx.use, ctx.heads = tables, use, (q.shape[1] // size, k.shape[1] // size)
        return use.turn(q, k, v, *tables, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Called by autograd."""
        return *ctx.use.turn_back(grad.contiguous(), *ctx.tables, *ctx.heads), None, None


class Gate(torch.autograd.Function):
    """`Kernels.gate`."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, use: Kernels) -> Tensor:
        """Called by `apply`."""
        ctx.save_for_backward(gate, up)
        ctx.use = use
        return use.gate(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Called by autograd."""
        return *ctx.use.gate_back(grad.contiguous(), *ctx.saved_tensors), None


class Gather(torch.autograd.Function):
    """Rows `index` of x, of which row `inverse[i]` is row i's own; where `real` is False a row stands for nobody.

    Its gradient is a gather too: an index_select would add up the gradients of all padding at one place, one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, real: Tensor | None) -> Tensor:
        """Called by `apply`."""
        ctx.inverse, ctx.real = inverse, real
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Called by autograd."""
        back = grad.index_select(0, ctx.inverse)
        if ctx.real is not None:
            back = back.masked_fill_(~ctx.real.view(-1, *[1] * (back.dim() - 1)), 0.0)
        return back, None, None, None


def score_tokens_fused(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, temperature: float, use: Kernels | None = None
) -> TokenScores:
    """`logprobs.score_tokens_chunked` with one pass over a chunk's logits in each direction.

    Args:
        hidden: (N, H).
        weight: (V, H) of an output layer without a bias.
        ids: (N,), each below V.
    """
    logprobs, entropy = _Scores.apply(hidden, weight, ids, temperature, use or kernels())  # type: ignore[no-untyped-call]
    return TokenScores(logprobs, entropy)


def chunk_tokens(weight: Tensor) -> int:
    """Tokens whose logits are computed at once."""
    return max(128, CHUNK_BYTES // (weight.shape[0] * weight.element_size()))


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, heat: float, use: Kernels
    ) -> tuple[Tensor, Tensor]:
        """Called by `apply`."""
        parts = [
            use.score(F.linear(h, weight), i, heat)
            for h, i in zip(hidden.split(chunk_tokens(weight)), ids.split(chunk_tokens(weight)), strict=True)
        ]
        logprobs, entropy, top, log_total = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, ids, top, log_total)
        ctx.heat, ctx.use = heat, use
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        """Called by autograd."""
        hidden, weight, ids, top, log_total = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Half-precision sums over many chunks would lose the small ones.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(ids), chunk_tokens(weight)):
            rows = slice(start, start + chunk_tokens(weight))
            pulls = F.linear(hidden[rows], weight)
            ctx.use.score_back(pulls, ids[rows], grad[rows].contiguous(), top[rows], log_total[rows], ctx.heat)
            if grad_hidden is not None:
                torch.mm(pulls, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += pulls.t() @ hidden[rows]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None
