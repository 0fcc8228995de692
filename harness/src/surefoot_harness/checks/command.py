"""What the commands do: read the source, judge it, say it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surefoot_harness.baseline import MIN_RUNS, Baseline, Baselines, baseline_names, load_baseline, prediction_band
from surefoot_harness.checks import CheckReport, parse_check, run_checks
from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import write_atomic
from surefoot_harness.series import Metrics, describe
from surefoot_harness.sources import load_metrics
from surefoot_harness.tables import table


def judge_source(
    source: Path, expressions: Sequence[str], checks_file: Path | None, baselines: Baselines
) -> tuple[CheckReport, list[str]]:
    """The report of every check over `source`, and what is worth knowing about how it was read.

    The checks are read first: a mistake in one of them is told before a large log is loaded.
    """
    checks = all_checks(expressions, checks_file)
    if not checks:
        raise ConfigError("no checks were given", "a run without checks is not judged", "add an expression in quotes")
    for check in checks:
        parse_check(check)
    if baselines.default is not None:
        load_baseline(baselines.folder, baselines.default)
    metrics = load_metrics(source)
    return run_checks(metrics, checks, baselines), [f"note: {note}" for note in metrics.notes]


def all_checks(expressions: Sequence[str], checks_file: Path | None) -> list[str]:
    """Those of the command line, then those of the file."""
    return [*expressions, *(read_checks(checks_file) if checks_file is not None else [])]


def read_checks(path: Path) -> list[str]:
    """The checks of a file: one on each line; empty lines and lines that begin with # are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{path} cannot be read: {error}", "it holds the checks", "check the path") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def write_junit(path: Path, report: CheckReport) -> None:
    """The report as a JUnit file, written whole."""
    try:
        write_atomic(path, report.as_junit())
    except OSError as error:
        raise StateError(
            f"{path} cannot be written: {error.strerror}", "--junit asked for it", "choose another"
        ) from error


def list_baselines(folder: Path) -> str:
    """A table of the baselines in `folder`."""
    baselines = [load_baseline(folder, name) for name in baseline_names(folder)]
    rows = [[b.name, str(len(b.runs)), b.runs[-1].added, b.runs[-1].source] for b in baselines if b.runs]
    return table("Baselines", ["Name", "Runs", "Newest", "From"], rows) if rows else f"no baselines in {folder}"


def show_baseline(folder: Path, name: str, alpha: float) -> str:
    """A baseline's runs, the band of each metric's mean, and what was loosened and why."""
    baseline = load_baseline(folder, name)
    runs = [
        [run.source, run.added, (run.commit or "")[:12], run.config_hash or "", str(len(run.metrics))]
        for run in baseline.runs
    ]
    parts = [
        table(f"Runs of {name}", ["Run", "Added", "Commit", "Config", "Metrics"], runs),
        table("Bands of the mean", ["Metric", "Runs", "Band"], _bands(baseline, alpha)),
    ]
    if baseline.loosened:
        told = [[e["metric"], f"{e['factor']:g}", e.get("when", ""), e["reason"]] for e in baseline.loosened]
        parts.append(table("Loosened", ["Metric", "Factor", "When", "Reason"], told))
    return "\n\n".join(parts)


def _bands(baseline: Baseline, alpha: float) -> list[list[str]]:
    rows = []
    for metric in sorted({name for run in baseline.runs for name in run.metrics}):
        values = [statistics.fmean(run.metrics[metric].values()) for run in baseline.runs if metric in run.metrics]
        if len(values) >= MIN_RUNS:
            text = str(prediction_band(values, alpha, factor=baseline.factor(metric)[0]))
        else:
            text = f"not enough runs: {MIN_RUNS} are needed"
        rows.append([metric, str(len(values)), text])
    return rows


def list_metrics(metrics: Metrics) -> str:
    """A table of what a source recorded: each metric as a check writes it, how many points, and the last value."""
    rows = [
        [f'data["{name}"]', str(each["points"]), f"{each['first_step']} to {each['last_step']}", each["last"]]
        for name, each in metric_facts(metrics).items()
    ]
    return table(f"Metrics of {metrics.source}", ["Metric", "Points", "Steps", "Last value"], rows)


def metric_facts(metrics: Metrics) -> dict[str, Any]:
    """The same, for machines."""
    return {
        name: {
            "points": len(series), "first_step": series.steps[0], "last_step": series.steps[-1],
            "last": describe(series[series.steps[-1]]),
        }
        for name, series in sorted(metrics.items()) if series.steps
    }  # fmt: skip


def nothing_judged(metrics: Metrics) -> ConfigError:
    """The error for a source that no check was made of: to have looked at it is no evidence."""
    name = next((name for name in ("reward", "loss") if name in metrics), sorted(metrics)[0])
    value = f'data["{name}"]' if metrics[name].single else f'last(data["{name}"])'
    return ConfigError(
        "no checks were given", "a run without checks is not judged",
        f"add an expression in quotes, such as '{value} > 0'",
    )  # fmt: skip
