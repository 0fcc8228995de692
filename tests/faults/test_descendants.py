"""The driver is killed with -9 in any phase: five seconds later nothing that it, or a reward of its, started is left.

The fork server that starts the runs adopts what dead drivers leave behind (it is a subreaper), daemons included; one
test looks for a mark in the environment of every process instead, so that the two ways of looking check each other.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from command import ROOT
from figures import Record, note
from kill_runs import Bench, Case

MARK = "SUREFOOT_TEST_MARK"
PATIENCE_S = 5.0
LONG_S = 120
LEFT = "driver killed at a random instant: no process left after five seconds"
FAMILY = '''
import os, signal, subprocess, time
from pathlib import Path

def daemon():
    """Forks twice, leaves the session, ignores what it can: the classical way to get away."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()

def grade(completions, **columns):
    """Leaves a daemon and a child in a session of its own behind, every time."""
    daemon()
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    return [float(len(c) % 3) for c in completions]

def hang(completions, **columns):
    """The same, and never answers."""
    grade(completions)
    Path("hanging").touch()
    time.sleep(600)
'''
BUSY = Case(
    "with children", {"reward_funcs": ["family.py:grade"], "eval_metric": None, "max_steps": 4, "reward_workers": 2}
)
HANGING = Case(
    "reward call in progress", {"reward_funcs": ["family.py:hang"], "reward_timeout_s": 200.0, "reward_workers": 2}
)


def place(bench: Bench, case: Case) -> Path:
    folder = bench.folder(Case(case.name, {k: v for k, v in case.keys.items() if v is not None}))
    if "eval_metric" in case.keys:
        config = folder / "run.toml"
        config.write_text(
            "".join(line for line in config.read_text().splitlines(True) if not line.startswith("eval_metric"))
        )
    (folder / "family.py").write_text(FAMILY)
    return folder


def wait_for(path: Path) -> None:
    give_up = time.monotonic() + LONG_S
    while not path.exists():
        assert time.monotonic() < give_up, f"{path.name} never came"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "failpoint", ["session.before_build", "loop.after_collect", "learner.after_step", "session.before_verdict"]
)
def test_nothing_is_left_of_a_driver_that_is_killed_here(bench: Bench, failpoint: str) -> None:
    ended = bench.train(place(bench, BUSY), failpoints=f"{failpoint}=kill")
    assert ended.code == -signal.SIGKILL, ended.said
    assert bench.warm.orphans(PATIENCE_S) == []


def test_nothing_is_left_of_a_reward_call_in_progress(bench: Bench) -> None:
    folder = place(bench, HANGING)
    driver = bench.start(folder)
    wait_for(folder / "hanging")
    assert driver.kill().code == -signal.SIGKILL
    assert bench.warm.orphans(PATIENCE_S) == []


def test_planted_a_daemon_of_the_driver_itself_is_seen(bench: Bench) -> None:
    """Teeth: a process that nothing ties to the driver is left, and both the server and the test say so."""
    folder = place(bench, BUSY)
    (folder / "family.py").write_text(FAMILY + "daemon()\n")  # at import, which happens in the driver
    ended = bench.train(folder, failpoints="session.before_build=kill")
    assert ended.code == -signal.SIGKILL, ended.said
    assert len(bench.warm.orphans(0.5)) == 1


def kill_at_random(bench: Bench, seed: int) -> None:
    driver = bench.start(place(bench, BUSY))
    if driver.wait(random.Random(seed).uniform(0.0, 2.0)) is None:
        driver.kill()
    assert bench.warm.orphans(PATIENCE_S) == [], f"seed {seed}"


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_left_of_a_driver_that_is_killed_at_a_random_instant(
    bench: Bench, seed: int, record_property: Record
) -> None:
    kill_at_random(bench, seed)
    note(record_property, "P10", LEFT, 1, seeds=range(seed, seed + 1))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5, 105))
def test_nothing_is_left_of_a_hundred_drivers(bench: Bench, seed: int, record_property: Record) -> None:
    kill_at_random(bench, seed)
    note(record_property, "P10", LEFT, 1, seeds=range(seed, seed + 1))


def marked(mark: str) -> set[int]:
    """Every living process that was started with this mark in its environment, or forked from one that was."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.add(int(path.parent.name))
        except OSError:
            continue  # it ended while we looked, or is not ours
    return found


def test_no_process_carries_the_mark_of_a_killed_command(bench: Bench) -> None:
    folder, mark = place(bench, HANGING), uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), MARK: mark}
    argv = [sys.executable, "-m", "surefoot", "train", "run.toml"]
    running = subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for(folder / "hanging")
    assert len(marked(mark)) >= 5, "the driver, the fork server, a worker, its daemon and its child"
    running.kill()
    running.wait()
    give_up = time.monotonic() + PATIENCE_S
    while marked(mark) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert marked(mark) == set()
