"""What a person sees of a run: the seam `View`, plain lines for pipes and files, and the last block.

Owns       the wording of progress and verdict; `console.py` draws the same facts live on a terminal.
Promises   one line per logged step, names and values in fixed order, so that it can be read and grepped; every
           text is made printable first; a reader who goes away (a closed pipe, a closed terminal) or stops reading
           never stops a training run.
Never      decides anything: numbers come in, text goes out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from surefoot.records import Verdict
from surefoot.tracking.screen import Screen
from surefoot.tracking.text import duration, number, printable, shown_path

SHOWN = {
    "reward": "reward",
    "kl": "kl",
    "entropy": "entropy",
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
        """Take in what an earlier life of the run was shown; its pace is not that of this one."""
        for row in rows:
            if any(name.startswith("eval_") for name in row):
                self.evaluated(row)
            else:
                self.step(int(row["step"]), row)
        self.last.pop("step", None)
        self._first = None

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Take in one evaluation."""
        self.last |= metrics
        if "eval_accuracy" in metrics:
            self.accuracies.append(metrics["eval_accuracy"])

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
        self.history.evaluated(metrics)
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


def eval_text(metrics: Mapping[str, float]) -> str:
    """`held-out accuracy 0.6125 +- 0.0244 of 400  reward 0.61`, as far as it is known."""
    parts = []
    if "eval_accuracy" in metrics:
        parts.append(f"held-out accuracy {number(metrics['eval_accuracy'])}")
        if "eval_accuracy_stderr" in metrics:
            parts[-1] += f" +- {number(metrics['eval_accuracy_stderr'])}"
    if "eval_reward" in metrics:
        parts.append(f"held-out reward {number(metrics['eval_reward'])}")
    if metrics.get("killswitch/fire"):
        parts.append("guard FIRED")
    if "eval_n" in metrics:
        parts.append(f"answers {number(metrics['eval_n'])}")
    if metrics.get("eval_failures"):
        parts.append(f"without verdict {number(metrics['eval_failures'])}")
    return "  ".join(parts)


def verdict_lines(outcome: Finished, history: History) -> list[str]:
    """The last block: verdict, numbers, run folder, what to do next."""
    run = shown_path(outcome.run_dir)
    lines = ["", f"{outcome.verdict}  after {history.done} of {history.max_steps} steps in {duration(history.seconds)}"]
    lines += [f"  {reason}" for reason in outcome.reasons]
    lines += _journey("held-out accuracy", history.accuracies) + _journey("reward", history.rewards)
    if history.tokens:
        lines.append(f"  tokens sampled     {history.tokens:.0f}")
    lines += [f"  {note}" for note in history.notes]
    lines += ["", f"run folder  {run}"]
    weights = _last_checkpoint(outcome.run_dir)
    if weights is not None:
        lines.append(f"weights     {shown_path(weights)}  (a plain Hugging Face folder)")
        lines.append(f"next        surefoot eval {run}")
    else:
        lines.append(f"next        read {run}/verdict.json and {run}/metrics.jsonl")
    return lines


def best_text(best: Mapping[str, Any]) -> str:
    """`best  eval_accuracy 0.9 at step 40  (checkpoints/step_40)`, and what it was before, if that was better."""
    line = f"{'best':<18} {best['metric']} {number(best['value'])} at step {best['step']}"
    line += f"  ({best['checkpoint'] or 'not kept'})"
    before = best["before_training"]
    return line + f"; before training {number(before)}" if before is not None and before > best["value"] else line


def _journey(name: str, values: Sequence[float]) -> list[str]:
    return [f"  {name:<18} {number(values[0])} -> {number(values[-1])}"] if values else []


def _last_checkpoint(run_dir: Path) -> Path | None:
    steps = [p for p in run_dir.glob("checkpoints/step_*") if p.name.removeprefix("step_").isdigit()]
    return max(steps, key=lambda p: int(p.name.removeprefix("step_")), default=None)
