"""How often a guard is wrong and how long it takes, for its settings, in words and numbers.

Owns       the table of measured rates, and the sentences of `HeldOutGuard.describe()`.
Promises   the figures are those of simulated runs: `benchmarks/guard_rates.py` measures again, and a test compares.

What a false alarm costs and what a delay costs is for you to weigh; a guard that does not say its rates leaves you to
find out. The chance that noise alone crosses a margin of z standard errors falls with exp(-z * z), so that two numbers
per cell are enough for all margins; the delay grows in proportion to z.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.guards.collapse_rules import GAP_SHARE, Limits

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


def expected_rates(limits: Limits) -> Rates:
    """False alarms of all rules that judge by noise, and the delay of `decline`."""
    alarms = 0.0
    if "decline" in limits.rules:
        alarms += _alarms(limits, limits.margin_se, limits.decline_patience)
    if "gap" in limits.rules:
        alarms += _alarms(limits, limits.margin_se * GAP_SHARE, 1)
    return Rates(min(alarms, 1.0) if limits.margin_se else 1.0, _delay(limits))


def _alarms(limits: Limits, margin_se: float, patience: int) -> float:
    log_rate, per_square, _, _ = _cell(limits.ema_alpha, patience)
    return math.exp(log_rate - per_square * margin_se * margin_se)


def _delay(limits: Limits) -> float | None:
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


def describe(limits: Limits) -> str:
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


def _alarm_words(limits: Limits, rates: Rates) -> str:
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
