"""One value a reward function returned becomes a number, or a named reason for having none.

Owns       the six reasons, and what counts as a number.
Promises   a mark has a finite value or a reason, never both and never neither; nothing
           that is not a number becomes one (a failure is never 0).
Never      calls a reward function.

Read next: `rewards/workers.py`, which calls `judge` beside the function it has just run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

RAISED, TIMEOUT, DIED = "raised", "timeout", "died"
"""The call itself failed: an exception, no answer in time, the process went away."""
NOT_FINITE, NOT_A_NUMBER, ABSTAINED = "nan", "not_a_number", "abstained"
"""The call returned, but not a verdict: NaN or infinity, something else, None."""


RewardFunction = Callable[..., Any]
"""TRL's form: `f(prompts, completions, **columns) -> list[float | None]`, (G,) in and out."""


@dataclass(frozen=True, slots=True)
class RewardValue:
    """What one function said of one completion.

    Example:
        >>> Mark(0.5, None)
        Mark(value=0.5, reason=None)
    """

    value: float | None
    reason: str | None
    seconds: float | None = field(default=None, compare=False, repr=False)
    """Wall time of the calls that led to it, those that failed included; None where nobody measured it."""


def parse_reward(value: Any) -> RewardValue:
    """Judge one returned value.

    Example:
        >>> judge(True), judge(float("inf")).reason, judge("1.0").reason, judge(None).reason
        (Mark(value=1.0, reason=None), 'nan', 'not_a_number', 'abstained')
    """
    if value is None:
        return RewardValue(None, ABSTAINED)
    number = _as_float(value)
    if number is None:
        return RewardValue(None, NOT_A_NUMBER)
    return RewardValue(number, None) if math.isfinite(number) else RewardValue(None, NOT_FINITE)


def _as_float(value: Any) -> float | None:
    """Numbers and 0-d arrays or tensors as a float; None for everything else."""
    try:
        if getattr(value, "ndim", 0) != 0:
            return None
        if hasattr(value, "item"):
            # A tensor with a gradient warns when float() is called on it; item() is the same number.
            value = value.item()
        if isinstance(value, str | bytes | complex) or not hasattr(type(value), "__float__"):
            return None
        return float(value)
    except OverflowError:
        return math.inf  # an integer beyond every float: not finite, and said so
    except Exception:  # noqa: BLE001 - somebody's __float__ or item() failed, which is exactly "not a number"
        return None
