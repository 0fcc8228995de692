"""Draw the pictures of docs/guards.md: `python scripts/plot_guard.py [FOLDER]` writes three SVG files.

The runs are simulated and seeded, the verdicts are those of the real `HeldOutGuard`, and a test compares the files in
docs/img with what this script writes. Plain text in, plain text out: no plotting library.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.guards import GuardStatus, HeldOutGuard

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "img"
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 300, 52, 34, 16, 40
REWARD, HELDOUT, BAND, ALARM, GREY = "#c2571a", "#1b62a5", "#9cc3e6", "#b00020", "#555555"
FOLDS, NOISE, ONSET = 160, 0.02, 60

Point = tuple[float, float]


@dataclass
class Plot:
    """Axes, and what was drawn into them."""

    title: str
    x_label: str
    x_range: Point
    y_range: Point
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    parts: list[str] = field(default_factory=list)

    def at(self, point: Point) -> Point:
        """Where a point lies on the page."""
        (x0, x1), (y0, y1) = self.x_range, self.y_range
        x = LEFT + (point[0] - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - (point[1] - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)

    def line(self, points: Iterable[Point], colour: str, *, width: float = 2.0, faint: bool = False) -> None:
        """A curve."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self.at, points))
        look = f'stroke="{colour}" stroke-width="{width:g}" stroke-opacity="{0.35 if faint else 1:g}"'
        self.parts.append(f'<polyline points="{path}" fill="none" {look}/>')

    def upright(self, x: float, colour: str, label: str, level: float) -> None:
        """A dashed line at one x, with a word beside it at height `level`."""
        (left, bottom), (_, top) = self.at((x, self.y_range[0])), self.at((x, self.y_range[1]))
        look = f'stroke="{colour}" stroke-width="1.5" stroke-dasharray="5 4"'
        self.parts.append(f'<line x1="{left:.1f}" y1="{bottom:.1f}" x2="{left:.1f}" y2="{top:.1f}" {look}/>')
        self.word((x, level), label, colour, dx=6)

    def word(self, point: Point, text: str, colour: str, *, dx: float = 0, anchor: str = "start") -> None:
        """Text at a point."""
        x, y = self.at(point)
        self.parts.append(f'<text x="{x + dx:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>')

    def svg(self) -> str:
        """The whole picture."""
        box = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="12">'
        ground = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
        title = f'<text x="{LEFT}" y="20" font-size="14" fill="#222222">{self.title}</text>'
        return "\n".join(
            [head, f"<title>{self.title}</title>", ground, title, *self._axes(), *self.parts, "</svg>", ""]
        )

    def _axes(self) -> Iterable[str]:
        right = WIDTH - RIGHT
        for value in self.y_ticks:
            _, y = self.at((self.x_range[0], value))
            yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" fill="{GREY}" text-anchor="end">{value:g}</text>'
        for value in self.x_ticks:
            x, y = self.at((value, self.y_range[0]))
            yield f'<text x="{x:.1f}" y="{y + 16:.1f}" fill="{GREY}" text-anchor="middle">{value:g}</text>'
        middle = (LEFT + right) / 2
        yield f'<text x="{middle:.1f}" y="{HEIGHT - 6}" fill="{GREY}" text-anchor="middle">{self.x_label}</text>'


def simulate(bend: Callable[[int], Point], seed: int) -> tuple[list[Point], list[GuardStatus]]:
    """Reward and held-out around the two lines of `bend`, and what the guard said to each."""
    dice, guard = random.Random(seed), HeldOutGuard()
    values, said = [], []
    for t in range(FOLDS):
        reward, heldout = (line + dice.gauss(0.0, NOISE) for line in bend(t))
        values.append((reward, heldout))
        said.append(guard.update(t, reward, heldout))
    return values, said


def streak_stop(values: Sequence[Point], alpha: float = 0.5, patience: int = 3) -> int | None:
    """Where the plain rule stops: held-out's average fell and the reward's rose, so many times in a row."""
    reward, heldout = values[0]
    streak = 0
    for t, (new_reward, new_heldout) in enumerate(values[1:], start=1):
        up, down = alpha * (new_reward - reward), alpha * (new_heldout - heldout)
        reward, heldout = reward + up, heldout + down
        streak = streak + 1 if up > 0 > down else 0
        if streak == patience:
            return t
    return None


