"""What is seen of a run while it goes on: the seam `View`, plain lines and the last block; and its files, kept fresh.

Owns       the wording of progress and verdict; `console.py` draws the same facts live on a terminal.
Promises   one line per logged step, names and values in fixed order, so that it can be read and grepped; every
           text is made printable first; a reader who goes away (a closed pipe, a closed terminal) or stops reading
           never stops a training run.
Never      decides anything: numbers come in, text goes out.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from surefoot.errors import SurefootError
from surefoot.protocols import count_text
from surefoot.records import Verdict
from surefoot.report.markup import esc
from surefoot.system.text import counted, duration, number, printable, shown_path
from surefoot.tracking import live
from surefoot.tracking.live import Facts, StatusBoard, StatusWriter, Timeline
from surefoot.tracking.metrics import headlines, kind_of

# -- Where a run is shown, for as long as somebody looks ------------------------------------------
# Promises   a reader who goes away (a closed pipe, a closed terminal) or stops reading (a paused terminal, a full pipe)
# never stops a training run, and never raises.


_PIECE = 1000
"""Characters written at once: at most 4000 bytes, which a pipe that has room takes whole."""


class Screen:
    """A stream as far as anybody reads it; for everything that is shown, by whichever thread.

    A reader who is gone is not missed: the numbers are in metrics.jsonl. One who stops reading (a paused terminal, a
    full pipe) is waited for once; then lines are left out until there is room again, and their number is said.
    """

    def __init__(self, stream: TextIO | None, *, patience_s: float = 5.0) -> None:
        self._stream, self._patience_s = stream, patience_s
        self._blocked = False
        self._left_out = 0

    @property
    def encoding(self) -> str:
        """What characters can be shown."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether somebody sits before it."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Show it, if that is possible. Never raises for want of a reader."""
        shown = text.encode(self.encoding, errors="backslashreplace").decode(self.encoding)
        for begin in range(0, len(shown), _PIECE):
            self._put(shown[begin : begin + _PIECE])
        return len(text)

    def flush(self) -> None:
        """Nothing waits here: `write` has flushed."""

    def _put(self, piece: str) -> None:
        if self._stream is None:
            return
        try:
            if not self._has_room(self._stream):
                self._left_out += piece.count("\n")
                return
            if self._left_out:
                piece = f"[{self._left_out} lines were left out: nobody read them]\n{piece}"
                self._left_out = 0
            self._stream.write(piece)
            self._stream.flush()
        except (OSError, ValueError):  # a closed pipe, a closed terminal, a closed stream, a full disk behind it
            if self._stream in (sys.stdout, sys.__stdout__):
                silence_stdout()
            self._stream = None

    def _has_room(self, stream: TextIO) -> bool:
        """Whether one piece can be written without waiting for a reader."""
        poll = select.poll()
        try:
            poll.register(stream.fileno(), select.POLLOUT)
        except (OSError, AttributeError):  # not a file of the system: nobody to wait for
            return True
        self._blocked = not poll.poll(0 if self._blocked else self._patience_s * 1000)
        return not self._blocked


def silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush does not complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):
        os.dup2(nowhere, 1)
    if nowhere != 1:
        os.close(nowhere)


# -- What a person sees of a run: the seam `View`, plain lines for pipes and files, and the last block


SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "scored_entropy": "entropy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut",
    "clip_ratio/region_mean": "clipped",
    "frac_reward_zero_std": "zero_std",
    "grad_norm": "grad",
    "tokens_per_second": "tok/s",
}
"""Metrics on a step's line, in order, with their short names."""


