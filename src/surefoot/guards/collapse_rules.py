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

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import ConfigError, InputError
from surefoot.guards.noise import Level

REWARD_SLACK = 2.0
"""Standard errors by which the reward may lie below its value at held-out's best and still count as not falling."""
GAP_SHARE = 1.1
"""Share of the margin that the gap needs: it stops at the first evaluation, so noise has more chances."""
BOTH_SHARE = 0.8
"""Share of the margin that each of two falls needs: that both are noise is far less likely than that one is."""


@dataclass(frozen=True, kw_only=True)
class CollapseLimits:
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


def make_curves(limits: CollapseLimits) -> Curves:
    """Empty curves for these limits."""
    heldout, reward, lead = (Level(limits.ema_alpha, limits.margin_se) for _ in range(3))
    entropy, length = (Ratio(limits.ema_alpha, limits.min_steps) for _ in range(2))
    return Curves(heldout, reward, lead, entropy, length)


@dataclass(frozen=True)
class Rule:
    """One way to collapse."""

    holds: Callable[[Curves, CollapseLimits], bool]
    reason: Callable[[Curves, CollapseLimits], str]
    patience: Callable[[CollapseLimits], int]
    fed: Callable[[Curves], bool] = lambda curves: True
    """Whether the numbers that the rule needs have ever arrived."""


def decline_margin(curves: Curves, limits: CollapseLimits) -> float:
    """What held-out has to fall below its best."""
    return max(curves.heldout.margin(), limits.min_drop)


def _decline(curves: Curves, limits: CollapseLimits) -> bool:
    reward = curves.reward
    slack = REWARD_SLACK * reward.sd * reward.spread
    return curves.heldout.drop > decline_margin(curves, limits) and reward.ema >= curves.reward_at_best - slack


def _decline_reason(curves: Curves, limits: CollapseLimits) -> str:
    level, gain = curves.heldout, curves.reward.ema - curves.reward_at_best
    return (
        f"held-out fell to {level.ema:.4g}, {level.drop:.4g} below its best ({level.best:.4g} at step "
        f"{curves.best_step}; noise margin {decline_margin(curves, limits):.2g}), while the reward went {gain:+.4g}"
    )


def _gap(curves: Curves, limits: CollapseLimits) -> bool:
    allowed = limits.max_proxy_real_gap or 0.0
    # The gap since the first evaluation carries that one's noise for good; the growth since the narrowest does not.
    return curves.gap > allowed and curves.lead.drop > allowed + curves.lead.margin(GAP_SHARE)


def _gap_reason(curves: Curves, limits: CollapseLimits) -> str:
    return (
        f"proxy_real_gap is {curves.gap:.4g}, above {limits.max_proxy_real_gap or 0.0:g}: since the first evaluation "
        f"the reward gained {curves.reward.ema - curves.first_reward:+.4g} and held-out "
        f"{curves.heldout.ema - curves.first_heldout:+.4g} (noise margin {curves.lead.margin(GAP_SHARE):.2g})"
    )


def _kl(curves: Curves, limits: CollapseLimits) -> bool:
    limit = math.inf if limits.kl_hard_stop is None else limits.kl_hard_stop
    return curves.kl_nonfinite > 0 or (curves.kl_ema is not None and curves.kl_ema > limit)


def _kl_reason(curves: Curves, limits: CollapseLimits) -> str:
    if curves.kl_nonfinite:
        return f"kl_to_init was not finite in {curves.kl_nonfinite} evaluation(s), which counts as a breach"
    return f"kl_to_init is {curves.kl_ema:.4g} on average, above kl_hard_stop = {limits.kl_hard_stop:g}"


def _both_falling(curves: Curves, limits: CollapseLimits) -> bool:
    heldout, reward = curves.heldout, curves.reward
    far = heldout.drop > max(heldout.margin(BOTH_SHARE), limits.min_drop)
    return far and reward.drop > reward.margin(BOTH_SHARE)


def _both_reason(curves: Curves, limits: CollapseLimits) -> str:
    del limits
    return (
        f"both are falling: held-out is {curves.heldout.drop:.4g} and the reward {curves.reward.drop:.4g} "
        "below its best"
    )  # fmt: skip


def _entropy(curves: Curves, limits: CollapseLimits) -> bool:
    return curves.entropy.below(limits.min_entropy_ratio)


