"""Processes of a run on Ray are killed or stopped: replaced, resumed from the journal, or the end with a name.

Every surviving run is compared with an undisturbed one: equal bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot
from figures import Record, note
from ray_kit import TINY, environment, left_after, litter, litter_of, mark_of, numbers, place, ray_run, wait_for

from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PATIENCE_S = 5.0
DEAD_S = 60.0
DEAD = "only engine killed, and each of its replacements, default keys: exit code 77 with its name in time"
STOP_S = 10.0
STOPPED = "run on Ray asked to stop: exit code 75 in time, nothing left, resumed to the same end"
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
    with ray_run(tmp_path / "run", *words, env={"SUREFOOT_SLOW_REWARD": "0.5"}) as run:
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


@pytest.mark.turns(2)
def test_an_engine_that_dies_again_and_again_ends_the_run_with_77_its_name_and_its_last_lines(
    tmp_path: Path, record_property: Record
) -> None:
    """The only engine, with the keys as they are by default: a minute from its first death to the end of the run."""
    pytest.importorskip("ray", reason="needs the ray extra")
    with ray_run(tmp_path / "run", "max_steps=500", "runtime.engines=1") as run:
        run.wait_step(1)
        mark = mark_of(run.pid("learner"))
        seen: list[int] = []
        began = time.monotonic()
        while run.process.poll() is None:
            pids = run.pids("engine 0")
            if len(pids) > len(seen):  # each as soon as it says that it is there
                seen.append(run.kill("engine 0"))
            time.sleep(0.02)
        code, said = run.end()
        seconds = time.monotonic() - began
    assert code == 77, said
    assert seconds <= DEAD_S, f"{seconds:.1f} s from the first death to the end\n{said}"
    assert f"engine 0 was lost {len(seen)} times in a row" in said
    assert "SIGKILL" in said
    assert f"engine 0 begins as process {seen[-1]}" in said, "its last lines"
    assert 2 <= len(seen) <= 6
    assert left_after(mark, PATIENCE_S) == []
    note(record_property, "P9", DEAD, 1, f"{len(seen)} processes lost", seconds=[seconds], limit_s=DEAD_S)


def kill_the_driver(tmp_path: Path, trial: int, delay_s: float) -> None:
    before = litter()
    with ray_run(tmp_path / f"run{trial}", "max_steps=2000", env={"SUREFOOT_TRIAL": f"{tmp_path}-{trial}"}) as run:
        give_up = time.monotonic() + delay_s
        while time.monotonic() < give_up and run.process.poll() is None:
            time.sleep(0.02)
        family = carrying(f"SUREFOOT_TRIAL={tmp_path}-{trial}")
        run.process.kill()
        run.process.wait()
    give_up = time.monotonic() + PATIENCE_S
    while (left := carrying(f"SUREFOOT_TRIAL={tmp_path}-{trial}")) and time.monotonic() < give_up:
        time.sleep(0.05)
    assert left == [], [Path(f"/proc/{pid}/cmdline").read_bytes()[:80] for pid in left]
    wait_for(lambda: litter_of({*family, run.process.pid}, before) == [], "the end of its folders and shared memory")


def kill_and_go_on(
    folder: Path, words: list[str], rng: random.Random, memory: dict[int, Any] | None
) -> tuple[int, int]:
    """Kill the driver at random instants of its life and of its resumes' lives; then to the end: exit code, kills.

    Args:
        memory: for an asynchronous run, what its lives have logged; each later one has to log the same.
    """
    killed, command = 0, [sys.executable, "-m", "surefoot", "train"]
    begin = [*command, *TINY, "runtime.kind=ray", f"output_dir={folder}", *words]
    while True:
        again = killed == 0 or (killed < 3 and rng.random() < 0.4)
        run = subprocess.Popen(
            [*command, "--resume", str(folder)] if (folder / "config.toml").exists() else begin,
            cwd=folder.parent, env=environment(SUREFOOT_SLOW_REWARD="0.2"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said, _ = run.communicate(timeout=rng.uniform(4.0, 25.0) if again else 600)
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            killed += 1
            if not (folder / "config.toml").exists():
                shutil.rmtree(folder, ignore_errors=True)
            if memory is not None:
                compare(folder, memory)
            continue
        assert run.returncode in (0, 1), said.decode(errors="replace")
        if memory is not None:
            compare(folder, memory)
        return run.returncode, killed


def compare(folder: Path, memory: dict[int, Any]) -> None:
    """Steps that an earlier life logged are there with the same numbers; then remember the new ones."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    for row in (row for row in rows if "loss" in row):
        (told,) = numbers([row])
        assert memory.setdefault(int(row["step"]), told) == told, f"step {row['step']} became another"


