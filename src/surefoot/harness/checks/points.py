"""Which recorded points a helper uses, and whether they are numbers.

A range counts recorded points, not steps: 1 is the first recorded point, -1 the last, the end is left out, and
end 0 means "through the last". So a series that starts at step 0 or 101, or has one point in ten steps, loses
nothing. A range that reaches outside of what was recorded fails: those points are not there to judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.harness.checks.problems import CheckFailedError
from surefoot.harness.series import Series, describe, is_number

Item = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Points:
    """Some recorded points of one series, in order of step."""

    name: str
    items: list[Item]
    single: bool = False
    """The source gave one number without a step."""

    @classmethod
    def of(cls, series: Series) -> Points:
        """All points of `series`."""
        return cls(series.name, series.points(), series.single)

    @property
    def steps(self) -> list[int]:
        """The recorded steps."""
        return [step for step, _ in self.items]

    def spread(self) -> str:
        """The steps in words, for messages."""
        if not self.items:
            return "no steps"
        return f"steps {self.items[0][0]} to {self.items[-1][0]}, {len(self.items)} recorded"


@dataclass(frozen=True, slots=True)
class Range:
    """The points asked for: by position among the recorded points, or by step."""

    start: int = 1
    end: int = 0
    from_step: int | None = None
    to_step: int | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Range:
        """The range among a helper's arguments; what is left out keeps its default."""
        names = ("start", "end", "from_step", "to_step")
        return cls(**{name: int(given[name]) for name in names if given.get(name) is not None})

    @property
    def everything(self) -> bool:
        """Whether no range was asked for."""
        return self == Range()

    def __str__(self) -> str:
        if self.from_step is not None or self.to_step is not None:
            low = "the first" if self.from_step is None else self.from_step
            return f"from step {low} to {'the last' if self.to_step is None else self.to_step}"
        return f"({self.start}, {self.end})"


def select(points: Points, wanted: Range) -> Points:
    """The points inside `wanted`; an empty or overreaching range is a `CheckFailedError`.

    Example:
        >>> select(Points("loss", [(0, 9.0), (10, 7.0), (20, 5.0)]), Range(-2, 0)).items
        [(10, 7.0), (20, 5.0)]
    """
    if not points.items:
        raise CheckFailedError(f"{points.name} has no recorded points")
    if wanted.everything:
        return points
    if wanted.from_step is not None or wanted.to_step is not None:
        chosen = _by_step(points, wanted)
    else:
        chosen = _by_position(points, wanted)
    if not chosen:
        raise CheckFailedError(f"empty range: {wanted} of {points.name} holds no point ({points.spread()})")
    return Points(points.name, chosen, points.single)


def _by_position(points: Points, wanted: Range) -> list[Item]:
    total = len(points.items)
    first = wanted.start + total if wanted.start < 0 else max(wanted.start, 1) - 1
    stop = wanted.end + total if wanted.end <= 0 else wanted.end - 1
    chosen = points.items[max(first, 0) : max(stop, 0)]
    if chosen and (first < 0 or stop > total):
        raise CheckFailedError(
            f"the range {wanted} of {points.name} reaches outside of what was recorded ({points.spread()})"
        )
    return chosen


def _by_step(points: Points, wanted: Range) -> list[Item]:
    low = -math.inf if wanted.from_step is None else wanted.from_step
    high = math.inf if wanted.to_step is None else wanted.to_step
    return [item for item in points.items if low <= item[0] <= high]


def usable(points: Points) -> list[float]:
    """The values, or a `CheckFailedError` that names the first step whose value is not a finite number."""
    bad = [(step, value) for step, value in points.items if not is_number(value)]
    if bad:
        step, value = bad[0]
        more = f" (and {len(bad) - 1} more of {len(points.items)} points)" if len(bad) > 1 else ""
        where = "" if points.single else f" at step {step}"
        raise CheckFailedError(f"{points.name} is {describe(value)}{where}{more}")
    return [float(value) for _, value in points.items]


def one_number(points: Points) -> float:
    """The number of a source that gave one number; a series has to be asked for one of its points."""
    if points.single:
        return usable(points)[0]
    raise CheckFailedError(
        f'{points.name} is a series ({points.spread()}), not one number: use data["..."]["STEP"], last() or mean()'
    )


def joined(parts: Sequence[Points]) -> list[Item]:
    """All points in order of step; two values for one step fail, because either choice would hide the other."""
    merged: dict[int, Any] = {}
    for part in parts:
        for step, value in part.items:
            if step in merged and merged[step] != value:
                raise CheckFailedError(f"step {step} has two values, {merged[step]} and {value} ({part.name})")
            merged[step] = value
    return sorted(merged.items())
