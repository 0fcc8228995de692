"""How a notebook shows the outcome of a run.

Promises   nothing that a model, a task or a path says is read as HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from surefoot.tracking.report_text import esc
from surefoot.tracking.text import duration, number, shown_path
from surefoot.tracking.view import Finished

_SHOWN = ("eval_accuracy", "eval_reward", "reward", "kl", "entropy", "completions/mean_length")
_COLOURS = {"PASS": "#1a7f37", "FAIL": "#b3261e", "ERROR": "#b3261e"}


class Kept(Finished, Protocol):
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


def outcome_table(outcome: Kept) -> str:
    """A table without scripts and without anything from elsewhere."""
    colour = _COLOURS.get(str(outcome.verdict), "#8a6100")
    reasons = "<br>".join(esc(reason, 500) for reason in list(outcome.reasons)[:10])
    rows = "".join(
        f'<tr><th style="text-align:left">{esc(name)}</th><td style="text-align:left">{esc(value, 500)}</td></tr>'
        for name, value in _rows(outcome)
    )
    return f'<div><b style="color:{colour}">{esc(outcome.verdict)}</b><br>{reasons}<table>{rows}</table></div>'


def _rows(outcome: Kept) -> Iterator[tuple[str, str]]:
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
