"""Carries a plan out: snapshot, train, judge, one trial after the other.

Promises   a trial that is already judged for this very code and these very settings is not run again; one that reached
           its last step without a verdict is judged again from its numbers; everything else runs afresh.
Never      leaves a process behind: asked to stop, it stops the trainer, writes INCOMPLETE and says so.

Read next: `verdicts.py`, how a trial is judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from surefoot_harness.errors import ConfigError, StateError, SurefootError
from surefoot_harness.files import write_atomic
from surefoot_harness.own_command import own_name
from surefoot_harness.scrub import is_secret_name, scrub
from surefoot_harness.suites import plan
from surefoot_harness.suites.executors import (
    Executor,
    Job,
    JobState,
    SlurmExecutor,
    SlurmSettings,
    sbatch_argv,
    script_path,
)
from surefoot_harness.suites.manifest import VARIABLE, Recipe, Suite, refuse
from surefoot_harness.suites.plan import (
    Code,
    Trial,
    command_of,
    config_hash,
    env_of,
    identify,
    snapshot_folder,
    take_snapshot,
    trials_of,
)
from surefoot_harness.suites.rules import untracked
from surefoot_harness.suites.verdicts import (
    PASSED,
    STOPPED,
    Ending,
    TrialJudgement,
    judge,
    load,
    read_verdict,
    steps_reached,
    worst_exit,
    write_verdict,
)
from surefoot_harness.system.signals import Deadline

Say = Callable[[str], None]
_SLICE_S = 0.5
"""A request to stop is noticed at least this often, however long the executor's interval is."""


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """A trial and its verdict as written."""

    trial: Trial
    record: dict[str, Any]
    skipped: bool = False
    """The verdict is an earlier one."""

    @property
    def exit_code(self) -> int:
        """What this verdict asks for."""
        return int(self.record.get("exit_code", 0 if self.record["status"] == "PASS" else 1))


class StopFlag:
    """Whether someone asked to stop. Signals set it; nothing is interrupted half-way."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Ask to stop."""
        self.asked = True

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Hear SIGINT, SIGTERM and SIGHUP while the block runs; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self.ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def run_trials(
    trials: Sequence[Trial], out: Path, executor: Executor, say: Say, *, fresh: bool = False,
    on_outcome: Callable[[TrialOutcome], None] | None = None,
) -> list[TrialOutcome]:  # fmt: skip
    """Run and judge every trial in order; stops early only when asked to."""
    root = trials[0].root
    code = identify(root)
    plan.prepare_out(out)
    outcomes: list[TrialOutcome] = []
    stop = StopFlag()
    with plan.only_one(out, trials[0].suite), stop.listening():
        snapshot = take_snapshot(root, code, snapshot_folder(out))
        say(f"code      {code.name}  ({snapshot})")
        for trial in trials:
            outcome = run_trial(trial, code, snapshot, executor, say, stop, fresh=fresh)
            outcomes.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome)
            if stop.asked:
                break
    return outcomes


def exit_code_of(outcomes: Sequence[TrialOutcome], planned: int) -> int:
    """One exit code for a suite: the worst of its required trials; some that never ran are a stop."""
    codes = [outcome.exit_code for outcome in outcomes if outcome.trial.recipe.required]
    if len(outcomes) < planned or STOPPED in [outcome.exit_code for outcome in outcomes]:
        codes.append(STOPPED)
    return worst_exit(codes)


def run_trial(
    trial: Trial, code: Code, snapshot: Path, executor: Executor, say: Say, stop: StopFlag, *, fresh: bool = False,
) -> TrialOutcome:  # fmt: skip
    """One trial from start to verdict."""
    earlier = None if fresh else judged_before(trial, code, say)
    if earlier is not None:
        return earlier
    plan.recreate(trial)
    facts = facts_of(trial, code, snapshot, executor)
    plan.write_provenance(trial, facts)
    say(f"running   {trial.label}  (log: {trial.log})")
    ending = _train(trial, code, snapshot, executor, stop)
    return conclude(trial, ending, facts, say)


