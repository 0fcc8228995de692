"""Log-probabilities where each rank holds a part of the vocabulary: no rank ever has all logits of a token.

Owns       the softmax over parts: two small exchanges per token, whatever the vocabulary's size.
Promises   equal to `logprobs.compute_logprobs` on the whole vocabulary; rows are taken together by the length of their
           prompt, and none is read from another row; parts that leave a gap or overlap are refused.
Never      knows a process group: the caller hands in how numbers are added over the ranks.

No run calls this: a run's own learner has the whole output layer where it scores. It is for whoever trains with one
that is split over ranks by tensor parallelism and wants the same numbers.

Axes: B rows, L sequence positions, T completion positions, V vocabulary, W this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from surefoot.errors import ShapeError
from surefoot.maths.logprobs import require_scorable


class Exchange(Protocol):
    """How the ranks with the other parts are asked; both change the tensor in place, to the same values everywhere."""

    def sum(self, values: Tensor) -> None:
        """Add it up over the ranks."""

    def max(self, values: Tensor) -> None:
        """Take the largest over the ranks, place by place."""


def compute_logprobs_sharded(
    logits: Tensor, completion_ids: Tensor, *, first: int, vocabulary: int, exchange: Exchange,
    prompt_lens: Tensor | Sequence[int] | None = None, temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Log-probability of every completion token, as `logprobs.compute_logprobs` has it; all ranks call it together.

    Args:
        logits: (B, L, W) this rank's part, for the token ids from `first` on.
        completion_ids: (B, T) the same on every rank.
        vocabulary: V, of all parts together.
        prompt_lens: (B,) tokens before the completion; None means that every row's completion ends at L.
        temperature: the one the sampler used.

    Returns:
        (B, T), the same on every rank; its gradient reaches this rank's part of the logits.
    """
    _require_shapes(logits, completion_ids, first, vocabulary)
    rows, length, width = logits.shape[0], logits.shape[1], completion_ids.shape[1]
    lens = [length - width] * rows if prompt_lens is None else [int(n) for n in prompt_lens]
    _require_inside(lens, rows, length, width)
    require_scorable(completion_ids.shape, completion_ids, vocabulary, temperature)
    found = logits.new_zeros(completion_ids.shape, dtype=_wide(logits.dtype))
    for prompt in sorted(set(lens)):  # the same order on every rank
        alike = torch.tensor([row for row, each in enumerate(lens) if each == prompt], device=logits.device)
        part = logits[alike, prompt - 1 : prompt - 1 + width]
        scores = _PartScores.apply(part, completion_ids[alike], first, temperature, exchange)  # type: ignore[no-untyped-call]
        found = found.index_copy(0, alike, scores)
    return found


class _PartScores(torch.autograd.Function):
    """(n, T) log-probabilities of tokens, given this rank's part (n, T, W) of their logits."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ids: Tensor, first: int, temperature: float, exchange: Exchange) -> Tensor:
        z = part.to(_wide(part.dtype)) / temperature
        peak = z.amax(-1)
        exchange.max(peak)
        z -= peak.unsqueeze(-1)
        own = (ids >= first) & (ids < first + part.shape[-1])
        place = (ids - first).clamp(0, part.shape[-1] - 1).unsqueeze(-1)
        chosen = torch.where(own, z.gather(-1, place).squeeze(-1), 0.0)
        e = z.exp_()
        sums = torch.stack([e.sum(-1), chosen, own.to(e.dtype)])
        exchange.sum(sums)
        total, chosen, owners = sums
        if not bool((owners == 1).all()):
            raise ShapeError(
                f"a token of {ids.numel()} is in {int(owners.min())} to {int(owners.max())} parts of the vocabulary",
                "parts with a gap or an overlap would give a distribution that is none",
                "let each rank's `first` be where the part of the rank before it ends",
            )
        ctx.save_for_backward(e, total, own, place)
        ctx.temperature, ctx.dtype = temperature, part.dtype
        scores: Tensor = chosen - total.log()
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        e, total, own, place = ctx.saved_tensors
        pull = grad / ctx.temperature
        pulled = e * (-pull / total).unsqueeze(-1)
        pulled.scatter_add_(-1, place, (pull * own).unsqueeze(-1))  # (onehot - p) * pull
        return pulled.to(ctx.dtype), None, None, None, None


def _require_shapes(logits: Tensor, completion_ids: Tensor, first: int, vocabulary: int) -> None:
    fits = logits.dim() == 3 and completion_ids.dim() == 2 and logits.shape[0] == completion_ids.shape[0]
    if not fits or logits.shape[-1] < 1 or not 0 <= first <= vocabulary - logits.shape[-1]:
        raise ShapeError(
            f"logits {tuple(logits.shape)} from token id {first} on do not go with completion_ids "
            f"{tuple(completion_ids.shape)} and a vocabulary of {vocabulary}",
            "broadcasting would score tokens with foreign logits",
            "pass logits (B, L, W), completion_ids (B, T), and a part that lies inside the vocabulary",
        )


def _require_inside(lens: Sequence[int], rows: int, length: int, width: int) -> None:
    outside = [row for row, prompt in enumerate(lens) if not 1 <= prompt <= length + 1 - width]
    if len(lens) != rows or outside:
        told = f"row {outside[0]}: a prompt of {lens[outside[0]]}" if outside else f"{len(lens)} prompt lengths"
        raise ShapeError(
            f"{told} and completions of {width} do not fit {rows} rows of {length} positions",
            "a position outside its row would be scored by foreign logits",
            "pass one length per row, with 1 <= prompt_len and prompt_len - 1 + T <= L",
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
