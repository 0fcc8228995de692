"""Processes of a run on Ray are killed or stopped: replaced, resumed from the journal, or the end with a name.

Every surviving run is compared with an undisturbed one: equal bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import Ran, surefoot
from figures import Record, note
from ray_kit import TINY, environment, left_after, litter, litter_of, mark_of, numbers, place, ray_run, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PATIENCE_S = 5.0
LEFT = "driver on Ray killed at a random instant: no process left after five seconds"


def undisturbed(tmp_path: Path, words: list[str]) -> Ran:
    alone = surefoot("train", *(w for w in TINY if not w.startswith("runtime.")), *words, cwd=tmp_path, run="alone")
    assert alone.code in (0, 1), alone.out + alone.err
    return alone


@pytest.mark.nightly
def test_stopped_members_and_a_killed_learner_change_not_one_number(tmp_path: Path) -> None:
    """SIGSTOP a worker, then SIGCONT it after its replacement; SIGKILL the learner: the session goes on by itself."""
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [*place(tmp_path), "max_steps=24", "learning_rate=1e-3", "eval_metric=exact"]
    alone = undisturbed(tmp_path, words)
    before = litter()
    with ray_run(tmp_path / "run", *words, env={"SLOW_REWARD": "0.5"}) as run:
        run.wait_step(2)
        mark = mark_of(run.pid("learner"))
        stopped = run.kill("worker 0", signal.SIGSTOP)
        wait_for(lambda: run.is_ready("worker 0", stopped), "another worker 0", run)
        wait_for(lambda: not Path(f"/proc/{stopped}").exists(), "the end of the stopped worker", run)
        lost = run.kill("learner")
        wait_for(lambda: run.is_ready("learner", lost), "another learner", run)
        code, said = run.end()
    assert code == alone.code, said
    assert "the learner was lost" in said
    assert numbers(run.metrics) == numbers(alone.metrics)
    assert left_after(mark, PATIENCE_S) == []
    assert litter_of({run.process.pid, lost, run.pid("learner")}, before) == []


def test_an_engine_that_dies_again_and_again_ends_the_run_with_77_its_name_and_its_last_lines(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    words = ["max_steps=500", "runtime.max_restarts=2"]
    with ray_run(tmp_path / "run", *words) as run:
        mark = mark_of(run.pid("learner"))
        seen: list[int] = []
        while run.process.poll() is None:
            pids = run.pids("engine 0")
            if len(pids) > len(seen):  # each as soon as it says that it is there
                seen.append(run.kill("engine 0"))
            time.sleep(0.02)
        code, said = run.end()
    assert code == 77, said
    assert "engine 0 was lost 3 times in a row" in said
    assert "SIGKILL" in said
    assert f"engine 0 begins as process {seen[-1]}" in said, "its last lines"
    assert len(seen) == 3
    assert left_after(mark, PATIENCE_S) == []


def kill_the_driver(tmp_path: Path, trial: int, delay_s: float) -> None:
    before = litter()
    with ray_run(tmp_path / f"run{trial}", "max_steps=2000", env={"TRIAL": f"{tmp_path}-{trial}"}) as run:
        give_up = time.monotonic() + delay_s
        while time.monotonic() < give_up and run.process.poll() is None:
            time.sleep(0.02)
        family = carrying(f"TRIAL={tmp_path}-{trial}")
        run.process.kill()
        run.process.wait()
    give_up = time.monotonic() + PATIENCE_S
    while (left := carrying(f"TRIAL={tmp_path}-{trial}")) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert left == [], [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in left]
    wait_for(lambda: litter_of({*family, run.process.pid}, before) == [], "the end of its folders and shared memory")


def carrying(entry: str) -> list[int]:
    """Processes with this entry in their environment: another way of looking than the mark's."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_nothing_is_left_of_a_driver_that_is_killed_at_any_moment(tmp_path: Path, record_property: Record) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    rng = random.Random(3)
    for trial in range(5):
        kill_the_driver(tmp_path, trial, rng.uniform(1.0, 14.0))
    note(record_property, "P10", LEFT, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("half", [0, 1])
def test_nothing_is_left_of_a_hundred_killed_drivers(tmp_path: Path, record_property: Record, half: int) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    rng = random.Random(4 + half)
    for trial in range(50):
        kill_the_driver(tmp_path, trial, rng.uniform(1.0, 20.0))
    note(record_property, "P10", LEFT, 50)


@pytest.mark.nightly
def test_asked_to_stop_it_saves_leaves_nothing_and_goes_on_to_the_same_end(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [*place(tmp_path), "max_steps=12", "learning_rate=1e-3", "eval_metric=exact"]
    alone = undisturbed(tmp_path, words)
    with ray_run(tmp_path / "run", *words, env={"SLOW_REWARD": "0.5"}) as run:
        run.wait_step(3)
        mark = mark_of(run.pid("learner"))
        os.kill(run.process.pid, signal.SIGTERM)
        code, said = run.end()
    assert code == 75, said
    assert left_after(mark, PATIENCE_S) == []
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", "--resume", str(run.folder)], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == alone.code, done.stdout + done.stderr
    assert numbers(run.metrics) == numbers(alone.metrics)
