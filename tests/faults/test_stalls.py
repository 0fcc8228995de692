"""A run that no longer moves, held by a failpoint in every stage: 76, the stage by name, the stacks, nobody left.

`tests/unit/runtime/test_watchdog.py` has the ways to be stuck; here are the places, and the slow ways.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from figures import Record, note
from kill_kit import Ended
from kill_runs import Bench, Case, wait_for

from surefoot.run import guardian

LIMIT_S = 3.0
NOTICED_S = 5.0
"""How long after stall_timeout_s a stuck run may live: stacks are written, children ended."""
STUCK = "stuck in a stage: exit code 76 with its name at most 5 s after stall_timeout_s"
CASE = Case("stuck", {"max_steps": 2, "save_steps": 1, "stall_timeout_s": LIMIT_S, "reward_timeout_s": LIMIT_S / 2})
PATIENT = Case("patient", {"max_steps": 2, "save_steps": 1, "stall_timeout_s": 300.0})
STAGES = {
    "session.before_build": "starting|loading|building",
    "loop.before_collect": "collecting|generating|publishing|evaluating",
    "learner.after_backward": "learning",
    "loop.before_publish": "publishing|learning|starting",
    "loop.before_evaluate": "evaluating|publishing",
    "checkpoint.after_weights": "saving",
    "session.before_verdict": "saving|judging|verdict|ending",
}
EVERY_DAY = ("session.before_build", "loop.before_collect", "learner.after_backward", "checkpoint.after_weights")


def held(bench: Bench, failpoint: str, seconds: float, case: Case = CASE) -> tuple[Ended, Path]:
    folder = bench.folder(case)
    return bench.train(folder, failpoints=f"{failpoint}=sleep:{seconds}@1"), folder


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=[] if name in EVERY_DAY else [pytest.mark.nightly]) for name in STAGES]
)
def test_a_run_that_is_stuck_in_this_stage_ends_with_76_and_shows_where(
    bench: Bench, stage: str, record_property: Record
) -> None:
    folder = bench.folder(CASE)
    driver = bench.start(folder, failpoints=f"{stage}=sleep:600@1", before=[("trace", folder / "trace")])
    wait_for(folder / "trace", stage)
    stuck = time.monotonic()
    ended = driver.end()
    seconds = time.monotonic() - stuck
    assert ended.code == 76, ended.said
    assert seconds <= LIMIT_S + NOTICED_S, f"{seconds:.1f} s from the last step to the end"
    found = re.search(rf"StalledError: no progress for {LIMIT_S:g} s while (.+)", ended.said)
    assert found is not None, ended.said
    assert re.search(STAGES[stage], found[1]), f"it was stuck at {stage} and says {found[1]!r}"
    [dump] = [path for path in (folder / "run/logs").iterdir() if "StalledError" in path.read_text(errors="replace")]
    assert str(dump.name) in ended.said
    assert re.search(r"storage/files\.py.* in failpoint", dump.read_text())
    assert bench.warm.orphans() == []
    bench.check(CASE, folder, bench.resume(folder))
    note(record_property, "P9", STUCK, 1, f"with {LIMIT_S:g} s", seconds=[seconds], limit_s=LIMIT_S + NOTICED_S)


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
@pytest.mark.config_key("stall_timeout_s")
def test_the_same_pause_is_a_stall_under_a_short_limit_and_none_under_a_long_one(bench: Bench) -> None:
    assert held(bench, "loop.before_log", 2 * LIMIT_S)[0].code == 76
    assert held(bench, "loop.before_log", 2 * LIMIT_S, PATIENT)[0].code == 0


# -- the interpreter itself is stuck ------------------------------------------------------------------
PRELUDE = """
import ctypes, os, sys, time
from pathlib import Path
from surefoot.system import signals
from surefoot.run.watchdog import Watchdog
dump = Path(sys.argv[1])
"""
LONG_S = 120


def program(body: str, tmp_path: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", PRELUDE + body, str(tmp_path / "stacks.txt")]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_call_that_keeps_the_interpreter_to_itself_is_ended_with_its_stack(tmp_path: Path) -> None:
    """Locked twice, it waits for ever; and PyDLL keeps the interpreter's lock, so that no other thread runs."""
    body = (
        "def selfish():\n    lock = ctypes.create_string_buffer(64)\n"
        "    for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(lock)\n"
        "with Watchdog(0.2, dump=dump):\n    selfish()\n"
    )
    running = program(body, tmp_path)
    running.communicate(timeout=LONG_S)
    dump = (tmp_path / "stacks.txt").read_text()
    assert running.returncode == -signal.SIGKILL
    assert "StalledError: the interpreter did not run" in dump
    assert "in selfish" in dump


def test_planted_without_the_guardian_nobody_ends_it(tmp_path: Path) -> None:
    """Teeth: such a call with the guardian dead. It comes back after twice the limit, and nobody has noticed."""
    body = (
        "with Watchdog(0.2, dump=dump) as dog:\n"
        "    dog._guardian.kill()\n    signals.tick('x')\n    ctypes.PyDLL(None).sleep(3)\n    signals.tick('x')\n"
        "print('lived')\n"
    )
    running = program(body, tmp_path)
    out, _ = running.communicate(timeout=LONG_S)
    assert (running.returncode, out) == (0, "lived\n")


def test_being_stopped_for_long_is_no_stall(tmp_path: Path) -> None:
    """SIGSTOP for five limits of the watchdog, and longer than the guardian's: on SIGCONT both count from there."""
    body = (
        "with Watchdog(0.5, dump=dump):\n"
        "    print('up', flush=True)\n"
        "    for _ in range(100):\n        signals.tick('walking'); time.sleep(0.01)\n"
        "    print('done', flush=True)\n"
    )
    running = program(body, tmp_path)
    assert running.stdout is not None
    running.stdout.readline()
    running.send_signal(signal.SIGSTOP)
    while not guardian.is_stopped(running.pid):
        os.sched_yield()
    time.sleep(2.5)  # the length of the stop is the input here: beyond both limits
    running.send_signal(signal.SIGCONT)
    out, err = running.communicate(timeout=LONG_S)
    assert (running.returncode, out) == (0, "done\n"), err
    assert not (tmp_path / "stacks.txt").exists()
