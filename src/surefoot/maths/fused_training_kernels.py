"""Triton kernels of `fused_training.py`: a decoder's small operations, forward and backward.

Owns       the kernels; importing this needs Triton.
Promises   forward, every kernel rounds where the model's own modules round; backward, sums are float32.
Never      is imported on a CPU.

Axes: N rows (tokens), H hidden, V vocabulary, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from surefoot.maths.fused_kernels import add_rms_norm, block_of, rms_norm

_PROGRAMS = 528
"""Of a kernel that adds up over rows: four for each multiprocessor of the largest GPU it was tried on."""


@triton.jit
def _norm_back_kernel(
    grad, grad_sum, summed, weight, dx, parts, rows, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < H
    dtype = dx.dtype.element_ty
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        place = row * H + at
        x = tl.load(summed + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / H + eps)
        normed = x * scale
        total += g * normed.to(dtype).to(tl.float32)
        pulled = g * factor
        d = scale * (pulled - normed * (tl.sum(pulled * normed, axis=0) / H))
        if ADDS:
            d += tl.load(grad_sum + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + place, d.to(dtype), mask=inside)
    tl.store(parts + program * H + at, total, mask=inside)


@triton.jit
def _turn_part(
    source, target, c1, s1, c2, s2, HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, TURNS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    at_head, at = tl.arange(0, BLOCK_HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (at_head < HEADS) & (at < HALF)
    place = at_head * D + at
    dtype = target.dtype.element_ty
    first = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + place + HALF, mask=inside, other=0.0).to(tl.float32)
    if TURNS:
        if BACK:
            turned_1 = first * c1 + second * s2
            turned_2 = second * c2 - first * s1
        else:
            turned_1 = (first * c1).to(dtype).to(tl.float32) - (second * s1).to(dtype).to(tl.float32)
            turned_2 = (second * c2).to(dtype).to(tl.float32) + (first * s2).to(dtype).to(tl.float32)
        first, second = turned_1, turned_2
    tl.store(target + place, first.to(dtype), mask=inside)
    tl.store(target + place + HALF, second.to(dtype), mask=inside)


@triton.jit
def _turn_kernel(
    q, k, v, cos, sin, packed, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)[None, :]
    inside = at < HALF
    c1 = tl.load(cos + row * D + at, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sin + row * D + at, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cos + row * D + HALF + at, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sin + row * D + HALF + at, mask=inside, other=0.0).to(tl.float32)
    own_q, own_k, own_v = q + row * HEADS * D, k + row * KV_HEADS * D, v + row * KV_HEADS * D
    all_q = packed + row * (HEADS + 2 * KV_HEADS) * D
    all_k, all_v = all_q + HEADS * D, all_q + (HEADS + KV_HEADS) * D
    if BACK:
        _turn_part(all_q, own_q, c1, s1, c2, s2, HEADS, D, HALF, BLOCK, BLOCK_Q, True, True)
        _turn_part(all_k, own_k, c1, s1, c2, s2, KV_HEADS, D, HALF, BLOCK, BLOCK_K, True, True)
        _turn_part(all_v, own_v, c1, s1, c2, s2, KV_HEADS, D, HALF, BLOCK, BLOCK_K, False, True)
    else:
        _turn_part(own_q, all_q, c1, s1, c2, s2, HEADS, D, HALF, BLOCK, BLOCK_Q, True, False)
        _turn_part(own_k, all_k, c1, s1, c2, s2, KV_HEADS, D, HALF, BLOCK, BLOCK_K, True, False)
        _turn_part(own_v, all_v, c1, s1, c2, s2, KV_HEADS, D, HALF, BLOCK, BLOCK_K, False, False)


@triton.jit
def _gate_kernel(gate, up, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = out.dtype.element_ty
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, ((g / (1.0 + tl.exp(-g))).to(dtype).to(tl.float32) * u).to(dtype), mask=inside)


@triton.jit
def _gate_back_kernel(grad, gate, up, d_gate, d_up, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    dtype = d_up.dtype.element_ty
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    open_ = 1.0 / (1.0 + tl.exp(-g))
    tl.store(d_up + at, (d * g * open_).to(dtype), mask=inside)
    tl.store(d_gate + at, (d * u * open_ * (1.0 + g * (1.0 - open_))).to(dtype), mask=inside)


@triton.jit
def _score_kernel(
    logits, ids, logprobs, entropy, tops, log_totals, heat, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * V
    at = tl.arange(0, BLOCK)
    # One running set for each place of the block: no reduction until the end of the row.
    top = tl.full((BLOCK,), -1.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    moment = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        z = tl.load(base + start + at, mask=start + at < V, other=float("-inf")).to(tl.float32) / heat
        higher = tl.where(z > top, z, top)
        kept, e = tl.exp(top - higher), tl.exp(z - higher)
        moment = (moment + total * (top - higher)) * kept + e * tl.where(z > -1.0e38, z - higher, 0.0)
        total = total * kept + e
        top = higher
    highest = tl.max(top, axis=0)
    kept = tl.exp(top - highest)
    # A place that saw nothing has a total of 0; its distance to the highest must not become 0 times infinity.
    moment = tl.sum((moment + total * tl.where(total > 0.0, top - highest, 0.0)) * kept, axis=0)
    total_sum = tl.sum(total * kept, axis=0)
    log_total = tl.log(total_sum)
    chosen = tl.load(base + tl.load(ids + row)).to(tl.float32) / heat
    tl.store(logprobs + row, (chosen - highest) - log_total)
    tl.store(entropy + row, log_total - moment / total_sum)
    tl.store(tops + row, highest)
    tl.store(log_totals + row, log_total)


@triton.jit
def _score_back_kernel(
    logits, ids, grad, tops, log_totals, heat, V: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < V
    place = logits + row.to(tl.int64) * V + at
    g = tl.load(grad + row)
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32) / heat
    p = tl.exp((z - tl.load(tops + row)) - tl.load(log_totals + row))
    pull = g / heat
    d = tl.where(at == tl.load(ids + row), pull, 0.0) - p * pull
    # Selection, not multiplication: a token without a gradient may hold NaN, and NaN * 0 is NaN.
    d = tl.where(g != 0.0, d, 0.0)
    tl.store(place, d.to(logits.dtype.element_ty), mask=inside)


def norm(x: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `fused_training.Kernels.norm`."""
    return (x, rms_norm(x, weight, eps)) if added is None else add_rms_norm(x, added, weight, eps)


