"""Two curves in text, for the moment when a run is stopped.

Owns       a bounded memory of a long series, and its picture.
Promises   memory stays bounded however long the run is; the picture shows the whole run, not its end; the first and the
           last value are printed as numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

MOST = 512
"""Points that are kept; beyond it neighbours are averaged and each point stands for twice as many values."""
_BARS = "▁▂▃▄▅▆▇█"


@dataclass
class Curve:
    """A series of any length in at most `MOST` points."""

    points: list[float] = field(default_factory=list)
    stride: int = 1
    pending: float = 0.0
    waiting: int = 0
    first: float = 0.0
    last: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def add(self, value: float) -> None:
        """Append one value."""
        empty = not self.points and not self.waiting
        self.first, self.last = value if empty else self.first, value
        self.low, self.high = (value, value) if empty else (min(self.low, value), max(self.high, value))
        self.pending += (value - self.pending) / (self.waiting + 1)
        self.waiting += 1
        if self.waiting == self.stride:
            self.points.append(self.pending)
            self.pending, self.waiting = 0.0, 0
        if len(self.points) == MOST:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [left + (right - left) / 2 for left, right in pairs]
            self.stride *= 2

    def line(self, name: str, width: int) -> str:
        """`held-out  0.810 ▇█▆▃▁ 0.220  (0.220 to 0.830)`: first value, picture, last value, range."""
        values = _squeezed([*self.points, self.pending] if self.waiting else self.points, width)
        span = f"({self.low:.3f} to {self.high:.3f})"
        return f"{name:<9} {self.first:>6.3f} {_bars(values)} {self.last:<6.3f} {span}"


def _squeezed(values: Sequence[float], width: int) -> list[float]:
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)] if count else [0]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


def _bars(values: Sequence[float]) -> str:
    low, high = min(values, default=0.0), max(values, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)
