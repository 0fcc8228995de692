"""What the report knows of a run: read from its folder, bounded, with a note for all that is not there; its curves.

Promises   a torn, odd or missing file costs its own part of the page and nothing else; reading is
           bounded.
Never      fills a gap: what could not be read is listed in `missing`.
"""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.protocols import count_text
from surefoot.report.markup import Chart, Curve, Scale, draw, esc
from surefoot.system.files import bounded_lines, linked, open_plain
from surefoot.system.text import number
from surefoot.tracking import live
from surefoot.tracking.live import Span, Window, read_bounded
from surefoot.tracking.metrics import EVALUATION, LINE_BYTES, headlines, kind_of, lookup

MAX_ROWS = 4000
"""Training steps that are looked at; of a longer run every k-th is, and all its evaluations."""
METRICS_BYTES = 64_000_000
"""Of those that are looked at: what a hundred thousand evaluations do not reach."""
SMALL = 4_000_000
ROLLOUT_BYTES = 8_000_000

Row = dict[str, float]
Point = tuple[float, float]


@dataclass
class RunData:
    """One run, as far as it could be read."""

    root: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    train: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    every: int = 1
    """Of the training steps, every so many-th was read."""
    windows: list[live.Window] = field(default_factory=list)
    rollouts: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """(step, rollouts) of the first and the last step that were kept."""
    missing: list[str] = field(default_factory=list)

    def series(self, name: str) -> list[Point]:
        """(step, value) of one metric over training steps, or evaluations for names that only those have."""
        rows = self.evals if name.startswith(EVALUATION) or name == "timing/eval" else self.train
        return [(row["step"], row[name]) for row in rows if name in row]

    def sets(self) -> list[str]:
        """The headline metric of each evaluation set, in the order of the log."""
        return headlines(name for row in self.evals for name in row)

    def names(self, prefix: str) -> list[str]:
        """The training metrics with this prefix, in order."""
        return sorted({name for row in self.train for name in row if name.startswith(prefix)})


def read_run(root: Path) -> RunData:
    """Everything the report shows; only a folder that is no run is an error."""
    if not (root / "config.toml").is_file():
        raise StateError(
            f"{root} is not a run folder",
            "it has no config.toml" if root.is_dir() else "it is a file" if root.exists() else "it does not exist",
            "give the folder that `surefoot train` named at its end",
        )
    data = RunData(root)
    data.config_text = (_bytes(data, "config.toml") or b"").decode("utf-8", errors="replace")
    try:
        data.config = tomllib.loads(data.config_text)
    except (ValueError, RecursionError):
        data.missing.append("config.toml cannot be parsed")
    data.verdict = _object(data, "verdict.json", "the run has not ended, or was killed")
    data.environment = _object(data, "environment.json", "versions and machine are unknown")
    data.status = _object(data, live.STATUS_FILE, "")
    _read_metrics(data)
    _read_timeline(data)
    _read_rollouts(data)
    return data


def _bytes(data: RunData, name: str, limit: int = SMALL) -> bytes | None:
    try:
        return read_bounded(data.root / name, limit)
    except StateError as error:
        data.missing.append(error.what)
        return b""


def _object(data: RunData, name: str, absent: str) -> dict[str, Any]:
    text = _bytes(data, name)
    if text is None:
        if absent:
            data.missing.append(f"{name} is not there: {absent}")
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        data.missing.append(f"{name} cannot be read")
        return {}
    return found


def _read_metrics(data: RunData) -> None:
    path, odd, left = data.root / "metrics.jsonl", 0, METRICS_BYTES
    try:
        with open_plain(path) as file:
            size, first = os.fstat(file.fileno()).st_size, len(file.readline(LINE_BYTES)) or 1
            data.every = max(1, math.ceil(size / first / MAX_ROWS))
            file.seek(0)
            for number, line in enumerate(bounded_lines(file, LINE_BYTES)):
                if number % data.every and not (b'"eval_' in line or b'"eval/' in line):
                    continue
                left -= len(line)
                if left < 0:
                    data.missing.append(f"metrics.jsonl: lines from {number + 1} on are left out, it is too long")
                    break
                odd += not _take(data, line)
    except FileNotFoundError:
        data.missing.append("metrics.jsonl is not there: no curves")
    except OSError as error:
        data.missing.append(f"metrics.jsonl cannot be read: {error.strerror}")
    if odd:
        data.missing.append(f"metrics.jsonl: {odd} lines cannot be read (a killed run may leave a torn last one)")


