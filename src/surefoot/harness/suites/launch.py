"""Hands a suite to Slurm: chained jobs from one snapshot, a script that continues them, and a judged watch.

Owns       the variables CONTAINER ACCOUNT PARTITION MOUNTS HF_HOME HF_DATASETS_CACHE EXTRA_ENV EXTRA_SCRIPT_ARGS
           IS_RELEASE EXCLUDE_GRES SLURM_JOB_SUFFIX DRYRUN WATCH WATCH_INTERVAL.
Promises   DRYRUN=1 creates nothing, DRYRUN=2 only the snapshot; a missing variable is named before anything happens.

Read next: `executors/slurm.py`, the scripts.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.harness.files import write_atomic
from surefoot.harness.scrub import is_secret_name
from surefoot.harness.suites import folders
from surefoot.harness.suites.executors.base import Job
from surefoot.harness.suites.executors.slurm import SlurmExecutor, SlurmSettings, sbatch_argv, script_path
from surefoot.harness.suites.judge import PASSED, STOPPED, Ending
from surefoot.harness.suites.manifest import Recipe, Suite, refuse
from surefoot.harness.suites.plan import Trial, trials_of
from surefoot.harness.suites.reading import VARIABLE
from surefoot.harness.suites.rules import untracked
from surefoot.harness.suites.run import (
    Outcome,
    Say,
    StopFlag,
    conclude,
    ending_of,
    exit_code_of,
    facts_of,
    job_of,
    wait,
)
from surefoot.harness.suites.snapshot import Code, identify, snapshot_folder, take_snapshot

REQUIRED = ("CONTAINER", "ACCOUNT", "PARTITION", "MOUNTS", "HF_HOME", "HF_DATASETS_CACHE")
MAY_BE_EMPTY = ("MOUNTS",)


def settings_from_env(environ: Mapping[str, str]) -> SlurmSettings:
    """What the cluster needs, from variables; every missing one is named at once."""
    missing = [name for name in REQUIRED if name not in environ or (not environ[name] and name not in MAY_BE_EMPTY)]
    if missing:
        raise ConfigError(
            f"not set: {' '.join(missing)}", "Slurm jobs need them",
            'export them first; MOUNTS="" when nothing else is to be mounted',
        )  # fmt: skip
    env = {name: environ[name] for name in ("HF_HOME", "HF_DATASETS_CACHE")} | extra_env(environ.get("EXTRA_ENV", ""))
    return SlurmSettings(
        account=environ["ACCOUNT"], partition=environ["PARTITION"], container=environ["CONTAINER"],
        mounts=environ["MOUNTS"], env=env, gres=not environ.get("EXCLUDE_GRES"),
        job_suffix=environ.get("SLURM_JOB_SUFFIX", ""),
    )  # fmt: skip


def extra_env(text: str) -> dict[str, str]:
    """`A=1 B='x y'` as variables, quoted like a shell would.

    Example:
        >>> extra_env("A=1 B='x y'")
        {'A': '1', 'B': 'x y'}
    """
    found = {}
    for word in words_of("EXTRA_ENV", text):
        name, equals, value = word.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise ConfigError(f"EXTRA_ENV has {word!r}", "it takes NAME=VALUE words", "quote values with spaces")
        if is_secret_name(name):
            raise ConfigError(
                f"EXTRA_ENV holds the secret {name}", "its value would lie readable in a job script",
                "export it: Slurm passes the environment on",
            )  # fmt: skip
        found[name] = value
    return found


def words_of(name: str, text: str) -> tuple[str, ...]:
    """A variable's words, split like a shell would split them."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(
            f"{name} is {text!r}: {error}", "it is split into words like in a shell", "close it"
        ) from error


def watch_interval(environ: Mapping[str, str]) -> float:
    """Seconds between two looks at the queue."""
    text = environ.get("WATCH_INTERVAL") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 86_400:
        raise ConfigError(f"WATCH_INTERVAL is {text!r}", "it is a number of seconds above 0", "such as 60")
    return seconds


def dryrun_of(environ: Mapping[str, str]) -> int:
    """0, 1 or 2."""
    text = environ.get("DRYRUN") or "0"
    if text not in ("0", "1", "2"):
        raise ConfigError(f"DRYRUN is {text!r}", "1 estimates, 2 takes the snapshot, 0 submits", "choose one of these")
    return int(text)


def launch(
    suite: Suite, recipes: Sequence[Recipe], out: Path, say: Say, *, dryrun: int, environ: Mapping[str, str],
    extra_args: Sequence[str] = (), overrides: Sequence[str] = (),
) -> int:  # fmt: skip
    """Everything from the estimate to the last verdict; the exit code."""
    if dryrun == 1:
        return PASSED
    refuse(suite.path, list(untracked(suite, recipes)))
    code = identify(suite.root)
    _refuse_dirty_release(code, environ)
    if dryrun == 2:
        folders.prepare_out(out)
        say(f"snapshot  {take_snapshot(suite.root, code, snapshot_folder(out))}")
        return PASSED
    executor = SlurmExecutor(settings_from_env(environ), watch_interval(environ))
    trials = cluster_trials(suite, recipes, out, environ, extra_args, overrides)
    folders.prepare_out(out)
    with folders.only_one(out, suite.name):
        snapshot = take_snapshot(suite.root, code, snapshot_folder(out))
        say(f"snapshot  {snapshot}")
        jobs = [(trial, submit(trial, code, snapshot, executor, say)) for trial in trials]
        if not environ.get("WATCH") or environ["WATCH"] == "0":
            say("judge     when the jobs have ended: surefoot suite run with --executor slurm and the same --out")
            return PASSED
        return _watch(jobs, executor, say)