def _entropy_reason(curves: Curves, limits: CollapseLimits) -> str:
    return f"entropy {_against(curves.entropy)}, below {limits.min_entropy_ratio:g} of it: the policy stopped exploring"


def _explosion(curves: Curves, limits: CollapseLimits) -> bool:
    return curves.length.above(limits.max_length_ratio)


def _explosion_reason(curves: Curves, limits: CollapseLimits) -> str:
    return f"completion length {_against(curves.length)}, more than {limits.max_length_ratio:g} times as long"


def _shrinking(curves: Curves, limits: CollapseLimits) -> bool:
    return curves.length.below(1.0 / limits.max_length_ratio)


def _shrinking_reason(curves: Curves, limits: CollapseLimits) -> str:
    return f"completion length {_against(curves.length)}, less than a {limits.max_length_ratio:g}th"


def _against(series: Ratio) -> str:
    return f"is {series.ema:.4g} on average against {series.baseline:.4g} in the first {series.first} evaluations"


def _saturated(curves: Curves, limits: CollapseLimits) -> bool:
    del limits
    return curves.saturated


def _saturated_reason(curves: Curves, limits: CollapseLimits) -> str:
    what = "has no spread within the batch" if curves.std_seen else "did not change"
    return (
        f"the reward is saturated: at its highest ({curves.last_reward:.4g}) it {what} in {limits.saturation_patience} "
        "evaluations in a row, so nothing is left to learn from"
    )


def _patience(limits: CollapseLimits) -> int:
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


def breached(curves: Curves, limits: CollapseLimits) -> list[str]:
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


# -- What a guard accepts: every setting and every number is checked before it changes anything ---


LIMIT_OF = {"kl": "kl_hard_stop", "gap": "max_proxy_real_gap"}
"""Rules that are on when their limit is given."""
STRONGEST_MARGIN = 20.0
LARGEST = 1e100
"""Beyond it differences overflow, and one value would blind the guard for good."""


def checked_limits(*, rules: Sequence[str] | None, **settings: Any) -> CollapseLimits:
    """The settings as `Limits`; all that is wrong with them is said at once.

    Raises:
        ConfigError: a value or a rule is refused (also a ValueError).
    """
    problems = [*_problems(settings), *([] if rules is None else _rule_problems(rules, settings))]
    if problems:
        raise ConfigError(
            "HeldOutGuard refused: " + "; ".join(problems),
            "a guard with a setting that means nothing looks like a guard and stops nothing",
            "correct the values above; docs/guards.md explains each",
        )
    given = [name for name, limit in LIMIT_OF.items() if settings[limit] is not None]
    return CollapseLimits(rules=tuple(rules) if rules is not None else ("decline", *sorted(given)), **settings)


def _problems(settings: dict[str, Any]) -> list[str]:
    found = []
    for name in ("min_steps", "decline_patience", "saturation_patience"):
        if not _is_whole(settings[name]) or settings[name] < 1:
            found.append(f"{name} = {settings[name]!r} is not a whole number of at least 1")
    ranges = {
        "ema_alpha": (0.0, 1.0, "above 0 and at most 1", False),
        "margin_se": (0.0, STRONGEST_MARGIN, f"between 0 and {STRONGEST_MARGIN:g}", True),
        "min_drop": (0.0, math.inf, "at least 0", True),
        "kl_hard_stop": (0.0, math.inf, "at least 0", True),
        "max_proxy_real_gap": (0.0, math.inf, "at least 0", True),
        "min_entropy_ratio": (0.0, 1.0, "above 0 and at most 1", False),
        "max_length_ratio": (1.0, math.inf, "above 1", False),
    }
    for name, (low, high, words, closed) in ranges.items():
        value = settings[name]
        if value is None and name in LIMIT_OF.values():
            continue
        inside = is_number(value) and math.isfinite(value) and low <= value <= high and (closed or value > low)
        if not inside:
            found.append(f"{name} = {value!r} is not a number {words}")
    return found


def _rule_problems(rules: Sequence[str], settings: dict[str, Any]) -> list[str]:
    if isinstance(rules, str) or not rules:
        return [f"rules = {rules!r} is not a list of at least one name (known: {', '.join(RULES)})"]
    found = [f"unknown rule {name!r} (known: {', '.join(RULES)})" for name in rules if name not in RULES]
    if len(set(rules)) != len(rules):
        found.append(f"rules = {list(rules)} names one twice")
    if "kl" in rules and settings["kl_hard_stop"] is None:
        found.append("the rule kl needs kl_hard_stop")
    for name, limit in LIMIT_OF.items():
        if name not in rules and settings[limit] is not None:
            found.append(f"{limit} is given and rules does not name {name}")
    return found


