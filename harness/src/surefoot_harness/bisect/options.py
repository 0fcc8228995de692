"""What was asked for: options first, the documented environment variables where an option was left out."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from surefoot_harness.errors import ConfigError
from surefoot_harness.own_command import own_name

INTRODUCED = "introduced"
STATS = ("last", "mean", "median", "min", "max")
_FALSE = {"", "0", "false", "no", "off"}


@dataclass(frozen=True, kw_only=True)
class BisectOptions:
    """One call of `surefoot bisect`."""

    command: tuple[str, ...] = ()
    good: str | None = None
    bad: str | None = None
    good_path: str | None = None
    """The PATH of `--good=introduced PATH`."""
    replay: Path | None = None
    no_reset: bool = False
    save_dir: Path | None = None
    save_log: bool = False
    skip_good_check: bool = False
    sed: str = ""
    extra_args: str = ""
    sets: tuple[str, ...] = ()
    relax: tuple[str, ...] = ()
    drop_checks: tuple[str, ...] = ()
    reason: str = "surefoot bisect"
    rebuild: str = ""
    venv_cache: Path | None = None
    skip_codes: tuple[int, ...] = ()
    crash_is_bad: bool = False
    """Whether a commit at which the command crashes is blamed; otherwise it is skipped."""
    require_env: tuple[str, ...] = ()
    metric: str | None = None
    worse_than: float | None = None
    higher_is_worse: bool = False
    margin: float | None = None
    """Distance between a good and a bad level, half of it on either side of `worse_than`; None learns both levels."""
    stat: str = "last"
    metrics_at: str | None = None
    flaky: bool = False
    rates: tuple[float, float] | None = None
    repeat: int = 1
    alpha: float = 0.05
    max_samples: int = 1000
    folder: Path = field(default_factory=Path.cwd)
    """Where the command is run: the folder the user is in."""

    @property
    def noisy(self) -> bool:
        """Whether commits are judged by many samples and not by one exit code."""
        return self.flaky or self.metric is not None


def with_environment(options: BisectOptions, environ: Mapping[str, str] | None = None) -> BisectOptions:
    """Fill in from GOOD, BAD, BISECT_REPLAY_LOG and the others what no option said; then check what was given."""
    env = os.environ if environ is None else environ
    found = replace(
        options,
        good=options.good or env.get("GOOD") or None,
        bad=options.bad or env.get("BAD") or None,
        replay=options.replay or _path(env.get("BISECT_REPLAY_LOG")),
        no_reset=options.no_reset or _flag(env.get("BISECT_NO_RESET")),
        save_dir=options.save_dir or _path(env.get("BISECT_SAVE_DIR")),
        skip_good_check=options.skip_good_check or _flag(env.get("SKIP_GOOD_CHECK")),
        sed=options.sed or env.get("SED_CLAUSES", ""),
        extra_args=options.extra_args or env.get("EXTRA_SCRIPT_ARGS", ""),
    )
    found = _introduced(found)
    found = replace(found, replay=_absolute(found.replay), save_dir=_absolute(found.save_dir))
    found = replace(found, venv_cache=_absolute(found.venv_cache))
    _check(found, env)
    return found


def _introduced(options: BisectOptions) -> BisectOptions:
    """`--good=introduced PATH -- CMD`: the parser hands over PATH as the first plain word."""
    if options.good and options.good.startswith(f"{INTRODUCED} "):
        return replace(options, good=INTRODUCED, good_path=options.good.removeprefix(INTRODUCED).strip())
    if options.good != INTRODUCED or options.good_path:
        return options
    if len(options.command) < 2:
        raise ConfigError(
            "--good=introduced needs a PATH and a command",
            "GOOD is the commit that added PATH",
            f"{own_name()} bisect --good=introduced t.sh --bad HEAD -- ./t.sh",
        )
    return replace(options, good_path=options.command[0], command=options.command[1:])


def _check(options: BisectOptions, env: Mapping[str, str]) -> None:
    for name in options.require_env:
        if not env.get(name):
            raise ConfigError(
                f"{name} is not set", "--require-env asks for it before anything is run", f"export {name}"
            )
    problem = next(_problems(options), None)
    if problem:
        raise ConfigError(*problem)


def _problems(options: BisectOptions) -> Iterator[tuple[str, str, str]]:
    """What, why and fix of everything in the values that cannot be meant."""
    if options.flaky and options.metric:
        yield "--flaky and --metric were both given", "a commit is judged by one of them", "drop one"
    if (options.metric is None) != (options.worse_than is None):
        yield "--metric and --worse-than come together", "one names the number, the other the limit", "give both"
    if options.stat not in STATS:
        yield f"--stat {options.stat}", "it makes one number of a series", f"choose {', '.join(STATS)}"
    if not 0.0 < options.alpha < 0.5:
        yield f"--alpha {options.alpha}", "it is the share of wrong answers that is accepted", "choose 0 < alpha < 0.5"
    for name, value in (("--worse-than", options.worse_than), ("--margin", options.margin)):
        if value is not None and not math.isfinite(value):
            yield f"{name} {value}", "a limit is a number", "give a finite one"
    if options.margin is not None and options.margin <= 0:
        yield f"--margin {options.margin}", "it is the distance between good and bad", "give a positive number"
    if options.rates is not None and not 0.0 < options.rates[0] < options.rates[1] < 1.0:
        yield f"--rates {options.rates}", "they are shares of failing runs", "0 < GOOD < BAD < 1, as in 0.05,0.4"
    if options.repeat < 1 or options.max_samples < 1:
        yield "--repeat and --max-samples count runs", "below 1 nothing is run", "give 1 or more"
    if options.noisy and options.skip_good_check:
        yield (
            "SKIP_GOOD_CHECK with --flaky or --metric",
            "the samples of GOOD are the reference that the others are compared with",
            "choose a GOOD that can be tested: --good=introduced PATH",
        )
    for text, name in ((options.extra_args, "EXTRA_SCRIPT_ARGS"), (options.rebuild, "--rebuild")):
        if not _splits(text):
            yield f"{name} has an unclosed quote: {text}", "it is split into words as a shell does", "close the quote"


def _splits(text: str) -> bool:
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def _flag(text: str | None) -> bool:
    return text is not None and text.strip().lower() not in _FALSE


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else Path(os.path.abspath(path.expanduser()))
