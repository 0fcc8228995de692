"""What one loss is made of: every number and choice, and what a step holds.

Owns       `LossSettings`, pure numbers and strings, and `StepTotals`, the denominators.
Promises   a value out of range, or a pair that contradicts itself, cannot be constructed.
Never      imports torch or reads a config file.

Read next: `losses.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from surefoot.errors import ConfigError

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
