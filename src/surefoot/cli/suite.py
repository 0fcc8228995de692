"""`surefoot suite`: list, run, launch, check, package and report."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from surefoot.cli.exits import guarded
from surefoot.cli.overview import WholeLines

if TYPE_CHECKING:
    from surefoot.harness.suites.session import Request

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


def add_to(app: typer.Typer) -> None:
    """Register the group."""
    group = typer.Typer(
        cls=WholeLines, no_args_is_help=True, help="Recipes, executors, verdicts: run a suite and judge it."
    )
    for command in (list_suites, run, launch, check, package, report):
        group.command("list" if command is list_suites else command.__name__)(command)
    app.add_typer(group, name="suite")


def list_suites(suites: _Suites = None) -> None:
    """List every suite and its recipes."""
    sys.exit(guarded(partial(_list, suites)))


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
        from surefoot.harness.suites import session

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
        from surefoot.harness.suites import launch as launcher
        from surefoot.harness.suites import session

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
    sys.exit(guarded(partial(_check, name, suites)))


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
        from surefoot.harness.suites.package import package as pack

        made = pack(runs, out, hosts=host or [], commit=commit)
        torn = f", {made.torn} bytes of unfinished records left out" if made.torn else ""
        _say(f"{made.path}  {made.files} event files, {made.replaced} host names replaced{torn}")
        return 0

    sys.exit(guarded(action))


def report(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder made by --results.")]) -> None:
    """Print a result folder; 0 only when every required part passed."""

    def action() -> int:
        from surefoot.harness.suites.results import report as text_of

        text, verdict = text_of(folder)
        _say(text)
        return 0 if verdict == "PASS" else 1

    sys.exit(guarded(action))


def _list(suites: Path | None) -> int:
    from surefoot.harness.suites import session

    text, broken = session.list_suites(*session.suites_folder(suites, Path.cwd()))
    _say(text)
    for problem in broken:
        print(problem, file=sys.stderr)
    return 2 if broken else 0


def _check(name: str, suites: Path | None) -> int:
    from surefoot.harness.suites import session
    from surefoot.harness.suites.rules import check_suite
    from surefoot.harness.tables import table

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
) -> Request:  # fmt: skip
    from surefoot.harness.suites import session
    from surefoot.harness.suites.overrides import Overrides

    set_, relax, drop, reason = changes
    overrides = Overrides(tuple(set_ or ()), tuple(relax or ()), tuple(drop or ()), reason)
    suite = session.find_suite(name, suites, Path.cwd())
    return session.make_request(suite, recipes or [], overrides, extra or [], executor, out, os.environ)


def _say(text: str) -> None:
    from surefoot.tracking.text import printable

    try:
        print("\n".join(printable(line) for line in text.split("\n")), flush=True)
    except BrokenPipeError:  # nobody reads on; the verdict and the exit code still have to come
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
