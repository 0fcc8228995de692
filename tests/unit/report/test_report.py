"""The page shows what the run left, says what is missing, and is safe to open whatever a model wrote."""

from __future__ import annotations

import json
import math
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from surefoot.cli import runs
from surefoot.errors import StateError, StorageError
from surefoot.report import data as report_data
from surefoot.report import markup
from surefoot.report import page as module
from surefoot.report import page as report_rollouts
from surefoot.report.data import MAX_LANES, colours, lanes, read_run, steps_on_the_clock
from surefoot.report.markup import MAX_POINTS, Chart, Curve, Scale, draw, esc, foreign, smooth, thin
from surefoot.report.page import render, write_report
from surefoot.tracking.live import Span, Timeline, Window

SAFE_TAGS = set(
    "html head meta title style body main header footer section div span p b small ul li h1 h2 h3 h4 figure figcaption "
    "article details summary pre table thead tbody tr th td svg g line text rect polyline polygon circle".split()
)
NASTY = [
    "</pre></title></style><script>alert(1)</script>",
    "<img src=x onerror=alert(1)> <svg onload=alert(1)> <iframe src=//x> <a href=javascript:alert(1)>",
    "\"><b onmouseover=alert(1)> ' ` ${x} {{x}}",
    "abc \u202e live \u2066 \x1b[31m \x00 \u200b \ud800 \ufeff \u2028 end",
    "<!-- --> ]]> &lt;script&gt; &#60;script&#62;",
]


