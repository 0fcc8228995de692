"""Policy-gradient losses: tensors in, tensors out.

Owns       the per-token objective, its clips and corrections, and how tokens become one number.
Promises   the denominator comes from `StepTotals`, so any cut of a step adds up to the same loss,
           gradient and statistics; a masked position is selected away, so NaN there stays there.
Never      reads a config, moves a device, logs, or counts a denominator from what it was handed.

    logp, old_logp --ratio--> clip --(* correction)--> + beta * kl --> + nll --> / step totals

Axes: B rows (one per sample), T completion positions.

Read next: docs/maths.md for the formulas, `reference.py` for the same thing in slow motion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError

# -- What one loss is made of: every number and choice, and what a step holds ---------------------
# Owns       `LossSettings`, pure numbers and strings, and `StepTotals`, the denominators.
# Promises   a value out of range, or a pair that contradicts itself, cannot be constructed.
# Never      imports torch or reads a config file.


LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"]
Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
KLEstimator = Literal["k1", "k2", "k3"]

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"),
    "level": (None, "token", "sequence"),
    "kl_estimator": ("k1", "k2", "k3"),
    "correction": (None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
}


class StepTotals(NamedTuple):
    """What one optimiser step holds, over all its microbatches and ranks."""

    rows: int
    """Samples with at least one trained token."""
    tokens: int
    """Trained tokens."""
    max_completion_length: int
    """The configured limit: the constant that Dr. GRPO divides by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """Every number and choice that shapes the loss; a pair that contradicts itself cannot be built."""

    loss_type: LossType = "dapo"
    level: Literal["token", "sequence"] | None = None
    """Ratio per token, or one per sequence (geometric mean over its tokens); None: sequence for gspo, else token."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """Upper clip, `epsilon` when None. For cispo: the cap on the weight itself, required, at least 1."""
    delta: float | None = None
    """Dual clip: the largest ratio a negative advantage is multiplied with."""
    beta: float = 0.0
    kl_estimator: KLEstimator = "k3"
    kl_input_clamp: float | None = None
    """The log-ratio is kept in [-c, c] before the estimator; where that acts, the token has no KL gradient."""
    kl_output_clamp: float | None = None
    """The estimate, weighed, is kept in [-c, c]; where that acts, the token has no KL gradient."""
    kl_bias_correction: bool = True
    """Multiply the estimate by the token's (differentiable) ratio; its gradient is that of KL(policy || reference)."""
    correction: Correction | None = None
    """Weigh tokens by learner over sampler probability; above the bound truncate or mask."""
    correction_clip: float = 3.0
    correction_floor: float | None = None
    """Lower bound of the correction weight; below it truncate or mask, as above the upper one."""
    force_on_policy_ratio: bool = False
    """Treat the ratio as exactly 1, with its gradient."""
    positive_nll: float = 0.0
    """Coefficient of -logp on rows with a positive advantage."""

    def __post_init__(self) -> None:
        problems = [*self._values(), *self._pairs()]
        if problems:
            raise ConfigError(
                "; ".join(problems),
                "such a loss is not the one that was asked for",
                "change one of the two values named; docs/maths.md has the table",
            )

    @property
    def whole_rows(self) -> bool:
        """Whether a row has one ratio, and not one per token."""
        return self.level == "sequence" or self.loss_type == "gspo"

    @property
    def high(self) -> float:
        """The upper clip in force."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    def _values(self) -> Iterator[str]:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                yield f"{name} = {getattr(self, name)!r} is none of {', '.join(map(str, allowed))}"
        for name in ("beta", "positive_nll", "high"):
            if not 0 <= getattr(self, name) < float("inf"):
                yield f"{name} = {getattr(self, name)} must be finite and not negative"
        if not 0 <= self.epsilon < 1:
            yield f"epsilon = {self.epsilon}: 1 - epsilon must lie in (0, 1]"
        for name in ("kl_input_clamp", "kl_output_clamp", "correction_clip"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                yield f"{name} = {value} must be above 0"

    def _pairs(self) -> Iterator[str]:
        if self.delta is not None and not self.delta > 1 + self.high:
            yield f"delta = {self.delta} with an upper clip of 1 + {self.high}: it must lie above"
        if self.correction_floor is not None and not 0 <= self.correction_floor < self.correction_clip:
            yield f"correction_floor = {self.correction_floor} with correction_clip = {self.correction_clip}"
        if self.correction_floor is not None and self.correction is None:
            yield f"correction_floor = {self.correction_floor} with correction = None: it would bound nothing"
        if self.beta == 0 and (self.kl_input_clamp is not None or self.kl_output_clamp is not None):
            yield "a KL clamp with beta = 0: there is no KL to clamp"
        if self.whole_rows and self.correction in ("token_truncate", "token_mask"):
            yield f"level = sequence with correction = {self.correction}: a sequence ratio takes a sequence correction"
        if self.loss_type == "gspo" and self.level == "token":
            yield "loss_type = gspo with level = token: gspo has one ratio per row"
        if self.force_on_policy_ratio and self.delta is not None:
            yield f"force_on_policy_ratio with delta = {self.delta}: a ratio of 1 never reaches a second clip"
        if self.loss_type == "cispo":
            yield from self._cispo_pairs()

    def _cispo_pairs(self) -> Iterator[str]:
        if self.level == "sequence":
            yield "loss_type = cispo with level = sequence: cispo weighs single tokens"
        if self.delta is not None:
            yield f"loss_type = cispo with delta = {self.delta}: cispo has no second clip"
        if self.force_on_policy_ratio:
            yield "loss_type = cispo with force_on_policy_ratio: a weight of 1 never reaches its cap"
        if self.epsilon_high is None or self.epsilon_high < 1:
            yield (
                f"loss_type = cispo with epsilon_high = {self.epsilon_high}: it caps the weight itself, and a cap "
                "below 1 only scales every token down; 5.0 is usual"
            )


# -- Policy-gradient losses: tensors in, tensors out ----------------------------------------------


LARGEST_LOG = 20.0
"""Weights above e^20 are taken as e^20: in ratios that a clip bounds anyway, and in statistics of corrections."""


class LossTerms(NamedTuple):
    """A loss and its statistics; adding those of any cut gives those of the whole."""

    loss: Tensor
    """() already divided by the step's totals."""
    sums: dict[str, Tensor]
    """() each, detached; `stats.finish` turns them into means."""


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    settings: LossSettings,
    totals: StepTotals,
    ref_logp: Tensor | None = None,
    sampler_logp: Tensor | None = None,
) -> LossTerms:
    """The share that these rows have in the step's loss.

    Args:
        logp: (B, T) under the policy being trained.
        old_logp: (B, T) under the learner's weights that the rollouts came from. No gradient.
        advantages: (B,) one number per row, shared by the row's tokens.
        mask: (B, T) bool, True where the policy itself chose the token and it carries loss.
        totals: of the whole step, not of these rows.
        ref_logp: (B, T) under the reference; needed exactly when beta > 0.
        sampler_logp: (B, T) as the engine reported them; needed when a correction is set.

    Returns:
        `LossTerms`; the gradient on a masked position is exactly zero.
    """
    _require_inputs(logp, old_logp, advantages, mask, settings, ref_logp, sampler_logp)
    hidden = ~mask
    logp = logp.masked_fill(hidden, 0.0)
    old_logp = old_logp.detach().masked_fill(hidden, 0.0)
    weight = advantages.detach().to(logp.dtype).unsqueeze(1)  # (B, 1): along rows, never along tokens
    counts = mask.sum(1)

    anchor = logp.detach() if settings.force_on_policy_ratio else old_logp
    ratio = _ratio(logp - anchor, counts, weight, settings)
    per_token = _objective(ratio, logp, weight, settings)
    sums = _ratio_sums(ratio, logp - anchor, weight, mask, settings)
    if settings.correction is not None and sampler_logp is not None:
        gap = (old_logp - sampler_logp.detach()).masked_fill(hidden, 0.0)
        correction, added = _correction(gap, mask, settings)
        per_token = per_token * correction
        sums |= added
    sums["policy_loss"] = _reduce(per_token.detach(), mask, counts, settings, totals)
    if settings.beta > 0 and ref_logp is not None:
        kl = _penalty(logp, ref_logp.detach().masked_fill(hidden, 0.0), (logp - anchor).exp(), settings)
        per_token = per_token + settings.beta * kl
        sums |= {"kl": _total(kl, mask), "kl_tokens": mask.sum()}
    if settings.positive_nll > 0:
        nll = torch.where(weight > 0, -logp, torch.zeros_like(logp))
        per_token = per_token + settings.positive_nll * nll
        sums |= {"positive_nll": _total(nll, mask), "positive_tokens": ((weight > 0) & mask).sum()}
    loss = _reduce(per_token, mask, counts, settings, totals)
    return LossTerms(loss, sums | {"loss": loss.detach(), "tokens": mask.sum(), "rows": (counts > 0).sum()})


