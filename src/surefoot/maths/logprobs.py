"""Log-probabilities of tokens that were already chosen.

Owns       which logit scores which token, temperature, and softmax in enough precision.
Promises   a position outside its row is refused, never read from the next row; temperature
           divides logits, never log-probabilities; entropy that was not asked for is None.
Never      knows about masks, rewards or models.

    logits  -- compute_logprobs ------> (B, T)        align, then score
    logits  -- score_tokens ----------> TokenScores   one logit row per token
    hidden  -- score_tokens_chunked --> TokenScores   the same, without ever holding all logits

Axes: B rows, L sequence positions, T completion positions, V vocabulary, H hidden size, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surefoot.errors import ConfigError, ShapeError

CHUNK_TOKENS = 128
"""Tokens whose logits exist at one time: at V = 49152 that is 25 MB in float32."""


class TokenScores(NamedTuple):
    """What the policy thought of each chosen token."""

    logprobs: Tensor
    """(...) differentiable."""
    entropy: Tensor | None
    """(...) in nats, detached; None when it was not asked for."""


def compute_logprobs(
    logits: Tensor,
    completion_ids: Tensor,
    *,
    prompt_lens: Tensor | Sequence[int] | None = None,
    temperature: float = 1.0,
    align: bool = True,
) -> Tensor:
    """Log-probability of every completion token.

    No run aligns here: `learner.forward` picks the states and has its own check of positions. The TRL bridge calls
    this with `align=False`.

    Args:
        logits: (B, L, V) over prompt and completion; (B, T, V) with `align=False`.
        completion_ids: (B, T) padded on the right with any valid id.
        prompt_lens: (B,) tokens before the completion. None means that every row's completion
            ends at L, as under left padding.
        temperature: the one the sampler used.
        align: token t of row i is scored by the logits at `prompt_lens[i] - 1 + t`;
            False means that logits and tokens already correspond one to one.

    Returns:
        (B, T) in float32 (float64 for float64 logits).
    """
    if logits.dim() != 3 or completion_ids.dim() != 2 or logits.shape[0] != completion_ids.shape[0]:
        raise ShapeError(
            f"logits {tuple(logits.shape)} do not go with completion_ids {tuple(completion_ids.shape)}",
            "broadcasting would score tokens with foreign logits",
            "pass logits (B, L, V) and completion_ids (B, T)",
        )
    if not align and prompt_lens is not None:
        raise ShapeError(
            "prompt_lens given with align=False",
            "one-to-one logits have no prompt to skip",
            "drop prompt_lens, or pass whole-sequence logits with align=True",
        )
    aligned = _align(logits, completion_ids.shape[1], prompt_lens) if align else logits
    return score_tokens(aligned, completion_ids, temperature=temperature).logprobs


def score_tokens(logits: Tensor, ids: Tensor, *, temperature: float = 1.0, with_entropy: bool = False) -> TokenScores:
    """Score tokens whose logits are at hand: logits (..., V), ids (...)."""
    require_scorable(logits.shape[:-1], ids, logits.shape[-1], temperature)
    logp = torch.log_softmax(logits.to(_wide(logits.dtype)) / temperature, dim=-1)
    chosen = logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if not with_entropy:
        return TokenScores(chosen, None)
    with torch.no_grad():
        floor = torch.finfo(logp.dtype).min  # a forbidden token has logp -inf, and 0 * -inf is NaN
        entropy = -(logp.exp() * logp.clamp(min=floor)).sum(-1)
    return TokenScores(chosen, entropy)


def score_tokens_chunked(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int = CHUNK_TOKENS,
    keep_bytes: int = 0,
) -> TokenScores:
    """`score_tokens(hidden @ weight.T + bias, ids)` with the logits of one chunk alive at a time.

    The backward pass recomputes each chunk (unless it was kept), skips tokens whose gradient is exactly zero
    (masked, clipped, or without advantage), and adds to one weight gradient in place.

    Args:
        hidden: (..., H) the last hidden state at the positions that predict `ids`.
        weight: (V, H) of a plain output layer. A head that carries an adapter must be merged
            by the caller: reading its base weight would leave the adapter untrained.
        ids: (...) chosen tokens.
        bias: (V,) or None.
        keep_bytes: chunks up to this much memory are kept for the backward pass instead of being
            computed again: a third less work where there is room. Changes no number.
    """
    if hidden.shape[-1] != weight.shape[-1] or weight.dim() != 2:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} does not go with weight {tuple(weight.shape)}",
            "the output layer reads the last hidden axis",
            "pass hidden (..., H) and weight (V, H)",
        )
    if chunk_tokens < 1:
        raise ConfigError(f"chunk_tokens = {chunk_tokens}", "a chunk holds tokens", "use 1 or more")
    require_scorable(hidden.shape[:-1], ids, weight.shape[0], temperature)
    flat = hidden.reshape(-1, hidden.shape[-1])
    settings = _Chunking(temperature, chunk_tokens, with_entropy, keep_bytes)
    logprobs, entropy = _ChunkedScores.apply(flat, weight, bias, ids.reshape(-1), settings)  # type: ignore[no-untyped-call]
    return TokenScores(logprobs.view(ids.shape), entropy.view(ids.shape) if with_entropy else None)


class _Chunking(NamedTuple):
    temperature: float
    tokens: int
    with_entropy: bool
    keep_bytes: int


class _ChunkedScores(torch.autograd.Function):
    """logprobs (N,) and entropy (N,) of tokens, given hidden (N, H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, how: _Chunking
    ) -> tuple[Tensor, Tensor]:
        wide = _wide(hidden.dtype)
        logprobs, shift, log_total = (hidden.new_empty(len(ids), dtype=wide) for _ in range(3))
        entropy = hidden.new_empty(len(ids) if how.with_entropy else 0, dtype=wide)
        ctx.kept = {}
        room = how.keep_bytes if any(ctx.needs_input_grad[:3]) else 0
        for start in range(0, len(ids), how.tokens):
            rows = slice(start, start + how.tokens)
            z = _scaled_logits(hidden[rows], weight, bias, how)
            shift[rows] = z.amax(-1)
            z -= shift[rows].unsqueeze(-1)
            chosen = z.gather(-1, ids[rows].unsqueeze(-1)).squeeze(-1)
            room -= z.numel() * z.element_size()
            if room >= 0:
                ctx.kept[start] = z
            # Entropy is log(sum e^z) - sum(z e^z) / sum(e^z); otherwise the exponentials may overwrite z.
            e = z.exp() if how.with_entropy or room >= 0 else z.exp_()
            total = e.sum(-1)
            log_total[rows] = total.log()
            logprobs[rows] = chosen - log_total[rows]
            if how.with_entropy:
                moment = e.mul_(z.clamp_(min=torch.finfo(wide).min)).sum(-1)
                entropy[rows] = log_total[rows] - moment / total
        ctx.save_for_backward(hidden, weight, bias, ids, shift, log_total)
        ctx.how = how
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, shift, log_total = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        sink = _Gradients(hidden, weight, bias, need_hidden, need_weight, need_bias)
        # Selection, not multiplication: a masked token may hold NaN, and NaN * 0 is NaN.
        for start in range(0, len(ids), ctx.how.tokens):
            rows = start + (grad[start : start + ctx.how.tokens] != 0).nonzero().squeeze(-1)
            if not len(rows):
                continue
            h = hidden[rows]
            if start in ctx.kept:
                z = ctx.kept[start][rows - start]
            else:
                z = _scaled_logits(h, weight, bias, ctx.how).sub_(shift[rows].unsqueeze(-1))
            p = z.sub_(log_total[rows].unsqueeze(-1)).exp_()
            pull = (grad[rows] / ctx.how.temperature).unsqueeze(-1)
            p.mul_(-pull).scatter_add_(-1, ids[rows].unsqueeze(-1), pull)  # (onehot - p) * pull
            sink.add(rows, p, h)
        return *sink.results(), None, None


