"""Statistics as sums: collected anywhere, added in any order, divided once.

Owns       the mismatch between sampler and learner, entropy, and how sums become metrics.
Promises   a metric is the same for every cut of the step; keys that end in `_min` and `_max`
           reduce as such, all others add; what is undefined is left out of the result, never 0 or 1.
Never      logs, and never divides before the whole step is known.

    token_sums(...) + sequence_sums(...) + LossTerms.sums --merge--> sums --finish--> {"kl": 0.012, ...}

Axes: B rows, T completion positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from surefoot.maths.losses import OWN_SUM, estimate_kl, require_shape

Sums = Mapping[str, Tensor]

MEANS: dict[str, tuple[str, str]] = {
    "scored_entropy": ("entropy", "entropy_tokens"),
    "kl": ("kl", "kl_tokens"),
    "positive_nll": ("positive_nll", "positive_tokens"),
    "scored_share": ("entropy_tokens", "step_tokens"),
    "clip_ratio/low_mean": ("clip_low", "clip_places"),
    "clip_ratio/high_mean": ("clip_high", "clip_places"),
    "clip_ratio/region_mean": ("clip_region", "clip_places"),
    "clip_ratio/delta_mean": ("delta_clipped", "clip_places"),
    "cispo_clip_ratio": ("cispo_clipped", "clip_places"),
    "probs_ratio": ("ratio", "ratios"),
    "abs_log_ratio": ("abs_log_ratio", "tokens"),
    "correction/raw_mean": ("correction_raw", "corrections"),
    "correction/log_mean": ("correction_log", "corrections"),
    "correction/used_mean": ("correction_used", "corrections"),
    "correction/bounded_share": ("corrections_bounded", "corrections"),
    "correction/rejected_share": ("rejected_tokens", "weighed_tokens"),
    "token_mult_prob_error": ("mult_prob_error", "mismatch_tokens"),
    "gen_kl_error": ("gen_kl", "mismatch_tokens"),
    "policy_kl_error": ("policy_kl", "mismatch_tokens"),
    "js_divergence_error": ("js_divergence", "mismatch_tokens"),
    "approx_entropy": ("approx_entropy", "mismatch_tokens"),
    "sampling/sampling_logp_difference/mean": ("abs_difference", "mismatch_tokens"),
    "sampling/importance_sampling_ratio/mean": ("sampling_ratio", "mismatch_tokens"),
    "seq_mult_prob_error/mean": ("seq_error", "seq_rows"),
    "seq_mult_prob_error/kept_mean": ("seq_kept_error", "seq_kept_rows"),
    "seq_mult_prob_error/masked_correct_share": ("seq_masked_correct", "seq_masked_judged"),
    "sdpo/live_fraction": ("distill_rows_live", "distill_rows"),
    "sdpo/teacher_gain": ("distill_gain", "distill_gain_tokens"),
    "replay/accuracy": ("preference_wins", "preference_pairs"),
    "replay/margin": ("preference_margin", "preference_pairs"),
}
"""Metric: numerator and count. A count of zero, or a sum nobody collected, leaves the metric out."""

EXTREMES: dict[str, tuple[str, str]] = {
    "sampling/sampling_logp_difference/max": ("abs_difference_max", "mismatch_tokens"),
    "sampling/importance_sampling_ratio/min": ("sampling_ratio_min", "mismatch_tokens"),
    "sampling/importance_sampling_ratio/max": ("sampling_ratio_max", "mismatch_tokens"),
    "seq_mult_prob_error/min": ("seq_error_min", "seq_rows"),
    "seq_mult_prob_error/max": ("seq_error_max", "seq_rows"),
    "seq_mult_prob_error/kept_min": ("seq_kept_error_min", "seq_kept_rows"),
    "seq_mult_prob_error/kept_max": ("seq_kept_error_max", "seq_kept_rows"),
}
"""Metric: smallest or largest value seen, and the count that must not be zero."""

TOTALS: dict[str, str] = {
    "loss": "loss",
    "policy_loss": "policy_loss",
    "correction/overflow": "corrections_overflown",
    "trained_tokens": "tokens",
    "trained_rows": "rows",
    "seq_mult_prob_error/masked_rows": "seq_masked_rows",
    "sdpo/loss": "distill_loss",
    "sdpo/too_long": "distill_too_long",
    "replay/loss": "preference_loss",
    "replay/pairs": "preference_pairs",
}
"""Metric: a sum that is already the value."""


@torch.no_grad()
def token_sums(
    mask: Tensor, *, logp: Tensor | None = None, sampler_logp: Tensor | None = None, entropy: Tensor | None = None
) -> dict[str, Tensor]:
    """Sums over the masked tokens of what was measured; nothing for what was not.

    Args:
        mask: (B, T) bool.
        logp: (B, T) under the learner, on the weights that sampled (before the update).
        sampler_logp: (B, T) as the engine reported them.
        entropy: (B, T) of the learner.
    """
    sums: dict[str, Tensor] = {}
    if entropy is not None:
        _require_shape("entropy", entropy, mask.shape)
        sums |= {"entropy": _add(entropy, mask), "entropy_tokens": mask.sum()}
    if logp is None or sampler_logp is None:
        return sums
    learner, sampler = _selected(logp, sampler_logp, mask)
    gap = learner - sampler
    ratio = gap.exp()
    mixture = torch.logaddexp(learner, sampler) - math.log(2.0)
    # Both k3 terms against the mixture are added, not averaged; docs/maths.md has the worked example.
    js = estimate_kl(learner - mixture, "k3") + estimate_kl(sampler - mixture, "k3")
    sums |= {
        "mismatch_tokens": mask.sum(),
        "mult_prob_error": _add(gap.abs().exp(), mask),
        "gen_kl": _add(estimate_kl(gap, "k3"), mask),
        "policy_kl": _add(estimate_kl(-gap, "k3"), mask),
        "js_divergence": _add(js, mask),
        "approx_entropy": _add(-ratio * learner, mask),
        "abs_difference": _add(gap.abs(), mask),
        "sampling_ratio": _add(ratio, mask),
    }
    return sums | _range("abs_difference", gap.abs(), mask) | _range("sampling_ratio", ratio, mask)


def sequence_errors(logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> Tensor:
    """(B,) mean of exp|logp - sampler_logp| over each row's masked tokens; NaN for a row without any. As below."""
    learner, sampler = _selected(logp.detach(), sampler_logp, mask)
    return (learner - sampler).abs().exp().masked_fill(~mask, 0.0).sum(1) / mask.sum(1)


