"""Commands that run tests: `test` hands its words to pytest, `cover` measures a command and all its workers."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from surefoot_harness.cli.exits import guarded
from surefoot_harness.cli.overview import WholeLines
from surefoot_harness.own_command import own_name

if TYPE_CHECKING:
    from surefoot_harness.assets import Asset, AssetState
    from surefoot_harness.suites.session import SuiteRequest


_DATA = Path(".surefoot/coverage")
_Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Where the data of all runs is kept.")]
_TEST_HELP = """Usage: {own} test [PATH below the unit folder] [pytest options]

  {own} test                        every unit test
  {own} test maths/test_losses.py   tests/unit/maths/test_losses.py
  {own} test --hf-gated             with the tests that need a token
  {own} test --mcore-only           only the tests of one marker group

The unit folder is tests/unit, or unit_folder under [tool.surefoot] in pyproject.toml. Every other word reaches pytest
as it stands, and its exit code comes back: 5, nothing collected, is not a pass."""


def add_runner(app: typer.Typer) -> None:
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
    """Run the unit tests with pytest; every word is passed on (see its --help)."""
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
    from surefoot_harness import worker_coverage

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
    from surefoot_harness.runners import run_tests

    if words in (["-h"], ["--help"]):
        print(_TEST_HELP.format(own=own_name()))
        return 0
    run_tests(words, Path.cwd())
    return 70  # unreachable: pytest has replaced this process


def _report(data: Path, fail_under: float | None, as_json: bool) -> int:
    from surefoot_harness import worker_coverage

    found = worker_coverage.report(data)
    enough = worker_coverage.meets(found.percent, fail_under)
    print(json.dumps(found.as_json(), indent=2, ensure_ascii=False) if as_json else found.text())
    if not enough:
        print(f"FAIL: {found.line}; --fail-under {fail_under:g} is not shown to be reached", file=sys.stderr)
    return 0 if enough else 1


# -- `surefoot trend` and `surefoot assets`: what tests recorded over time, and what they need built ahead


_Names = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer resolves this spelling in every version we allow
    typer.Argument(metavar="NAME ...", help="Which assets; all when left out.", show_default=False),
]
_Manifest = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--manifest", help="The TOML file that declares them; the nearest pyproject.toml when left out."),
]


def add_trend(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(trend)
    assets = typer.Typer(
        cls=WholeLines, no_args_is_help=True, help="Build, list and check what tests need built ahead of time."
    )
    assets.command("build")(build_assets)
    assets.command("list")(list_assets)
    assets.command("check")(check_assets)
    app.add_typer(assets, name="assets")


def trend(
    metric: Annotated[
        str,
        typer.Argument(
            metavar="METRIC | FILE.jsonl", help="A name that tests tracked, such as loss; or a file of measured ratios."
        ),
    ],
    test: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Only this test: its key, such as test_loss::test_small, or its node id. Of a file: cells so called."
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="The history folder.")] = Path("unit_results"),
    last: Annotated[int, typer.Option(metavar="K", help="Compare the newest value with the K before it.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    fail_on_change: Annotated[
        bool, typer.Option("--fail-on-change", help="Exit 1 unless every newest value is judged and unchanged.")
    ] = False,
) -> None:
    """Show METRIC over the history of test sessions, and flag a step change of its newest value.

    Of a FILE.jsonl with ratios by cell and commit: each cell, with a mark where its newest ratio is worse than the best
    before it beyond both intervals.
    """
    if metric.endswith(".jsonl"):
        sys.exit(guarded(partial(_ratio_trend, Path(metric), test, last, as_json, fail_on_change)))
    sys.exit(guarded(partial(_trend, metric, test, folder, last, as_json, fail_on_change)))


def build_assets(
    names: _Names = None,
    manifest: _Manifest = None,
    offline: Annotated[bool, typer.Option("--offline", help="Refuse what needs the network.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build again even what is complete.")] = False,
) -> None:
    """Build the assets that are not complete; exit 1 if one fails."""
    sys.exit(guarded(partial(_build_assets, names or [], manifest, offline, force)))


def list_assets(names: _Names = None, manifest: _Manifest = None) -> None:
    """List the declared assets and how they stand."""
    sys.exit(guarded(partial(_list_assets, names or [], manifest, judge=False)))


def check_assets(names: _Names = None, manifest: _Manifest = None) -> None:
    """Verify every byte of the assets; exit 1 unless all are complete."""
    sys.exit(guarded(partial(_list_assets, names or [], manifest, judge=True)))


def _trend(metric: str, test: str | None, folder: Path, last: int, as_json: bool, fail_on_change: bool) -> int:
    import json

    from surefoot_harness.system.text import printable
    from surefoot_harness.tables import terminal_width
    from surefoot_harness.trend import read_history, trends
    from surefoot_harness.verdict import Verdict

    history = read_history(folder)
    for problem in history.unreadable:
        print(printable(f"cannot be read: {problem}"), file=sys.stderr)
    found = trends(history, metric, test, last)
    if as_json:
        whole = {"trends": [each.as_json() for each in found], "unreadable": list(history.unreadable)}
        print(json.dumps(whole, indent=2, allow_nan=False))
    else:
        print(printable("\n\n".join(each.as_text(terminal_width()) for each in found)))
    changed = any(each.status is not Verdict.PASS for each in found)
    return 1 if fail_on_change and changed else 0


def _ratio_trend(path: Path, cell: str | None, last: int, as_json: bool, fail_on_change: bool) -> int:
    from surefoot_harness.ratios import ratio_trends, read_ratios
    from surefoot_harness.system.text import printable
    from surefoot_harness.tables import terminal_width
    from surefoot_harness.verdict import Verdict

    found = ratio_trends(read_ratios(path), cell, last)
    if as_json:
        print(json.dumps({"trends": [each.as_json() for each in found]}, indent=2, allow_nan=False))
    else:
        print(printable("\n\n".join(each.as_text(terminal_width()) for each in found)))
    changed = any(each.status is not Verdict.PASS for each in found)
    return 1 if fail_on_change and changed else 0


def _build_assets(names: list[str], manifest: Path | None, offline: bool, force: bool) -> int:
    from surefoot_harness.asset_build import build_all
    from surefoot_harness.assets import find_assets
    from surefoot_harness.errors import SurefootError
    from surefoot_harness.system.text import printable

    code = 0
    for asset, outcome in build_all(find_assets(manifest, names), offline=offline, force=force):
        if isinstance(outcome, SurefootError):
            code = 1
            print(printable(f"FAIL  {outcome}"), file=sys.stderr, flush=True)
        else:
            print(
                printable(f"PASS  {asset.name}: {outcome.files} files, {outcome.size} bytes in {asset.folder}"),
                flush=True,
            )
    return code


def _list_assets(names: list[str], manifest: Path | None, *, judge: bool) -> int:
    from surefoot_harness.assets import COMPLETE, examine, find_assets
    from surefoot_harness.system.text import printable
    from surefoot_harness.tables import table, terminal_width

    states = [(asset, examine(asset)) for asset in find_assets(manifest, names).values()]
    rows = [_row(asset, state) for asset, state in states]
    print(printable(table("Assets", ["Name", "Status", "Files", "Bytes", "Detail"], rows, terminal_width())))
    return 1 if judge and any(state.status != COMPLETE for _, state in states) else 0


def _row(asset: Asset, state: AssetState) -> list[str]:
    todo = f"{state.detail}; run: {asset.build_command}" if state.detail else asset.description
    return [asset.name, state.status, str(state.files), str(state.size), todo]


# -- `surefoot suite`: list, run, launch, check, package and report -------------------------------


# typer resolves annotations at run time and knows this spelling of "may be left out" in every version we allow.
_Suites = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--suites",
        metavar="DIR",
        help="Where NAME.toml lies; suites/ at the top of the repository.",
        show_default=False,
    ),
]
_Name = Annotated[str, typer.Argument(metavar="NAME", help="A suite: nightly, or suites/nightly.toml.")]
_Recipes = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--recipe", metavar="R", help="Only this recipe; may be given again.", show_default=False),
]
_Set = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the recipe, such as max_steps=3.", show_default=False
    ),
]
_Relax = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--relax", metavar="'OLD=>NEW'", help="Judge by another check.", show_default=False),
]
_Drop = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--drop-check", metavar="EXPR", help="Leave a check out; needs --reason.", show_default=False),
]
_Reason = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--reason", metavar="TEXT", help="Why; goes into the verdict.", show_default=False),
]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print commands and GPU-hours, create nothing.")]
_Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--out", metavar="DIR", help="Where runs go; default runs/suites.", show_default=False),
]
_Extra = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(metavar="-- WORDS", help="Words added to the trainer's command.", show_default=False),
]


def add_suite(app: typer.Typer) -> None:
    """Register the group."""
    group = typer.Typer(
        cls=WholeLines, no_args_is_help=True, help="Recipes, executors, verdicts: run a suite and judge it."
    )
    for command in (list_suites, run, launch, check, package, report):
        group.command("list" if command is list_suites else command.__name__)(command)
    app.add_typer(group, name="suite")


def list_suites(suites: _Suites = None) -> None:
    """List every suite and its recipes."""
    sys.exit(guarded(partial(_list_suites, suites)))


def run(
    name: _Name, extra: _Extra = None, recipe: _Recipes = None,
    executor: Annotated[str, typer.Option(help="local, docker or slurm.")] = "local",
    set_: _Set = None, relax: _Relax = None, drop_check: _Drop = None, reason: _Reason = None, dry_run: _DryRun = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Run again even if a verdict is there.")] = False,
    out: _Out = None,
    results: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--results", metavar="DIR", help="Also write one JSON per recipe here.", show_default=False),
    ] = None,
    suites: _Suites = None,
) -> None:  # fmt: skip
    """Train every recipe of a suite and judge it by its checks. 0 only when all pass.

    Exit: 0 PASS, 1 a check failed, 2 usage or arguments that the trainer rejects, 3 nobody can tell, 70 the trainer
    broke, 74 disk or memory full (also SIGKILL), 75 stopped, 76 out of time.
    """

    def action() -> int:
        from surefoot_harness.suites import session

        request = _request(name, suites, recipe, (set_, relax, drop_check, reason), extra, executor, out)
        if dry_run:
            _say(session.describe(request, os.environ))
            return 0
        return session.run(request, os.environ, _say, fresh=fresh, results_folder=results)

    sys.exit(guarded(action))


def launch(
    name: _Name, extra: _Extra = None, recipe: _Recipes = None, set_: _Set = None, relax: _Relax = None,
    drop_check: _Drop = None, reason: _Reason = None, dry_run: _DryRun = False, out: _Out = None,
    suites: _Suites = None,
) -> None:  # fmt: skip
    """Submit every recipe of a suite to Slurm, as chained jobs from one code snapshot.

    Reads CONTAINER ACCOUNT PARTITION MOUNTS HF_HOME HF_DATASETS_CACHE (needed), EXTRA_ENV EXTRA_SCRIPT_ARGS IS_RELEASE
    EXCLUDE_GRES SLURM_JOB_SUFFIX DRYRUN=1|2 WATCH=1 WATCH_INTERVAL.
    """

    def action() -> int:
        from surefoot_harness.suites import run as launcher
        from surefoot_harness.suites import session

        dryrun = 1 if dry_run else launcher.dryrun_of(os.environ)
        request = _request(name, suites, recipe, (set_, relax, drop_check, reason), extra, "slurm", out)
        _say(session.estimate(request.recipes))
        return launcher.launch(
            request.suite, request.recipes, request.out, _say, dryrun=dryrun, environ=os.environ,
            extra_args=request.extra_args, overrides=request.overrides.recorded(),
        )  # fmt: skip

    sys.exit(guarded(action))


def check(name: _Name, suites: _Suites = None) -> None:
    """Check that a suite is consistent: names, configs, hardware, budget, checks, git."""
    sys.exit(guarded(partial(_check_suite, name, suites)))


def package(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder with event files.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where the tarball goes.")],
    commit: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name the tarball by this commit.", show_default=False),
    ] = None,
    host: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="A further host name to take out.", show_default=False),
    ] = None,
) -> None:
    """Pack the event files of RUNS without host names into COMMIT.tar.gz."""

    def action() -> int:
        from surefoot_harness.suites.package import package as pack

        made = pack(runs, out, hosts=host or [], commit=commit)
        torn = f", {made.torn} bytes of unfinished records left out" if made.torn else ""
        _say(f"{made.path}  {made.files} event files, {made.replaced} host names replaced{torn}")
        return 0

    sys.exit(guarded(action))


def report(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder made by --results.")]) -> None:
    """Print a result folder; 0 only when every required part passed."""

    def action() -> int:
        from surefoot_harness.suites.verdicts import report as text_of

        text, verdict = text_of(folder)
        _say(text)
        return 0 if verdict == "PASS" else 1

    sys.exit(guarded(action))


def _list_suites(suites: Path | None) -> int:
    from surefoot_harness.suites import session

    text, broken = session.list_suites(*session.suites_folder(suites, Path.cwd()))
    _say(text)
    for problem in broken:
        print(problem, file=sys.stderr)
    return 2 if broken else 0


def _check_suite(name: str, suites: Path | None) -> int:
    from surefoot_harness.suites import session
    from surefoot_harness.suites.rules import check_suite
    from surefoot_harness.tables import table

    suite = session.find_suite(name, suites, Path.cwd())
    findings = check_suite(suite, suite.path.parent)
    rows = [
        [str(finding.status), finding.rule, problem] for finding in findings for problem in finding.problems or ("",)
    ]
    _say(table(f"Suite {name}", ["Status", "Rule", "Problem"], rows))
    return int(any(finding.problems for finding in findings))


def _request(
    name: str, suites: Path | None, recipes: list[str] | None,
    changes: tuple[list[str] | None, list[str] | None, list[str] | None, str | None], extra: list[str] | None,
    executor: str, out: Path | None,
) -> SuiteRequest:  # fmt: skip
    from surefoot_harness.suites import session
    from surefoot_harness.suites.manifest import Overrides

    set_, relax, drop, reason = changes
    overrides = Overrides(tuple(set_ or ()), tuple(relax or ()), tuple(drop or ()), reason)
    suite = session.find_suite(name, suites, Path.cwd())
    return session.make_request(suite, recipes or [], overrides, extra or [], executor, out, os.environ)


def _say(text: str) -> None:
    from surefoot_harness.system.text import printable

    try:
        print("\n".join(printable(line) for line in text.split("\n")), flush=True)
    except BrokenPipeError:  # nobody reads on; the verdict and the exit code still have to come
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