class _Gradients:
    """One buffer per gradient, added to chunk after chunk."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, need_hidden: bool, need_weight: bool, need_bias: bool
    ) -> None:
        self.weight_value = weight
        self.hidden = torch.zeros_like(hidden) if need_hidden else None
        # Half-precision sums over many chunks would lose the small ones; keep the buffer wide.
        self.weight = torch.zeros_like(weight, dtype=_wide(weight.dtype)) if need_weight else None
        self.bias = torch.zeros_like(bias, dtype=_wide(bias.dtype)) if need_bias and bias is not None else None
        self.bias_dtype = bias.dtype if bias is not None else weight.dtype

    def add(self, rows: Tensor, logit_grad: Tensor, h: Tensor) -> None:
        """logit_grad (n, V) of tokens `rows`, whose hidden state is h (n, H)."""
        if self.bias is not None:
            self.bias += logit_grad.sum(0)
        narrow = logit_grad.to(h.dtype)
        if self.hidden is not None:
            self.hidden[rows] = narrow @ self.weight_value
        if self.weight is not None and self.weight.dtype == h.dtype:
            self.weight.addmm_(narrow.t(), h)
        elif self.weight is not None:
            self.weight += narrow.t() @ h

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        weight = None if self.weight is None else self.weight.to(self.weight_value.dtype)
        bias = None if self.bias is None else self.bias.to(self.bias_dtype)
        return self.hidden, weight, bias


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, how: _Chunking) -> Tensor:
    """(n, V) logits over temperature, in the wide dtype; a fresh tensor that may be overwritten."""
    z = torch.nn.functional.linear(hidden, weight, bias).to(_wide(hidden.dtype))
    return z.div_(how.temperature) if how.temperature != 1.0 else z


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _align(logits: Tensor, width: int, prompt_lens: Tensor | Sequence[int] | None) -> Tensor:
    """(B, T, V) the logits that predict each completion token."""
    rows, length = logits.shape[:2]
    if prompt_lens is None:
        prompt_lens = [length - width] * rows
    starts = torch.as_tensor(prompt_lens, device=logits.device)
    if starts.shape != (rows,) or starts.is_floating_point():
        raise ShapeError(
            f"prompt_lens has shape {tuple(starts.shape)} and type {starts.dtype} for {rows} rows",
            "a broadcast prompt length aligns only one row",
            "pass one integer per row",
        )
    outside = ((starts < 1) | (starts - 1 + width > length)).nonzero().flatten().tolist()
    if outside:
        row = outside[0]
        raise ShapeError(
            f"row {row}: prompt of {int(starts[row])} and completion of {width} do not fit in {length} positions "
            f"({len(outside)} such rows)",
            "the position lies outside its row; flat indexing would read the next row's logits",
            "pass 1 <= prompt_len and prompt_len - 1 + T <= L",
        )
    positions = (starts - 1).unsqueeze(1) + torch.arange(width, device=logits.device)
    return logits[torch.arange(rows, device=logits.device).unsqueeze(1), positions]


def require_scorable(lead: torch.Size, ids: Tensor, vocabulary: int, temperature: float) -> None:
    """Refuse a temperature of 0, ids without logits of their own, and ids that the output layer does not have."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"temperature = {temperature}", "greedy decoding has no distribution to score", "use a value above 0"
        )
    if ids.shape != lead:
        raise ShapeError(
            f"ids have shape {tuple(ids.shape)}, logits or hidden states lead with {tuple(lead)}",
            "each token needs exactly one row of logits",
            "pass ids of the leading shape",
        )
    outside = ((ids < 0) | (ids >= vocabulary)).nonzero()
    if len(outside):
        where = tuple(outside[0].tolist())
        raise ShapeError(
            f"row {where[0]}: token id {int(ids[where])} at {where} is outside the vocabulary of {vocabulary}",
            "the tokenizer and the output layer disagree, or padding is not a token id",
            "pad with a valid id and mask it; check the tokenizer",
        )
