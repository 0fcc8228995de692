"""Asked to stop in every phase of a real run: 75 each time, and the resumed run ends bit for bit as if nobody had asked.

A failpoint holds the run in the phase; the signal is sent when it has got there. What is held for a second goes on and
is finished or left by itself; what is held for a minute has to be abandoned.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import kill_plants
import pytest
from command import typed
from figures import Record, note
from kill_kit import Driver, Ended
from kill_runs import Bench, Case

ASKED = "asked to stop at a random instant: exit code 75, and the resumed run is the whole run"
CASE = Case("stopped", {"preflight_tasks": 2, "max_steps": 4, "save_steps": 2})
PHASES = {
    "start-up": "session.before_build=sleep:60",
    "evaluation at the start": "loop.before_evaluate=sleep:1@1",
    "collecting": "loop.before_collect=sleep:1@2",
    "learning, done in time": "learner.before_step=sleep:1@2",
    "learning, abandoned": "learner.after_backward=sleep:60@2",
    "publishing": "loop.before_publish=sleep:1@3",
    "logging": "loop.before_log=sleep:1@2",
    "saving": "checkpoint.after_weights=sleep:1@1",
    "evaluation at the end": "loop.before_evaluate=sleep:1@3",
}
LONG_S = 120


def wait_for(driver: Driver, trace: Path, failpoint: str) -> None:
    """Until the run has come to the failpoint, and to its right hit."""
    name, _, hit = failpoint.partition("=")[0], *failpoint.partition("@")[1:]
    give_up = time.monotonic() + LONG_S
    while not trace.exists() or kill_plants.passed(trace).count(name) < int(hit or 1):
        ended = driver.wait(0.01)
        assert ended is None, f"it ended before it came to {name}:\n{ended}"
        assert time.monotonic() < give_up, f"it never came to {name}"


def stopped(bench: Bench, folder: Path, failpoint: str, *numbers: signal.Signals) -> Ended:
    """A run that was held at a failpoint and then sent these signals, half a second apart."""
    trace = folder / "trace"
    driver = bench.start(folder, failpoints=failpoint, before=[("trace", trace)])
    wait_for(driver, trace, failpoint)
    for later, number in enumerate(numbers):
        time.sleep(0.5 if later else 0)  # two presses of a key, not one that arrives twice
        os.kill(driver.pid, number)
    return driver.end()


@pytest.mark.parametrize("failpoint", PHASES.values(), ids=PHASES)
def test_a_stop_in_this_phase_ends_with_75_and_the_resumed_run_is_the_whole_run(bench: Bench, failpoint: str) -> None:
    number = random.Random(failpoint).choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    folder = bench.folder(CASE)
    ended = stopped(bench, folder, failpoint, number)
    assert ended.code == 75, f"{number.name}: exit {ended.code}\n{ended.said}"
    assert bench.warm.orphans() == []
    bench.check(CASE, folder, bench.resume(folder))


def test_a_stop_between_two_steps_leaves_a_checkpoint_of_the_step_and_a_verdict(bench: Bench) -> None:
    folder = bench.folder(CASE)
    ended = stopped(bench, folder, "loop.before_log=sleep:1@3", signal.SIGTERM)
    assert ended.code == 75, ended.said
    assert "--resume" in ended.said
    verdict = json.loads((folder / "run/verdict.json").read_text())
    assert (verdict["status"], verdict["executed_steps"]) == ("INCOMPLETE", 3)
    assert (folder / "run/checkpoints/step_3/manifest.json").exists()


@pytest.mark.parametrize("failpoint", ["learner.after_backward=sleep:60@2", "checkpoint.after_weights=sleep:60"])
def test_a_second_ctrl_c_does_not_wait_and_leaves_nothing_half_done(bench: Bench, failpoint: str) -> None:
    folder = bench.folder(CASE)
    ended = stopped(bench, folder, failpoint, signal.SIGINT, signal.SIGINT)
    assert ended.code == 75, ended.said
    bench.check(CASE, folder, bench.resume(folder))


def test_a_run_that_does_not_let_go_is_ended_and_can_be_resumed(bench: Bench) -> None:
    """Held for a minute where nothing may be left: between two phases."""
    folder = bench.folder(CASE)
    ended = stopped(bench, folder, "loop.before_log=sleep:60@2", signal.SIGTERM)
    assert ended.code == 75, ended.said
    assert "did not let go" in ended.said
    bench.check(CASE, folder, bench.resume(folder))


# -- random instants -----------------------------------------------------------------------------
def stop_at_random(bench: Bench, seed: int) -> None:
    dice, folder = random.Random(seed), bench.folder(CASE)
    driver = bench.start(folder)
    ended = driver.wait(dice.uniform(0.05, bench.whole(CASE).seconds))
    if ended is None:
        os.kill(driver.pid, dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]))
        ended = driver.end()
    early = not (folder / "run/config.toml").exists()  # before anything of ours listens, the system's own rule holds
    assert ended.code in (75, 0) or (early and ended.code < 0), f"seed {seed}: exit {ended.code}\n{ended.said}"
    bench.check(CASE, folder, ended if ended.code == 0 else bench.go_on(folder).end())


@pytest.mark.parametrize("seed", range(5))
def test_a_stop_at_a_random_instant_loses_nothing(bench: Bench, seed: int, record_property: Record) -> None:
    stop_at_random(bench, seed)
    note(record_property, "P11", ASKED, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5, 105))
def test_a_hundred_stops_at_random_instants_lose_nothing(bench: Bench, seed: int, record_property: Record) -> None:
    stop_at_random(bench, seed)
    note(record_property, "P11", ASKED, 1)


# -- nobody looks on any more ----------------------------------------------------------------------
def test_a_hang_up_does_not_stop_a_run(bench: Bench) -> None:
    folder = bench.folder(CASE)
    bench.check(CASE, folder, stopped(bench, folder, "loop.before_log=sleep:0.5@2", signal.SIGHUP))


def command(folder: Path) -> tuple[list[str], dict[str, str]]:
    return typed("train", "run.toml"), {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}


def test_a_reader_who_has_enough_does_not_stop_a_run(bench: Bench) -> None:
    folder = bench.folder(CASE)
    argv, env = command(folder)
    with subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.readline()
        running.stdout.close()  # what `| head -1` does
        assert running.wait(LONG_S) == 0, running.stderr and running.stderr.read()
    assert (folder / "run/metrics.jsonl").read_text().count("\n") >= 4
    assert json.loads((folder / "run/verdict.json").read_text())["executed_steps"] == 4


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(theirs)


def test_a_terminal_that_is_closed_does_not_stop_a_run(bench: Bench, terminal: tuple[int, int]) -> None:
    """The run owns the terminal, draws on it, and is hung up: SIGHUP, and every write fails from then on."""
    ours, theirs = terminal
    folder = bench.folder(CASE)
    argv, env = command(folder)
    running = subprocess.Popen(
        argv, cwd=folder, env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    assert os.read(ours, 1)
    os.close(ours)
    running.send_signal(signal.SIGHUP)
    assert running.wait(LONG_S) == 0
    assert json.loads((folder / "run/verdict.json").read_text())["executed_steps"] == 4
