"""At which steps the guard folds: those at which the trainer logs."""

from __future__ import annotations

import math
from typing import Any

from surefoot.trl_bridge.problems import refused


def fold_every(logging_steps: Any, max_steps: Any = None) -> int:
    """Steps from one fold to the next.

    A whole number counts steps. A number between 0 and 1 is that share of the run, rounded up, as in Hugging Face's
    `Trainer`; it needs `max_steps`.

    Example:
        >>> fold_every(10), fold_every(0.1, max_steps=35)
        (10, 4)
    """
    what = f"logging_steps = {logging_steps!r}"
    why = "the guard folds when the trainer logs, and this names no step"
    if isinstance(logging_steps, bool | str) or not _is_finite(logging_steps) or logging_steps <= 0:
        raise refused(f"{what} is not a number above 0", why, "use logging_steps=10, or any whole number")
    if logging_steps < 1:
        if not _is_finite(max_steps) or max_steps <= 0:
            raise refused(f"{what} is a share of an unknown number of steps", why, "set max_steps, or a whole number")
        share: float = max_steps * logging_steps
        return math.ceil(share)
    if logging_steps != int(logging_steps):
        raise refused(f"{what} is not whole", why, "use a whole number, or a share below 1")
    return int(logging_steps)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False
