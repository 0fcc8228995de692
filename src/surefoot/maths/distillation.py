"""Self-distillation: the policy that saw a hint teaches the policy that did not.

Owns       the divergence between student and teacher at every completion token, and how it becomes one number.
Promises   the teacher gets no gradient at all; a row without feedback is selected away, so whatever its teacher
           holds stays there; any cut of a step adds up to the same loss, gradient and sums.
Never      reads a config, moves a device, logs, or counts a denominator from what it was handed.

    plain context  + completion --> student logits \\
                                                    >-- divergence per token --(* ratio)--> / tokens of the step
    hinted context + completion --> teacher logits /    (same completion, same token index)

With P the teacher, Q the student and w the mixing weight:

    w = 0        KL(P || Q), forward: cover what the teacher would say
    w = 1        KL(Q || P), reverse: say only what the teacher would say
    0 < w < 1    w KL(P || M) + (1 - w) KL(Q || M) with M = w P + (1 - w) Q, the generalised Jensen-Shannon
                 divergence; it is about w KL(P || Q) near 0, so the two ends are not its limits

Axes: B rows (one per sample), T completion positions, L sequence positions, V vocabulary, N live tokens, K top tokens.

Read next: `losses.py`, whose manner this follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surefoot.errors import ConfigError, ShapeError
from surefoot.maths.logprobs import _align
from surefoot.maths.losses import LossTerms, require_shape

__all__ = ["completion_logits", "distillation_loss", "live_mask", "refuse_misaligned"]


class _How(NamedTuple):
    mixing: float
    top_k: int | None
    temperature: float


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    tokens_in_step: int,
    mixing: float = 1.0,
    has_feedback: Tensor | None = None,
    top_k: int | None = None,
    importance_clip: float | None = None,
    log_ratio: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> LossTerms:
    """The share that these rows have in the step's distillation loss.

    Args:
        student_logits: (B, T, V) that predict each completion token, without the hint. Log-probabilities do as well.
        teacher_logits: (B, T, V) that predict the same tokens after the hint. Detached here.
        mask: (B, T) bool, True where the policy itself chose the token.
        tokens_in_step: live tokens (`live_mask(mask, has_feedback).sum()`) of the whole step, not of these rows.
        mixing: 0 forward KL, 1 reverse KL, in between generalised Jensen-Shannon.
        has_feedback: (B,) bool, which rows have a teacher; None means all of them.
        top_k: compare the student's K likeliest tokens, and all others as one; None compares every token.
        importance_clip: weigh each token by its ratio to the policy that sampled it, kept at or below this.
        log_ratio: (B, T) log of that ratio, current less sampling policy; given exactly with `importance_clip`.
        chunk_tokens: hold the distributions of so many tokens at a time, and compute them again for the gradient.

    Returns:
        `LossTerms`. `distill_rows_live / distill_rows` is the share of samples with a live teacher.
    """
    _require_inputs(student_logits, teacher_logits, mask, has_feedback, log_ratio)
    _require_numbers(mixing, top_k, importance_clip, temperature, chunk_tokens, log_ratio is not None)
    if tokens_in_step < 1:
        raise ShapeError(
            f"the step's live tokens are {tokens_in_step}",
            "a step without a live teacher has no distillation loss, and 0 would look like one",
            "leave the channel out of this step and count it as dead; see has_feedback",
        )
    live = live_mask(mask, has_feedback)
    how = _How(mixing, top_k, temperature)
    per_token = _divergences(student_logits, teacher_logits.detach(), live, how, chunk_tokens)
    sums = {"distill_divergence": per_token.detach().sum(), "distill_tokens": live.sum()}
    if importance_clip is not None and log_ratio is not None:
        ratio = log_ratio.detach().to(per_token.dtype)[live].exp()
        per_token = per_token * ratio.clamp(max=importance_clip)
        sums["distill_clipped"] = (ratio > importance_clip).sum()
    loss = per_token.sum() / tokens_in_step
    sums |= {"distill_rows": mask.any(1).sum(), "distill_rows_live": live.any(1).sum()}
    return LossTerms(loss, sums | {"distill_loss": loss.detach()})


def live_mask(mask: Tensor, has_feedback: Tensor | None) -> Tensor:
    """(B, T) bool: the tokens that a teacher speaks to."""
    return mask if has_feedback is None else mask & has_feedback.unsqueeze(1)


def completion_logits(logits: Tensor, width: int, prompt_lens: Tensor | Sequence[int]) -> Tensor:
    """(B, T, V) the logits that predict each of `width` completion tokens, from whole sequences (B, L, V).

    The hint makes the teacher's prompt longer, so student and teacher are cut out with their own `prompt_lens`;
    after that token t is token t on both sides.
    """
    if logits.dim() != 3:
        raise ShapeError(f"logits have shape {tuple(logits.shape)}", "rows, positions, vocabulary", "pass (B, L, V)")
    return _align(logits, width, prompt_lens)


def refuse_misaligned(student_ids: Tensor, teacher_ids: Tensor, mask: Tensor) -> None:
    """Raise unless both contexts end in the same completion: (B, T) token ids, equal wherever `mask` is True."""
    for name, tensor in (("student_ids", student_ids), ("teacher_ids", teacher_ids)):
        _require_shape(name, tensor, mask.shape)
    wrong = ((student_ids != teacher_ids) & mask).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise ShapeError(
            f"row {row}, token {place}: the student scores id {int(student_ids[row, place])}, the teacher "
            f"{int(teacher_ids[row, place])} ({len(wrong)} such tokens)",
            "a teacher that is one token off teaches the next word for this one",
            "append the very same completion ids to the hinted prompt, and cut with each context's own prompt_lens",
        )


def _divergences(student: Tensor, teacher: Tensor, live: Tensor, how: _How, chunk_tokens: int | None) -> Tensor:
    """(N,) one divergence per live token, in the order of `live`."""
    if chunk_tokens is None:
        return _divergence(student[live], teacher[live], how)
    places = live.nonzero()
    parts = [
        checkpoint(_divergence_at, student, teacher, part, how, use_reentrant=False)
        for part in places.split(chunk_tokens)
        if len(part)
    ]
    return torch.cat(parts) if parts else _divergence(student[live], teacher[live], how)


def _divergence_at(student: Tensor, teacher: Tensor, places: Tensor, how: _How) -> Tensor:
    rows, columns = places.unbind(1)
    return _divergence(student[rows, columns], teacher[rows, columns], how)


def _divergence(student_logits: Tensor, teacher_logits: Tensor, how: _How) -> Tensor:
    """(N,) from logits (N, V)."""
    wide = torch.float64 if student_logits.dtype == torch.float64 else torch.float32
    student, teacher = (
        torch.log_softmax(logits.to(wide) / how.temperature, dim=-1) for logits in (student_logits, teacher_logits)
    )
    if how.top_k is not None and how.top_k < student.shape[-1]:
        top = student.detach().topk(how.top_k, dim=-1).indices
        student, teacher = _bucketed(student, top), _bucketed(teacher, top)
    if how.mixing == 0:
        return _kl(teacher, student)
    if how.mixing == 1:
        return _kl(student, teacher)
    floor = _floor(student)
    shares = (student.clamp(min=floor) + math.log1p(-how.mixing), teacher.clamp(min=floor) + math.log(how.mixing))
    mixture = torch.logaddexp(*shares)
    return how.mixing * _kl(teacher, mixture) + (1 - how.mixing) * _kl(student, mixture)


def _bucketed(logp: Tensor, top: Tensor) -> Tensor:
    """(N, K + 1) the chosen tokens, and all others as one; a whole distribution again."""
    floor = _floor(logp)
    rest = logp.clamp(min=floor).scatter(-1, top, floor).logsumexp(-1, keepdim=True)
    rest = rest.masked_fill(rest < floor / 2, -math.inf)  # nobody is left: impossible, not merely rare
    return torch.cat([logp.gather(-1, top), rest], dim=-1)


def _floor(logp: Tensor) -> float:
    """Stands for -inf under a sum of exponentials: a sum of nothing but -inf has a NaN gradient, this one has 0."""
    return torch.finfo(logp.dtype).min / 4


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """(N,) KL(p || q) of log-probabilities (N, V). What p never says costs nothing, even where q forbids it."""
    weight = p.exp()
    never = weight == 0
    return (weight * (p.masked_fill(never, 0.0) - q.masked_fill(never, 0.0))).sum(-1)


def _require_inputs(
    student: Tensor, teacher: Tensor, mask: Tensor, has_feedback: Tensor | None, log_ratio: Tensor | None
) -> None:
    if student.dim() != 3:
        raise ShapeError(f"student_logits have shape {tuple(student.shape)}", "rows, tokens, vocabulary", "(B, T, V)")
    _require_shape("teacher_logits", teacher, student.shape)
    _require_shape("mask", mask, student.shape[:2])
    if log_ratio is not None:
        _require_shape("log_ratio", log_ratio, mask.shape)
    if has_feedback is not None:
        _require_shape("has_feedback", has_feedback, mask.shape[:1])
    for name, tensor in (("mask", mask), ("has_feedback", has_feedback)):
        if tensor is not None and tensor.dtype != torch.bool:
            raise ShapeError(f"{name} has type {tensor.dtype}", "masks select, they do not weigh", "pass a bool tensor")


def _require_numbers(
    mixing: float, top_k: int | None, clip: float | None, temperature: float, chunk: int | None, has_ratio: bool
) -> None:
    problems = {
        f"mixing = {mixing} lies outside [0, 1]": not 0 <= mixing <= 1,
        f"top_k = {top_k} is below 1": top_k is not None and top_k < 1,
        f"importance_clip = {clip} is not above 0": clip is not None and not clip > 0,
        f"importance_clip = {clip} with{'' if has_ratio else 'out'} log_ratio": has_ratio is (clip is None),
        f"temperature = {temperature} is not above 0": not 0 < temperature < math.inf,
        f"chunk_tokens = {chunk} is below 1": chunk is not None and chunk < 1,
    }
    if any(problems.values()):
        raise ConfigError(
            "; ".join(problem for problem, there in problems.items() if there),
            "such a loss is not the one that was asked for",
            "change the value named; importance_clip and log_ratio come together",
        )


_require_shape = partial(
    require_shape,
    why="student and teacher are compared token by token; broadcasting would compare foreign ones",
    fix="cut both with `completion_logits`, to the same number of completion tokens",
)
