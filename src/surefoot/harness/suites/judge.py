"""The verdict on one trial, from its exit status, its numbers and its checks; written to `verdict.json`.

    trainer failed              ERROR        before any number is looked at
    stopped, or out of time     INCOMPLETE
    no numbers, or unreadable   ERROR        nobody can tell (exit 3)
    fewer than max_steps        INCOMPLETE   checks, when asked for, are for information
    a check did not pass        FAIL
    otherwise                   PASS

Promises   every check that was asked for has a row; a missing row is a FAIL.
Never      reads the log: words that a model was prompted with decide nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import StateError, SurefootError
from surefoot.harness.files import read_json, write_json
from surefoot.harness.scrub import scrub
from surefoot.harness.series import Metrics
from surefoot.harness.suites.executors.base import exit_words
from surefoot.harness.suites.manifest import Recipe
from surefoot.harness.suites.plan import Trial
from surefoot.records import Verdict

PASSED, FAILED, USAGE, UNKNOWN, STOPPED = 0, 1, 2, 3, 75
PROGRESS = "train/loss"
"""Its last step says how far a training got; the flat `loss` counts as well."""
KEYS = (
    "status", "reasons", "checks", "commit", "dirty", "config_hash", "container", "steps_reached", "max_steps",
    "overrides", "extra_args", "command", "started", "finished",
)  # fmt: skip
"""Every `verdict.json` has them all."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the trainer ended. `exit_code` None: it ran earlier, and nobody wrote down how it ended."""

    exit_code: int | None
    run: int = 1
    why: str = ""
    out_of_time: bool = False
    stopped: bool = False
    infrastructure: bool = False
    lost: bool = False
    """It ended, and nobody can tell how: killed with its machine, or thrown out of the queue."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, the sentences that carry it, and the exit code that it asks for."""

    status: Verdict
    reasons: tuple[str, ...]
    exit_code: int
    checks: tuple[dict[str, Any], ...] = ()
    steps_reached: int | None = None


def judge(trial: Trial, ending: Ending) -> Judgement:
    """Judge a trial that has ended; writes `metrics.json` beside the verdict when there are numbers."""
    early = _by_ending(trial.recipe, ending)
    metrics: Metrics | None = None
    trouble = ""
    try:
        metrics = _collect(trial)
    except SurefootError as error:
        trouble = f"{error.what}: {error.why}"
    reached = steps_reached(metrics, trial.recipe) if metrics is not None else None
    if early is not None:
        return Judgement(early.status, early.reasons, early.exit_code, (), reached)
    if metrics is None:
        return Judgement(Verdict.ERROR, ("the trainer left no numbers that can be read", trouble), UNKNOWN)
    return _by_numbers(trial, metrics, reached, ending)


def steps_reached(metrics: Metrics, recipe: Recipe) -> int | None:
    """How many steps the progress metric shows; None when it was not recorded."""
    series, _ = metrics.resolve(recipe.progress or PROGRESS)
    if series is None or not series.steps or series.single:
        return None
    return series.steps[-1] - recipe.first_step + 1


def load(trial: Trial) -> Metrics:
    """The numbers that a trial's trainer left; a `StateError` when there are none."""
    from surefoot.harness.sources import load_metrics

    return load_metrics(trial.run / trial.recipe.metrics)