class Page(HTMLParser):
    """Every tag and attribute of a page, and all its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.words += data


def a_run(folder: Path, *, steps: int = 12, text: str = "42", **extra: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text('model = "pebble"\ntasks = "builtin:sums"\nmax_steps = 12\ndtype = "float32"\n')
    rows: list[dict[str, Any]] = [{"step": 0, "eval_accuracy": 0.25, "eval_accuracy_stderr": 0.05, "eval_n": 80.0}]
    for step in range(1, steps + 1):
        rows.append({"step": step, "reward": 0.2 + step / 100, "kl": 0.1, "entropy": 1.0, "num_tokens": 10.0})
        rows[-1] |= {"step_time": 0.5, "timing/collect": 0.2, "timing/learn": 0.2, "completions/mean_length": 4.0}
        rows[-1] |= extra
    rows.append({"step": steps, "eval_accuracy": 0.75, "eval_accuracy_stderr": 0.04, "eval_n": 80.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    verdict = {
        "status": "PASS",
        "reasons": ["all 12 planned steps ran", text],
        "seconds": 65.0,
        "executed_steps": steps,
    }
    (folder / "verdict.json").write_text(json.dumps(verdict | {"target": ["eval_accuracy", 0.85]}))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "versions": {"torch": text}}))
    (folder / "rollouts").mkdir(exist_ok=True)
    one = {"task": text, "prompt": text, "text": text, "version": 3, "finish_reason": "stop", "rollout": 0}
    kept = [
        one | {"reward": reward, "failure": failure, "reward_parts": {text: reward, "b": None}, "group": "g"}
        for reward, failure in ((1.0, None), (0.0, None), (None, "timeout"), (0.5, None))
    ]
    (folder / "rollouts" / f"step_{steps}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    timeline = Timeline(folder / "timeline.jsonl")
    with timeline.span("learn", track=text):
        pass
    timeline.step_done(1)
    timeline.close()
    return folder


def test_the_page_holds_verdict_curves_clock_rollouts_and_config(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a run", **{"sync/probe_gap": 2e-6, "failures/timeout": 1.0, "async/staleness_max": 1.0})
    page = write_report(run)
    text = page.read_text(encoding="utf-8")
    words = Page(text).words
    assert page == run / "report.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    for told in (
        "PASS", "all 12 planned steps ran", "0.25 → 0.75", "12 of 12", "1m 05s", "Held-out accuracy", "target 0.85",
        "Training reward", "KL to the reference", "Where a step's time goes", "Staleness", "Weight-sync proof gap",
        "tolerance 1.0e-04", "failures/timeout", "best reward", "worst reward", "no verdict: timeout", "by chance",
        "prompt", "completion", "version 3", "builtin:sums", "max_steps", "healthy is up",
    ):  # fmt: skip
        assert told in words, told
    assert "could not be drawn" not in words
    assert "2.0e-06 nats, at step 1" in words
    assert len(text) < 200_000


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_no_text_becomes_markup_and_nothing_stays_invisible(tmp_path: Path, text: str) -> None:
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")
    page = Page(write_report(a_run(tmp_path / "run", text=text)).read_text(encoding="utf-8"))
    assert set(page.tags) <= SAFE_TAGS
    assert [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href", "action")] == []
    assert not [c for c in page.words if c in "\u202e\u2066\x1b\x00\u200b\ud800\ufeff\u2028"]


@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text_is_shown_to_the_letter_or_spelled_out(text: str) -> None:
    page = Page(f"<pre>{foreign(text)}</pre>")
    assert set(page.tags) <= {"pre", "span"}
    visible = "".join(c for c in text if not markup._is_hidden(c) and c not in "\n\t")
    spelled = page.words.replace("\n", "").replace("\t", "")
    assert [c for c in visible if c not in spelled] == []
    assert not any(markup._is_hidden(c) for c in page.words)


def test_the_page_needs_nothing_from_elsewhere_and_may_run_nothing(tmp_path: Path) -> None:
    text = write_report(a_run(tmp_path / "run")).read_text(encoding="utf-8")
    page = Page(text)
    assert "script" not in page.tags
    assert any("default-src 'none'" in value for _, value in page.attributes)
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text


def test_planted_unescaped_text_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_rollouts, "foreign", lambda text: text)
    with pytest.raises(AssertionError):
        test_no_text_becomes_markup_and_nothing_stays_invisible(tmp_path, NASTY[0])


def test_a_secret_of_the_config_is_not_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "hunter2-hunter2")
    run = a_run(tmp_path / "run")
    with (run / "config.toml").open("a") as file:
        file.write('system_prompt = "say hunter2-hunter2"\n')
    assert "hunter2-hunter2" not in write_report(run).read_text(encoding="utf-8")


# -- what is missing or odd --------------------------------------------------------------


@pytest.mark.parametrize("name", ["metrics.jsonl", "verdict.json", "environment.json", "timeline.jsonl", "rollouts"])
def test_a_missing_file_costs_its_own_part_and_is_named(tmp_path: Path, name: str) -> None:
    run = a_run(tmp_path / "run")
    path = run / name
    if path.is_dir():
        for each in path.iterdir():
            each.unlink()
    else:
        path.unlink()
    words = Page(render(read_run(run))).words
    assert "What is missing" in words
    assert name in words[words.index("What is missing") :]
    assert "could not be drawn" not in words


def test_a_run_that_was_killed_at_once_still_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    page = Page(render(read_run(tmp_path)))
    assert "no verdict yet" in page.words
    assert ("class", "verdict PASS") not in page.attributes


@pytest.mark.parametrize(
    "junk", [b"", b"\xff\x00", b"{", b"[]", b"null\n5\n", b'{"step": "x"}\n', b"[" * 99999], ids=range(7)
)
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "verdict.json", "environment.json", "timeline.jsonl", "config.toml", "status.json"]
)
def test_junk_in_any_file_never_stops_the_page_and_is_never_a_pass(tmp_path: Path, name: str, junk: bytes) -> None:
    run = a_run(tmp_path / "run")
    (run / name).write_bytes(junk)
    words = Page(write_report(run).read_text(encoding="utf-8")).words
    if name == "verdict.json":
        assert "no verdict yet" in words


ODD: list[Any] = [
    None,
    -1,
    True,
    "x",
    [],
    {},
    [[]],
    {"a": {"b": [1]}},
    10**400,
    ["<b>"],
    {"planned": "x", "dropped": 3},
]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_odd_values_in_the_verdict_cost_at_most_their_part(tmp_path: Path, value: Any) -> None:
    run = a_run(tmp_path / "run")
    names = "status reasons seconds planned_steps executed_steps target shown_target ledger best".split()
    (run / "verdict.json").write_text(json.dumps(dict.fromkeys(names, value)))
    (run / "status.json").write_text(json.dumps(dict.fromkeys(["replicas", "workers"], value)))
    (run / "environment.json").write_text(json.dumps(dict.fromkeys(["versions", "git", "cpus"], value)))
    page = Page(render(read_run(run)))
    assert "Training reward" in page.words
    assert set(page.tags) <= SAFE_TAGS


def test_a_torn_last_line_and_numbers_that_are_none_are_counted_and_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "reward": NaN, "kl": 1e999}\n{"step": 14, "rew')
    data = read_run(run)
    assert [x for x, _ in data.series("reward")] == list(range(1, 13))
    assert any("2 lines cannot be read" in each for each in data.missing)


def test_a_part_that_cannot_be_drawn_says_so_and_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(data: object) -> str:
        raise KeyError("x")

    monkeypatch.setattr(module, "_clock", broken)
    words = Page(render(read_run(a_run(tmp_path / "run")))).words
    assert "timeline could not be drawn" in words
    assert "Training reward" in words
    assert "KeyError" in words[words.index("What is missing") :]


def test_errors_are_typed(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is not a run folder"):
        write_report(tmp_path / "none")
    run = a_run(tmp_path / "run")
    with pytest.raises(StorageError):
        write_report(run, tmp_path)
    with pytest.raises(StorageError):
        write_report(run, tmp_path / "no" / "such" / "report.html")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


# -- size --------------------------------------------------------------------------------


def test_a_long_run_is_thinned_and_its_evaluations_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_data, "MAX_ROWS", 50)
    run = a_run(tmp_path / "run", steps=2000)
    data = read_run(run)
    assert data.every > 1
    assert len(data.train) < 200
    assert [value for _, value in data.series("eval_accuracy")] == [0.25, 0.75]
    assert len(render(data)) < 200_000


def test_long_rollouts_are_cut_and_the_rest_is_counted(tmp_path: Path) -> None:
    words = Page(render(read_run(a_run(tmp_path / "run", text="ab" * 50_000)))).words
    assert "96000 more characters" in words
    assert len(words) < 120_000


# -- drawing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [[0.0], [0.0, 0.0], [5.0] * 30, [-1e299, 1e299], [1e-320, 1e-310], [1.0, 1.0 + 1e-16], [-3.0, 7.0]],
    ids=range(7),
)
@pytest.mark.parametrize("log", [False, True])
def test_a_chart_of_any_finite_numbers_has_finite_coordinates(values: list[float], log: bool) -> None:
    points = list(enumerate(values))
    text = draw(Chart("x", [Curve("x", points)], log=log, limit=("limit", 1.0)))
    assert "nan" not in text
    assert "inf" not in text


def test_thinning_keeps_the_mean_and_smoothing_a_constant() -> None:
    points = [(float(x), math.sin(x)) for x in range(MAX_POINTS * 4)]
    kept = thin(points)
    assert len(kept) == MAX_POINTS
    assert math.isclose(sum(y for _, y in kept) / len(kept), sum(y for _, y in points) / len(points), abs_tol=1e-12)
    assert smooth([(float(x), 2.0) for x in range(9)], 5) == [(float(x), 2.0) for x in range(9)]


def test_ticks_are_round_and_inside() -> None:
    assert Scale(0.0, 1.0).ticks(4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert Scale(1.0, 40.0).ticks(5, whole=True) == [10.0, 20.0, 30.0, 40.0]
    assert Scale(1e-7, 1e-4, log=True).ticks() == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4])


def test_spans_that_overlap_lie_beside_each_other() -> None:
    spans = [Span("a", "t", 0, 2), Span("b", "t", 1, 3), Span("c", "t", 2, 4), Span("d", "t", 3, 5)]
    assert [(s.name, lane) for s, lane in lanes(spans)] == [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
    assert max(lane for _, lane in lanes([Span("a", "t", 0, 9)] * 20)) == MAX_LANES - 1


def test_the_clock_shows_the_median_and_the_slowest_step_cut_at_their_edges() -> None:
    windows = [
        Window(n, float(n), n + length, [Span("learn", "loop", n - 5.0, n + 50.0)])
        for n, length in enumerate([1, 2, 9])
    ]
    windows.append(Window(9, 0.0, 20.0, [Span("learn", "loop", 1.0, 2.0)], slowest=True, left_out=3))
    text = steps_on_the_clock(windows)
    assert text.index("Step 1: 2 s") < text.index("Step 9: 20 s")
    assert "3 more spans" in text
    assert colours(windows) == {"learn": 1}


def test_many_tracks_are_cut_and_counted_with_numbers_in_order() -> None:
    spans = [Span(f"n{n}", f"worker-{n}", 0.0, 1.0) for n in range(100)] + [Span("learn", "loop", 0.0, 1.0)]
    text = steps_on_the_clock([Window(1, 0.0, 1.0, spans)])
    assert "more tracks" in text
    assert text.index(">loop<") < text.index(">worker-2<") < text.index(">worker-10<")


def _at_home(folder: Path) -> Path:
    """A run of somebody whose files lie in folders of their own, outside of any checkout."""
    run = a_run(folder / "my run", text="")
    home = "/srv/of jo/secret project"
    (run / "config.toml").write_text(
        f'model = "{home}/models/qwen"\ntasks = "{home}/data/mine.jsonl"\nreward_funcs = ["{home}/data/r.py:score"]\n'
    )
    (run / "environment.json").write_text(json.dumps({"python": "3.11", "git": {"commit": None, "dirty": None}}))
    verdict = {"status": "INCOMPLETE", "reasons": ["saved in /srv/jo/runs/mine/checkpoints/step_3 (asked to)"]}
    (run / "verdict.json").write_text(json.dumps(verdict))
    one = {"task": "t", "prompt": "p", "version": 3, "rollout": 0, "reward": 1.0, "finish_reason": "stop"}
    rows = [
        one | {"text": "", "completion_ids": [7]},
        one | {"text": " ", "completion_ids": [7, 8], "reward": 0.0},
        one | {"text": "x", "ended": "answered", "turns": [{"text": "x", "completion_ids": [7]}], "reward": 0.5},
    ]
    (run / "rollouts" / "step_12.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_page_for_others_has_no_folders_of_ours_and_says_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _at_home(tmp_path)
    text = write_report(run).read_text(encoding="utf-8")
    words = Page(text).words
    for told in (
        "…/models/qwen", "…/data/mine.jsonl", "…/data/r.py:score", "saved in …/checkpoints/step_3 (asked to)",
        "1 token", "2 tokens", "1 turn", "turn 1, 1 token, trained", "answered", "ended by stop",
        "(empty)", "(white space only)", "from my run",
    ):  # fmt: skip
        assert told in words, told
    for wrong in ("/srv/", "secret project", str(tmp_path), "None", "1 tokens", "1 turns", "ended by answered"):
        assert wrong not in text, wrong
    monkeypatch.setattr("surefoot.report.page.local", str)
    assert "/srv/of jo" in write_report(run).read_text(encoding="utf-8"), "a path that is not cut is seen"


def test_short_texts_are_cut_and_escaped() -> None:
    assert esc("<a>" * 2) == "&lt;a&gt;&lt;a&gt;"
    assert esc("x" * 600).endswith(" …")


# -- the command --------------------------------------------------------------------------


def test_the_command_writes_where_it_is_told_and_exits_3_for_no_run(tmp_path: Path) -> None:
    app = typer.Typer()
    runs.add_report(app)
    app.command("other")(lambda: None)
    run = a_run(tmp_path / "run")
    done = CliRunner().invoke(app, ["report", str(run), "--output", str(tmp_path / "my page.html")])
    assert (done.exit_code, (tmp_path / "my page.html").exists(), (run / "report.html").exists()) == (0, True, False)
    assert CliRunner().invoke(app, ["report", str(tmp_path / "none")]).exit_code == 3


def one_evaluation(folder: Path, step: int, **row: float) -> str:
    """The page of a run with this evaluation alone, and one step."""
    a_run(folder)
    rows = [{"step": 1, "reward": 0.0}, {"step": step, "eval_n": 9.0} | row]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return render(read_run(folder))


@pytest.mark.parametrize(("step", "when"), [(0, "before training"), (1, "after step 1")])
def test_one_evaluation_of_few_answers_is_one_count_on_the_page(tmp_path: Path, step: int, when: str) -> None:
    page = one_evaluation(tmp_path / "run", step, eval_accuracy=5 / 9, eval_right=5.0, eval_accuracy_stderr=0.17)
    assert f"<b>5 of 9</b><span>held-out accuracy, measured once, {when}</span>" in page
    assert '<span class="now">5 of 9</span>' in page, "and beside its curve"
    assert "<b>0</b><span>training reward</span>" in page
    assert "→ 0" not in page


@pytest.mark.parametrize("step", [0.0, 1.0, 7.0])
def test_the_axes_of_a_single_point_show_no_step_and_no_share_below_0(step: float) -> None:
    """A run has no step -1, and what cannot be negative has no axis below 0."""
    for chart in (
        Chart("x", [Curve("x", [(step, 0.0)])]),
        Chart("x", [Curve("x", [(step, 0.0)], [0.125])], floor=0.0),
        Chart("x", [Curve("x", [(step, 0.002)], [0.125])], floor=0.0),
    ):
        ticks = [float(tick) for tick in re.findall(r'class="tick"[^>]*>([^<]+)<', draw(chart))]
        assert len(ticks) > 2
        assert min(ticks) >= 0.0, ticks
    below = [float(t) for t in re.findall(r'class="tick"[^>]*>([^<]+)<', draw(Chart("x", [Curve("x", [(1.0, -2.0)])])))]
    assert min(below) < 0.0, "a reward may be negative"