def _take(data: RunData, line: bytes) -> bool:
    """Add one line; whether it could be."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or not _is_number(row.get("step")):
        return False
    numbers = {str(name): float(value) for name, value in row.items() if _is_number(value)}
    (data.evals if kind_of(numbers) == "eval" else data.train).append(numbers)
    return len(numbers) == len(row)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _read_timeline(data: RunData) -> None:
    text = _bytes(data, live.TIMELINE_FILE)
    if text is None:
        data.missing.append(f"{live.TIMELINE_FILE} is not there: no step on the clock")
        return
    data.windows, odd = live.read_timeline(text)
    if odd:
        data.missing.append(f"{live.TIMELINE_FILE}: {odd} lines cannot be read")


def _read_rollouts(data: RunData) -> None:
    found = {}
    if linked(data.root, "rollouts"):
        data.missing.append("rollouts/ is a link, which leads out of the run folder: it was not looked at")
        return
    for path in (data.root / "rollouts").glob("step_*.jsonl"):
        if match := re.fullmatch(r"step_(\d{1,12})\.jsonl", path.name):
            found[int(match[1])] = path
    if not found:
        data.missing.append("rollouts/ is empty: save_rollouts was off, or no step was made")
    for step in sorted({min(found), max(found)} if found else ()):
        rows, odd = _rollouts_of(found[step])
        data.rollouts.append((step, rows))
        if odd:
            data.missing.append(f"rollouts/{found[step].name}: {odd} lines cannot be read")


def _rollouts_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rollouts of one step, up to a limit of bytes; a line that goes over it is not counted as odd."""
    rows, odd = [], 0
    try:
        with open_plain(path) as file:
            text = file.read(ROLLOUT_BYTES)
            whole = not file.read(1)
    except OSError:
        return [], 1
    lines = text.split(b"\n")
    for line in lines if whole else lines[:-1]:
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, Mapping):
            rows.append(dict(row))
        else:
            odd += 1
    return rows, odd


# -- Which curves are shown, in the order in which a person asks for them --------------------------


_ARROWS = {"up": "↑ healthy is up", "down": "↓ healthy is down", "steady": "→ healthy is steady"}
_SINGLE = (
    ("KL to the reference", "kl"),
    ("Entropy", "scored_entropy"),
    ("Groups without a gradient", "frac_reward_zero_std"),
    ("Gradient norm", "grad_norm"),
    ("Throughput", "tokens_per_second"),
)
PARTS = ("collect", "learn", "publish", "pack", "proof")
"""Parts of a step that follow one another; the rest of the step is shown as `other`."""


def charts(data: RunData) -> list[Chart]:
    """Every chart for which there is a number."""
    found = [*_learning(data), *_singles(data), *_length(data), *_tools(data), *_time(data), *_async(data)]
    found += _proof(data)
    return [chart for chart in found if any(curve.points for curve in chart.curves)]


def absent(data: RunData) -> list[str]:
    """Curves that a reader may look for in vain, and why they are not there."""
    words = {
        "eval_accuracy": "held-out accuracy: no evaluation has a task metric",
        "kl": "KL: no reference is kept with beta = 0",
        "async/staleness_mean": "staleness: a synchronous run trains on what it has just sampled",
        "sync/probe_gap": "weight-sync proof: no probe figures in this log",
    }
    if data.sets():  # what is held out is there, under its own names
        del words["eval_accuracy"]
    return [why for name, why in words.items() if not data.series(name)]


def card(chart: Chart) -> str:
    """A chart with its name, what is healthy, its last value and its legend."""
    first = chart.curves[0].points
    now = f"{esc(number(first[-1][1]))}<small> {esc(chart.unit)}</small>" if first else ""
    last = f'<span class="now">{esc(chart.now) if chart.now else now}</span>' if first else ""
    keys = [f'<span class="key k{index}">{esc(curve.name)}</span>' for index, curve in enumerate(chart.curves)]
    legend = "".join(keys) if len(chart.curves) > 1 or chart.curves[0].spread else ""
    notes = "".join(f"<span>{esc(note)}</span>" for note in (_ARROWS.get(chart.healthy, ""), *chart.notes) if note)
    return (
        f'<figure class="card"><figcaption><h3>{esc(chart.title)}</h3>{"" if chart.stacked else last}</figcaption>'
        f'{draw(chart)}<p class="legend">{legend}{notes}</p><p class="about">{esc(chart.about)}</p></figure>'
    )


def _learning(data: RunData) -> Iterator[Chart]:
    target = _target(data)
    for name, title in (("eval_accuracy", "Held-out accuracy"), ("eval_reward", "Held-out reward")):
        points = data.series(name)
        if name == "eval_reward" and data.series("eval_accuracy"):
            continue
        errors = [row.get(f"{name}_stderr", 0.0) for row in data.evals if name in row]
        spread = errors if any(errors) else []
        curve = Curve(f"{title.lower()} ± standard error" if spread else title.lower(), points, spread, dots=True)
        limit = (target[2], target[1]) if target and target[0] == name else None
        rows = [row for row in data.evals if name in row]
        count = count_text(rows[-1]) if rows and name == "eval_accuracy" else None
        yield Chart(title, [curve], *_facts(name), limit=limit, floor=0.0, now=count or "")
    for name in data.sets():
        title = name.removeprefix("eval/").replace("/", ": ")
        errors = [row.get(f"{name}_stderr", 0.0) for row in data.evals if name in row]
        spread = errors if any(errors) else []
        limit = (target[2], target[1]) if target and target[0] == name else None
        label = f"{title} ± standard error" if spread else title
        yield Chart(title, [Curve(label, data.series(name), spread, dots=True)], *_facts(name), limit=limit, floor=0.0)
    parts = data.names("rewards/")
    means = [name for name in parts if name.endswith("/mean")][:5]
    curves = [Curve("reward", data.series("reward"))]
    if len(means) > 1:
        curves += [Curve(name.split("/")[1], data.series(name)) for name in means]
    yield Chart("Training reward", curves, *_facts("reward"))