def facts_of(trial: Trial, code: Code, snapshot: Path, executor: Executor) -> dict[str, Any]:
    """What ran: for `provenance.json` before, for `verdict.json` after."""
    return {
        "suite": trial.suite,
        "recipe": trial.recipe.name,
        "seed": trial.seed,
        "commit": code.commit,
        "dirty": code.dirty,
        "config_hash": config_hash(trial),
        "container": trial.recipe.container,
        "executor": executor.name,
        "snapshot": str(snapshot),
        "command": [scrub(word) for word in command_of(trial, 1, code, snapshot, executor.python)],
        "extra_args": [scrub(word) for word in trial.extra_args],
        "overrides": list(trial.overrides),
        "started": plan.now(),
    }


def conclude(trial: Trial, ending: Ending, facts: dict[str, Any], say: Say) -> TrialOutcome:
    """Judge, write, and say it."""
    judgement = judge(trial, ending)
    record = write_verdict(trial, judgement, {**facts, "finished": plan.now()})
    _announce(trial, judgement, say)
    return TrialOutcome(trial, record)


def judged_before(trial: Trial, code: Code, say: Say) -> TrialOutcome | None:
    """An earlier result of the same training that reached its last step: its verdict, or its numbers judged now."""
    facts = plan.read_provenance(trial)
    if facts is None or not plan.same_training(trial, code, facts):
        return None
    _refuse_unfinished(trial, facts)
    if (_steps(trial) or 0) < trial.recipe.max_steps:
        return None
    record = read_verdict(trial)
    same_words = record is not None and record["overrides"] == list(trial.overrides)
    if record is not None and same_words and plan.same_training(trial, code, record):
        say(f"skipped   {trial.label}: already {record['status']} for this code and settings (--fresh runs it again)")
        return TrialOutcome(trial, record, skipped=True)
    code_then = plan.recorded_exit(trial)
    if code_then:
        return None
    say(f"judging   {trial.label}: it reached its last step, but has no verdict for these checks")
    return conclude(trial, Ending(code_then), {**facts, "overrides": list(trial.overrides)}, say)


def _refuse_unfinished(trial: Trial, facts: dict[str, Any]) -> None:
    if facts.get("executor") == "slurm" and plan.recorded_exit(trial) is None:
        raise StateError(
            f"{trial.label} was launched on slurm and has not ended", "a second start would take its folder away",
            f"wait for it, or start again with --fresh; jobs: {facts.get('jobs')}",
        )  # fmt: skip


def _steps(trial: Trial) -> int | None:
    try:
        return steps_reached(load(trial), trial.recipe)
    except SurefootError:
        return None  # no numbers: it did not get there


def _train(trial: Trial, code: Code, snapshot: Path, executor: Executor, stop: StopFlag) -> Ending:
    """The chain of runs, one after the other; ends at the first that does not end well, or at the last step."""
    ending = Ending(0)
    for number in range(1, trial.recipe.num_runs + 1):
        job = job_of(trial, number, code, snapshot, executor)
        try:
            ending = _wait(executor, executor.submit(job), number, stop)
        except SurefootError as error:  # this trial could not be run; the next one may
            return Ending(None, number, f"{error.what}: {error.why}", infrastructure=True)
        done = number < trial.recipe.num_runs and (_steps(trial) or 0) >= trial.recipe.max_steps
        if ending.exit_code != 0 or ending.stopped or ending.out_of_time or done:
            break
    return ending


def job_of(trial: Trial, number: int, code: Code, snapshot: Path, executor: Executor) -> Job:
    """Run `number` (from 1) of a trial as a job."""
    recipe = trial.recipe
    name = f"{trial.suite}-{recipe.name}" + ("" if trial.seed is None else f"-seed{trial.seed}")
    return Job(
        name=name if recipe.num_runs == 1 else f"{name}-{number}.{recipe.num_runs}",
        argv=command_of(trial, number, code, snapshot, executor.python),
        env=env_of(trial, number, code, snapshot, executor.python),
        cwd=snapshot, folder=trial.folder, log=trial.log, exit_file=trial.exit_file(number),
        minutes=recipe.minutes, nodes=recipe.nodes, gpus_per_node=recipe.gpus_per_node,
        segment_size=recipe.segment_size, container=recipe.container,
    )  # fmt: skip


