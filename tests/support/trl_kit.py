"""A guarded trainer without TRL that is driven into a collapse, step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]
FALLING = [0.28 - 0.05 * t for t in range(12)]


def collapse(trainer: Any, steps: int = 12) -> None:
    """The reward rises by 0.03 per step; what held-out does is the trainer's evaluation."""
    for t in range(steps):
        trainer.state.global_step = t
        trainer._metrics["train"]["reward"].append(0.30 + 0.03 * t)
        trainer._maybe_update_killswitch()
