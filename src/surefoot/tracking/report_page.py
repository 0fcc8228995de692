"""The page around the parts: head, style, footer. No script, nothing from elsewhere, light and dark."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.tracking.report_text import esc

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