def _wait(executor: Executor, job_id: str, number: int, stop: StopFlag) -> Ending:
    while True:
        state = executor.poll(job_id)
        if state.done:
            return ending_of(state, number)
        if stop.asked:
            executor.cancel(job_id)
            return Ending(None, number, stopped=True)
        wait(executor.interval, stop)


def wait(seconds: float, stop: StopFlag) -> None:
    """Sleep, but hear a request to stop."""
    deadline = Deadline(seconds)
    while not stop.asked and (left := deadline.left) > 0:
        time.sleep(min(left, _SLICE_S))


def ending_of(state: JobState, number: int) -> Ending:
    """How a finished job ended."""
    return Ending(
        state.exit_code, number, state.why, state.out_of_time, False, state.infrastructure, lost=state.exit_code is None
    )


def _announce(trial: Trial, judgement: TrialJudgement, say: Say) -> None:
    say(f"{judgement.status:<9} {trial.label}")
    for reason in judgement.reasons:
        say(f"            {scrub(reason)}")
    if judgement.status == "ERROR" and trial.log.is_file():
        from surefoot_harness.suites.executors import tail

        for line in tail(trial.log).splitlines()[-10:]:
            say(f"          | {scrub(line)}")


# -- Hands a suite to Slurm: chained jobs from one snapshot, a script that continues them, and a judged watch
# Owns       the variables CONTAINER ACCOUNT PARTITION MOUNTS HF_HOME HF_DATASETS_CACHE EXTRA_ENV EXTRA_SCRIPT_ARGS
# IS_RELEASE EXCLUDE_GRES SLURM_JOB_SUFFIX DRYRUN WATCH WATCH_INTERVAL.
# Promises   DRYRUN=1 creates nothing, DRYRUN=2 only the snapshot; a missing variable is named before anything happens.


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
        plan.prepare_out(out)
        say(f"snapshot  {take_snapshot(suite.root, code, snapshot_folder(out))}")
        return PASSED
    executor = SlurmExecutor(settings_from_env(environ), watch_interval(environ))
    trials = cluster_trials(suite, recipes, out, environ, extra_args, overrides)
    plan.prepare_out(out)
    with plan.only_one(out, suite.name):
        snapshot = take_snapshot(suite.root, code, snapshot_folder(out))
        say(f"snapshot  {snapshot}")
        jobs = [(trial, submit(trial, code, snapshot, executor, say)) for trial in trials]
        if not environ.get("WATCH") or environ["WATCH"] == "0":
            say(f"judge     when the jobs have ended: {own_name()} suite run with --executor slurm and the same --out")
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
    plan.recreate(trial)
    facts = facts_of(trial, code, snapshot, executor)
    plan.write_provenance(trial, facts | {"jobs": []})
    jobs = [_chained(trial, number, code, snapshot, executor) for number in range(1, trial.recipe.num_runs + 1)]
    for job in jobs:
        executor.prepare(job)
    calls = [sbatch_argv(job, executor.settings, script_path(job)) for job in jobs]
    write_atomic(trial.folder / "continue.sh", continue_script(trial, calls))
    ids: list[str] = []
    for number, job in enumerate(jobs, 1):
        ids.append(executor.submit(dataclasses.replace(job, after=ids[-1] if ids else None)))
        plan.write_provenance(trial, facts | {"jobs": ids})
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
    stop, outcomes = StopFlag(), list[TrialOutcome]()
    with stop.listening():
        for trial, ids in jobs:
            ending = _chain_end(ids, executor, stop)
            if ending is None:
                say("stopped watching; the jobs go on")
                return STOPPED
            facts = plan.read_provenance(trial)
            assert facts is not None, "written before the first job was submitted"
            outcomes.append(conclude(trial, ending, facts, say))
    say("")
    for outcome in outcomes:
        say(f"{words_for(outcome):<12}  {outcome.trial.label}")
    return exit_code_of(outcomes, len(jobs))


def words_for(outcome: TrialOutcome) -> str:
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
