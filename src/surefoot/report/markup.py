"""Text that a page may show: escaped, bounded, and with everything invisible made visible.

Model output is hostile until proven otherwise: it may hold markup, characters that turn the reading direction around,
or terminal codes. Here all of it becomes plain characters; a control character becomes its name in a box of its own.
"""

from __future__ import annotations

import html
import itertools
import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.system.text import number, printable

LONGEST = 4000


def esc(text: object, limit: int = 500) -> str:
    """A short text of ours or of a config: secrets hidden, control characters spelled out, escaped."""
    whole = printable(str(text))
    return html.escape(whole if len(whole) <= limit else whole[:limit] + " …", quote=True)


def local(text: object) -> str:
    """The same text with its absolute paths cut to their last two names: a page is for others, who have other folders.

    Example:
        >>> local("model = '/srv/jo/my runs/qwen', saved in /srv/x/run/checkpoints/step_3; http://a/b/c/d")
        "model = '…/my runs/qwen', saved in …/checkpoints/step_3; http://a/b/c/d"
    """
    whole = str(text)
    if whole.startswith("/") and "\n" not in whole:
        return _ending(whole)
    return _BARE.sub(lambda found: _ending(found[0]), _QUOTED.sub(lambda found: _ending(found[0]), whole))


_QUOTED = re.compile(r"""(?<=")/[^"\n]+(?=")|(?<=')/[^'\n]+(?=')""")
_BARE = re.compile(r"""(?<![\w.…/:~<-])/(?:[^\s"'<>|;,:()]+/)+[^\s"'<>|;,:()]*""")


def _ending(path: str) -> str:
    names = [name for name in path.split("/") if name]
    return path if len(names) <= 2 else "…/" + "/".join(names[-2:])