def finite(name: str, value: Any, *, least: float = -math.inf) -> float:
    """A finite number of at least `least`, as a float.

    Raises:
        InputError: it is not (also a ValueError).
    """
    if is_number(value) and least <= float(value) and abs(float(value)) < LARGEST:  # NaN is neither
        return float(value)
    wanted = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
    raise InputError(
        f"{name} is {value!r}, not {wanted}",
        "a guard that averages it in would be blind from here on",
        f"skip this evaluation or repair what measures {name}; the guard has not changed",
    )


def is_number(value: Any) -> bool:
    """Whether it can be compared as a float: numbers and one-element arrays, but no booleans and no text."""
    if isinstance(value, bool | str | bytes) or value is None:
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(name: str, value: Any) -> int:
    """A whole number of at least 0.

    Raises:
        InputError: it is not.
    """
    if _is_whole(value) and value >= 0:
        return int(value)
    raise InputError(
        f"{name} is {value!r}, not a whole number of at least 0",
        "a verdict has to name the step it belongs to",
        "pass the optimiser step",
    )


def number_or_none(name: str, value: Any) -> float | None:
    """A float that may be infinite or not a number, or None."""
    if value is None or is_number(value):
        return None if value is None else float(value)
    raise InputError(f"{name} is {value!r}, not a number", "it cannot be averaged", f"pass {name} as a float, or None")


# -- How often a guard is wrong and how long it takes, for its settings, in words and numbers -----
# Owns       the table of measured rates, and the sentences of `HeldOutGuard.describe()`.
# Promises   the figures are those of simulated runs: `benchmarks/guard_rates.py` measures again, and a test compares.
#
# What a false alarm costs and what a delay costs is for you to weigh; a guard that does not say its rates leaves you to
# find out. The chance that noise alone crosses a margin of z standard errors falls with exp(-z * z), so that two
# numbers
# per cell are enough for all margins; the delay grows in proportion to z.


COST, RAMP = 6.0, 40
"""The decline that delays are stated for: 6 noise deviations of held-out, lost over 40 evaluations."""
_PATIENCE = (1, 3, 10)
_MEASURED: dict[float, tuple[tuple[float, float, float, float], ...]] = {
    0.02: ((-0.57, 0.556, 36.0, 6.0), (-0.92, 0.565, 36.0, 6.0), (-1.6, 0.563, 36.1, 5.4)),
    0.05: ((1.19, 0.398, 19.0, 4.0), (0.84, 0.426, 19.1, 3.4), (0.35, 0.515, 23.0, 2.0)),
    0.1: ((2.43, 0.409, 15.3, 3.2), (1.72, 0.43, 16.3, 3.2), (0.95, 0.539, 24.1, 3.4)),
    0.2: ((3.1, 0.4, 14.4, 4.6), (2.29, 0.447, 16.4, 4.6), (1.2, 0.611, 24.4, 4.6)),
    0.5: ((4.54, 0.456, 16.2, 6.8), (2.76, 0.516, 21.1, 7.4), (1.1, 0.8, 30.1, 7.4)),
    1.0: ((5.12, 0.496, 21.8, 11.2), (1.86, 0.532, 33.0, 12.0), (1.07, 1.029, 46.2, 15.8)),
}
"""By ema_alpha and, inside, by patience: logarithm of the alarms per 100 evaluations at z = 0, what it loses per z * z,
the median delay at z = 4, and what it gains per unit of z. Flat curves, which are the worst case."""


@dataclass(frozen=True)
class Rates:
    """What to expect of a guard."""

    false_alarms: float
    """Per 100 evaluations of a healthy run; 1 or more means that noise alone will stop it."""
    delay: float | None
    """Median evaluations from the onset of the reference decline to the stop; None if it cannot be seen at all."""


