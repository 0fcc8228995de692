"""Commands that run tests: `test` hands its words to pytest, `cover` measures a command and all its workers."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from surefoot.cli.exits import guarded
from surefoot.cli.overview import WholeLines

_DATA = Path(".surefoot/coverage")
_Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Where the data of all runs is kept.")]
_TEST_HELP = """Usage: surefoot test [PATH below the unit folder] [pytest options]

  surefoot test                        every unit test
  surefoot test maths/test_losses.py   tests/unit/maths/test_losses.py
  surefoot test --hf-gated             with the tests that need a token
  surefoot test --mcore-only           only the tests of one marker group

The unit folder is tests/unit, or unit_folder under [tool.surefoot] in pyproject.toml. Every other word reaches pytest
as it stands, and its exit code comes back: 5, nothing collected, is not a pass."""


def add_to(app: typer.Typer) -> None:
    """Register `test` and `cover`."""
    as_it_stands = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command("test", context_settings=as_it_stands, add_help_option=False)(test)
    group = typer.Typer(
        cls=WholeLines, no_args_is_help=True, help="Coverage of a command and every Python process below it."
    )
    group.command("run", context_settings={"allow_interspersed_args": False})(cover_run)
    group.command("report")(cover_report)
    app.add_typer(group, name="cover")


def test(context: typer.Context) -> None:
    """Run the unit tests with pytest; every word is passed on (surefoot test --help)."""
    sys.exit(guarded(partial(_test, list(context.args))))


def cover_run(
    command: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer resolves annotations at run time
        typer.Argument(metavar="-- CMD ...", help="The command to measure.", show_default=False),
    ] = None,
    data: _Data = _DATA,
    source: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--source", metavar="DIR", help="Measure files below this folder; the current one when left out."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget earlier runs first.")] = False,
    save_every: Annotated[
        float, typer.Option("--save-every", metavar="SECONDS", help="Save while running too, so a kill loses less.")
    ] = 0,
) -> None:
    """Run CMD and measure it, its subprocesses, pools and Ray workers. Exits with CMD's own code."""
    from surefoot.harness import worker_coverage

    sys.exit(guarded(partial(worker_coverage.run, command or [], data, source or [Path()], fresh, save_every)))


def cover_report(
    data: _Data = _DATA,
    fail_under: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--fail-under", metavar="PERCENT", help="Exit 1 below this.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Add up all runs and print what ran; says "lower bound" when a worker left no data."""
    sys.exit(guarded(partial(_report, data, fail_under, as_json)))


def _test(words: list[str]) -> int:
    from surefoot.harness.runners import run_tests

    if words in (["-h"], ["--help"]):
        print(_TEST_HELP)
        return 0
    run_tests(words, Path.cwd())
    return 70  # unreachable: pytest has replaced this process


def _report(data: Path, fail_under: float | None, as_json: bool) -> int:
    from surefoot.harness import worker_coverage

    found = worker_coverage.report(data)
    enough = worker_coverage.meets(found.percent, fail_under)
    print(json.dumps(found.as_json(), indent=2, ensure_ascii=False) if as_json else found.text())
    if not enough:
        print(f"FAIL: {found.line}; --fail-under {fail_under:g} is not shown to be reached", file=sys.stderr)
    return 0 if enough else 1