def foreign(text: str, limit: int = LONGEST) -> str:
    """A model's or a task's text, to the letter as far as it is shown; what is invisible is marked."""
    shown, more = text[:limit], len(text) - limit
    parts = []
    for hidden, run in itertools.groupby(shown, key=_is_hidden):
        piece = "".join(run)
        parts.append(f'<span class="ctl">{_name(piece)}</span>' if hidden else html.escape(piece, quote=True))
    if more > 0:
        parts.append(f'<span class="more"> … {more} more characters</span>')
    return "".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: int = 0) -> str:
    """A table of escaped cells; the last `numbers` columns are aligned to the right, an empty header is left out."""
    first = len(header) - numbers

    def cells(kind: str, row: Sequence[object]) -> str:
        return "".join(
            f"<{kind}{' class=num' if index >= first else ''}>{esc(cell)}</{kind}>" for index, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    top = f"<thead><tr>{cells('th', header)}</tr></thead>" if any(header) else ""
    return f'<div class="wide"><table>{top}<tbody>{body}</tbody></table></div>'


def _is_hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in _HIDDEN


_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _name(piece: str) -> str:
    spelled = piece.encode("unicode_escape", errors="surrogatepass").decode("ascii")
    return html.escape(spelled, quote=True)


# -- Curves as SVG text: axes, labels, legend, a band, a dashed limit. Numbers in, markup out; no library, no script
# Promises   every text is escaped; coordinates are finite whatever the numbers are; a chart has a few hundred points.


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


# -- The page around the parts: head, style, footer. No script, nothing from elsewhere, light and dark


POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is loaded, nothing runs: even markup that got past the escaping could do nothing."""
_LIGHT = "2563c9 c2600a 17805e 8246c9 b8355c 7d6400 0b7f9e 667080".split()
_DARK = "6ea8ff ffa657 4cc38a b99cff ff8fab d9c15b 5cc9e6 9aa4b2".split()


def _colours(values: Sequence[str]) -> str:
    return "".join(f"--c{index}:#{value};" for index, value in enumerate(values))


_SERIES = "".join(
    f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.k{i}::before{{background:var(--c{i})}}" for i in range(8)
)
STYLE = (
    ":root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1a2230;--soft:#5a6574;--line:#e2e6ec;"
    "--good:#17805e;--bad:#c02a3a;--warn:#9a6200;--mine:#eef3fb;--yours:#f4f5f7;--onbar:#fff;" + _colours(_LIGHT) + "}"
    "@media (prefers-color-scheme:dark){:root{--bg:#0f141b;--card:#171e28;--ink:#e7ebf1;--soft:#9aa6b5;--line:#2a3442;"
    "--good:#4cc38a;--bad:#ff7b86;--warn:#e6b450;--mine:#18263c;--yours:#1d2530;--onbar:#0f141b;"
    + _colours(_DARK)
    + "}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;line-height:1.2;margin:2px 0 0;overflow-wrap:anywhere}
h2{font-size:18px;margin:40px 0 12px}
h3{font-size:14px;font-weight:600;margin:0}
section h3{margin:18px 0 8px}section figcaption h3{margin:0}section .panel>h3:first-child{margin-top:0}
small{font-weight:400;color:var(--soft)}
.over{color:var(--soft);font-size:13px;letter-spacing:.02em;overflow-wrap:anywhere}
header{display:flex;gap:16px 28px;align-items:flex-start;justify-content:space-between;flex-wrap:wrap}
header>div{min-width:0}
.verdict{font-weight:700;font-size:20px;padding:8px 18px;border-radius:10px;
border:2px solid currentColor;white-space:nowrap}
.PASS{color:var(--good)}.FAIL,.ERROR{color:var(--bad)}.INCOMPLETE,.SKIP,.none-yet{color:var(--warn)}
ul.reasons{margin:14px 0 0;padding-left:20px}
ul.reasons li{overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:22px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 14px}
.tile b{display:block;font-size:20px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(350px,100%),1fr));gap:16px}
.card,.rollout,.panel{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 16px;margin:0}
.card{display:flex;flex-direction:column}
figcaption{display:flex;justify-content:space-between;align-items:baseline;gap:10px;margin-bottom:6px}
.now{font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.legend,.chips{display:flex;flex-wrap:wrap;gap:4px 14px;margin:6px 0 0;font-size:12.5px;color:var(--soft)}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.about{margin:4px 0 0;font-size:12.5px;color:var(--soft)}
svg{display:block;width:100%;height:auto;overflow:hidden}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;fill:var(--soft)}
.grid{stroke:var(--line);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1;opacity:.5}
polyline{fill:none;stroke-linejoin:round;stroke-linecap:round}
.curve{stroke-width:2}.raw{stroke-width:1;opacity:.35}.band{opacity:.16}.area{opacity:.85}
.limit{stroke:var(--bad);stroke-width:1.2;stroke-dasharray:5 4}
svg text.limit-name{fill:var(--bad);text-anchor:end}
svg.clock{min-width:760px}
svg text.track{font-size:12px;fill:var(--ink)}
svg text.inbar{font-size:11px;fill:var(--onbar)}
.bar{stroke:var(--card);stroke-width:.6}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;text-align:left;color:var(--soft);font-size:12.5px}
th,td{padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:anywhere}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));gap:16px;align-items:start}
th:last-child,td:last-child{padding-right:0}
.rollouts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(460px,100%),1fr));gap:14px;align-items:start}
.chips{margin:0 0 10px}.chips b{color:var(--ink)}
.chips span{overflow-wrap:anywhere;overflow:hidden}
.said{border-radius:8px;padding:8px 12px;margin-top:8px;border-left:3px solid var(--line);background:var(--yours)}
.completion{background:var(--mine);border-left-color:var(--c0)}.tool{margin-left:22px;border-left-style:dashed}
.said h4{margin:0 0 2px;font-size:11.5px;font-weight:600;color:var(--soft);text-transform:uppercase;
letter-spacing:.05em}
pre{margin:0;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace;white-space:pre-wrap;
overflow-wrap:anywhere;unicode-bidi:isolate;overflow:auto;max-height:30em}
details pre{font-size:12.5px;white-space:pre;overflow-x:auto}
summary{cursor:pointer;color:var(--soft);font-size:13.5px;margin-top:10px}
.ctl{background:var(--warn);color:var(--card);border-radius:3px;padding:0 3px;font-size:11px}
.more,.none{color:var(--soft)}
.missing{border-left:3px solid var(--warn);padding:8px 14px;background:var(--card);border-radius:8px}
.missing ul{margin:4px 0;padding-left:20px}
footer{margin-top:44px;color:var(--soft);font-size:13px;overflow-wrap:anywhere}
@media (max-width:520px){main{padding:18px 12px 40px}h1{font-size:21px}
.tiles{grid-template-columns:1fr 1fr}.tile b{font-size:17px}}
@media print{body{background:#fff}.card,.rollout{break-inside:avoid}}
""" + _SERIES
)


def page(title: str, parts: Sequence[str], footer: str) -> str:
    """The whole document; `parts` and `footer` are markup, `title` is text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="referrer" content="no-referrer"><meta name="robots" content="noindex">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{esc(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(parts) + f"\n<footer>{footer}</footer></main></body></html>\n"
    )  # fmt: skip


def section(title: str, body: str) -> str:
    """A part with its heading."""
    return f"<section><h2>{esc(title)}</h2>{body}</section>"
