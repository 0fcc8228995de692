"""A person reads the plan, the steps, the warnings and the verdict; live or as lines, the same facts."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from surefoot.config.load import load_config
from surefoot.records import Verdict
from surefoot.report.console import PlainView, RichView, View, batch_arithmetic, open_view
from surefoot.report.view import History, best_text

STEP = {"reward": 0.5, "kl": 0.0, "scored_entropy": 1.25, "completions/mean_length": 4.0, "tokens_per_second": 1234.5}
STEP |= {"frac_reward_zero_std": 0.25, "clip_ratio/region_mean": 0.125, "num_tokens": 100.0}
EVAL = {"eval_accuracy": 0.6125, "eval_accuracy_stderr": 0.0244, "eval_n": 400.0}
NASTY = "all [bold]equal[/bold] \x1b[2J"


@dataclass
class Ended:
    run_dir: Path
    verdict: Verdict = Verdict.PASS
    reasons: tuple[str, ...] = ("eval_accuracy 0.9 reached 0.85",)
    evaluate_with: str = ""
    seconds: float | None = None


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
    view.history.evaluated(2, EVAL)
    with console.capture() as capture:
        console.print(view._frame())
    text = capture.get()
    for word in ("step 2/10", "left", "held-out accuracy", "0.6125", "kl", "entropy", "length", "clipped", "zero_std"):
        assert word in text, word
    assert "▁█" in text


def test_time_left_is_judged_by_steps_not_by_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("surefoot.report.view.time.monotonic", lambda: clock[0])
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
    assert "100 tasks x 1 answer" in text, "no more than there are"
    assert "1,095,680 parameters" in text
    assert "target reward >= 1.0" in text


def test_with_tools_the_limit_of_a_completion_is_that_of_a_turn() -> None:
    words = ["tasks_per_step=2", "num_generations=4", "max_completion_length=256", "max_steps=3", "eval_steps=1"]
    plain = "\n".join(batch_arithmetic(load_config(None, words).config))
    assert "8 rollouts, at most 2048 tokens, 1 microbatch (" in plain
    assert "every step and before the first" in plain
    tools = [*words, "max_turns=8", "tools.servers=mcp.json", "max_staleness=1", "importance_sampling_correction=true"]
    text = "\n".join(batch_arithmetic(load_config(None, tools).config))
    assert "8 rollouts, at most 16384 tokens (8 turns of 256), 2 microbatches (" in text
    assert "6 task visits, at most 49152 tokens" in text
    assert "samples at most 1 version old" in text


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


def test_a_run_that_ended_before_says_how_long_it_took_then(tmp_path: Path) -> None:
    out = io.StringIO()
    PlainView(3, out).finish(Ended(tmp_path, seconds=3723.0))
    assert "PASS  after 0 of 3 steps in 1h 02m" in out.getvalue()


# -- numbers that are not more than they are ---------------------------------------------------------

FEW = {"eval_accuracy": 5 / 9, "eval_accuracy_stderr": 0.17, "eval_right": 5.0, "eval_n": 9.0}


def ended(run_dir: Path, *evaluations: tuple[int, dict[str, float]]) -> str:
    stream = io.StringIO()
    view = PlainView(10, stream)
    for step, metrics in evaluations:
        view.evaluated(step, metrics)
    view.step(10, STEP)
    view.finish(Ended(run_dir))
    return stream.getvalue()


def test_few_answers_are_a_count_and_many_a_share(run_dir: Path) -> None:
    text = ended(run_dir, (0, FEW), (10, FEW | {"eval_accuracy": 2 / 9, "eval_right": 2.0}))
    assert "  held-out accuracy 5 of 9  answers 9\n" in text, "a count needs no standard error"
    assert "  held-out accuracy  5 of 9 -> 2 of 9\n" in text
    many = {"eval_accuracy": 0.25, "eval_accuracy_stderr": 0.05, "eval_right": 20.0, "eval_n": 80.0}
    assert "  held-out accuracy  0.25 -> 0.25\n" in ended(run_dir, (0, many), (10, many))


def test_a_mean_of_marks_between_0_and_1_is_no_count(run_dir: Path) -> None:
    """0.002 of 4 answers: nobody counted right ones, so none are claimed."""
    text = ended(run_dir, (0, {"eval_accuracy": 0.002, "eval_accuracy_stderr": 0.001, "eval_n": 4.0}))
    assert "held-out accuracy 0.002 +- 0.001  answers 4" in text
    assert "of 4" not in text


@pytest.mark.parametrize(("step", "when"), [(0, "before training"), (10, "after step 10")])
def test_one_evaluation_is_shown_as_one(run_dir: Path, step: int, when: str) -> None:
    text = ended(run_dir, (step, EVAL | {"eval_accuracy": 0.0}))
    assert f"  held-out accuracy  0  (measured once, {when})\n" in text
    assert "0 -> 0" not in text
    assert "  reward             0.5\n" in text, "and so is one step"


@pytest.mark.parametrize(
    ("best", "said"),
    [
        ({"step": 4, "value": 2 / 9, "checkpoint": "checkpoints/step_4"}, "2 of 9 at step 4  (checkpoints/step_4)"),
        ({"step": 4, "value": 2 / 9, "checkpoint": None}, "2 of 9 at step 4  (not kept)"),
        ({"step": 0, "value": 5 / 9, "checkpoint": None}, "the model it began with: eval_accuracy 5 of 9 before"),
    ],
    ids=str,
)
def test_the_best_is_named_and_never_one_that_is_worse_than_the_start(best: dict[str, Any], said: str) -> None:
    line = best_text({"metric": "eval_accuracy", "before_training": 5 / 9} | best, FEW)
    assert line.startswith("best  ")
    assert said in line
    assert "of 9" not in best_text({"metric": "eval_reward", "before_training": None} | best, FEW), (
        "no share of answers"
    )