def expected_rates(limits: CollapseLimits) -> Rates:
    """False alarms of all rules that judge by noise, and the delay of `decline`."""
    alarms = 0.0
    if "decline" in limits.rules:
        alarms += _alarms(limits, limits.margin_se, limits.decline_patience)
    if "gap" in limits.rules:
        alarms += _alarms(limits, limits.margin_se * GAP_SHARE, 1)
    return Rates(min(alarms, 1.0) if limits.margin_se else 1.0, _delay(limits))


def _alarms(limits: CollapseLimits, margin_se: float, patience: int) -> float:
    log_rate, per_square, _, _ = _cell(limits.ema_alpha, patience)
    return math.exp(log_rate - per_square * margin_se * margin_se)


def _delay(limits: CollapseLimits) -> float | None:
    visible = limits.margin_se * math.sqrt(2.0 * limits.ema_alpha / (2.0 - limits.ema_alpha))
    if "decline" not in limits.rules or visible >= COST:
        return None
    if not limits.margin_se:
        return float(limits.decline_patience)
    _, _, at_four, per_unit = _cell(limits.ema_alpha, limits.decline_patience)
    beyond = max(0, limits.decline_patience - _PATIENCE[-1])
    return max(float(limits.decline_patience), at_four + per_unit * (limits.margin_se - 4.0) + beyond)


def _cell(alpha: float, patience: int) -> list[float]:
    """The four numbers between the cells of the table; beyond its edge, those of the edge."""
    rows = [_between(_PATIENCE, row, patience) for row in _MEASURED.values()]
    return _between(tuple(_MEASURED), rows, alpha)


def _between(grid: Sequence[float], rows: Sequence[Sequence[float]], where: float) -> list[float]:
    right = min(max(bisect.bisect_left(grid, where), 1), len(grid) - 1)
    low, high = math.log(grid[right - 1]), math.log(grid[right])
    share = min(max((math.log(where) - low) / (high - low), 0.0), 1.0)
    return [a + share * (b - a) for a, b in zip(rows[right - 1], rows[right], strict=True)]


def describe(limits: CollapseLimits) -> str:
    """Rules and rates, one line each."""
    rates = expected_rates(limits)
    derived = {"shorter": 1.0 / limits.max_length_ratio, "gap": limits.max_proxy_real_gap or 0.0}
    lines = [
        f"HeldOutGuard: no verdict before evaluation {limits.min_steps}, averages with ema_alpha {limits.ema_alpha:g}",
        *(f"  {name}: {_WORDS[name].format(l=limits, **derived)}" for name in limits.rules),
        f"  expected false alarms: {_alarm_words(limits, rates)}",
    ]
    if "decline" in limits.rules:
        lines.append(f"  expected detection delay: {_delay_words(rates)}")
    return "\n".join(lines)


def _alarm_words(limits: CollapseLimits, rates: Rates) -> str:
    if not limits.margin_se:
        return "margin_se is 0: noise alone will stop a healthy run"
    if rates.false_alarms >= 1.0:
        return "1 or more per 100 evaluations: noise alone will stop a healthy run"
    one_in = f"one run of 100 in {1.0 / rates.false_alarms:,.0f}" if rates.false_alarms > 1e-6 else "none to speak of"
    return f"{rates.false_alarms:.2g} per 100 evaluations of a flat healthy run ({one_in}), fewer while held-out rises"


def _delay_words(rates: Rates) -> str:
    what = f"a decline of {COST:g} noise deviations over {RAMP} evaluations"
    if rates.delay is None:
        return f"{what} is within the margin and is never seen; lower margin_se or ema_alpha"
    return f"{rates.delay:.0f} evaluations after the onset of {what}, sooner if it is steeper"


_WORDS = {
    "decline": "held-out more than {l.margin_se:g} standard errors below its best while the reward is not, "
    "{l.decline_patience} evaluations in a row",
    "gap": "reward gain above held-out gain by more than {gap:g} and by more than noise",
    "kl": "average kl_to_init above {l.kl_hard_stop:g}, or not finite",
    "both_falling": "held-out and reward both below their best by more than noise, {l.decline_patience} in a row",
    "entropy_collapse": "average entropy below {l.min_entropy_ratio:g} of the first {l.min_steps} evaluations",
    "length_explosion": "average completion length above {l.max_length_ratio:g} times that of the first {l.min_steps}",
    "length_collapse": "average completion length below {shorter:.2g} times that of the first {l.min_steps}",
    "reward_saturated": "no spread in the reward at its highest, {l.saturation_patience} evaluations in a row",
}
