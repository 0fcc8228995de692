"""The named rules: each looks at the smoothed curves and says whether this evaluation speaks for a collapse.

Owns       what counts as evidence, and the sentence that a stopped run prints.
Promises   every rule has its own name and reason; a fall counts only beyond the noise margin; a rule whose numbers
           never arrive is named, not silently satisfied.
Never      remembers that it fired: `collapse.py` does.

    decline            held-out fell below its best while the reward did not
    gap                the reward gained more than held-out, by more than max_proxy_real_gap
    kl                 the policy is further from where it began than kl_hard_stop
    both_falling       held-out and reward both fell below their best
    entropy_collapse   the policy no longer explores
    length_explosion   completions have grown many times over
    length_collapse    completions have shrunk to stubs
    reward_saturated   the reward is as high as ever and the same for all: nothing is left to learn from

Read next: `collapse.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from surefoot.guards.noise import Level

REWARD_SLACK = 2.0
"""Standard errors by which the reward may lie below its value at held-out's best and still count as not falling."""
GAP_SHARE = 1.1
"""Share of the margin that the gap needs: it stops at the first evaluation, so noise has more chances."""
BOTH_SHARE = 0.8
"""Share of the margin that each of two falls needs: that both are noise is far less likely than that one is."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the rules compare with; checked by `HeldOutGuard`."""

    rules: tuple[str, ...]
    min_steps: int
    decline_patience: int
    ema_alpha: float
    margin_se: float
    min_drop: float
    kl_hard_stop: float | None
    max_proxy_real_gap: float | None
    min_entropy_ratio: float
    max_length_ratio: float
    saturation_patience: int


@dataclass
class Ratio:
    """A smoothed series beside the mean of its first values."""

    alpha: float
    first: int
    count: int = 0
    ema: float = 0.0
    baseline: float = 0.0

    def fold(self, value: float) -> None:
        """Take in the next value."""
        self.count += 1
        self.ema = value if self.count == 1 else self.ema + self.alpha * (value - self.ema)
        if self.count <= self.first:
            self.baseline += (value - self.baseline) / self.count

    def below(self, ratio: float) -> bool:
        """Whether the average is under this share of the baseline, once there is one."""
        return self.count > self.first and self.ema < ratio * self.baseline

    def above(self, ratio: float) -> bool:
        """Whether it is over it."""
        return self.count > self.first and self.ema > ratio * self.baseline


@dataclass
class Curves:
    """Everything the rules can see: smoothed curves and what was true at held-out's best."""

    heldout: Level
    reward: Level
    lead: Level
    """Held-out minus reward: when it falls, the gap grows."""
    entropy: Ratio
    length: Ratio
    kl_ema: float | None = None
    kl_nonfinite: int = 0
    reward_at_best: float = 0.0
    best_step: int = 0
    first_reward: float = 0.0
    first_heldout: float = 0.0
    best_reward: float | None = None
    last_reward: float | None = None
    std_seen: bool = False
    saturated: bool = False
    streak: int = 0
    held: dict[str, int] = field(default_factory=dict)
    """Per rule, for how many folds in a row it has held."""

    @property
    def gap(self) -> float:
        """Reward gain minus held-out gain since the first evaluation, both smoothed."""
        return (self.reward.ema - self.first_reward) - (self.heldout.ema - self.first_heldout)


def make_curves(limits: Limits) -> Curves:
    """Empty curves for these limits."""
    heldout, reward, lead = (Level(limits.ema_alpha, limits.margin_se) for _ in range(3))
    entropy, length = (Ratio(limits.ema_alpha, limits.min_steps) for _ in range(2))
    return Curves(heldout, reward, lead, entropy, length)


@dataclass(frozen=True)
class Rule:
    """One way to collapse."""

    holds: Callable[[Curves, Limits], bool]
    reason: Callable[[Curves, Limits], str]
    patience: Callable[[Limits], int]
    fed: Callable[[Curves], bool] = lambda curves: True
    """Whether the numbers that the rule needs have ever arrived."""


def decline_margin(curves: Curves, limits: Limits) -> float:
    """What held-out has to fall below its best."""
    return max(curves.heldout.margin(), limits.min_drop)


def _decline(curves: Curves, limits: Limits) -> bool:
    reward = curves.reward
    slack = REWARD_SLACK * reward.sd * reward.spread
    return curves.heldout.drop > decline_margin(curves, limits) and reward.ema >= curves.reward_at_best - slack


def _decline_reason(curves: Curves, limits: Limits) -> str:
    level, gain = curves.heldout, curves.reward.ema - curves.reward_at_best
    return (
        f"held-out fell to {level.ema:.4g}, {level.drop:.4g} below its best ({level.best:.4g} at step "
        f"{curves.best_step}; noise margin {decline_margin(curves, limits):.2g}), while the reward went {gain:+.4g}"
    )


