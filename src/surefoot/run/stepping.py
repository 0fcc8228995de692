"""A run that its caller steps: the loop of `surefoot.train`, with the caller's own code between two steps.

Promises   a stepped run is the run that `surefoot.train` makes, bit for bit, whatever is asked of it between its steps;
           one that is closed early is saved, says INCOMPLETE, and can be resumed; the caller's own time is no stall.
Never      lets a callback change a run: it is told numbers and folders, after the fact.

    with surefoot.prepare(model="pebble", ...) as run:
        for metrics in run:                  # or run.step(), run.evaluate(), run.save() as you like
            print(run.steps_done, metrics["reward"])
    print(run.outcome)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.errors import ConfigError, StateError
from surefoot.report.console import View
from surefoot.run.outcome import Outcome
from surefoot.run.session import BetweenSteps, Steps
from surefoot.system.signals import OUTSIDE, tick

Numbers = Mapping[str, float]


class Callback:
    """Told of what a stepped run does; override what you want to hear of.

    An exception of a callback reaches whoever stepped the run; the step itself is over and whole.
    """

    def on_step(self, run: TrainingRun, metrics: Numbers) -> None:
        """After an optimiser step: its numbers, as metrics.jsonl has them."""

    def on_evaluate(self, run: TrainingRun, metrics: Numbers) -> None:
        """After an evaluation: one that was planned, before step 1 too, or one that you asked for."""

    def on_save(self, run: TrainingRun, folder: Path) -> None:
        """After `run.save()`."""

    def on_end(self, run: TrainingRun, outcome: Outcome) -> None:
        """After the last step, the last evaluation and the verdict."""


class TrainingRun:
    """A run between two of its steps. Made by `surefoot.prepare`; leave it by `finish`, `close` or a `with` block."""

    def __init__(self, steps: Steps, view: View, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = checked(callbacks)
        self.outcome: Outcome | None = None
        """What the run came to, once it is finished."""
        self._steps, self._view = steps, view
        self._now: BetweenSteps | None = None
        self._evaluated = -1
        self._advance()

    @property
    def steps_done(self) -> int:
        """Optimiser steps that are over, those before a resume too."""
        return self._alive().run.step

    @property
    def done(self) -> bool:
        """Whether no step is left: all planned ones ran, or a soft guard fired. `finish` is left to do."""
        from surefoot.evaluation import guard_fired

        run = self._alive().run
        return run.step >= run.config.max_steps or guard_fired(run)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._alive().folder.root

    def step(self) -> Numbers:
        """One optimiser step, with everything that belongs to it: logging, planned evaluations, saves, the guard.

        Raises:
            SurefootError: whatever ends the run; the verdict is written, and the run is over.
        """
        if self.done:
            raise StateError(
                f"all {self.steps_done} steps of this run are over",
                "a step more would be one that nobody planned",
                "call run.finish(), and surefoot.resume(run.outcome.run_dir, max_steps=...) to make it longer",
            )
        self._advance()
        metrics = dict(self._alive().run.last_metrics)
        self._tell("on_step", metrics)
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Answer the held-out tasks and evaluation sets now, with the weights that the engines serve.

        The answers are not written anywhere, and neither the guard nor the best checkpoint hears of them: the run goes
        on as if nobody had asked.
        """
        from surefoot.evaluation import answer, eval_metrics

        run = self._alive().run
        if not run.heldout and not run.eval_sets:
            raise ConfigError(
                "no task is held out, and there is no evaluation set", "there is nothing to answer",
                "set heldout_fraction above 0, or give eval_sets or eval_dataset",
            )  # fmt: skip
        with self._at_work("evaluating"):
            found = eval_metrics(answer(run.runtime, run.heldout, run.eval_sets, run.step))
        self._tell("on_evaluate", found)
        return found

    def save(self) -> Path:
        """A checkpoint of the run as it is now; it stays as long as those that the run makes itself."""
        run, kept = self._alive()
        with self._at_work("saving"):
            run.hooks.save(run.step)
        folder = kept.checkpoint(run.step)
        self._tell("on_save", folder)
        return folder

    def finish(self) -> Outcome:
        """Whatever steps are left, the last evaluation, the final checkpoint, and the verdict."""
        while self.outcome is None:
            if self.done:
                self._advance()
            else:
                self.step()
        return self.outcome

    def close(self) -> None:
        """End here: saved, INCOMPLETE, resumable. A finished run is left as it is; may be called twice."""
        try:
            self._steps.close()
        finally:
            self._now = None
            self._view.close()

    def __iter__(self) -> Iterator[Numbers]:
        """Every step that is left."""
        while self.outcome is None and not self.done:
            yield self.step()

    def __enter__(self) -> TrainingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A run whose steps are over gets its verdict; any other is closed, and can be resumed."""
        try:
            if kind is None and self._now is not None and self.done:
                self.finish()
        finally:
            self.close()

    def _alive(self) -> BetweenSteps:
        if self._now is None:
            raise StateError(
                "this run is over" if self.outcome is not None else "this run was closed",
                "its engines and workers are gone",
                "look at run.outcome" if self.outcome is not None else "go on with surefoot.prepare(resume=folder)",
            )
        return self._now

    def _advance(self) -> None:
        """To the next place between two steps, or to the end."""
        before = self._now
        try:
            with self._at_work("between two steps"):
                self._now = next(self._steps)
        except StopIteration as end:
            self._tell_of_evaluation(before)
            self.outcome, self._now = end.value, None
            self._view.close()
            self._tell("on_end", self.outcome)
        except BaseException:
            self._now = None
            self._view.close()
            raise
        else:
            self._tell_of_evaluation(self._now)

    def _tell_of_evaluation(self, now: BetweenSteps | None) -> None:
        """Of one that was planned, once."""
        if now is not None and now.run.last_eval and now.run.last_eval_step != self._evaluated:
            self._evaluated = now.run.last_eval_step
            self._tell("on_evaluate", dict(now.run.last_eval))

    @contextmanager
    def _at_work(self, what: str) -> Iterator[None]:
        """The watchdog looks on while this runs, and not while the caller's own code does."""
        tick(what)
        try:
            yield
        finally:
            tick(OUTSIDE)

    def _tell(self, what: str, about: object) -> None:
        for callback in self.callbacks:
            getattr(callback, what)(self, about)


def checked(callbacks: Any) -> tuple[Callback, ...]:
    """The callbacks, or a refusal of what is none."""
    found = tuple(callbacks) if isinstance(callbacks, Sequence) else (callbacks,)
    for each in found:
        if not isinstance(each, Callback):
            name = each.__name__ if isinstance(each, type) else type(each).__name__
            raise ConfigError(
                f"callbacks holds {name}", "a run tells instances of surefoot.Callback, and nobody else",
                "derive from surefoot.Callback and override on_step, on_evaluate, on_save or on_end",
            )  # fmt: skip
    return found
