"""How much time is left: a moment on the monotonic clock, and nothing else."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit that begins now.

    Example:
        >>> deadline = Deadline(60)
        >>> deadline.expired, 59 < deadline.left <= 60, Deadline(0).expired, Deadline(-1).left
        (False, True, True, 0.0)
    """

    seconds: float
    """How long, from when this was made."""
    ends: float = field(init=False)
    """In seconds of `time.monotonic`, for what takes a moment."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", time.monotonic() + self.seconds)

    @property
    def left(self) -> float:
        """Seconds until it is over, never below 0."""
        return max(0.0, self.ends - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self.ends