@torch.no_grad()
def sequence_sums(
    logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    *,
    threshold: float | None = None,
    correct: Tensor | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Per-sequence mismatch before and after masking whole sequences above `threshold`. No run calls this.

    Args:
        correct: (B,) bool, which rows were right; gives the share of correct ones among the masked.

    Returns:
        sums, and keep (B,) bool: False for rows above the threshold. Rows without a masked-in
        token contribute to nothing.
    """
    errors = sequence_errors(logp, sampler_logp, mask)
    present = mask.any(1)
    over = torch.zeros_like(present) if threshold is None else present & ~(errors <= threshold)
    kept = present & ~over
    sums = {"seq_error": _add(errors, present), "seq_rows": present.sum(), "seq_kept_rows": kept.sum()}
    sums |= {"seq_kept_error": _add(errors, kept), "seq_masked_rows": over.sum()}
    sums |= _range("seq_error", errors, present) | _range("seq_kept_error", errors, kept)
    if correct is not None:
        sums |= {"seq_masked_correct": (correct.bool() & over).sum(), "seq_masked_judged": over.sum()}
    return sums, ~over


def merge(parts: Iterable[Sums]) -> dict[str, Tensor]:
    """One dict of sums from those of several microbatches or ranks."""
    merged: dict[str, Tensor] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = _combine(name, merged[name], value) if name in merged else value
    return merged


def finish(sums: Sums) -> dict[str, float]:
    """Metrics by name. An undefined one is absent; a non-finite one stays non-finite, so that checks fail."""
    metrics: dict[str, float] = {}
    for metric, (name, count) in MEANS.items():
        if name in sums and count in sums and int(sums[count]) > 0:
            metrics[metric] = float(sums[name]) / int(sums[count])
    for metric, (name, count) in EXTREMES.items():
        if name in sums and count in sums and int(sums[count]) > 0:
            metrics[metric] = float(sums[name])
    for metric, name in TOTALS.items():
        if name in sums:
            metrics[metric] = float(sums[name])
    for name in sums:  # what a loss type adds up under a word of its own
        if name.startswith(OWN_SUM) and int(sums["tokens"]) > 0:
            metrics[name] = float(sums[name]) / int(sums["tokens"])
    if metrics.get("scored_share", 1.0) == 1.0 and "scored_entropy" in metrics:
        metrics["entropy"] = metrics["scored_entropy"]  # of every sampled token: what others mean by that name
    return metrics


def _combine(name: str, left: Tensor, right: Tensor) -> Tensor:
    if name.endswith("_min"):
        return torch.minimum(left, right)
    if name.endswith("_max"):
        return torch.maximum(left, right)
    return left + right


def _selected(logp: Tensor, sampler_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both sides with masked positions set to 0, in float64 where the device has it."""
    _require_shape("logp", logp, mask.shape)
    _require_shape("sampler_logp", sampler_logp, mask.shape)
    dtype = torch.float32 if logp.device.type == "mps" else torch.float64
    hidden = ~mask
    return logp.to(dtype).masked_fill(hidden, 0.0), sampler_logp.to(dtype).masked_fill(hidden, 0.0)


def _add(values: Tensor, mask: Tensor) -> Tensor:
    return values.masked_fill(~mask, 0.0).sum()


def _range(name: str, values: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Smallest and largest masked value; +inf and -inf when there is none, which `finish` leaves out."""
    if values.numel() == 0:
        return {}
    low = values.masked_fill(~mask, math.inf).amin()
    return {f"{name}_min": low, f"{name}_max": values.masked_fill(~mask, -math.inf).amax()}


_require_shape = partial(
    require_shape, why="broadcasting would compare foreign tokens", fix="pass {name} of the mask's shape"
)