class Finished(Protocol):
    """How a run ended, as far as a view needs to know."""

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL, INCOMPLETE or ERROR."""

    @property
    def reasons(self) -> Sequence[str]:
        """Why, one line each."""

    @property
    def run_dir(self) -> Path:
        """The run folder."""

    @property
    def evaluate_with(self) -> str:
        """How to look at its weights again; empty when that is `surefoot eval RUN`."""

    @property
    def seconds(self) -> float | None:
        """How long it took; None: since the view was made."""


class View(Protocol):
    """Who watches a run."""

    def start(self, plan_lines: Sequence[str]) -> None:
        """The plan, before anything is computed."""

    def resumed(self, line: str, rows: Sequence[Mapping[str, float]]) -> None:
        """The run goes on: from where, and the lines of metrics.jsonl that were written before."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimiser step was logged."""

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out tasks were answered."""

    def warn(self, text: str, remedy: str) -> None:
        """Something that usually ends badly, and what to do."""

    def note(self, lines: Sequence[str]) -> None:
        """Facts that belong to the verdict: the curves of a stopped run, the best weights."""

    def finish(self, outcome: Finished) -> None:
        """The verdict. Nothing comes after it."""

    def close(self) -> None:
        """Let go of the screen, however the run ended; safe to call twice."""


class History:
    """What a view remembers: first and last of everything it was shown, and the clock."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.done = 0
        self.rewards: list[float] = []
        self.accuracies: list[float] = []
        self.sets: dict[str, list[float]] = {}
        """The headline number of each evaluation set, by its metric's name."""
        self.heldout: list[tuple[int, str]] = []
        """Step and accuracy of the first and the last evaluation, as they are shown."""
        self.last: dict[str, float] = {}
        self.tokens = 0.0
        self.notes: list[str] = []
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in one step."""
        self.done = step
        self._first = self._first or (step, time.monotonic())
        self.last |= metrics
        self.tokens += metrics.get("num_tokens", 0.0)
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])

    def resumed(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Take in what was shown before the resume; its pace is not that of this one."""
        for row in rows:
            if kind_of(row) == "eval":
                self.evaluated(int(row["step"]), row)
            else:
                self.step(int(row["step"]), row)
        self.last.pop("step", None)
        self._first = None

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in one evaluation."""
        self.last |= metrics
        if "eval_accuracy" in metrics:
            self.accuracies.append(metrics["eval_accuracy"])
            self.heldout = [*self.heldout[:1], (step, accuracy_text(metrics))]
        for name in headlines(metrics):
            self.sets.setdefault(name, []).append(metrics[name])

    @property
    def seconds(self) -> float:
        """Since the view was made."""
        return time.monotonic() - self._began

    @property
    def left(self) -> str:
        """Time to go at the pace since the first step (loading a model is no step); a dash before it is known."""
        if self._first is None:
            return "-"
        step, moment = self._first
        if self.done > step:
            pace = (time.monotonic() - moment) / (self.done - step)
        elif "step_time" in self.last:
            pace = self.last["step_time"]
        else:
            return "-"
        return duration(pace * (self.max_steps - self.done))


class PlainView:
    """One readable line per event; for pipes, files and terminals without a cursor."""

    def __init__(self, max_steps: int, stream: TextIO | None = None) -> None:
        self.history = History(max_steps)
        self._screen = Screen(stream or sys.stdout)

    def start(self, plan_lines: Sequence[str]) -> None:
        """Print the plan."""
        self._lines(plan_lines)

    def resumed(self, line: str, rows: Sequence[Mapping[str, float]]) -> None:
        """Print from where."""
        self.history.resumed(rows)
        self._lines([line])

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line: `step   7/150  reward 0.5  kl 0.01 ...`."""
        self.history.step(step, metrics)
        self._lines([f"{self._place(step)}  {step_text(metrics)}  left {self.history.left}"])

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the evaluation's line."""
        self.history.evaluated(step, metrics)
        self._lines([f"{self._place(step)}  {eval_text(metrics)}"])

    def warn(self, text: str, remedy: str) -> None:
        """Print a warning with its remedy."""
        self._lines([f"warning: {text}", f"  remedy: {remedy}"])

    def note(self, lines: Sequence[str]) -> None:
        """Keep for the last block."""
        self.history.notes += lines

    def finish(self, outcome: Finished) -> None:
        """Print the last block."""
        self._lines(verdict_lines(outcome, self.history))

    def close(self) -> None:
        """Nothing to give back."""

    def _place(self, step: int) -> str:
        width = len(str(self.history.max_steps))
        return f"step {step:>{width}}/{self.history.max_steps}"

    def _lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._screen.write(printable(line) + "\n")


def step_text(metrics: Mapping[str, float]) -> str:
    """The shown metrics that exist, aligned: `reward 0.5000  kl 0.0012`."""
    return "  ".join(f"{short} {number(metrics[name]):<7}" for name, short in SHOWN.items() if name in metrics)


def accuracy_text(metrics: Mapping[str, float]) -> str:
    """`0.6125`, or `5 of 9` where the answers are few."""
    return count_text(metrics) or number(metrics["eval_accuracy"])


def eval_text(metrics: Mapping[str, float]) -> str:
    """`held-out accuracy 0.6125 +- 0.0244  gsm8k accuracy 0.41 +- 0.03 of 200`, as far as it is known, on one line."""
    parts = []
    if "eval_accuracy" in metrics:
        parts.append(f"held-out accuracy {accuracy_text(metrics)}")
        if "eval_accuracy_stderr" in metrics and count_text(metrics) is None:
            parts[-1] += f" +- {number(metrics['eval_accuracy_stderr'])}"
    if "eval_reward" in metrics:
        parts.append(f"held-out reward {number(metrics['eval_reward'])}")
    parts += [_set_text(name, metrics) for name in headlines(metrics)]
    if metrics.get("killswitch/fire"):
        parts.append("guard FIRED")
    if "eval_n" in metrics:
        parts.append(f"answers {number(metrics['eval_n'])}")
    if metrics.get("eval_failures"):
        parts.append(f"without verdict {number(metrics['eval_failures'])}")
    return "  ".join(parts)