def kl_in_reward(
    rewards: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, *, beta: float, estimator: KLEstimator = "k1"
) -> Tensor:
    """(B,) rewards less beta times each row's summed KL estimate, detached: for KL in the reward.

    No run calls this: there is no key for it. k1 is the natural choice here: its sum is an unbiased estimate of the
    sequence KL. Use either this or `LossSettings.beta`; both together penalise twice.
    """
    for name, tensor in (("ref_logp", ref_logp), ("mask", mask)):
        require_shape(name, tensor, logp.shape)
    require_shape("rewards", rewards, logp.shape[:1])
    hidden = ~mask
    gap = (ref_logp - logp).detach().masked_fill(hidden, 0.0)
    return rewards - beta * estimate_kl(gap, estimator).sum(1)


def estimate_kl(gap: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token KL(policy || reference) from gap = log reference - log policy, at policy samples."""
    if estimator == "k1":
        return -gap
    if estimator == "k2":
        return gap.square() / 2
    if estimator == "k3":
        return torch.expm1(gap) - gap  # exp(gap) - 1 would round a small gap away
    raise ConfigError(f"kl_estimator = {estimator!r}", "it must be k1, k2 or k3", "correct the spelling")


def _ratio(log_ratio: Tensor, counts: Tensor, weight: Tensor, settings: LossSettings) -> Tensor:
    """(B, T), or (B, 1) for sequence level. Masked entries of `log_ratio` are 0 already.

    Where a clip bounds the ratio from above, its logarithm is bounded first: the loss is the same, and an exponential
    that overflows would turn the gradient of 0 into NaN. A negative advantage without `delta` has no such clip.
    """
    if settings.whole_rows:
        log_ratio = (log_ratio.sum(1) / counts.clamp(min=1)).unsqueeze(1)
    highest = max(1 + settings.high, settings.delta or 0.0)
    bounded = log_ratio.clamp(max=max(LARGEST_LOG, math.log(highest)))
    if settings.loss_type == "cispo" or settings.delta is not None:
        return bounded.exp()
    return torch.where(weight >= 0, bounded, log_ratio).exp()


def _objective(ratio: Tensor, logp: Tensor, weight: Tensor, settings: LossSettings) -> Tensor:
    """(B, T) the loss of each token before corrections."""
    if settings.loss_type == "cispo":
        return -ratio.detach().clamp(max=settings.high) * weight * logp
    bounded = ratio.clamp(1 - settings.epsilon, 1 + settings.high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    return -torch.minimum(ratio * weight, bounded * weight).expand_as(logp)


def _correction(gap: Tensor, mask: Tensor, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight (B, T) or (B, 1) from the *old* policy, so it does not change with inner steps; and its sums.

    The weight of a long row may overflow: truncation and mask know what to do with it, a mean does not. So the
    statistic counts every weight as at most e^20, and how many were larger.
    """
    whole = settings.correction in ("sequence_truncate", "sequence_mask")
    log_raw = gap.sum(1, keepdim=True) if whole else gap
    raw, shown = log_raw.exp(), log_raw.clamp(max=LARGEST_LOG).exp()
    floor = 0.0 if settings.correction_floor is None else settings.correction_floor
    bounded = raw.clamp(floor, settings.correction_clip)
    outside = raw != bounded  # NaN differs from itself: it counts as outside, and is kept below
    masking = settings.correction in ("token_mask", "sequence_mask")
    used = torch.where(outside & ~raw.isnan(), torch.zeros_like(raw), raw) if masking else bounded
    valid = mask.any(1, keepdim=True) if whole else mask
    sums = {
        "correction_raw": _total(shown, valid),
        "correction_log": _total(log_raw, valid),
        "correction_used": _total(used, valid),
        "corrections_overflown": ((log_raw > LARGEST_LOG) & valid).sum(),
        "corrections_bounded": (outside & valid).sum(),
        "corrections": valid.sum(),
    }
    if masking:
        sums |= {"rejected_tokens": (outside & mask).sum(), "weighed_tokens": mask.sum()}
    return used, sums


def _penalty(logp: Tensor, ref_logp: Tensor, ratio: Tensor, settings: LossSettings) -> Tensor:
    """(B, T) the KL estimate of each token, weighed by the token's own `ratio` (B, T) if asked to.

    A token that a clamp holds pushes nowhere: its estimate is constant, so its weight must be constant too. With the
    weight's gradient left in, a token far below the reference would be pushed further down.
    """
    low, high = settings.kl_input_clamp, settings.kl_output_clamp
    true_gap = ref_logp - logp
    gap = true_gap if low is None else true_gap.clamp(-low, low)
    kl = estimate_kl(gap, settings.kl_estimator)
    if settings.kl_bias_correction:
        free = gap == true_gap  # where the clamp of the input does not act
        if settings.kl_estimator == "k3":
            # d(ratio * k3)/d(logp) is exactly ratio * -gap, but autograd takes it as the difference of two numbers of
            # size e^gap: in float32 that is off by 12 at a gap of 20. Same value, same gradient, no cancellation.
            kl = (kl * ratio).detach() - (ratio * gap * free).detach() * (logp - logp.detach())
        else:
            kl = kl * torch.where(free, ratio, ratio.detach())
    return kl if high is None else kl.clamp(-high, high)


def _reduce(per_token: Tensor, mask: Tensor, counts: Tensor, settings: LossSettings, totals: StepTotals) -> Tensor:
    """() the rows' share of the step's loss."""
    per_token = per_token.masked_fill(~mask, 0.0)
    if settings.loss_type in ("grpo", "gspo"):
        return (per_token.sum(1) / counts.clamp(min=1)).sum() / _positive("rows", totals.rows)
    if settings.loss_type == "dr_grpo":
        limit = _positive("max_completion_length", totals.max_completion_length)
        return per_token.sum() / (_positive("rows", totals.rows) * limit)
    return per_token.sum() / _positive("tokens", totals.tokens)


@torch.no_grad()
def _ratio_sums(
    ratio: Tensor, log_ratio: Tensor, weight: Tensor, mask: Tensor, settings: LossSettings
) -> dict[str, Tensor]:
    """Counts over ratios: tokens, or rows at sequence level.

    `clip_places` is what shares of clipped ones are taken of; the learner adds rows that it did not have to score.
    """
    valid = mask.any(1, keepdim=True) if settings.whole_rows else mask
    sums = {"ratios": valid.sum(), "ratio": _total(ratio, valid), "abs_log_ratio": _total(log_ratio.abs(), mask)}
    sums["clip_places"] = valid.sum()
    if settings.loss_type == "cispo":
        return sums | {"cispo_clipped": ((ratio > settings.high) & (weight > 0) & valid).sum()}
    low = (ratio < 1 - settings.epsilon) & (weight < 0) & valid
    high = (ratio > 1 + settings.high) & (weight > 0) & valid
    sums |= {"clip_low": low.sum(), "clip_high": high.sum(), "clip_region": (low | high).sum()}
    if settings.delta is not None:
        sums["delta_clipped"] = ((ratio > settings.delta) & (weight < 0) & valid).sum()
    return sums


def _total(values: Tensor, valid: Tensor) -> Tensor:
    return values.detach().masked_fill(~valid, 0.0).sum()


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ShapeError(
            f"the step's {name} is {value}",
            "a step without trained tokens has no loss, and 0 would look like one",
            "skip the step with a reason, or take totals over the whole step",
        )
    return value


def _require_inputs(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    ref_logp: Tensor | None,
    sampler_logp: Tensor | None,
) -> None:
    named = {"old_logp": old_logp, "mask": mask, "ref_logp": ref_logp, "sampler_logp": sampler_logp}
    for name, tensor in named.items():
        if tensor is not None:
            require_shape(name, tensor, logp.shape)
    require_shape("advantages", advantages, logp.shape[:1])
    if mask.dtype != torch.bool:
        raise ShapeError(f"mask has type {mask.dtype}", "masks select, they do not weigh", "pass a bool tensor")
    if settings.beta > 0 and ref_logp is None:
        raise ShapeError(f"beta = {settings.beta} without ref_logp", "there is nothing to stay near", "score it")
    if settings.correction is not None and sampler_logp is None:
        raise ShapeError(
            f"correction = {settings.correction} without sampler_logp", "there is nothing to correct for", "pass it"
        )


def require_shape(
    name: str,
    tensor: Tensor,
    expected: torch.Size,
    *,
    why: str = "broadcasting would accept it and train on the wrong weights",
    fix: str = "check how {name} was packed; see docs/maths.md",
) -> None:
    """Refuse another shape with a `ShapeError`; `{name}` in `fix` is the tensor's."""
    if tensor.shape != expected:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}", why, fix.format(name=name)
        )


__all__ = ["LossSettings", "LossTerms", "StepTotals", "estimate_kl", "kl_in_reward", "policy_loss", "require_shape"]
