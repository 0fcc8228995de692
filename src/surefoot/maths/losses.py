"""Policy-gradient losses: tensors in, tensors out.

Owns       the registry of loss types, `LOSSES`, the corrections and penalties that all of them share, and how tokens
           become one number.
Promises   the denominator comes from `StepTotals`, so any cut of a step adds up to the same loss,
           gradient and statistics; a masked position is selected away, so NaN there stays there.
Never      reads a config, moves a device, logs, or counts a denominator from what it was handed.

    logp, old_logp --ratio--> clip --(* correction)--> + beta * kl --> + nll --> / step totals

Axes: B rows (one per sample), T completion positions.

Read next: docs/maths.md for the formulas, `reference.py` for the same thing in slow motion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError

# -- What one loss is made of: every number and choice, and what a step holds ---------------------
# Owns       `LossSettings`, pure numbers and strings, and `StepTotals`, the denominators.
# Promises   a value out of range, or a pair that contradicts itself, cannot be constructed.
# Never      imports torch or reads a config file.


Correction = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
KLEstimator = Literal["k1", "k2", "k3"]

_CHOICES: dict[str, tuple[str | None, ...]] = {
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

    loss_type: str = "dapo"
    """A name in `LOSSES`; with `own`, the name of that."""
    own: LossKind | None = None
    """A loss type that is in no table: one of the user's own."""
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
        known = self.own is not None or self.loss_type in LOSSES
        unknown = [] if known else [f"loss_type = {self.loss_type!r} is none of {', '.join(LOSSES)}"]
        problems = [*unknown, *self._values(), *(self._pairs() if known else ())]
        if problems:
            raise ConfigError(
                "; ".join(problems),
                "such a loss is not the one that was asked for",
                "change one of the two values named; docs/maths.md has the table",
            )

    @property
    def kind(self) -> LossKind:
        """The entry behind `loss_type`."""
        return LOSSES[self.loss_type] if self.own is None else self.own

    @property
    def whole_rows(self) -> bool:
        """Whether a row has one ratio, and not one per token."""
        return self.level == "sequence" or self.kind.row_ratio

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
        if self.force_on_policy_ratio and self.delta is not None:
            yield f"force_on_policy_ratio with delta = {self.delta}: a ratio of 1 never reaches a second clip"
        yield from self.kind.refuses(self)


# -- The loss types: each is one entry, with its formula, its counts, and how tokens become one number
# Owns       `LOSSES`; `config.choices.LOSSES` has the same names for those who may not import torch, and
# `reference.LOSSES` the same formulas in slow motion.
# Never      masks, corrects or penalises: that is common to all of them, below.


class LossInputs(NamedTuple):
    """What the formula of a loss type sees. Entries where `mask` is False are 0, and nothing of them counts."""

    ratio: Tensor
    """(B, T) new over old probability, or (B, 1) where a row has one ratio."""
    logp: Tensor
    """(B, T) under the policy being trained; carries the gradient."""
    old_logp: Tensor
    """(B, T) what the ratio is taken against. No gradient."""
    advantages: Tensor
    """(B, 1) along rows, never along tokens. No gradient."""
    mask: Tensor
    """(B, T) bool."""
    settings: LossSettings

    @property
    def valid(self) -> Tensor:
        """Where there is a ratio: the mask, or (B, 1) rows with a token."""
        return self.mask.any(1, keepdim=True) if self.settings.whole_rows else self.mask


Sums = Mapping[str, Tensor]
Reduction = Callable[[Tensor, Tensor, StepTotals], Tensor]
"""`reduce(per_token, counts, totals)`: (B, T) with 0 where the mask is False, (B,) trained tokens of each row -> ()."""