def _singles(data: RunData) -> Iterator[Chart]:
    for title, name in _SINGLE:
        if name == "scored_entropy":  # runs of the first edition called it `entropy`
            name = next((each for each in (name, "entropy") if data.series(each)), "approx_entropy")
        yield Chart(title, [Curve(title.lower(), data.series(name))], *_facts(name), floor=0.0)


def _length(data: RunData) -> Iterator[Chart]:
    curves = [Curve(kind, data.series(f"completions/{kind}_length")) for kind in ("mean", "min", "max")]
    yield Chart("Completion length", [c for c in curves if c.points], *_facts("completions/mean_length"), floor=0.0)


def _tools(data: RunData) -> Iterator[Chart]:
    """Only of runs with tools."""
    pairs = (
        ("calls per rollout", "tools/call_frequency"), ("rollouts that call", "tools/called_share"),
        ("calls that failed", "tools/failure_frequency"),
    )  # fmt: skip
    found = [Curve(label, data.series(name)) for label, name in pairs if data.series(name)]
    if found:
        yield Chart("Tool calls", found, "calls, shares", "steady", "what rollouts asked of tools", floor=0.0)


def _time(data: RunData) -> Iterator[Chart]:
    """Where a step's seconds go, stacked; evaluation and saving lie between two steps and are not in it."""
    rows = [row for row in data.train if "step_time" in row]
    names = [name for name in PARTS if any(f"timing/{name}" in row for row in rows)]
    if not rows or not names:
        return
    parts = {name: [(row["step"], row.get(f"timing/{name}", 0.0)) for row in rows] for name in names}
    rest = [max(0.0, row["step_time"] - sum(row.get(f"timing/{name}", 0.0) for name in names)) for row in rows]
    parts["other"] = [(row["step"], seconds) for row, seconds in zip(rows, rest, strict=True)]
    about = "wall time of the parts of one step; evaluation and saving come between steps"
    yield Chart("Where a step's time goes", [Curve(n, p) for n, p in parts.items()], "s", "down", about, stacked=True)


def _async(data: RunData) -> Iterator[Chart]:
    kinds = ("mean", "max")
    curves = [Curve(kind, data.series(f"async/staleness_{kind}")) for kind in kinds]
    bound = data.config.get("max_staleness")
    limit = ("max_staleness", float(bound)) if isinstance(bound, int) and bound > 0 else None
    about = "weight versions between sampling a group and training on it"
    yield Chart("Staleness", [c for c in curves if c.points] or curves, "versions", "down", about, limit, floor=0.0)
    pairs = (("waiting", "async/queue"), ("in flight", "async/in_flight"), ("wasted", "async/wasted"))
    found = [Curve(label, data.series(name)) for label, name in pairs if data.series(name)]
    if found:
        yield Chart(
            "Groups on their way", found, "groups", "steady", "waiting for the learner, being played", floor=0.0
        )


def _proof(data: RunData) -> Iterator[Chart]:
    allowed = tolerance(data)
    limit = ("tolerance", allowed) if allowed else None
    for title, name, about in (
        ("Weight-sync proof gap", "sync/probe_gap",
         "the probe: after each sync every engine answers fixed probes; its logprobs against the learner's own"),
        ("Sampler against learner", "sampling/sampling_logp_difference/max",
         "largest difference between the logprob a token was sampled with and the learner's own"),
    ):  # fmt: skip
        curve = Curve("largest gap", [(x, y) for x, y in data.series(name) if y > 0])
        bound = limit if name == "sync/probe_gap" or data.config.get("max_staleness", 0) == 0 else None
        yield Chart(title, [curve], "nats", "down", about, bound, log=True)


def tolerance(data: RunData) -> float | None:
    """The largest gap that the run allowed, by its config."""
    given = data.config.get("parity_tolerance")
    if isinstance(given, int | float):
        return float(given)
    from surefoot.config import PARITY_TOLERANCE  # slow to load, and not every page needs it

    return PARITY_TOLERANCE.get(str(data.config.get("dtype")))


def _target(data: RunData) -> tuple[str, float, str] | None:
    """(metric, value, what to call it): the run's own target, or the one that is only shown to a shortened run."""
    own = [data.config.get("target_metric"), data.config.get("target_value")]
    kinds = (
        ("target", data.verdict.get("target") or own),
        ("target of the full run", data.verdict.get("shown_target")),
    )
    for label, found in kinds:
        if isinstance(found, list) and len(found) == 2 and isinstance(found[1], int | float):
            return str(found[0]), float(found[1]), label
    return None


def _facts(name: str) -> tuple[str, str, str]:
    """Unit, healthy direction and meaning, from the register of metrics."""
    metric = lookup(name)
    return ("", "", "") if metric is None else (metric.unit, metric.healthy, metric.description)


# -- One step on the clock: a row per learner, engine and worker, a bar per piece of work ---------


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