def _set_text(name: str, metrics: Mapping[str, float]) -> str:
    """`gsm8k accuracy 0.41 +- 0.03 (pass@4 0.7) of 200`."""
    _, own, kind = name.split("/")
    text = f"{own} {kind} {number(metrics[name])}"
    if (error := metrics.get(f"{name}_stderr")) is not None:
        text += f" +- {number(error)}"
    tries = [each for each in metrics if each.startswith(f"eval/{own}/pass@")]
    if tries:  # the last is that of all answers
        text += f" ({tries[-1].rpartition('/')[2]} {number(metrics[tries[-1]])})"
    text += f" of {number(metrics[f'eval/{own}/n'])}"
    lost = metrics.get(f"eval/{own}/failures")
    return text + f", {number(lost)} without verdict" if lost else text


def verdict_lines(outcome: Finished, history: History) -> list[str]:
    """The last block: verdict, numbers, run folder, what to do next."""
    run = shown_path(outcome.run_dir)
    seconds = history.seconds if outcome.seconds is None else outcome.seconds
    lines = [
        "",
        f"{outcome.verdict}  after {history.done} of {counted(history.max_steps, 'step')} in {duration(seconds)}",
    ]
    lines += [f"  {reason}" for reason in outcome.reasons]
    lines += _heldout(history.heldout)
    for name, values in history.sets.items():
        lines += _journey(name.removeprefix("eval/").replace("/", " "), [number(value) for value in values])
    lines += _journey("reward", [number(value) for value in history.rewards])
    if history.tokens:
        lines.append(f"  tokens sampled     {history.tokens:.0f}")
    lines += [f"  {note}" for note in history.notes]
    lines += ["", f"run folder  {run}"]
    weights = _last_checkpoint(outcome.run_dir)
    if weights is not None:
        kind = (
            "an adapter in PEFT's form" if (weights / "adapter_config.json").exists() else "a plain Hugging Face folder"
        )
        lines.append(f"weights     {shown_path(weights)}  ({kind})")
        lines.append(f"next        {outcome.evaluate_with or f'surefoot eval {run}'}")
    else:
        lines.append(f"next        read {run}/verdict.json and {run}/metrics.jsonl")
    return lines


def best_text(best: Mapping[str, Any], evaluation: Mapping[str, float]) -> str:
    """`best  eval_accuracy 0.9 at step 40  (checkpoints/step_40)`, or that no step was better than the start.

    Args:
        best: as in verdict.json.
        evaluation: the metrics of any evaluation of the run: how many answers such a number is made of.
    """
    name, value = best["metric"], number(best["value"])
    if name == "eval_accuracy" and "eval_right" in evaluation:
        value = count_text({**evaluation, "eval_right": round(best["value"] * evaluation["eval_n"])}) or value
    if best["step"] == 0:
        return f"{'best':<18} the model it began with: {name} {value} before training, and never more after a step"
    return f"{'best':<18} {name} {value} at step {best['step']}  ({best['checkpoint'] or 'not kept'})"


def _heldout(shown: Sequence[tuple[int, str]]) -> list[str]:
    """From the first evaluation to the last; of one alone, when it was."""
    if len(shown) == 1:
        step, value = shown[0]
        when = f"after step {step}" if step else "before training"
        return [f"  {'held-out accuracy':<18} {value}  (measured once, {when})"]
    return _journey("held-out accuracy", [value for _, value in shown])


def _journey(name: str, values: Sequence[str]) -> list[str]:
    """From the first to the last; one alone is one."""
    return [f"  {name:<18} {' -> '.join([values[0], *values[1:][-1:]])}"] if values else []


def _last_checkpoint(run_dir: Path) -> Path | None:
    steps = [p for p in run_dir.glob("checkpoints/step_*") if p.name.removeprefix("step_").isdigit()]
    return max(steps, key=lambda p: int(p.name.removeprefix("step_")), default=None)


# -- How a notebook shows the outcome of a run ----------------------------------------------------


_SHOWN = ("eval_accuracy", "eval_reward", "reward", "kl", "scored_entropy", "completions/mean_length")
_COLOURS = {"PASS": "#1a7f37", "FAIL": "#b3261e", "ERROR": "#b3261e"}


