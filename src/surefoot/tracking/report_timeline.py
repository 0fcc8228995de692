"""One step on the clock: a row per learner, engine and worker, a bar per piece of work."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Sequence

from surefoot.tracking.report_svg import Scale
from surefoot.tracking.report_text import esc
from surefoot.tracking.timeline import Span, Window

WIDTH, LEFT, ROW, TOP = 1040.0, 110.0, 22.0, 8.0
MAX_TRACKS = 28
_FIRST = ("loop", "learner", "the learner", "sync")
MAX_LANES = 4
_COLOURS = 8
_USUAL = {"collect": 0, "learn": 1, "publish": 2, "evaluate": 3, "save": 4, "generate": 5, "group": 6}
"""As in the chart of a step's time, where it has the same names."""


def steps_on_the_clock(windows: Sequence[Window]) -> str:
    """The median step and the slowest one."""
    whole = [window for window in windows if window.spans and window.seconds > 0]
    if not whole:
        return '<p class="none">No step was recorded with its spans.</p>'
    recent = [window for window in whole if not window.slowest] or whole
    middle = statistics.median_low(window.seconds for window in recent)
    chosen = [(next(w for w in recent if w.seconds == middle), f"the median of the last {len(recent)} kept")]
    chosen += [
        (window, "the slowest after the first") for window in whole if window.slowest and window is not chosen[0][0]
    ]
    names = colours(window for window, _ in chosen)
    keys = "".join(f'<span class="key k{colour}">{esc(name)}</span>' for name, colour in names.items())
    parts = [f'<p class="legend">{keys}</p>']
    for window, why in chosen:
        parts.append(f"<h3>Step {window.step}: {window.seconds:.3g} s <small>({esc(why)})</small></h3>")
        parts.append(f'<div class="wide">{draw_step(window, names)}</div>')
        if window.left_out:
            parts.append(f'<p class="about">{window.left_out} more spans were not kept.</p>')
    return "".join(parts)


def draw_step(window: Window, names: dict[str, int]) -> str:
    """One step as SVG; spans that began before it or go on after it are cut at its edges."""
    tracks = _tracks(window)
    shown = tracks[:MAX_TRACKS]
    height = TOP + ROW * (len(shown) + (len(tracks) > len(shown))) + 26
    scale = Scale(0.0, window.seconds)
    parts = [_grid(scale, height)]
    for row, track in enumerate(shown):
        y = TOP + ROW * row
        parts.append(f'<text class="track" x="{LEFT - 8}" y="{y + 15:.0f}" text-anchor="end">{esc(track, 16)}</text>')
        placed = lanes([span for span in window.spans if span.track == track])
        count = 1 + max(lane for _, lane in placed)
        parts += [_bar(span, window, scale, (y, lane, count), names[span.name]) for span, lane in placed]
    if len(tracks) > len(shown):
        y = TOP + ROW * len(shown) + 15
        parts.append(f'<text class="track" x="{LEFT}" y="{y:.0f}">and {len(tracks) - len(shown)} more tracks</text>')
    box = f'viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="step {window.step} on the clock"'
    return f'<svg class="clock" {box}>{"".join(parts)}</svg>'


def _grid(scale: Scale, height: float) -> str:
    base, parts = height - 22, []
    for tick in scale.ticks(8):
        x = _x(scale, tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{base}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 15}" text-anchor="middle">{tick:.4g} s</text>')
    return "".join(parts)


def lanes(spans: Sequence[Span]) -> list[tuple[Span, int]]:
    """Each span with its lane: spans that overlap lie beside each other; beyond the last lane they share it."""
    ends = [float("-inf")] * MAX_LANES
    placed = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        lane = next((index for index, end in enumerate(ends) if end <= span.start), MAX_LANES - 1)
        ends[lane] = max(ends[lane], span.end)
        placed.append((span, lane))
    return placed


def colours(windows: Iterable[Window]) -> dict[str, int]:
    """A colour for every name: the usual ones always have theirs, the others what is left, then the last."""
    names = list(dict.fromkeys(s.name for w in windows for s in sorted(w.spans, key=lambda s: s.start)))
    free = [index for index in range(_COLOURS - 1) if index not in {_USUAL.get(name) for name in names}]
    given = {name: _USUAL[name] for name in names if name in _USUAL}
    for name in names:
        if name not in given:
            given[name] = free.pop(0) if free else _COLOURS - 1
    return {name: given[name] for name in names}


def _bar(span: Span, window: Window, scale: Scale, place: tuple[float, int, int], colour: int) -> str:
    y, lane, count = place
    height = (ROW - 4) / count
    start, end = max(span.start, window.start) - window.start, min(span.end, window.end) - window.start
    x, right = _x(scale, start), _x(scale, end)
    width = max(right - x, 1.0)
    label = f"{span.name} on {span.track}: {span.end - span.start:.3g} s, from {span.start - window.start:.3g} s"
    words = f'<text class="inbar" x="{x + 5:.1f}" y="{y + 15:.1f}">{esc(span.name, 20)}</text>'
    return (
        f'<g><title>{esc(label)}</title><rect class="bar f{colour}" x="{x:.1f}" y="{y + 2 + lane * height:.1f}" '
        f'width="{width:.1f}" height="{height - 0.5:.1f}" rx="{3 if count == 1 else 1}"/>'
        f"{words if count == 1 and width > 9 * len(span.name[:20]) else ''}</g>"
    )


def _tracks(window: Window) -> list[str]:
    """The few that every run has first, then by name, numbers as numbers."""
    found = {span.track for span in window.spans}

    def key(track: str) -> tuple[int, list[tuple[int, str]]]:
        place = _FIRST.index(track) if track in _FIRST else len(_FIRST)
        return place, [(int(p) if p.isdigit() else -1, p) for p in re.split(r"(\d{1,9})", track)]

    return sorted(found, key=key)


def _x(scale: Scale, value: float) -> float:
    return LEFT + scale.share(value) * (WIDTH - LEFT - 24)