def cluster_trials(
    suite: Suite, recipes: Sequence[Recipe], out: Path, environ: Mapping[str, str], extra_args: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> list[Trial]:  # fmt: skip
    """Trials with the container on record, the words of EXTRA_SCRIPT_ARGS, and those of a release when it is one."""
    container, release = environ.get("CONTAINER"), bool(environ.get("IS_RELEASE"))
    changed = [dataclasses.replace(r, container=r.container or container, release=release) for r in recipes]
    words = (*extra_args, *words_of("EXTRA_SCRIPT_ARGS", environ.get("EXTRA_SCRIPT_ARGS", "")))
    return trials_of(suite, changed, out, words, overrides)


def submit(trial: Trial, code: Code, snapshot: Path, executor: SlurmExecutor, say: Say) -> list[str]:
    """Recreate the folder, write every script and the continue script, submit the chain; the job ids."""
    folders.recreate(trial)
    facts = facts_of(trial, code, snapshot, executor)
    folders.write_provenance(trial, facts | {"jobs": []})
    jobs = [_chained(trial, number, code, snapshot, executor) for number in range(1, trial.recipe.num_runs + 1)]
    for job in jobs:
        executor.prepare(job)
    calls = [sbatch_argv(job, executor.settings, script_path(job)) for job in jobs]
    write_atomic(trial.folder / "continue.sh", continue_script(trial, calls))
    ids: list[str] = []
    for number, job in enumerate(jobs, 1):
        ids.append(executor.submit(dataclasses.replace(job, after=ids[-1] if ids else None)))
        folders.write_provenance(trial, facts | {"jobs": ids})
        say(f"submitted {trial.label}  run {number} of {len(jobs)}  job {ids[-1]}")
    say(f"continue  bash {shlex.quote(str(trial.folder / 'continue.sh'))}")
    return ids


def _chained(trial: Trial, number: int, code: Code, snapshot: Path, executor: SlurmExecutor) -> Job:
    """One job of a chain: its own log, and a look at how the former run ended."""
    job = job_of(trial, number, code, snapshot, executor)
    log = trial.folder / f"slurm_{number}.{trial.recipe.num_runs}.log"
    return dataclasses.replace(job, log=log, after_exit_file=trial.exit_file(number - 1) if number > 1 else None)


def continue_script(trial: Trial, calls: Sequence[Sequence[str]]) -> str:
    """Submits every run that has not ended well yet, chained, from the same snapshot."""
    lines = ["#!/bin/bash", f"# Continues {trial.label}: runs that ended well are left out.", "set -eu", "after=()"]
    for number, call in enumerate(calls, 1):
        done = shlex.quote(str(trial.exit_file(number)))
        *options, script = call
        lines += [
            f'if [ "$(cat {done} 2>/dev/null)" != 0 ]; then',
            f"  rm -f {done}",
            f'  job=$({shlex.join(options)} ${{after[@]+"${{after[@]}}"}} {shlex.quote(script)})',
            '  after=("--dependency=afterany:${job%%;*}")',
            f'  echo "run {number}: job ${{job%%;*}}"',
            "fi",
        ]
    return "\n".join(lines) + "\n"


def _watch(jobs: Sequence[tuple[Trial, list[str]]], executor: SlurmExecutor, say: Say) -> int:
    """Wait for every chain, judge it, print METRIC PASS, METRIC FAIL or GENERAL FAIL."""
    stop, outcomes = StopFlag(), list[Outcome]()
    with stop.listening():
        for trial, ids in jobs:
            ending = _chain_end(ids, executor, stop)
            if ending is None:
                say("stopped watching; the jobs go on")
                return STOPPED
            facts = folders.read_provenance(trial)
            assert facts is not None, "written before the first job was submitted"
            outcomes.append(conclude(trial, ending, facts, say))
    say("")
    for outcome in outcomes:
        say(f"{words_for(outcome):<12}  {outcome.trial.label}")
    return exit_code_of(outcomes, len(jobs))


def words_for(outcome: Outcome) -> str:
    """A verdict in the launcher's three words."""
    return {"PASS": "METRIC PASS", "FAIL": "METRIC FAIL"}.get(outcome.record["status"], "GENERAL FAIL")


def _chain_end(ids: Sequence[str], executor: SlurmExecutor, stop: StopFlag) -> Ending | None:
    """How the first run that did not end well ended, or the last one; None when asked to stop."""
    ending = Ending(0)
    for number, job_id in enumerate(ids, 1):
        while not (state := executor.poll(job_id)).done:
            if stop.asked:
                return None
            wait(executor.interval, stop)
        ending = ending_of(state, number)
        if ending.exit_code != 0:
            break
    return ending


def _refuse_dirty_release(code: Code, environ: Mapping[str, str]) -> None:
    if environ.get("IS_RELEASE") and code.dirty is not None:
        raise ConfigError(
            "IS_RELEASE is set and the tree differs from its commit", "a release is the code of one commit",
            "commit or remove what git status shows",
        )  # fmt: skip