def curves(title: str, bend: Callable[[int], Point], seed: int) -> tuple[Plot, list[Point], list[GuardStatus]]:
    """Both curves, their averages, and the line that held-out's average must not cross."""
    values, said = simulate(bend, seed)
    plot = Plot(title, "evaluation", (0, FOLDS), (0.2, 1.0), range(0, FOLDS + 1, 20), (0.2, 0.4, 0.6, 0.8, 1.0))
    for index, (colour, smooth) in enumerate(((REWARD, "reward_ema"), (HELDOUT, "heldout_ema"))):
        plot.line([(t, pair[index]) for t, pair in enumerate(values)], colour, width=1, faint=True)
        plot.line([(s.step, getattr(s, smooth)) for s in said], colour)
    edge = [(s.step, s.best_heldout - s.margin) for s in said if s.margin is not None and s.folds >= 10]
    plot.line([point for point in edge if point[1] > plot.y_range[0]], BAND, width=1.5)
    return plot, values, said


def hacked(t: int) -> Point:
    """The policy learns to please the grader from `ONSET` on."""
    share = min(max(t - ONSET, 0) / 60, 1.0)
    return 0.55 + 0.35 * share, 0.6 - 0.3 * share


def together(t: int) -> Point:
    """A healthy run that levels off."""
    quality = 0.35 + 0.35 * min(t / 80, 1.0)
    return quality + 0.05, quality


def plot_decline() -> str:
    """A collapse, stopped."""
    plot, _, said = curves("The reward rises, held-out falls: the guard stops the run", hacked, seed=4)
    fired = next(s.step for s in said if s.fire)
    plot.upright(ONSET, GREY, "it begins", 0.96)
    plot.upright(fired, ALARM, f"stopped, {fired - ONSET} evaluations later", 0.24)
    for level, text, colour in ((0.96, "reward", REWARD), (0.38, "held-out", HELDOUT)):
        plot.word((FOLDS - 2, level), text, colour, anchor="end")
    plot.word((24, 0.51), "best of held-out minus the noise margin", BAND)
    return plot.svg()


def plot_healthy() -> str:
    """A healthy run that the plain rule would have stopped."""
    plot, values, said = curves("A healthy run: noise stops the plain patience rule, not the guard", together, seed=1)
    if any(s.fire for s in said):
        raise RuntimeError("the picture of a healthy run must not show a stop")
    stop = streak_stop(values)
    if stop is None:
        raise RuntimeError("the plain rule did not stop this run; choose another seed")
    plot.upright(stop, GREY, "patience 3 would stop here", 0.94)
    plot.word((FOLDS - 2, 0.83), "reward", REWARD, anchor="end")
    plot.word((FOLDS - 2, 0.63), "held-out, and below it the margin", HELDOUT, anchor="end")
    return plot.svg()


def median_delay(cost: float, runs: int = 31) -> float:
    """Median evaluations to the stop, of a decline by `cost` noise deviations over 40 evaluations."""
    delays = []
    for seed in range(runs):
        dice, guard, t = random.Random(seed), HeldOutGuard(), 0
        while t < 200 and not guard.should_halt():
            grown = min(max(t - ONSET, 0) / 40, 1.0) * cost * NOISE
            guard.update(t, 0.5 + grown + dice.gauss(0, NOISE), 0.5 - grown + dice.gauss(0, NOISE))
            t += 1
        delays.append(t - 1 - ONSET)
    return float(sorted(delays)[runs // 2])


def plot_delay() -> str:
    """How the delay depends on the size of the decline."""
    costs = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0)
    plot = Plot(
        "Evaluations until the stop, by the size of the decline (default settings)",
        "noise deviations lost over 40 evaluations", (0, 12.5), (0, 60), range(0, 13, 2), (0, 10, 20, 30, 40, 50, 60),
    )  # fmt: skip
    points = [(cost, median_delay(cost)) for cost in costs]
    plot.line(points, HELDOUT)
    for point in points:
        plot.word(point, f"{point[1]:.0f}", HELDOUT, dx=4)
    return plot.svg()


PLOTS = {"guard_decline.svg": plot_decline, "guard_healthy.svg": plot_healthy, "guard_delay.svg": plot_delay}


def main() -> int:
    """Write every picture into the folder named on the command line, or docs/img."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PLOTS.items():
        (folder / name).write_text(draw(), encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
