"""`surefoot check`, `surefoot dump`, `surefoot baseline`: judge what a run logged."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Optional, TextIO

import typer

from surefoot_harness.cli.exits import guarded
from surefoot_harness.cli.overview import WholeLines

_Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A run folder, metrics.jsonl, metrics.json, trainer_state.json, or a folder of TensorBoard events.",
        show_default=False,
    ),
]
_Folder = Annotated[Path, typer.Option("--folder", "--baselines", help="Where baselines are stored.")]
_FOLDER = Path("surefoot-baselines")
_baseline = typer.Typer(
    cls=WholeLines, no_args_is_help=True, help="Stored runs, from which bands are derived.", rich_markup_mode=None
)


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command("check")(check)
    app.command("dump")(dump)
    app.add_typer(_baseline, name="baseline")


def check(
    source: _Source,
    expressions: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="EXPR...", help="Such as 'mean(data[\"train/loss\"]) < 1.5'.", show_default=False),
    ] = None,
    checks_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--checks-file", help="More checks: one on each line, # begins a comment.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    junit: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--junit", metavar="FILE", help="Also write JUnit XML.", show_default=False),
    ] = None,
    baseline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--baseline", metavar="NAME", help="Which baseline within_baseline() means.", show_default=False),
    ] = None,
    baselines: Annotated[Path, typer.Option("--baselines", help="Where baselines are stored.")] = _FOLDER,
) -> None:
    """Judge SOURCE by each EXPR: exit 0 all pass, 1 some fail, 2 an expression is refused, 3 SOURCE cannot be read.

    Without EXPR the metrics of SOURCE are listed, and the exit code is 2: no check is no evidence.
    """
    given = list(expressions or [])
    sys.exit(guarded(partial(_check, source, given, checks_file, as_json, junit, baseline, baselines)))


def _check(
    source: Path,
    expressions: list[str],
    checks_file: Path | None,
    as_json: bool,
    junit: Path | None,
    baseline: str | None,
    baselines: Path,
) -> int:
    from surefoot_harness.baseline import Baselines
    from surefoot_harness.checks.command import all_checks, judge_source, write_junit
    from surefoot_harness.tables import terminal_width

    if not all_checks(expressions, checks_file):
        return _list_metrics(source, as_json)
    report, notes = judge_source(source, expressions, checks_file, Baselines(baselines, baseline))
    if junit is not None:
        write_junit(junit, report)
    _print(notes, file=sys.stderr)
    _print([report.as_json() if as_json else report.as_table(terminal_width())])
    return report.exit_code


def _list_metrics(source: Path, as_json: bool) -> int:
    """What could be asked about; then the refusal all the same, since nothing was judged."""
    from surefoot_harness.checks.command import list_metrics, metric_facts, nothing_judged
    from surefoot_harness.sources import load_metrics

    metrics = load_metrics(source)
    _print([json.dumps({"metrics": metric_facts(metrics)}, indent=2) if as_json else list_metrics(metrics)])
    sys.stdout.flush()  # before the refusal, which goes to the other stream
    raise nothing_judged(metrics)


def dump(
    logdir: Annotated[Path, typer.Argument(metavar="LOGDIR", help="A folder with event files, at any depth.")],
    output: Annotated[Path, typer.Option("-o", "--output", "--output_path", help="The JSON file to write.")],
    error_on_conflicts: Annotated[
        bool, typer.Option("--error-on-conflicts", help="Refuse two files with two values for one step.")
    ] = False,
    require_tag_prefix: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--require-tag-prefix", metavar="PREFIX", help="Refuse events without such a tag."),
    ] = None,
) -> None:
    """Merge all TensorBoard events below LOGDIR into one JSON file: metric, then step, then value."""
    required = tuple(require_tag_prefix or ())
    sys.exit(guarded(partial(_dump, logdir, output, error_on_conflicts, required)))


def _dump(logdir: Path, output: Path, error_on_conflicts: bool, required: tuple[str, ...]) -> int:
    from surefoot_harness.sources import dump as dump_events

    _print(dump_events(logdir, output, error_on_conflicts=error_on_conflicts, required=required))
    return 0


@_baseline.command("add")
def baseline_add(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A finished run that you accept; any SOURCE of check.")],
    name: Annotated[str, typer.Option("--name", help="Which baseline.")] = "main",
    folder: _Folder = _FOLDER,
) -> None:
    """Store RUN in a baseline; three runs or more make a band."""
    sys.exit(guarded(partial(_baseline_add, run, name, folder)))


def _baseline_add(run: Path, name: str, folder: Path) -> int:
    from surefoot_harness.baseline import add_run, load_baseline
    from surefoot_harness.sources import load_metrics

    stored = add_run(run, load_metrics(run), folder=folder, name=name)
    total = len(load_baseline(folder, name).runs)
    _print([f"{name}: {total} runs; added {stored.source} with {len(stored.metrics)} metrics"])
    _print(f"left out {metric}: {why}" for metric, why in stored.left_out.items())
    return 0


@_baseline.command("list")
def baseline_list(folder: _Folder = _FOLDER) -> None:
    """Every baseline, how many runs it holds, and its newest run."""
    sys.exit(guarded(partial(_baseline_list, folder)))


def _baseline_list(folder: Path) -> int:
    from surefoot_harness.checks.command import list_baselines

    _print([list_baselines(folder)])
    return 0


@_baseline.command("show")
def baseline_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which baseline.")] = "main",
    alpha: Annotated[float, typer.Option("--alpha", help="False alarm rate of the bands shown.")] = 0.01,
    folder: _Folder = _FOLDER,
) -> None:
    """The runs of a baseline, the band of each metric's mean, and what was loosened and why."""
    sys.exit(guarded(partial(_baseline_show, name, alpha, folder)))


def _baseline_show(name: str, alpha: float, folder: Path) -> int:
    from surefoot_harness.checks.command import show_baseline

    _print([show_baseline(folder, name, alpha)])
    return 0


@_baseline.command("loosen")
def baseline_loosen(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which baseline.")],
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="Whose band.")],
    factor: Annotated[float, typer.Option("--factor", help="How many times as wide, from 1.", show_default=False)],
    reason: Annotated[str, typer.Option("--reason", help="Why; it is stored and shown with every verdict.")] = "",
    folder: _Folder = _FOLDER,
) -> None:
    """Widen the band of one metric; a reason is required."""
    sys.exit(guarded(partial(_baseline_loosen, name, metric, factor, reason, folder)))


def _baseline_loosen(name: str, metric: str, factor: float, reason: str, folder: Path) -> int:
    from surefoot_harness.baseline import loosen

    loosen(folder, name, metric, factor, reason)
    _print([f"{name}: the band of {metric} is {factor:g} times as wide: {reason.strip()}"])
    return 0


def _print(lines: Iterable[str], file: TextIO | None = None) -> None:
    from surefoot_harness.system.text import printable

    for line in lines:
        print(printable(line), file=file or sys.stdout)