def write_verdict(trial: Trial, judgement: Judgement, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the verdict; the same as a dictionary."""
    record: dict[str, Any] = {
        "status": str(judgement.status),
        "reasons": [scrub(reason) for reason in judgement.reasons],
        "checks": list(judgement.checks),
        "steps_reached": judgement.steps_reached,
        "max_steps": trial.recipe.max_steps,
        "exit_code": judgement.exit_code,
        **facts,
    }
    missing = [key for key in KEYS if key not in record]
    assert not missing, f"a verdict needs {missing}"
    write_json(trial.verdict, record)
    return record


def read_verdict(trial: Trial) -> dict[str, Any] | None:
    """An earlier verdict that can be relied on; None when there is none or any part of it does not fit."""
    try:
        record = read_json(trial.verdict)
    except StateError:
        return None
    if not isinstance(record, dict) or any(key not in record for key in KEYS):
        return None
    rows, steps = record["checks"], record["steps_reached"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not isinstance(steps, int):
        return None
    asked = [row.get("check") for row in rows] == list(trial.recipe.checks)
    good = all(row.get("status") == Verdict.PASS for row in rows)
    wanted = Verdict.PASS if good else Verdict.FAIL
    return record if asked and steps >= trial.recipe.max_steps and record["status"] == wanted else None


def _by_ending(recipe: Recipe, ending: Ending) -> Judgement | None:
    which = f" (run {ending.run} of {recipe.num_runs})" if recipe.num_runs > 1 else ""
    if ending.stopped:
        return Judgement(Verdict.INCOMPLETE, (f"stopped on request{which}",), STOPPED)
    if ending.out_of_time:
        return Judgement(Verdict.INCOMPLETE, (f"out of time after {recipe.minutes:g} minutes{which}",), FAILED)
    if ending.infrastructure or ending.lost:
        return Judgement(Verdict.ERROR, (f"{ending.why or 'the trainer could not be run'}{which}",), UNKNOWN)
    if ending.exit_code:
        return Judgement(Verdict.ERROR, (f"the trainer failed: {exit_words(ending.exit_code)}{which}",), FAILED)
    return None


def _by_numbers(trial: Trial, metrics: Metrics, reached: int | None, ending: Ending) -> Judgement:
    recipe = trial.recipe
    if reached is None:
        name = recipe.progress or PROGRESS
        near = ", ".join(metrics.nearest_names(name)) or "none"
        reason = f"{name} was not recorded, so nobody can tell how far it got (recorded: {near})"
        return Judgement(Verdict.ERROR, (reason, "set progress in the manifest"), UNKNOWN)
    steps = f"{reached} of {recipe.max_steps} steps"
    if reached < recipe.max_steps:
        rows = _rows(trial, metrics) if recipe.early_checks else ()
        return Judgement(Verdict.INCOMPLETE, (f"only {steps}",), FAILED, rows, reached)
    try:
        rows = _rows(trial, metrics)
    except SurefootError as error:  # a baseline that is missing or torn: no answer, and never a PASS
        return Judgement(
            Verdict.ERROR, (steps, f"the checks could not be run: {error.what}"), error.exit_code, (), reached
        )
    failed = [row for row in rows if row["status"] != Verdict.PASS]
    reasons = [steps, f"{len(rows) - len(failed)} of {len(rows)} checks passed"]
    if ending.exit_code is None:
        reasons.append("the trainer ran earlier; its exit status is not known")
    reasons += [f"{row['check']}: {row['message']}" for row in failed]
    passed = bool(rows) and not failed
    status, code = (Verdict.PASS, PASSED) if passed else (Verdict.FAIL, FAILED)
    return Judgement(status, tuple(reasons), code, rows, reached)


def _rows(trial: Trial, metrics: Metrics) -> tuple[dict[str, Any], ...]:
    """One row per check, in order; a check without an answer has failed."""
    from surefoot.harness.baseline import FOLDER, Baselines
    from surefoot.harness.checks import run_checks

    answers = run_checks(metrics, list(trial.recipe.checks), Baselines(trial.root / FOLDER)).rows
    rows = []
    for check, answer in itertools.zip_longest(trial.recipe.checks, answers):
        if answer is None or answer.check != check:
            rows.append({"check": check, "status": str(Verdict.FAIL), "value": None, "message": "no answer"})
        else:
            status = Verdict.PASS if answer.status is Verdict.PASS else Verdict.FAIL
            value = _plain(answer.value)
            rows.append({"check": check, "status": str(status), "value": value, "message": answer.message})
    return tuple(rows)


def _collect(trial: Trial) -> Metrics:
    """Load the numbers and keep them as one `metrics.json`, whatever form they had."""
    metrics = load(trial)
    table = {name: {str(step): _plain(value) for step, value in metrics[name].points()} for name in sorted(metrics)}
    write_json(trial.folder / "metrics.json", table)
    return metrics


def _plain(value: Any) -> Any:
    """As JSON can hold it: numbers that are not finite become their names, which no check takes for a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def worst_exit(codes: Sequence[int]) -> int:
    """One exit code for several: a stop wins, then a definite failure, then what nobody can tell."""
    for code in (STOPPED, FAILED, USAGE, UNKNOWN):
        if code in codes:
            return code
    return max(codes, default=UNKNOWN)
