"""Curves as SVG text: axes, labels, legend, a band, a dashed limit. Numbers in, markup out; no library, no script.

Promises   every text is escaped; coordinates are finite whatever the numbers are; a chart has a few hundred points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.tracking.report_text import esc
from surefoot.tracking.text import number

Point = tuple[float, float]
WIDTH, HEIGHT = 400.0, 194.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 14.0, 24.0
MAX_POINTS = 240


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: its name, its points, and half the width of the band around each, if there is one."""

    name: str
    points: Sequence[Point]
    spread: Sequence[float] = ()
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `limit` is drawn as a dashed line with its name."""

    title: str
    curves: Sequence[Curve]
    unit: str = ""
    healthy: str = ""
    """`up`, `down`, `steady` or nothing."""
    about: str = ""
    limit: tuple[str, float] | None = None
    log: bool = False
    stacked: bool = False
    floor: float | None = None
    """Nothing lies below here: the axis ends here where the curves come near."""
    now: str = ""
    """The last value, where another form than the plain number says it better."""
    notes: Sequence[str] = field(default=())


class Scale:
    """From numbers to pixels, linear or logarithmic, with round ticks."""

    def __init__(self, low: float, high: float, *, log: bool = False) -> None:
        self.log = log
        if log:
            low, high = math.log10(max(low, 1e-300)), math.log10(max(high, 1e-300))
        if not high > low:
            pad = abs(high) * 0.1 or 1.0
            low, high = low - pad, high + pad
        self.low, self.high = low, high

    def share(self, value: float) -> float:
        """Where a value lies between the ends, 0 to 1."""
        at = math.log10(max(value, 1e-300)) if self.log else value
        return min(1.0, max(0.0, (at - self.low) / (self.high - self.low)))

    def ticks(self, count: int = 4, *, whole: bool = False) -> list[float]:
        """Round values between the ends."""
        if self.log:
            every = max(1, math.ceil((self.high - self.low) / count))
            exponents = range(math.ceil(self.low - 1e-9), math.floor(self.high + 1e-9) + 1, every)
            return [10.0**e for e in exponents] or [10.0**self.high]
        rough = (self.high - self.low) / count
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
        step = max(1.0, float(round(step))) if whole else step
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, first + count + 3) if index * step <= self.high + step * 1e-9]


def draw(chart: Chart) -> str:
    """The chart as one `<svg>`; its name and unit are for the caller to print."""
    xs = [x for curve in chart.curves for x, _ in curve.points]
    across, up = _steps(xs), _vertical(chart)
    parts = [_axes(across, up, chart.unit)]
    parts += _areas(chart, across, up) if chart.stacked else _lines(chart, across, up)
    if chart.limit is not None:
        y = _y(up, chart.limit[1])
        parts.append(
            f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="limit-name" x="{WIDTH - RIGHT - 2}" y="{y - 4 if y > TOP + 14 else y + 12:.1f}">'
            f"{esc(chart.limit[0])} {esc(number(chart.limit[1]))}</text>"
        )
    return (
        f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" aria-label="{esc(chart.title)}">'
        + "".join(parts) + "</svg>"
    )  # fmt: skip


def _steps(xs: Sequence[float]) -> Scale:
    """The axis of steps. One point alone has a step to each side, where there is one: no run has a step -1."""
    low, high = min(xs), max(xs)
    return Scale(low, high) if high > low else Scale(max(0.0, low - 1), high + 1)


def thin(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points: means of equal runs, so that nothing is picked by chance."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    cuts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(cut[-1][0], math.fsum(y for _, y in cut) / len(cut)) for cut in cuts]


def smooth(points: Sequence[Point], width: int) -> list[Point]:
    """Mean of the values around each point; near the ends of as many as there are."""
    half, found = width // 2, []
    for index, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, index - half) : index + half + 1]]
        found.append((x, math.fsum(near) / len(near)))
    return found


def _vertical(chart: Chart) -> Scale:
    if chart.stacked:
        totals = [math.fsum(values) for values in zip(*([y for _, y in c.points] for c in chart.curves), strict=True)]
        return Scale(0.0, max(totals) * 1.05)
    values = [y for c in chart.curves for _, y in c.points]
    values += [
        y + sign * s for c in chart.curves for (_, y), s in zip(c.points, c.spread, strict=False) for sign in (1, -1)
    ]
    if chart.limit is not None:
        values.append(chart.limit[1])
    if chart.log:
        positive = [v for v in values if v > 0] or [1.0]
        return Scale(
            10.0 ** math.floor(math.log10(min(positive))), 10.0 ** math.ceil(math.log10(max(positive))), log=True
        )
    low, high = min(values), max(values)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 0.5
    floor = 0.0 if chart.floor is None else chart.floor
    under = any(y < floor for c in chart.curves for _, y in c.points)  # a band may be; what it is around may not
    return Scale(low - pad if under else max(floor, low - pad), high + pad)


def _axes(across: Scale, up: Scale, unit: str) -> str:
    parts = []
    for tick in up.ticks():
        y = _y(up, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{esc(_short(tick))}</text>'
        )
    base = HEIGHT - BOTTOM
    for tick in across.ticks(5, whole=True):
        x = _x(across, tick)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{base + 15:.1f}" text-anchor="middle">{esc(_short(tick))}</text>'
        )
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts)


def _lines(chart: Chart, across: Scale, up: Scale) -> list[str]:
    parts = []
    for index, curve in enumerate(chart.curves):
        points, dots = curve.points, curve.dots or len(curve.points) <= 2
        if curve.spread:
            edge = [(x, y + s) for (x, y), s in zip(points, curve.spread, strict=True)]
            edge += [(x, y - s) for (x, y), s in zip(points, curve.spread, strict=True)][::-1]
            parts.append(f'<polygon class="band f{index}" points="{_path(edge, across, up)}"/>')
        shown, calm = thin(points), len(points) >= 25 and not curve.dots
        if calm:
            parts.append(f'<polyline class="raw s{index}" points="{_path(shown, across, up)}"/>')
            shown = smooth(shown, max(5, len(shown) // 12))
        parts.append(f'<polyline class="curve s{index}" points="{_path(shown, across, up)}"/>')
        for x, y in shown if dots else ():
            label = f"{curve.name}: {number(y)} at step {x:.0f}"
            parts.append(
                f'<circle class="dot f{index}" cx="{_x(across, x):.1f}" cy="{_y(up, y):.1f}" r="3">'
                f"<title>{esc(label)}</title></circle>"
            )
    return parts


def _areas(chart: Chart, across: Scale, up: Scale) -> list[str]:
    below = [0.0] * MAX_POINTS
    parts = []
    for index, curve in enumerate(chart.curves):
        points = thin(curve.points)
        top = [(x, base + y) for (x, y), base in zip(points, below, strict=False)]
        edge = top + [(x, base) for (x, _), base in zip(points, below, strict=False)][::-1]
        parts.append(
            f'<polygon class="area f{index}" points="{_path(edge, across, up)}">'
            f"<title>{esc(curve.name)}</title></polygon>"
        )
        below = [y for _, y in top]
    return parts


def _path(points: Sequence[Point], across: Scale, up: Scale) -> str:
    return " ".join(f"{_x(across, x):.1f},{_y(up, y):.1f}" for x, y in points)


def _x(scale: Scale, value: float) -> float:
    return LEFT + scale.share(value) * (WIDTH - LEFT - RIGHT)


def _y(scale: Scale, value: float) -> float:
    return TOP + (1 - scale.share(value)) * (HEIGHT - TOP - BOTTOM)


def _short(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return (
        f"{value / 1000:.4g}k" if 1e4 <= abs(value) < 1e6 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    )
