"""Preferences between two recorded answers: raise the chosen one above the rejected one.

Owns       the pair, which pairs may be trained on, and the loss of a batch of them.
Promises   a pair without a reference, with equal sides, repeated, contradicted or of the wrong length is dropped
           under a named reason, never scored 0; any cut of a step adds up to the same loss, gradient and sums.
Never      reads a config, moves a device, logs, runs a model, or counts a denominator from what it was handed.

    traces --> PreferencePair --sift_pairs--> kept pairs --> log-probabilities --preference_loss--> LossTerms
                                    +-------> dropped["no_reference"], dropped["identical"], ...

    loss of a pair = -log sigmoid(beta * ((chosen - its reference) - (rejected - its reference)))

Axes: P pairs, B rows (one per sequence), T completion positions.

Read next: `losses.py`, whose manner this follows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError
from surefoot.maths.losses import LossTerms, require_shape

__all__ = ["PreferencePair", "SiftedPairs", "completion_logp", "preference_loss", "sift_pairs"]


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, of which the first was preferred.

    Example:
        >>> PreferencePair((1, 2), chosen_ids=(3, 9), rejected_ids=(4, 9), source="trace 17, 2 of 3 teachers").longest
        4
    """

    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]
    source: str
    """Where the preference comes from: trace, teachers, rule."""
    ref_chosen_logp: float | None = None
    """Log-probability of the whole chosen answer under the reference policy; None when nobody scored it."""
    ref_rejected_logp: float | None = None

    @property
    def longest(self) -> int:
        """Tokens of the prompt with the longer answer."""
        return len(self.prompt_ids) + max(len(self.chosen_ids), len(self.rejected_ids))


class SiftedPairs(NamedTuple):
    """The pairs that may be trained on, and how many were dropped, by reason."""

    kept: tuple[PreferencePair, ...]
    dropped: dict[str, int]


def sift_pairs(pairs: Iterable[PreferencePair], *, max_tokens: int, min_completion: int = 1) -> SiftedPairs:
    """Drop what cannot teach; each dropped pair has exactly one reason, the first that fits.

    no_source (nobody could check it), too_short, too_long, identical, no_reference, contradicted (the same two
    answers were preferred both ways round: both pairs go), repeated (the first one stays).

    Args:
        max_tokens: longest prompt with answer that is kept.
        min_completion: shortest answer that is kept, in tokens.
    """
    if max_tokens < 1 or min_completion < 1:
        raise ConfigError(
            f"max_tokens = {max_tokens}, min_completion = {min_completion}", "lengths count tokens", "use 1 or more"
        )
    everything = tuple(pairs)
    stated = {_answers(pair) for pair in everything}
    seen: set[tuple[tuple[int, ...], ...]] = set()
    kept: list[PreferencePair] = []
    dropped: Counter[str] = Counter()
    for pair in everything:
        reason = _reason(pair, max_tokens, min_completion)
        prompt, chosen, rejected = answers = _answers(pair)
        if reason is None and (prompt, rejected, chosen) in stated:
            reason = "contradicted"
        if reason is None and answers in seen:
            reason = "repeated"
        if reason is None:
            seen.add(answers)
            kept.append(pair)
        else:
            dropped[reason] += 1
    return SiftedPairs(tuple(kept), dict(dropped))


def completion_logp(logp: Tensor, mask: Tensor) -> Tensor:
    """(B,) log-probability of each whole answer: the sum over its tokens, from (B, T) and a bool mask (B, T)."""
    _require_shape("mask", mask, logp.shape)
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask has type {mask.dtype}", "masks select, they do not weigh", "pass a bool tensor")
    return logp.masked_fill(~mask, 0.0).sum(1)


def preference_loss(
    chosen_logp: Tensor,
    rejected_logp: Tensor,
    ref_chosen_logp: Tensor,
    ref_rejected_logp: Tensor,
    *,
    beta: float,
    pairs_in_step: int,
) -> LossTerms:
    """The share that these pairs have in the step's preference loss.

    Args:
        chosen_logp: (P,) log-probability of each chosen answer under the policy being trained.
        rejected_logp: (P,) the same of the rejected answers.
        ref_chosen_logp: (P,) the same under the reference. No gradient; NaN or infinite means that it is missing.
        ref_rejected_logp: (P,) of the rejected answers under the reference.
        beta: how far the policy may move from the reference; small is far.
        pairs_in_step: pairs with both references over the whole step, not over these rows.

    Returns:
        `LossTerms`; a pair without a reference adds nothing but to `preference_dropped`.
    """
    named = {"rejected_logp": rejected_logp, "ref_chosen_logp": ref_chosen_logp, "ref_rejected_logp": ref_rejected_logp}
    for name, tensor in named.items():
        _require_shape(name, tensor, chosen_logp.shape)
    if chosen_logp.dim() != 1:
        raise ShapeError(
            f"chosen_logp has shape {tuple(chosen_logp.shape)}", "one number per pair", "see completion_logp"
        )
    if not 0 < beta < math.inf:
        raise ConfigError(f"beta = {beta}", "at 0 every pair costs log 2 and teaches nothing", "use for example 0.1")
    if pairs_in_step < 1:
        raise ShapeError(
            f"the step's pairs are {pairs_in_step}",
            "a step without pairs has no preference loss, and 0 would look like one",
            "leave the channel out of this step and count it as dead",
        )
    reference = (ref_chosen_logp - ref_rejected_logp).detach()
    live = reference.isfinite()
    margin = (chosen_logp - rejected_logp)[live] - reference[live]
    per_pair = -torch.nn.functional.logsigmoid(beta * margin)
    loss = per_pair.sum() / pairs_in_step
    return LossTerms(loss, _sums(loss.detach(), per_pair.detach(), margin.detach(), live))


def _sums(loss: Tensor, per_pair: Tensor, margin: Tensor, live: Tensor) -> dict[str, Tensor]:
    return {
        "preference_loss": loss,
        "preference_total": per_pair.sum(),
        "preference_margin": margin.sum(),
        "preference_wins": (margin > 0).sum(),
        "preference_pairs": live.sum(),
        "preference_dropped": (~live).sum(),
    }


def _answers(pair: PreferencePair) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return pair.prompt_ids, pair.chosen_ids, pair.rejected_ids


def _reason(pair: PreferencePair, max_tokens: int, min_completion: int) -> str | None:
    """Why this pair cannot be trained on whatever the others are; None when it can."""
    references = (pair.ref_chosen_logp, pair.ref_rejected_logp)
    reasons = {
        "no_source": not pair.source,
        "too_short": min(len(pair.chosen_ids), len(pair.rejected_ids)) < min_completion,
        "too_long": pair.longest > max_tokens,
        "identical": pair.chosen_ids == pair.rejected_ids,
        "no_reference": any(logp is None or not math.isfinite(logp) for logp in references),
    }
    return next((reason for reason, there in reasons.items() if there), None)


_require_shape = partial(
    require_shape,
    why="broadcasting would compare the answers of different pairs",
    fix="check how {name} was collected: one entry per pair, in one order",
)
