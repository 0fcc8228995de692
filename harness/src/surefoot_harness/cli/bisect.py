"""`surefoot bisect`: which commit broke it."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from surefoot_harness.cli.exits import guarded
from surefoot_harness.errors import ConfigError
from surefoot_harness.own_command import own_name

_HELP = """Find the first commit that broke something: {own} bisect --good REF --bad REF -- CMD ...

CMD is run at commits between GOOD and BAD. Exit 0: good; 1 to 124: bad; 125, 126, 127: cannot tell, skip; 128 and
above: abort with the log saved. A commit without the script that CMD names, or that cannot be built, is skipped.
`surefoot ...` as CMD is bad only when a check, a suite's recipe or the trainer's own verdict failed.

--good=introduced PATH: GOOD is the earliest commit that has PATH.

Environment (an option wins): GOOD BAD BISECT_REPLAY_LOG BISECT_NO_RESET BISECT_SAVE_DIR SKIP_GOOD_CHECK SED_CLAUSES
EXTRA_SCRIPT_ARGS. CMD sees: SUREFOOT_BISECT_DIR (a folder of its own), SUREFOOT_SAMPLE, SUREFOOT_SEED,
SUREFOOT_OVERRIDES, SUREFOOT_REBUILD=1.

Exit: 0 found, 2 refused, 3 aborted, 75 stopped on request (resume with the printed line), 125 cannot tell.
"""

# typer resolves annotations at run time and knows this spelling of "may be left out" in every version we allow.
_MaybeText = Optional[str]  # noqa: UP045
_MaybePath = Optional[Path]  # noqa: UP045
_MaybeNumber = Optional[float]  # noqa: UP045
_MaybeTexts = Optional[list[str]]  # noqa: UP045
_MaybeCodes = Optional[list[int]]  # noqa: UP045

_Words = Annotated[
    _MaybeTexts,
    typer.Argument(metavar="[PATH] -- CMD ...", help="The command that judges a commit.", show_default=False),
]
_Good = Annotated[
    _MaybeText,
    typer.Option(
        "--good", metavar="REF", help="A commit that works, or: introduced PATH. [env GOOD]", show_default=False
    ),
]
_Bad = Annotated[
    _MaybeText, typer.Option("--bad", metavar="REF", help="A commit that does not. [env BAD]", show_default=False)
]
_Replay = Annotated[
    _MaybePath, typer.Option("--replay", help="Go on from a saved log. [env BISECT_REPLAY_LOG]", show_default=False)
]
_NoReset = Annotated[bool, typer.Option("--no-reset", help="Stay at the last commit. [env BISECT_NO_RESET]")]
_SaveDir = Annotated[
    _MaybePath,
    typer.Option(
        "--save-dir", help="For logs and verdicts; default bisect-logs. [env BISECT_SAVE_DIR]", show_default=False
    ),
]
_SaveLog = Annotated[bool, typer.Option("--save-log", help="Save the log also when the culprit was found.")]
_SkipGoodCheck = Annotated[
    bool, typer.Option("--skip-good-check", help="Trust GOOD without a run. [env SKIP_GOOD_CHECK]")
]
_Sed = Annotated[
    _MaybeText,
    typer.Option(
        "--sed",
        metavar="CLAUSES",
        help="Edit the script for each run, and restore it. [env SED_CLAUSES]",
        show_default=False,
    ),
]
_ExtraArgs = Annotated[
    _MaybeText,
    typer.Option(
        "--extra-args", metavar="WORDS", help="Words added to CMD. [env EXTRA_SCRIPT_ARGS]", show_default=False
    ),
]
_Sets = Annotated[
    _MaybeTexts,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the suite that CMD runs.", show_default=False),
]
_Relax = Annotated[
    _MaybeTexts, typer.Option("--relax", metavar="'OLD=>NEW'", help="Judge by another check.", show_default=False)
]
_DropCheck = Annotated[
    _MaybeTexts, typer.Option("--drop-check", metavar="EXPR", help="Leave a check out.", show_default=False)
]
_Reason = Annotated[
    _MaybeText, typer.Option("--reason", metavar="TEXT", help="Why checks are relaxed or dropped.", show_default=False)
]
_Rebuild = Annotated[
    _MaybeText,
    typer.Option(
        "--rebuild", metavar="CMD", help="Build the environment with this, once per lock file.", show_default=False
    ),
]
_VenvCache = Annotated[
    _MaybePath, typer.Option("--venv-cache", help="Keep the built environments here.", show_default=False)
]
_SkipCode = Annotated[
    _MaybeCodes,
    typer.Option("--skip-code", metavar="N", help="An exit code that also means: cannot tell.", show_default=False),
]
_CrashIsBad = Annotated[
    bool, typer.Option("--crash-is-bad", help="Blame a commit at which the training crashes; else it is skipped.")
]
_RequireEnv = Annotated[
    _MaybeTexts,
    typer.Option(
        "--require-env", metavar="NAME", help="Refuse to start unless this variable is set.", show_default=False
    ),
]
_Metric = Annotated[
    _MaybeText,
    typer.Option("--metric", metavar="NAME", help="Judge by a noisy number that each run logs.", show_default=False),
]
_WorseThan = Annotated[
    _MaybeNumber, typer.Option("--worse-than", help="The limit: below it is bad.", show_default=False)
]
_HigherIsWorse = Annotated[
    bool, typer.Option("--higher-is-worse", help="Above the limit is bad instead, as for a loss.")
]
_Margin = Annotated[
    _MaybeNumber,
    typer.Option("--margin", help="Distance of the good from the bad level around the limit.", show_default=False),
]
_Stat = Annotated[
    _MaybeText,
    typer.Option("--stat", metavar="NAME", help="Series to number: last, mean, median, min, max.", show_default=False),
]
_MetricsAt = Annotated[
    _MaybeText,
    typer.Option(
        "--metrics-at",
        metavar="PATH",
        help="Where a run leaves its metrics; default $SUREFOOT_BISECT_DIR.",
        show_default=False,
    ),
]
_Flaky = Annotated[bool, typer.Option("--flaky", help="CMD fails by chance: compare failure rates.")]
_Rates = Annotated[
    _MaybeText,
    typer.Option(
        "--rates", metavar="GOOD,BAD", help="Known failure rates for --flaky, as 0.05,0.4.", show_default=False
    ),
]
_Repeat = Annotated[int, typer.Option("--repeat", help="Runs per commit; three quarters decide.")]
_Alpha = Annotated[float, typer.Option("--alpha", help="Accepted share of wrong answers.")]
_MaxSamples = Annotated[int, typer.Option("--max-samples", help="Runs in all, for --metric and --flaky.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command("bisect", help=_HELP.format(own=own_name()))(bisect)


def bisect(
    words: _Words = None,
    good: _Good = None,
    bad: _Bad = None,
    replay: _Replay = None,
    no_reset: _NoReset = False,
    save_dir: _SaveDir = None,
    save_log: _SaveLog = False,
    skip_good_check: _SkipGoodCheck = False,
    sed: _Sed = None,
    extra_args: _ExtraArgs = None,
    sets: _Sets = None,
    relax: _Relax = None,
    drop_check: _DropCheck = None,
    reason: _Reason = None,
    rebuild: _Rebuild = None,
    venv_cache: _VenvCache = None,
    skip_code: _SkipCode = None,
    crash_is_bad: _CrashIsBad = False,
    require_env: _RequireEnv = None,
    metric: _Metric = None,
    worse_than: _WorseThan = None,
    higher_is_worse: _HigherIsWorse = False,
    margin: _Margin = None,
    stat: _Stat = None,
    metrics_at: _MetricsAt = None,
    flaky: _Flaky = False,
    rates: _Rates = None,
    repeat: _Repeat = 1,
    alpha: _Alpha = 0.05,
    max_samples: _MaxSamples = 1000,
) -> None:
    """Leave the tree, search, clean up."""
    from surefoot_harness.bisect import selfcopy

    given = dict(locals())
    selfcopy.leave_the_tree(sys.argv[1:])
    code = guarded(partial(_bisect, given))
    selfcopy.clean_up()
    sys.exit(code)


def _bisect(given: dict[str, Any]) -> int:
    from surefoot_harness.bisect.command import bisect as search
    from surefoot_harness.bisect.options import BisectOptions

    same = "good bad replay no_reset save_dir save_log skip_good_check rebuild venv_cache metric worse_than".split()
    same += ["crash_is_bad"]
    same += "higher_is_worse margin metrics_at flaky repeat alpha max_samples sed extra_args reason stat".split()
    lists = {"command": "words", "sets": "sets", "relax": "relax", "drop_checks": "drop_check"}
    lists |= {"skip_codes": "skip_code", "require_env": "require_env"}
    values: dict[str, Any] = {name: given[name] for name in same if given[name] is not None}
    values |= {name: tuple(given[key] or ()) for name, key in lists.items()}
    return search(BisectOptions(**values, rates=_rates(given["rates"])))


def _rates(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        good, bad = (float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--rates {text}", "it takes two numbers", "--rates 0.05,0.4") from error
    return good, bad