def norm_back(
    grad: Tensor, grad_sum: Tensor | None, summed: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As `fused_training.Kernels.norm_back`."""
    rows, width = summed.shape
    narrow = width <= 256  # the norms of queries and keys: many short rows
    programs = min(rows, 8 * _PROGRAMS if narrow else _PROGRAMS)
    dx = torch.empty_like(summed)
    parts = torch.empty(programs, width, dtype=torch.float32, device=summed.device)
    _norm_back_kernel[(programs,)](
        grad, grad if grad_sum is None else grad_sum, summed, weight, dx, parts, rows, eps, H=width,
        BLOCK=block_of(width), ADDS=grad_sum is not None, num_warps=1 if narrow else 4,
    )  # fmt: skip
    return dx, parts.sum(0)


def turn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, size: int) -> Tensor:
    """As `fused_training.Kernels.turn`."""
    heads, kv_heads = q.shape[1] // size, k.shape[1] // size
    packed = q.new_empty(len(q), heads + 2 * kv_heads, size)
    _turn(q, k, v, cos, sin, packed, heads, back=False)
    return packed


def turn_back(grad: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `fused_training.Kernels.turn_back`."""
    size = grad.shape[2]
    q, k, v = (grad.new_empty(len(grad), n * size) for n in (heads, kv_heads, kv_heads))
    _turn(q, k, v, cos, sin, grad, heads, back=True)
    return q, k, v


def _turn(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, packed: Tensor, heads: int, *, back: bool) -> None:
    size, kv_heads = packed.shape[2], (packed.shape[1] - heads) // 2
    _turn_kernel[(len(packed),)](
        q, k, v, cos, sin, packed, HEADS=heads, KV_HEADS=kv_heads, D=size, HALF=size // 2, BLOCK=block_of(size // 2),
        BLOCK_Q=block_of(heads), BLOCK_K=block_of(kv_heads), BACK=back, num_warps=4,
    )  # fmt: skip


def gate(gate: Tensor, up: Tensor) -> Tensor:
    """As `fused_training.Kernels.gate`."""
    out = torch.empty_like(gate)
    _gate_kernel[(triton.cdiv(gate.numel(), 2048),)](gate, up, out, gate.numel(), BLOCK=2048, num_warps=8)
    return out


def gate_back(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """As `fused_training.Kernels.gate_back`."""
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    _gate_back_kernel[(triton.cdiv(gate.numel(), 2048),)](
        grad, gate, up, d_gate, d_up, gate.numel(), BLOCK=2048, num_warps=8
    )
    return d_gate, d_up


def score(logits: Tensor, ids: Tensor, heat: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `fused_training.Kernels.score`."""
    rows, width = logits.shape
    out = [torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(4)]
    _score_kernel[(rows,)](logits, ids, *out, heat, V=width, BLOCK=2048, num_warps=8)
    return out[0], out[1], out[2], out[3]


def score_back(logits: Tensor, ids: Tensor, grad: Tensor, top: Tensor, log_total: Tensor, heat: float) -> None:
    """As `fused_training.Kernels.score_back`."""
    rows, width = logits.shape
    _score_back_kernel[(rows, triton.cdiv(width, 4096))](
        logits, ids, grad, top, log_total, heat, V=width, BLOCK=4096, num_warps=8
    )
