"""`surefoot trend` and `surefoot assets`: what tests recorded over time, and what they need built ahead."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from surefoot.cli.exits import guarded
from surefoot.cli.overview import WholeLines

if TYPE_CHECKING:
    from surefoot.harness.assets import Asset, State

_Names = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer resolves this spelling in every version we allow
    typer.Argument(metavar="NAME ...", help="Which assets; all when left out.", show_default=False),
]
_Manifest = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--manifest", help="The TOML file that declares them; the nearest pyproject.toml when left out."),
]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    app.command()(trend)
    assets = typer.Typer(
        cls=WholeLines, no_args_is_help=True, help="Build, list and check what tests need built ahead of time."
    )
    assets.command("build")(build)
    assets.command("list")(list_assets)
    assets.command("check")(check)
    app.add_typer(assets, name="assets")


def trend(
    metric: Annotated[str, typer.Argument(metavar="METRIC", help="A name that tests tracked, such as loss.")],
    test: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Only this test: its key, such as test_loss::test_small, or its node id."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="The history folder.")] = Path("unit_results"),
    last: Annotated[int, typer.Option(metavar="K", help="Compare the newest value with the K before it.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    fail_on_change: Annotated[
        bool, typer.Option("--fail-on-change", help="Exit 1 unless every newest value is judged and unchanged.")
    ] = False,
) -> None:
    """Show METRIC over the history of test sessions, and flag a step change of its newest value."""
    sys.exit(guarded(partial(_trend, metric, test, folder, last, as_json, fail_on_change)))


def build(
    names: _Names = None,
    manifest: _Manifest = None,
    offline: Annotated[bool, typer.Option("--offline", help="Refuse what needs the network.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Build again even what is complete.")] = False,
) -> None:
    """Build the assets that are not complete; exit 1 if one fails."""
    sys.exit(guarded(partial(_build, names or [], manifest, offline, force)))


def list_assets(names: _Names = None, manifest: _Manifest = None) -> None:
    """List the declared assets and how they stand."""
    sys.exit(guarded(partial(_list, names or [], manifest, judge=False)))


def check(names: _Names = None, manifest: _Manifest = None) -> None:
    """Verify every byte of the assets; exit 1 unless all are complete."""
    sys.exit(guarded(partial(_list, names or [], manifest, judge=True)))


def _trend(metric: str, test: str | None, folder: Path, last: int, as_json: bool, fail_on_change: bool) -> int:
    import json

    from surefoot.harness.tables import terminal_width
    from surefoot.harness.trend import read_history, trends
    from surefoot.records import Verdict
    from surefoot.tracking.text import printable

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


def _build(names: list[str], manifest: Path | None, offline: bool, force: bool) -> int:
    from surefoot.errors import SurefootError
    from surefoot.harness.asset_build import build_all
    from surefoot.harness.assets import find_assets
    from surefoot.tracking.text import printable

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


def _list(names: list[str], manifest: Path | None, *, judge: bool) -> int:
    from surefoot.harness.assets import COMPLETE, examine, find_assets
    from surefoot.harness.tables import table, terminal_width
    from surefoot.tracking.text import printable

    states = [(asset, examine(asset)) for asset in find_assets(manifest, names).values()]
    rows = [_row(asset, state) for asset, state in states]
    print(printable(table("Assets", ["Name", "Status", "Files", "Bytes", "Detail"], rows, terminal_width())))
    return 1 if judge and any(state.status != COMPLETE for _, state in states) else 0


def _row(asset: Asset, state: State) -> list[str]:
    todo = f"{state.detail}; run: {asset.build_command}" if state.detail else asset.description
    return [asset.name, state.status, str(state.files), str(state.size), todo]