def _gap(curves: Curves, limits: Limits) -> bool:
    allowed = limits.max_proxy_real_gap or 0.0
    # The gap since the first evaluation carries that one's noise for good; the growth since the narrowest does not.
    return curves.gap > allowed and curves.lead.drop > allowed + curves.lead.margin(GAP_SHARE)


def _gap_reason(curves: Curves, limits: Limits) -> str:
    return (
        f"proxy_real_gap is {curves.gap:.4g}, above {limits.max_proxy_real_gap or 0.0:g}: since the first evaluation "
        f"the reward gained {curves.reward.ema - curves.first_reward:+.4g} and held-out "
        f"{curves.heldout.ema - curves.first_heldout:+.4g} (noise margin {curves.lead.margin(GAP_SHARE):.2g})"
    )


def _kl(curves: Curves, limits: Limits) -> bool:
    limit = math.inf if limits.kl_hard_stop is None else limits.kl_hard_stop
    return curves.kl_nonfinite > 0 or (curves.kl_ema is not None and curves.kl_ema > limit)


def _kl_reason(curves: Curves, limits: Limits) -> str:
    if curves.kl_nonfinite:
        return f"kl_to_init was not finite in {curves.kl_nonfinite} evaluation(s), which counts as a breach"
    return f"kl_to_init is {curves.kl_ema:.4g} on average, above kl_hard_stop = {limits.kl_hard_stop:g}"


def _both_falling(curves: Curves, limits: Limits) -> bool:
    heldout, reward = curves.heldout, curves.reward
    far = heldout.drop > max(heldout.margin(BOTH_SHARE), limits.min_drop)
    return far and reward.drop > reward.margin(BOTH_SHARE)


def _both_reason(curves: Curves, limits: Limits) -> str:
    del limits
    return (
        f"both are falling: held-out is {curves.heldout.drop:.4g} and the reward {curves.reward.drop:.4g} "
        "below its best"
    )  # fmt: skip


def _entropy(curves: Curves, limits: Limits) -> bool:
    return curves.entropy.below(limits.min_entropy_ratio)


def _entropy_reason(curves: Curves, limits: Limits) -> str:
    return f"entropy {_against(curves.entropy)}, below {limits.min_entropy_ratio:g} of it: the policy stopped exploring"


def _explosion(curves: Curves, limits: Limits) -> bool:
    return curves.length.above(limits.max_length_ratio)


def _explosion_reason(curves: Curves, limits: Limits) -> str:
    return f"completion length {_against(curves.length)}, more than {limits.max_length_ratio:g} times as long"


def _shrinking(curves: Curves, limits: Limits) -> bool:
    return curves.length.below(1.0 / limits.max_length_ratio)


def _shrinking_reason(curves: Curves, limits: Limits) -> str:
    return f"completion length {_against(curves.length)}, less than a {limits.max_length_ratio:g}th"


def _against(series: Ratio) -> str:
    return f"is {series.ema:.4g} on average against {series.baseline:.4g} in the first {series.first} evaluations"


def _saturated(curves: Curves, limits: Limits) -> bool:
    del limits
    return curves.saturated


def _saturated_reason(curves: Curves, limits: Limits) -> str:
    what = "has no spread within the batch" if curves.std_seen else "did not change"
    return (
        f"the reward is saturated: at its highest ({curves.last_reward:.4g}) it {what} in {limits.saturation_patience} "
        "evaluations in a row, so nothing is left to learn from"
    )


def _patience(limits: Limits) -> int:
    return limits.decline_patience


RULES: dict[str, Rule] = {
    "decline": Rule(_decline, _decline_reason, _patience),
    "gap": Rule(_gap, _gap_reason, lambda limits: 1),
    "kl": Rule(_kl, _kl_reason, lambda limits: 1, lambda c: c.kl_ema is not None or c.kl_nonfinite > 0),
    "both_falling": Rule(_both_falling, _both_reason, _patience),
    "entropy_collapse": Rule(_entropy, _entropy_reason, _patience, lambda c: c.entropy.count > 0),
    "length_explosion": Rule(_explosion, _explosion_reason, _patience, lambda c: c.length.count > 0),
    "length_collapse": Rule(_shrinking, _shrinking_reason, _patience, lambda c: c.length.count > 0),
    "reward_saturated": Rule(_saturated, _saturated_reason, lambda limits: limits.saturation_patience),
}


def breached(curves: Curves, limits: Limits) -> list[str]:
    """Names of the rules that call for a stop at this fold; counts for how long each has held."""
    found = []
    for name in limits.rules:
        rule = RULES[name]
        held = curves.held[name] = curves.held.get(name, 0) + 1 if rule.holds(curves, limits) else 0
        patience = rule.patience(limits)
        if name == "decline":
            # Never on a fold in which held-out rose; with a margin of 0 only the plain streak is left.
            lasting = held >= patience and curves.heldout.fell and limits.margin_se > 0
            stop = held > 0 and (curves.streak >= patience or lasting)
        else:
            stop = held >= patience
        if stop and curves.heldout.count >= limits.min_steps:
            found.append(name)
    return found
