"""Carries a plan out: snapshot, train, judge, one trial after the other.

Promises   a trial that is already judged for this very code and these very settings is not run again; one that reached
           its last step without a verdict is judged again from its numbers; everything else runs afresh.
Never      leaves a process behind: asked to stop, it stops the trainer, writes INCOMPLETE and says so.

Read next: `judge.py`, how a trial is judged.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from surefoot.errors import StateError, SurefootError
from surefoot.harness.scrub import scrub
from surefoot.harness.suites import folders
from surefoot.harness.suites.executors.base import Executor, Job, JobState
from surefoot.harness.suites.judge import (
    STOPPED,
    Ending,
    Judgement,
    judge,
    load,
    read_verdict,
    steps_reached,
    worst_exit,
    write_verdict,
)
from surefoot.harness.suites.plan import Trial, command_of, config_hash, env_of
from surefoot.harness.suites.snapshot import Code, identify, snapshot_folder, take_snapshot

Say = Callable[[str], None]
_SLICE_S = 0.5
"""A request to stop is noticed at least this often, however long the executor's interval is."""


@dataclass(frozen=True, slots=True)
class Outcome:
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
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Run and judge every trial in order; stops early only when asked to."""
    root = trials[0].root
    code = identify(root)
    folders.prepare_out(out)
    outcomes: list[Outcome] = []
    stop = StopFlag()
    with folders.only_one(out, trials[0].suite), stop.listening():
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


def exit_code_of(outcomes: Sequence[Outcome], planned: int) -> int:
    """One exit code for a suite: the worst of its required trials; some that never ran are a stop."""
    codes = [outcome.exit_code for outcome in outcomes if outcome.trial.recipe.required]
    if len(outcomes) < planned or STOPPED in [outcome.exit_code for outcome in outcomes]:
        codes.append(STOPPED)
    return worst_exit(codes)


def run_trial(
    trial: Trial, code: Code, snapshot: Path, executor: Executor, say: Say, stop: StopFlag, *, fresh: bool = False,
) -> Outcome:  # fmt: skip
    """One trial from start to verdict."""
    earlier = None if fresh else judged_before(trial, code, say)
    if earlier is not None:
        return earlier
    folders.recreate(trial)
    facts = facts_of(trial, code, snapshot, executor)
    folders.write_provenance(trial, facts)
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
        "started": folders.now(),
    }


def conclude(trial: Trial, ending: Ending, facts: dict[str, Any], say: Say) -> Outcome:
    """Judge, write, and say it."""
    judgement = judge(trial, ending)
    record = write_verdict(trial, judgement, {**facts, "finished": folders.now()})
    _announce(trial, judgement, say)
    return Outcome(trial, record)


def judged_before(trial: Trial, code: Code, say: Say) -> Outcome | None:
    """An earlier result of the same training that reached its last step: its verdict, or its numbers judged now."""
    facts = folders.read_provenance(trial)
    if facts is None or not folders.same_training(trial, code, facts):
        return None
    _refuse_unfinished(trial, facts)
    if (_steps(trial) or 0) < trial.recipe.max_steps:
        return None
    record = read_verdict(trial)
    same_words = record is not None and record["overrides"] == list(trial.overrides)
    if record is not None and same_words and folders.same_training(trial, code, record):
        say(f"skipped   {trial.label}: already {record['status']} for this code and settings (--fresh runs it again)")
        return Outcome(trial, record, skipped=True)
    code_then = folders.recorded_exit(trial)
    if code_then:
        return None
    say(f"judging   {trial.label}: it reached its last step, but has no verdict for these checks")
    return conclude(trial, Ending(code_then), {**facts, "overrides": list(trial.overrides)}, say)


def _refuse_unfinished(trial: Trial, facts: dict[str, Any]) -> None:
    if facts.get("executor") == "slurm" and folders.recorded_exit(trial) is None:
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
    limit = time.monotonic() + seconds
    while not stop.asked and (left := limit - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE_S))


def ending_of(state: JobState, number: int) -> Ending:
    """How a finished job ended."""
    return Ending(
        state.exit_code, number, state.why, state.out_of_time, False, state.infrastructure, lost=state.exit_code is None
    )


def _announce(trial: Trial, judgement: Judgement, say: Say) -> None:
    say(f"{judgement.status:<9} {trial.label}")
    for reason in judgement.reasons:
        say(f"            {scrub(reason)}")
    if judgement.status == "ERROR" and trial.log.is_file():
        from surefoot.harness.suites.executors.base import tail

        for line in tail(trial.log).splitlines()[-10:]:
            say(f"          | {scrub(line)}")
