"""Asked to stop in every phase of a real run: 75 each time and within ten seconds, and the resumed run ends bit for bit
as if nobody had asked.

A failpoint holds the run in the phase; the signal is sent when it has got there. What is held for a second goes on and
is finished or left by itself; what is held for a minute has to be abandoned. The clock of a stop is the one of whoever
asked: from the signal to the end of the process.
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

IN_PHASE = "asked to stop in a chosen phase: exit code 75 in time, and the resumed run is the whole run"
ASKED = "asked to stop at a random instant: exit code 75 in time, and the resumed run is the whole run"
LATE = "asked to stop when only the verdict was left to write: exit code 0 in time"
LIMIT_S = 10.0
"""What is promised with the default stop_timeout_s, for every stop."""
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


def wait_until_it_listens(driver: Driver) -> None:
    """Until the process answers SIGTERM itself; before that, while Python starts, the system's own rule holds."""
    give_up = time.monotonic() + LONG_S
    while not listens(driver.pid):
        assert time.monotonic() < give_up, "it never listened"
        time.sleep(0.002)


def listens(pid: int) -> bool:
    """From the kernel: whether a process has a handler for SIGTERM."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False


def ask(driver: Driver, *numbers: signal.Signals) -> tuple[Ended, float]:
    """Send these signals, half a second apart; its end, and the seconds from the first of them to it."""
    asked = time.monotonic()
    for later, number in enumerate(numbers):
        time.sleep(0.5 if later else 0)  # two presses of a key, not one that arrives twice
        os.kill(driver.pid, number)
    return driver.end(), time.monotonic() - asked


def stopped(bench: Bench, folder: Path, failpoint: str, *numbers: signal.Signals, bug: str = "") -> tuple[Ended, float]:
    """A run that was held at a failpoint and then sent these signals."""
    trace = folder / "trace"
    planted = [("plant", bug)] if bug else []
    driver = bench.start(folder, failpoints=failpoint, before=[*planted, ("trace", trace)])
    wait_for(driver, trace, failpoint)
    return ask(driver, *numbers)


def check_stop(ended: Ended, seconds: float, limit_s: float = LIMIT_S) -> None:
    """What is promised of every stop of a run that was not over."""
    assert ended.code == 75, f"exit {ended.code}\n{ended.said}"
    assert seconds <= limit_s, f"{seconds:.2f} s from the signal to the end; {limit_s:g} are promised\n{ended.said}"


@pytest.mark.turns(3)
@pytest.mark.parametrize("failpoint", PHASES.values(), ids=PHASES)
def test_a_stop_in_this_phase_ends_with_75_and_the_resumed_run_is_the_whole_run(
    bench: Bench, failpoint: str, record_property: Record
) -> None:
    number = random.Random(failpoint).choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
    folder = bench.folder(CASE)
    ended, seconds = stopped(bench, folder, failpoint, number)
    check_stop(ended, seconds)
    assert bench.warm.orphans() == []
    bench.check(CASE, folder, bench.resume(folder))
    note(record_property, "P11", IN_PHASE, 1, seconds=[seconds], limit_s=LIMIT_S)


def test_a_stop_between_two_steps_leaves_a_checkpoint_of_the_step_and_a_verdict(bench: Bench) -> None:
    folder = bench.folder(CASE)
    ended, seconds = stopped(bench, folder, "loop.before_log=sleep:1@3", signal.SIGTERM)
    check_stop(ended, seconds)
    assert "--resume" in ended.said
    verdict = json.loads((folder / "run/verdict.json").read_text())
    assert (verdict["status"], verdict["executed_steps"]) == ("INCOMPLETE", 3)
    assert (folder / "run/checkpoints/step_3/manifest.json").exists()


@pytest.mark.parametrize("failpoint", ["learner.after_backward=sleep:60@2", "checkpoint.after_weights=sleep:60"])
def test_a_second_ctrl_c_does_not_wait_and_leaves_nothing_half_done(bench: Bench, failpoint: str) -> None:
    folder = bench.folder(CASE)
    check_stop(*stopped(bench, folder, failpoint, signal.SIGINT, signal.SIGINT))
    bench.check(CASE, folder, bench.resume(folder))


@pytest.mark.turns(3, 2)
def test_a_run_that_does_not_let_go_is_ended_and_can_be_resumed(bench: Bench, record_property: Record) -> None:
    """Held for a minute where nothing may be left: between two phases."""
    folder = bench.folder(CASE)
    ended, seconds = stopped(bench, folder, "loop.before_log=sleep:60@2", signal.SIGTERM)
    check_stop(ended, seconds)
    assert "did not let go" in ended.said
    bench.check(CASE, folder, bench.resume(folder))
    note(record_property, "P11", IN_PHASE, 1, seconds=[seconds], limit_s=LIMIT_S)


@pytest.mark.turns(3)
def test_a_save_that_takes_a_minute_is_given_up_in_time_and_the_run_goes_on_from_the_one_before(
    bench: Bench, record_property: Record
) -> None:
    folder = bench.folder(CASE)
    ended, seconds = stopped(bench, folder, "checkpoint.after_weights=sleep:60@2", signal.SIGTERM)
    check_stop(ended, seconds)
    assert "stopped by SIGTERM while saving, which took too long and was given up" in ended.said
    assert "raise stop_timeout_s = 10" in ended.said
    bench.check(CASE, folder, bench.resume(folder))
    note(record_property, "P11", IN_PHASE, 1, seconds=[seconds], limit_s=LIMIT_S)


# -- how long a stop may take --------------------------------------------------------------------
SLOW_SAVE = "checkpoint.after_weights=sleep:4@1"
HASTY = Case("hasty", CASE.keys | {"stop_timeout_s": 2.0})


@pytest.mark.config_key("stop_timeout_s")
@pytest.mark.turns(3, 1)
def test_the_same_slow_save_is_finished_within_the_default_time_and_given_up_under_a_shorter_limit(
    bench: Bench,
) -> None:
    folder = bench.folder(CASE)
    check_stop(*stopped(bench, folder, SLOW_SAVE, signal.SIGTERM))
    assert (folder / "run/checkpoints/step_2/manifest.json").exists()
    folder = bench.folder(HASTY)
    ended, _ = stopped(bench, folder, SLOW_SAVE, signal.SIGTERM)
    assert "raise stop_timeout_s = 2" in ended.said
    assert not (folder / "run/checkpoints/step_2").exists()
    again = bench.go_on(folder, failpoints=SLOW_SAVE, before=[("trace", folder / "resumed")])
    wait_for(again, folder / "resumed", SLOW_SAVE)
    assert "raise stop_timeout_s = 2" in ask(again, signal.SIGTERM)[0].said, "a resumed run has the key too"
    bench.check(HASTY, folder, bench.resume(folder))


def test_planted_a_save_that_is_waited_for_without_limit_breaks_the_promise(bench: Bench) -> None:
    """Teeth: as it was once. Two seconds are allowed, the save takes four."""
    folder = bench.folder(HASTY)
    ended, seconds = stopped(bench, folder, SLOW_SAVE, signal.SIGTERM, bug="stop_without_limit")
    assert ended.code == 75, ended.said
    with pytest.raises(AssertionError, match="2 are promised"):
        check_stop(ended, seconds, limit_s=2.0)


# -- random instants -----------------------------------------------------------------------------
def stop_at_random(bench: Bench, seed: int, record_property: Record) -> None:
    """One stop of a run that was not over; instants that hit nothing are drawn again."""
    dice = random.Random(seed)
    for _ in range(50):
        folder = bench.folder(CASE)
        driver = bench.start(folder)
        wait_until_it_listens(driver)
        if driver.wait(dice.uniform(0.0, bench.whole(CASE).seconds)) is not None:
            continue  # over before anybody asked
        ended, seconds = ask(driver, dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]))
        if ended.code == 0:  # only a run that had all its steps, its evaluation and its final save under way
            bench.check(CASE, folder, ended)
            assert seconds <= LIMIT_S, f"seed {seed}: {seconds:.2f} s"
            note(record_property, "P11", LATE, 1, seconds=[seconds], limit_s=LIMIT_S, seeds=range(seed, seed + 1))
            continue
        check_stop(ended, seconds)
        bench.check(CASE, folder, bench.go_on(folder).end())
        note(record_property, "P11", ASKED, 1, seconds=[seconds], limit_s=LIMIT_S, seeds=range(seed, seed + 1))
        return
    raise AssertionError(f"seed {seed}: fifty instants, and none hit a run")


@pytest.mark.turns(2)
@pytest.mark.parametrize("seed", range(5))
def test_a_stop_at_a_random_instant_loses_nothing(bench: Bench, seed: int, record_property: Record) -> None:
    stop_at_random(bench, seed, record_property)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5, 105))
def test_a_hundred_stops_at_random_instants_lose_nothing(bench: Bench, seed: int, record_property: Record) -> None:
    stop_at_random(bench, seed, record_property)


def test_a_stop_before_the_run_has_begun_ends_with_75_and_leaves_no_folder(bench: Bench) -> None:
    folder = bench.folder(CASE)
    driver = bench.start(folder, before=[("slow_config",)])
    wait_until_it_listens(driver)
    ended, seconds = ask(driver, signal.SIGTERM)
    check_stop(ended, seconds)
    assert "stopped by SIGTERM before the run began" in ended.said
    assert not (folder / "run").exists()


# -- nobody looks on any more ----------------------------------------------------------------------
def test_a_hang_up_does_not_stop_a_run(bench: Bench) -> None:
    folder = bench.folder(CASE)
    bench.check(CASE, folder, stopped(bench, folder, "loop.before_log=sleep:0.5@2", signal.SIGHUP)[0])


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
