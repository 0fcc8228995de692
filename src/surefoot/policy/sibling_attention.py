"""Attention for a whole batch laid out as one row: prompts once, then every completion behind them.

A completion's token sees its own prompt and its own completion, nobody else's. Products run over the real tokens
alone; only attention, which needs rectangles, pads: each completion attends to [its prompt, itself].

Axes: N tokens of the row, U prompts, P prompt width, B completions, T completion width, K key/value heads,
Q query heads per key/value head, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name
from transformers import AttentionInterface

NAME = "surefoot_siblings"


class Seating(NamedTuple):
    """Where each token of the row sits in the rectangles, and where to find it again."""

    prompts: Tensor  # (U * P,) token of the row at each place; padding repeats token 0
    completions: Tensor  # (B * T,)
    prompt_of: Tensor  # (B,) which prompt a completion follows
    prompt_bias: Tensor  # (1, 1, Q * P, P) causal
    bias: Tensor  # (B, 1, Q * T, P + T) hides the prompt's padding and what comes later
    back: Tensor  # (N,) place of each token among the U * P + B * T


def seat(
    prompt_lens: Sequence[int], lengths: Sequence[int], owner: Tensor, queries: int, dtype: torch.dtype
) -> Seating:
    """Places for a row that holds `prompt_lens` tokens per prompt, then `lengths` tokens per completion.

    Args:
        owner: (B,) index of each completion's prompt.
        queries: query heads per key/value head.
    """
    device = owner.device
    begins = torch.tensor([0, *prompt_lens, *lengths]).cumsum(0)[:-1]
    p, t = max(prompt_lens), max(max(lengths), 1)
    prompts, prompt_back = _places(begins[: len(prompt_lens)], torch.tensor(prompt_lens), p)
    completions, completion_back = _places(begins[len(prompt_lens) :], torch.tensor(lengths), t)
    back = torch.cat([prompt_back, len(prompts) + completion_back])
    lens = torch.tensor(prompt_lens, device=device)
    padding = torch.arange(p, device=device) >= lens[owner][:, None]  # (B, P)
    hidden = torch.cat([padding[:, None].expand(-1, t, -1), _later(t, device).expand(len(lengths), -1, -1)], dim=-1)
    return Seating(
        prompts.to(device), completions.to(device), owner, _as_bias(_later(p, device)[None], queries, dtype),
        _as_bias(hidden, queries, dtype), back.to(device),
    )  # fmt: skip


def _places(begins: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(rows * width,) tokens of a padded rectangle, and the place of each real token in it, in order."""
    steps = torch.arange(width)
    real = steps < lengths[:, None]
    return torch.where(real, begins[:, None] + steps, 0).flatten(), real.flatten().nonzero().squeeze(-1)


def _later(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).triu(1)


def _as_bias(hidden: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """(n, T, S) bool -> (n, 1, Q * T, S): query heads that share keys stand behind one another."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    # The lowest finite number, not minus infinity: no row of the softmax may be empty.
    return bias.masked_fill_(hidden, torch.finfo(dtype).min).repeat(1, queries, 1)[:, None]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, seating: Seating, scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """(1, K * Q, N, D) queries, (1, K, N, D) keys and values -> (1, N, K * Q, D)."""
    kv_heads = key.shape[1]
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))  # (N, heads, D)
    u, p = len(seating.prompts) // seating.prompt_bias.shape[-1], seating.prompt_bias.shape[-1]
    b = len(seating.prompt_of)

    def pick(tokens: Tensor, places: Tensor, rows: int) -> Tensor:
        picked: Tensor = tokens.index_select(0, places).unflatten(0, (rows, -1))  # (rows, width, heads, D)
        return picked

    keys, values = pick(k, seating.prompts, u), pick(v, seating.prompts, u)
    first = _mix(pick(q, seating.prompts, u), keys, values, seating.prompt_bias, kv_heads, scaling, dropout)
    own_keys, own_values = pick(k, seating.completions, b), pick(v, seating.completions, b)
    keys = torch.cat([_shared(keys, seating.prompt_of), own_keys], dim=1)
    values = torch.cat([_shared(values, seating.prompt_of), own_values], dim=1)
    rest = _mix(pick(q, seating.completions, b), keys, values, seating.bias, kv_heads, scaling, dropout)
    assert first.shape[1] == p, "one place per prompt token"
    mixed = torch.cat([first.flatten(0, 1), rest.flatten(0, 1)]).index_select(0, seating.back)
    return mixed[None], None


def _shared(prompts: Tensor, owner: Tensor) -> Tensor:
    """(U, P, K, D) -> (B, P, K, D), each completion's own prompt."""
    return prompts.expand(len(owner), -1, -1, -1) if len(prompts) == 1 else prompts.index_select(0, owner)


def _mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kv_heads: int, scaling: float, dropout: float) -> Tensor:
    """q (n, T, K * Q, D), k and v (n, S, K, D), bias (n or 1, 1, Q * T, S) -> (n, T, K * Q, D)."""
    width = q.shape[1]
    # Query heads that share a key head become the query axis: no keys are repeated in memory.
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (n, K, Q * T, D)
    mixed = F.scaled_dot_product_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    back: Tensor = mixed.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return back


AttentionInterface.register(NAME, attend)


@contextmanager
def sibling_attention(decoder: Any) -> Iterator[None]:
    """The decoder attends by seating for the length of the block; put back whatever happens."""
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = before
