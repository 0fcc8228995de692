"""A person reads the plan, the steps, the warnings and the verdict; live or as lines, the same facts."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.config_load import load_config
from surefoot.records import Verdict
from surefoot.tracking.console import PlainView, RichView, View, batch_arithmetic, open_view
from surefoot.tracking.view import History

STEP = {"reward": 0.5, "kl": 0.0, "entropy": 1.25, "completions/mean_length": 4.0, "tokens_per_second": 1234.5}
STEP |= {"frac_reward_zero_std": 0.25, "clip_ratio/region_mean": 0.125, "num_tokens": 100.0}
EVAL = {"eval_accuracy": 0.6125, "eval_accuracy_stderr": 0.0244, "eval_n": 400.0}
NASTY = "all [bold]equal[/bold] \x1b[2J"


@dataclass
class Ended:
    run_dir: Path
    verdict: Verdict = Verdict.PASS
    reasons: tuple[str, ...] = ("eval_accuracy 0.9 reached 0.85",)


def play(view: View, run_dir: Path) -> None:
    view.start(["one step  16 tasks"])
    view.evaluated(0, EVAL | {"eval_accuracy": 0.2})
    view.step(1, STEP)
    view.warn(NASTY, "raise it")
    view.step(2, STEP | {"reward": 0.75})
    view.evaluated(2, EVAL)
    view.finish(Ended(run_dir))
    view.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (2, 10, 9):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step_11.partial").mkdir()
    return tmp_path


def plain(run_dir: Path) -> str:
    stream = io.StringIO()
    play(PlainView(10, stream), run_dir)
    return stream.getvalue()


def rich(run_dir: Path, *, terminal: bool = True) -> str:
    stream = io.StringIO()
    play(RichView(10, Console(file=stream, force_terminal=terminal, width=100, highlight=False)), run_dir)
    return stream.getvalue()


@pytest.mark.parametrize("show", [plain, rich])
def test_the_end_has_verdict_numbers_folder_and_next_command(run_dir: Path, show: object) -> None:
    text = show(run_dir)  # type: ignore[operator]
    assert "PASS" in text
    assert "eval_accuracy 0.9 reached 0.85" in text
    assert "0.2 -> 0.6125" in text
    assert "0.5 -> 0.75" in text
    assert str(run_dir) in text
    assert f"surefoot eval {run_dir}" in text
    assert "step_10" in text, "the newest complete checkpoint, by number, not by name"
    assert "one step  16 tasks" in text


def test_plain_lines_are_one_per_event_and_can_be_grepped(run_dir: Path) -> None:
    lines = plain(run_dir).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line[:10] for line in steps] == ["step  0/10", "step  1/10", "step  2/10", "step  2/10"]
    assert "reward 0.5 " in steps[1]
    assert "zero_std 0.25" in steps[1]
    assert "tok/s " in steps[1]
    assert "grad" not in steps[1], "what was not measured is not shown"
    assert "held-out accuracy 0.6125 +- 0.0244" in steps[3]
    assert steps[1].index("kl") == steps[2].index("kl"), "columns stay in place"


@pytest.mark.parametrize("show", [plain, rich])
def test_text_is_never_markup_and_never_steers_the_terminal(run_dir: Path, show: object) -> None:
    text = show(run_dir)  # type: ignore[operator]
    assert "warning: all [bold]equal[/bold] \\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert "remedy: raise it" in text


def test_the_live_part_shows_numbers_curves_and_time_left(run_dir: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    view = RichView(10, console)
    view.history.step(1, STEP)
    view.history.step(2, STEP | {"reward": 0.75})
    view.history.evaluated(EVAL)
    with console.capture() as capture:
        console.print(view._frame())
    text = capture.get()
    for word in ("step 2/10", "left", "held-out accuracy", "0.6125", "kl", "entropy", "length", "clipped", "zero_std"):
        assert word in text, word
    assert "▁█" in text


def test_time_left_is_judged_by_steps_not_by_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("surefoot.tracking.view.time.monotonic", lambda: clock[0])
    history = History(10)
    assert history.left == "-"
    clock[0] = 1000.0  # a big model was loaded
    history.step(1, {"step_time": 3.0})
    assert history.left == "27s"
    clock[0] = 1004.0
    history.step(2, {"step_time": 3.0})
    assert history.left == "32s", "4 s per step as the clock saw it, 8 steps to go"


def test_the_cursor_comes_back_however_the_run_ends() -> None:
    stream = io.StringIO()
    view = RichView(10, Console(file=stream, force_terminal=True, width=80))
    view.start([])
    view.close()
    view.close()
    hidden, shown = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < shown


def test_no_colour_when_asked(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[1;32m" in rich(run_dir)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in rich(run_dir)


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert isinstance(open_view(3), PlainView)


def test_a_reader_who_leaves_does_not_stop_the_run(run_dir: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    play(PlainView(10, Closed()), run_dir)


def test_a_stream_that_cannot_write_a_character_gets_its_escape() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    PlainView(3, stream).start(["größer"])
    stream.seek(0)
    assert stream.read() == "gr\\xf6\\xdfer\n"


def test_without_weights_the_end_says_where_to_look(tmp_path: Path) -> None:
    stream = io.StringIO()
    view = PlainView(10, stream)
    view.finish(Ended(tmp_path, Verdict.ERROR, ("it broke",)))
    assert "ERROR  after 0 of 10 steps" in stream.getvalue()
    assert "verdict.json" in stream.getvalue()


def test_the_batch_arithmetic_multiplies() -> None:
    config = load_config(
        None,
        [
            "max_steps=10",
            "eval_steps=2",
            "eval_tasks=400",
            "num_iterations=2",
            "microbatch_size=64",
            "target_metric=reward",
            "target_value=1",
        ],
    ).config
    text = "\n".join(batch_arithmetic(config, train_tasks=800, heldout_tasks=100, parameters=1_095_680))
    assert "32 tasks x 8 generations = 256 rollouts" in text
    assert "at most 2048 tokens" in text
    assert "4 microbatches of 64 rollouts" in text
    assert "5 collections, each trained on 2 times" in text
    assert "160 task visits = 0.2 epochs" in text
    assert "at most 10240 tokens" in text
    assert "800 to train on, 100 held out" in text
    assert "100 tasks x 1 answers" in text, "no more than there are"
    assert "1,095,680 parameters" in text
    assert "target reward >= 1.0" in text


def test_a_resumed_run_shows_the_whole_run_and_not_only_its_last_life() -> None:
    stream = io.StringIO()
    view = PlainView(4, stream)
    rows = [{"step": 0, "eval_accuracy": 0.1}, {"step": 1, "reward": 0.25, "num_tokens": 10.0, "step_time": 99.0}]
    view.resumed("resumed after step 1 of 4", rows)
    assert view.history.left == "-", "the pace of an earlier life, perhaps on another machine, is not ours"
    view.step(2, {"reward": 0.5, "num_tokens": 5.0})
    assert stream.getvalue().splitlines()[0] == "resumed after step 1 of 4"
    assert (view.history.rewards, view.history.accuracies, view.history.tokens) == ([0.25, 0.5], [0.1], 15.0)
    assert "step" not in view.history.last