class NotebookOutcome(Finished, Protocol):
    """What is shown."""

    @property
    def metrics(self) -> Mapping[str, float]:
        """The last numbers."""

    @property
    def checkpoint(self) -> Path | None:
        """The newest weights."""

    @property
    def best_checkpoint(self) -> Path | None:
        """The best weights."""


def outcome_table(outcome: NotebookOutcome) -> str:
    """A table without scripts and without anything from elsewhere."""
    colour = _COLOURS.get(str(outcome.verdict), "#8a6100")
    reasons = "<br>".join(esc(reason, 500) for reason in list(outcome.reasons)[:10])
    rows = "".join(
        f'<tr><th style="text-align:left">{esc(name)}</th><td style="text-align:left">{esc(value, 500)}</td></tr>'
        for name, value in _rows(outcome)
    )
    return f'<div><b style="color:{colour}">{esc(outcome.verdict)}</b><br>{reasons}<table>{rows}</table></div>'


def _rows(outcome: NotebookOutcome) -> Iterator[tuple[str, str]]:
    for name in (
        *_SHOWN,
        *(each for each in outcome.metrics if each.startswith("eval/") and each.endswith("/accuracy")),
    ):
        if name in outcome.metrics:
            yield name, number(outcome.metrics[name])
    if outcome.seconds is not None:
        yield "wall time", duration(outcome.seconds)
    for name, path in (("weights", outcome.checkpoint), ("best weights", outcome.best_checkpoint)):
        if path is not None:
            yield name, shown_path(path)
    yield "run folder", shown_path(outcome.run_dir)
    if outcome.evaluate_with:
        yield "look again", outcome.evaluate_with


# -- Everything by which others see a run: `status.json`, `timeline.jsonl`, `report.html` ----------
# Owns       the three, from `with monitor:` to the end of the block; one place where a run plugs them in.
# Promises   nothing here stops or slows a run: what cannot be written becomes one warning.
#
#     with RunMonitor(folder, max_steps=100, warn=view.warn) as monitor:
#         phase = monitor.phase(stop.part)            pieces of a step become spans
#         with monitor.asking(runtime.status): ...    the replicas or the sampler are asked once a second
#         monitor.step(7, metrics)                    after each step; `evaluated` after each evaluation
#         monitor.finished(7)                         the step is over, its evaluation and checkpoint included
#     monitor.report()                                after the verdict


Phase = Callable[[str], AbstractContextManager[object]]


class RunMonitor:
    """One run, seen from outside. Enter it after everything that forks: it has a thread."""

    def __init__(self, folder: Path, *, max_steps: int, warn: Callable[[str, str], None]) -> None:
        """`warn` gets what went wrong, and a remedy."""
        self.folder, self._warn = folder, warn
        self.board = StatusBoard(max_steps=max_steps)
        self.timeline = Timeline(folder / live.TIMELINE_FILE)
        self.writer = StatusWriter(folder / live.STATUS_FILE, self.board.facts, warn=warn)
        self._inside = ExitStack()

    def __enter__(self) -> RunMonitor:
        self._inside.enter_context(self.timeline.listening())
        self._inside.enter_context(self.writer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.close()
        if self.timeline.problem is not None:
            self._warn(f"the timeline was not kept: {self.timeline.problem}", "the report will lack it")

    def asking(self, source: Callable[[], Facts]) -> AbstractContextManager[None]:
        """Inside this, `source` is asked at every writing; when it is left, nobody asks any more."""
        return self.board.asking(source)

    def phase(self, inner: Phase) -> Phase:
        """The loop's phases, each also a span on the track `loop`."""

        @contextmanager
        def both(name: str) -> Iterator[None]:
            with self.timeline.span(name), inner(name):
                yield

        return both

    def resumed(self, step: int, seconds_before: float = 0.0) -> None:
        """The run goes on from here; what came before the resume took so long."""
        self.board.resumed(step, seconds_before)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimiser step was logged."""
        self.board.step(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out tasks were answered."""
        self.board.evaluated(step, metrics)

    def finished(self, step: int) -> None:
        """Nothing more belongs to this step."""
        self.timeline.step_done(step)

    def report(self) -> Path | None:
        """Write the page; None, with a warning, where that is not possible."""
        return report_or_warn(self.folder, self._warn)


def report_or_warn(folder: Path, warn: Callable[[str, str], None]) -> Path | None:
    """Write `report.html` of this run; what is in its way ends nothing."""
    from surefoot.report.page import write_report

    try:
        return write_report(folder)
    except SurefootError as error:
        warn(f"the report was not written: {error.what}", f"try: surefoot report {folder}")
        return None