def mean_over_tokens(per_token: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
    """Every token of the step counts the same."""
    return per_token.sum() / _positive("tokens", totals.tokens)


def mean_over_rows(per_token: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
    """Every row counts the same: a long row's token counts less."""
    return (per_token.sum(1) / counts.clamp(min=1)).sum() / _positive("rows", totals.rows)


def sum_over_limit(per_token: Tensor, counts: Tensor, totals: StepTotals) -> Tensor:
    """A constant: length neither rewards nor punishes."""
    limit = _positive("max_completion_length", totals.max_completion_length)
    return per_token.sum() / (_positive("rows", totals.rows) * limit)


def _nothing(inputs: LossInputs) -> Sums:
    return {}


def _no_pairs(settings: LossSettings) -> Iterator[str]:
    yield from ()


@dataclass(frozen=True, kw_only=True, slots=True)
class LossKind:
    """A loss type: one of ours, or one of the user's own.

    Example:
        >>> LossKind(objective=lambda inputs: -inputs.ratio * inputs.advantages, reduce=mean_over_rows).row_ratio
        False
    """

    objective: Callable[[LossInputs], Tensor]
    """(B, T) the loss of each token, in the type of `logp`; (B, 1) will do where a row has one ratio."""
    reduce: Reduction = mean_over_tokens
    """How tokens become one number; the denominators are those of the whole step."""
    sums: Callable[[LossInputs], Sums] = _nothing
    """Word -> () sum over the mask, logged as `loss/WORD`, divided by the tokens that were scored."""
    counts: Callable[[LossInputs], Sums] = _nothing
    """Sums that `stats.MEANS` has metrics for, such as tokens clipped."""
    refuses: Callable[[LossSettings], Iterator[str]] = _no_pairs
    """One line for each pair of settings that does not go together."""
    row_ratio: bool = False
    """Always one ratio per row."""
    caps_ratio: bool = False
    """Ratios are bounded from above whatever the sign of the advantage, so e^20 stands for any that is larger."""
    every_row: bool = False
    """Rows with an advantage of 0 have a gradient too, and have to be scored."""


def _clipped(inputs: LossInputs) -> Tensor:
    ratio, weight, settings = inputs.ratio, inputs.advantages, inputs.settings
    bounded = ratio.clamp(1 - settings.epsilon, 1 + settings.high)
    if settings.delta is not None:
        ratio = ratio.clamp(max=settings.delta)
    return -torch.minimum(ratio * weight, bounded * weight)


def _clip_counts(inputs: LossInputs) -> Sums:
    ratio, weight, valid, settings = inputs.ratio, inputs.advantages, inputs.valid, inputs.settings
    low = (ratio < 1 - settings.epsilon) & (weight < 0) & valid
    high = (ratio > 1 + settings.high) & (weight > 0) & valid
    sums = {"clip_low": low.sum(), "clip_high": high.sum(), "clip_region": (low | high).sum()}
    if settings.delta is not None:
        sums["delta_clipped"] = ((ratio > settings.delta) & (weight < 0) & valid).sum()
    return sums


def _weighed(inputs: LossInputs) -> Tensor:
    return -inputs.ratio.detach().clamp(max=inputs.settings.high) * inputs.advantages * inputs.logp


def _cap_counts(inputs: LossInputs) -> Sums:
    capped = (inputs.ratio > inputs.settings.high) & (inputs.advantages > 0) & inputs.valid
    return {"cispo_clipped": capped.sum()}


def _cispo_pairs(settings: LossSettings) -> Iterator[str]:
    if settings.level == "sequence":
        yield "loss_type = cispo with level = sequence: cispo weighs single tokens"
    if settings.delta is not None:
        yield f"loss_type = cispo with delta = {settings.delta}: cispo has no second clip"
    if settings.force_on_policy_ratio:
        yield "loss_type = cispo with force_on_policy_ratio: a weight of 1 never reaches its cap"
    if settings.epsilon_high is None or settings.epsilon_high < 1:
        yield (
            f"loss_type = cispo with epsilon_high = {settings.epsilon_high}: it caps the weight itself, and a cap "
            "below 1 only scales every token down; 5.0 is usual"
        )


def _gspo_pairs(settings: LossSettings) -> Iterator[str]:
    if settings.level == "token":
        yield "loss_type = gspo with level = token: gspo has one ratio per row"


LOSSES: dict[str, LossKind] = {
    "grpo": LossKind(objective=_clipped, counts=_clip_counts, reduce=mean_over_rows),
    "bnpo": LossKind(objective=_clipped, counts=_clip_counts),
    "dr_grpo": LossKind(objective=_clipped, counts=_clip_counts, reduce=sum_over_limit),
    "dapo": LossKind(objective=_clipped, counts=_clip_counts),
    "cispo": LossKind(objective=_weighed, counts=_cap_counts, refuses=_cispo_pairs, caps_ratio=True),
    "gspo": LossKind(
        objective=_clipped, counts=_clip_counts, reduce=mean_over_rows, refuses=_gspo_pairs, row_ratio=True
    ),
}
"""Loss type -> its entry."""
OWN_SUM = "loss/"
"""Sums that a loss type declares under a word of its own begin so, and so do their metrics."""


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
    inputs = LossInputs(ratio, logp, anchor, weight, mask, settings)
    per_token = _per_token(inputs)
    sums = _ratio_sums(inputs, logp - anchor)
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
    if settings.kind.caps_ratio or settings.delta is not None:
        return bounded.exp()
    return torch.where(weight >= 0, bounded, log_ratio).exp()


def _per_token(inputs: LossInputs) -> Tensor:
    """(B, T) the loss of each token before corrections, by the loss type's own formula."""
    per_token, logp = inputs.settings.kind.objective(inputs), inputs.logp
    given: object = per_token
    if not isinstance(given, Tensor):
        raise ShapeError(
            f"the objective of loss_type = {inputs.settings.loss_type} gave a {type(given).__name__}",
            "a loss is one number per token, which are added up behind it",
            "return a tensor of the shape of logp",
        )
    rows = (logp.shape[0], 1)
    if per_token.shape != logp.shape and not (inputs.settings.whole_rows and per_token.shape == rows):
        raise ShapeError(
            f"the objective of loss_type = {inputs.settings.loss_type} gave the shape {tuple(per_token.shape)} for "
            f"log-probabilities of shape {tuple(logp.shape)}",
            "a loss is one number per token; masks, sums and denominators come behind it and belong to the whole step",
            "return a tensor of the shape of logp, neither summed nor averaged",
        )
    if per_token.dtype != logp.dtype:
        raise ShapeError(
            f"the objective of loss_type = {inputs.settings.loss_type} gave {per_token.dtype} for {logp.dtype}",
            "a coarser type loses digits, and a finer one would differ from what the run is compared with",
            "compute in the type of logp",
        )
    return per_token.expand_as(logp)


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
    return settings.kind.reduce(per_token.masked_fill(~mask, 0.0), counts, totals)


@torch.no_grad()
def _ratio_sums(inputs: LossInputs, log_ratio: Tensor) -> dict[str, Tensor]:
    """Counts over ratios: tokens, or rows at sequence level; and what the loss type itself counts.

    `clip_places` is what shares of clipped ones are taken of; the learner adds rows that it did not have to score.
    """
    valid = inputs.valid
    sums = {"ratios": valid.sum(), "ratio": _total(inputs.ratio, valid)}
    sums["abs_log_ratio"] = _total(log_ratio.abs(), inputs.mask)
    sums["clip_places"] = valid.sum()
    kind = inputs.settings.kind
    return sums | dict(kind.counts(inputs)) | {f"{OWN_SUM}{name}": value for name, value in _named_sums(inputs).items()}


def _named_sums(inputs: LossInputs) -> Mapping[str, Tensor]:
    """What the loss type adds up under names of its own."""
    sums = inputs.settings.kind.sums(inputs)
    given: Mapping[str, object] = sums
    for name, value in given.items():
        is_sum = isinstance(value, Tensor) and value.shape == ()
        if not is_sum or not name.isidentifier() or name.endswith(("_min", "_max")):
            shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(
                f"loss_type = {inputs.settings.loss_type} declares the sum {name!r} with {shape}",
                "a sum over tokens is one number under a plain word, and is added over every cut of the step",
                "return {word: tensor of shape ()}, each summed over inputs.mask",
            )
    return {name: value.detach() for name, value in sums.items()}


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


__all__ = [
    "LOSSES", "LossInputs", "LossKind", "LossSettings", "LossTerms", "StepTotals", "estimate_kl", "kl_in_reward",
    "mean_over_rows", "mean_over_tokens", "policy_loss", "require_shape", "sum_over_limit",
]  # fmt: skip
