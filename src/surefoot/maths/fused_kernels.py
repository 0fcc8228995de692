"""Small operations of a decoder, fused: one launch on a GPU where torch needs three to seven.

Owns       the Triton kernels of the fused path; importing this needs Triton.
Promises   every kernel rounds where the plain operations in `fused.py` round, so that both compute one model.
Never      is imported on a CPU: `fused.py` is what everybody asks.

Axes: N rows, H hidden, D head size, W KV width, S slots of the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _norm_kernel(
    x, added, weight, summed, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < H
    dtype = out.dtype.element_ty
    value = tl.load(x + row * H + at, mask=inside, other=0.0)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(added + row * H + at, mask=inside, other=0.0).to(tl.float32)).to(dtype)
        tl.store(summed + row * H + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / H + eps)
    normed = (wide * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + at, (normed * factor).to(dtype), mask=inside)


@triton.jit
def _place_kernel(
    qkv, cos, sin, positions, slots, q_norm, k_norm, q_out, k_cache, v_cache, eps, slot_stride, head_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    dtype = q_out.dtype.element_ty
    base = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * D
    first = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(base + HALF + at, mask=inside, other=0.0).to(tl.float32)
    position, slot = tl.load(positions + row), tl.load(slots + row)
    if head < HEADS + KV_HEADS:
        if NORMS:
            scale = 1.0 / tl.sqrt((tl.sum(first * first, axis=0) + tl.sum(second * second, axis=0)) / D + eps)
            norm = q_norm if head < HEADS else k_norm
            one = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
            two = tl.load(norm + HALF + at, mask=inside, other=0.0).to(tl.float32)
            first = ((first * scale).to(dtype).to(tl.float32) * one).to(dtype).to(tl.float32)
            second = ((second * scale).to(dtype).to(tl.float32) * two).to(dtype).to(tl.float32)
        c1 = tl.load(cos + position * D + at, mask=inside, other=0.0).to(tl.float32)
        s1 = tl.load(sin + position * D + at, mask=inside, other=0.0).to(tl.float32)
        c2 = tl.load(cos + position * D + HALF + at, mask=inside, other=0.0).to(tl.float32)
        s2 = tl.load(sin + position * D + HALF + at, mask=inside, other=0.0).to(tl.float32)
        turned_1 = (first * c1).to(dtype).to(tl.float32) - (second * s1).to(dtype).to(tl.float32)
        turned_2 = (second * c2).to(dtype).to(tl.float32) + (first * s2).to(dtype).to(tl.float32)
        first, second = turned_1, turned_2
    place = slot * slot_stride + position * D
    if head < HEADS:
        target = q_out + (row * HEADS + head) * D
    elif head < HEADS + KV_HEADS:
        target = k_cache + place + (head - HEADS) * head_stride
    else:
        target = v_cache + place + (head - HEADS - KV_HEADS) * head_stride
    tl.store(target + at, first.to(dtype), mask=inside)
    tl.store(target + HALF + at, second.to(dtype), mask=inside)


@triton.jit
def _attend_kernel(
    q, k_cache, v_cache, slots, positions, out, scale, slot_stride, head_stride, KV_HEADS: tl.constexpr,
    QUERIES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position, slot = tl.load(positions + row), tl.load(slots + row)
    at_q, at_d, at_n = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    place = (row * KV_HEADS + head) * QUERIES * D + at_q[:, None] * D + at_d[None, :]
    real = (at_q[:, None] < QUERIES) & (at_d[None, :] < D)
    queries = tl.load(q + place, mask=real, other=0.0)
    keys = k_cache + slot * slot_stride + head * head_stride
    values = v_cache + slot * slot_stride + head * head_stride
    highest = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    mixed = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for start in range(0, position + 1, BLOCK_N):
        seen = start + at_n <= position
        where = (start + at_n)[:, None] * D + at_d[None, :]
        there = seen[:, None] & (at_d[None, :] < D)
        k = tl.load(keys + where, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, axis=1))
        kept, p = tl.exp(highest - top), tl.exp(scores - top[:, None])
        v = tl.load(values + where, mask=there, other=0.0)
        mixed = mixed * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        total = total * kept + tl.sum(p, axis=1)
        highest = top
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=real)


@triton.jit
def _gate_kernel(gate_up, out, I: tl.constexpr, BLOCK: tl.constexpr):  # noqa: E741
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < I
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * I + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + at, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * I + at, (opened * up).to(dtype), mask=inside)


def block_of(size: int) -> int:
    """The power of two that holds it."""
    return int(triton.next_power_of_2(size))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `fused.PlainOps.rms_norm`."""
    out = x.new_empty(x.shape)
    width = x.shape[-1]
    _norm_kernel[(len(x),)](
        x, x, weight, x, out, eps, H=width, BLOCK=block_of(width), ADDS=False, num_warps=1 if width <= 256 else 4
    )
    return out


def add_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `fused.PlainOps.add_rms_norm`."""
    summed, out = x.new_empty(x.shape), x.new_empty(x.shape)
    width = x.shape[-1]
    _norm_kernel[(len(x),)](x, added, weight, summed, out, eps, H=width, BLOCK=block_of(width), ADDS=True, num_warps=4)
    return summed, out


def place(
    qkv: Tensor, tables: tuple[Tensor, Tensor], positions: Tensor, slots: Tensor, cache: Tensor, heads: int,
    norms: tuple[Tensor, Tensor] | None, eps: float,
) -> Tensor:  # fmt: skip
    """As `fused.PlainOps.place`."""
    kv_heads, size = cache.shape[2], cache.shape[4]
    out = qkv.new_empty(len(qkv), heads, size)
    q_norm, k_norm = (qkv, qkv) if norms is None else norms
    _place_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv, *tables, positions, slots, q_norm, k_norm, out, cache[0], cache[1], eps, cache.stride(1), cache.stride(2),
        HEADS=heads, KV_HEADS=kv_heads, D=size, HALF=size // 2, BLOCK=block_of(size // 2), NORMS=norms is not None,
        num_warps=1,
    )  # fmt: skip
    return out


def attend(q: Tensor, cache: Tensor, slots: Tensor, positions: Tensor, width: int) -> Tensor:
    """As `fused.PlainOps.attend`; reads each row as far as it is filled, whatever `width` says."""
    kv_heads, size = cache.shape[2], cache.shape[4]
    queries = q.shape[1] // kv_heads
    out = q.new_empty(len(q), q.shape[1] * size)
    precision = "ieee" if q.dtype.itemsize == 4 else "tf32"
    _attend_kernel[(len(q), kv_heads)](
        q, cache[0], cache[1], slots, positions, out, size**-0.5, cache.stride(1), cache.stride(2), KV_HEADS=kv_heads,
        QUERIES=queries, D=size, BLOCK_D=max(16, block_of(size)), BLOCK_Q=max(16, block_of(queries)), BLOCK_N=64,
        PRECISION=precision, num_warps=4,
    )  # fmt: skip
    return out


def gate(gate_up: Tensor) -> Tensor:
    """As `fused.PlainOps.gate`."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(len(gate_up), width)
    _gate_kernel[(len(gate_up), triton.cdiv(width, 1024))](gate_up, out, I=width, BLOCK=1024, num_warps=4)
    return out
