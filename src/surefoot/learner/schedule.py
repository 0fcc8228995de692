"""The learning rate at every step, as a function: printable before the run, checkable after it."""

from __future__ import annotations

import math

from surefoot.errors import InvariantError


def learning_rate_at(step: int, *, peak: float, kind: str, warmup_steps: int, max_steps: int) -> float:
    """Rate of optimiser step `step`, counted from 1; the first one is never 0 by accident.

    Example:
        >>> [learning_rate_at(s, peak=1.0, kind="linear", warmup_steps=2, max_steps=4) for s in (1, 2, 3, 4)]
        [0.5, 1.0, 1.0, 0.5]

    A step outside the schedule is refused: behind its end a decaying rate is negative, and would unlearn.
    """
    if not 1 <= step <= max_steps:
        raise InvariantError(
            f"optimiser step {step} has no learning rate: the schedule has steps 1 to {max_steps}",
            "behind its end a linear schedule is negative, and every update would be undone with interest",
            "the version ran ahead of the run's steps; resume from the last checkpoint, and report this",
        )
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if kind == "constant":
        return peak
    progress = (step - warmup_steps - 1) / max(1, max_steps - warmup_steps)  # 0 at the first step after warm-up
    return peak * (1 - progress) if kind == "linear" else peak * 0.5 * (1 + math.cos(math.pi * progress))