ON_RAY = "kill -9 of a run on Ray at random instants, resumed: bit-equal"


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_a_run_on_ray_killed_at_random_instants_goes_on_to_the_same_end(
    tmp_path: Path, seed: int, record_property: Record
) -> None:
    """The driver dies, at any moment of start, training or resume; the end is that of an undisturbed local run."""
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [*place(tmp_path), "max_steps=16", "learning_rate=1e-3", "eval_metric=exact"]
    alone = undisturbed(tmp_path, words)
    code, killed = kill_and_go_on(tmp_path / "run", words, random.Random(seed), None)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (code, numbers(rows)) == (alone.code, numbers(alone.metrics)), f"seed {seed}"
    note(record_property, "P2", ON_RAY, killed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(100, 106))
def test_an_asynchronous_run_on_ray_killed_at_random_instants_repeats_what_was_on_the_disk(
    tmp_path: Path, seed: int, record_property: Record
) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [
        *place(tmp_path), "max_steps=16", "learning_rate=1e-3", "eval_metric=exact", "max_staleness=2",
        "importance_sampling_correction=true",
    ]  # fmt: skip
    memory: dict[int, Any] = {}
    _, killed = kill_and_go_on(tmp_path / "run", words, random.Random(seed), memory)
    assert sorted(memory) == list(range(1, 17)), f"seed {seed}"
    with Journal.open(tmp_path / "run" / "journal" / "ledger.journal", readonly=True) as journal:
        ledger = Ledger.read(journal)
    ledger.check()
    balance = ledger.balance()
    assert (balance.lost, balance.leased, balance.trained + sum(balance.dropped.values())) == (0, 0, 64), f"seed {seed}"
    note(
        record_property,
        "P2",
        "kill -9 of an asynchronous run on Ray at random instants, resumed: journaled steps bit-equal",
        killed,
    )


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
    for trial in range(3):
        kill_the_driver(tmp_path, trial, rng.uniform(1.0, 14.0))
    note(record_property, "P10", LEFT, 3)


@pytest.mark.nightly
@pytest.mark.parametrize("half", [0, 1])
def test_nothing_is_left_of_a_hundred_killed_drivers(tmp_path: Path, record_property: Record, half: int) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    rng = random.Random(4 + half)
    for trial in range(50):
        kill_the_driver(tmp_path, trial, rng.uniform(1.0, 20.0))
    note(record_property, "P10", LEFT, 50)


@pytest.mark.nightly
@pytest.mark.parametrize("to_all", [False, True], ids=["to the driver", "to the learner as well"])
def test_asked_to_stop_it_saves_leaves_nothing_and_goes_on_to_the_same_end(
    tmp_path: Path, record_property: Record, to_all: bool
) -> None:
    """A batch system may send its signal to every process: a learner that it ended is not brought back."""
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [*place(tmp_path), "max_steps=12", "learning_rate=1e-3", "eval_metric=exact"]
    alone = undisturbed(tmp_path, words)
    with ray_run(tmp_path / "run", *words, env={"SUREFOOT_SLOW_REWARD": "0.5"}) as run:
        run.wait_step(3)
        mark = mark_of(run.pid("learner"))
        asked = time.monotonic()
        os.kill(run.process.pid, signal.SIGTERM)
        if to_all:
            run.kill("learner")
        code, said = run.end()
        seconds = time.monotonic() - asked
    assert code == 75, said
    assert seconds <= STOP_S, f"{seconds:.1f} s from the signal to the end\n{said}"
    assert left_after(mark, PATIENCE_S) == []
    note(record_property, "P11", STOPPED, 1, seconds=[seconds], limit_s=STOP_S)
    done = subprocess.run(
        [sys.executable, "-m", "surefoot", "train", "--resume", str(run.folder)], cwd=tmp_path, env=environment(),
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == alone.code, done.stdout + done.stderr
    assert numbers(run.metrics) == numbers(alone.metrics)
