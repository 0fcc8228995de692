"""A request to stop leaves the work only where it may be left, and always ends it.

Signals that have to end a process go to one of its own; the rest is sent to this one, which is the main thread.
"""
# ruff: noqa: PT012 - what happens inside a phase, line by line, is the point

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from surefoot.errors import CollapseStopError, InvariantError, RewardError
from surefoot.system.signals import ASKING, PARTS, StopRequested, StopSignals

LONG_S = 60
KINDS = {"abandonable": {"abandonable": True}, "tears": {"tears_weights": True}}


def send(number: signal.Signals = signal.SIGTERM) -> None:
    """To this process; a handler has run when this returns."""
    signal.raise_signal(number)


def wait_for_alarm() -> None:
    """Longer than any grace in here; the handler raises out of it."""
    time.sleep(LONG_S)


# -- phases ---------------------------------------------------------------------------------
@pytest.mark.parametrize("number", ASKING, ids=lambda n: n.name)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_phase_that_may_be_left_is_left_after_its_grace(kind: dict[str, bool], number: signal.Signals) -> None:
    seen: list[str] = []
    with StopSignals(grace_s=0.05) as stop:
        with pytest.raises(StopRequested, match=f"stopped by {number.name} while collecting"):
            with stop.phase("collecting", **kind):
                send(number)
                seen.append("goes on for its grace")
                wait_for_alarm()
        assert seen == ["goes on for its grace"]
        assert stop.asked
        assert stop.weights_torn is ("tears_weights" in kind)
        assert stop.may_save is not stop.weights_torn
        assert stop.current is None


def test_a_phase_without_grace_is_left_at_once() -> None:
    with StopSignals() as stop, pytest.raises(StopRequested), stop.phase("starting", abandonable=True, grace_s=0):
        send()
        pytest.fail("it went on")


def test_a_phase_that_ends_within_the_grace_is_whole_and_the_next_is_not_entered() -> None:
    with StopSignals(grace_s=LONG_S) as stop:
        with stop.phase("learning", tears_weights=True):
            send()
        assert stop.may_save
        with pytest.raises(StopRequested), stop.phase("collecting", abandonable=True):
            pytest.fail("it was entered")
        assert stop.may_save


def test_learning_that_begins_after_the_request_is_finished_within_the_grace_and_not_beyond() -> None:
    with StopSignals(grace_s=0.5) as stop:
        send()
        with stop.phase("learning", tears_weights=True):
            done = "in time"
        assert (done, stop.may_save) == ("in time", True)
        with pytest.raises(StopRequested), stop.phase("learning", tears_weights=True):
            wait_for_alarm()
        assert not stop.may_save
        assert stop.current is None


def test_learning_is_not_begun_when_the_grace_is_over() -> None:
    with StopSignals(grace_s=0) as stop:
        send()
        with pytest.raises(StopRequested), stop.phase("learning", tears_weights=True):
            pytest.fail("it was entered")
        assert not stop.may_save, "a step was half prepared"
        assert stop.current is None


def test_a_save_is_finished_and_may_begin_after_the_request() -> None:
    done = []
    with StopSignals(grace_s=0.01, last_resort_s=LONG_S) as stop:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
            with stop.phase("saving"):
                send(number)
                time.sleep(0.03)
                done.append(number)
        assert len(done) == 3
        with pytest.raises(StopRequested, match="SIGTERM"):
            stop.check()
        assert stop.may_save


def test_between_phases_nothing_is_thrown() -> None:
    with StopSignals(grace_s=0) as stop:
        send()
        assert stop.asked
        with pytest.raises(StopRequested):
            stop.check()


def test_without_a_request_nothing_happens() -> None:
    with StopSignals(grace_s=0) as stop:
        stop.check()
        for kind in KINDS.values():
            with stop.phase("x", **kind):
                stop.check()
        assert (stop.asked, stop.may_save, stop.reason) == (False, True, "asked to stop")


def test_a_save_inside_another_phase_is_finished_before_that_is_left() -> None:
    written = []
    with StopSignals(grace_s=0) as stop, pytest.raises(StopRequested, match="while collecting"):
        with stop.phase("collecting", abandonable=True):
            with stop.phase("writing the journal"):
                send()
                written.append(1)
            pytest.fail("the outer phase went on")
    assert written == [1]


def test_an_inner_phase_keeps_the_weights_of_its_outer_one_in_mind() -> None:
    with StopSignals(grace_s=0) as stop:
        with pytest.raises(StopRequested):
            with stop.phase("learning", tears_weights=True), stop.phase("scoring", abandonable=True):
                send()
        assert stop.weights_torn


def test_any_exception_out_of_learning_tears_the_weights() -> None:
    with StopSignals() as stop:
        with pytest.raises(ZeroDivisionError), stop.phase("learning", tears_weights=True):
            raise ZeroDivisionError
        assert not stop.may_save


def test_a_handler_that_raises_at_the_very_edge_of_a_phase_leaves_no_phase_behind() -> None:
    """A stale inner phase, as an exception on the first instruction of its exit would leave it, is healed by the outer."""
    with StopSignals(grace_s=0) as stop:
        with stop.phase("outer"):
            stale = stop.phase("stale", abandonable=True)
            stale.__enter__()
        assert stop.current is None
        send()


# -- the second request ------------------------------------------------------------------------
def press_twice() -> None:
    send(signal.SIGINT)
    time.sleep(0.3)  # the second press of a key, not an echo of the first
    send(signal.SIGINT)


@pytest.mark.parametrize("kind", [{}, *KINDS.values()], ids=["saving", *KINDS])
def test_a_second_ctrl_c_leaves_at_once_even_a_save(kind: dict[str, bool]) -> None:
    with StopSignals() as stop:
        with pytest.raises(StopRequested), stop.phase("saving", **kind):
            press_twice()
            pytest.fail("it went on")
        assert stop.immediate
        assert not stop.may_save
        assert stop.weights_torn is ("tears_weights" in kind)


def test_a_ctrl_c_that_arrives_twice_within_a_moment_is_one() -> None:
    with StopSignals() as stop:
        with stop.phase("saving"):
            send(signal.SIGINT)
            send(signal.SIGINT)
        assert not stop.immediate


def test_a_second_sigterm_is_no_second_ctrl_c() -> None:
    with StopSignals() as stop, stop.phase("saving"):
        send()
        time.sleep(0.3)
        send()


def test_it_is_no_exception_that_careless_code_swallows() -> None:
    with StopSignals(grace_s=0) as stop, pytest.raises(StopRequested), stop.phase("x", abandonable=True):
        try:
            send()
        except Exception:
            pytest.fail("swallowed")


# -- errors while stopping ---------------------------------------------------------------------
def broken_workers() -> RewardError:
    return RewardError("2 of 8 rollouts got no verdict", "the workers were ended", "mend them")


def test_workers_that_the_same_signal_ended_do_not_turn_a_stop_into_an_error() -> None:
    with StopSignals() as stop, pytest.raises(StopRequested, match="had failed: 2 of 8") as caught:
        with stop.phase("collecting", abandonable=True):
            send()
            raise broken_workers()
    assert isinstance(caught.value.__cause__, RewardError)


def test_without_a_request_an_error_stays_what_it_is_and_so_does_a_verdict() -> None:
    with StopSignals() as stop:
        with pytest.raises(RewardError), stop.phase("collecting", abandonable=True):
            raise broken_workers()
        with pytest.raises(CollapseStopError), stop.phase("evaluating", abandonable=True):
            send()
            raise CollapseStopError("it fell", "held-out", "look")


# -- the terminal, other threads, children ----------------------------------------------------
def test_a_hang_up_changes_nothing() -> None:
    with StopSignals(grace_s=0) as stop:
        with stop.phase("collecting", abandonable=True):
            send(signal.SIGHUP)
        assert stop.hung_up
        assert not stop.asked


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda n: n.name)
def test_what_was_ignored_at_the_start_stays_ignored(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals(grace_s=0) as stop, stop.phase("x", abandonable=True):
            send(number)
            assert (stop.asked, stop.hung_up) == (False, False)
    finally:
        signal.signal(number, before)


def test_everything_is_as_before_afterwards() -> None:
    numbers = (*ASKING, signal.SIGHUP, signal.SIGALRM)
    before, files, threads = (
        [signal.getsignal(n) for n in numbers],
        os.listdir("/proc/self/fd"),
        threading.active_count(),
    )
    with StopSignals(grace_s=0.01) as stop, pytest.raises(StopRequested), stop.phase("x", abandonable=True):
        send()
        wait_for_alarm()
    assert [signal.getsignal(n) for n in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.set_wakeup_fd(-1) == -1
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (len(files), threads)


def test_in_another_thread_the_caller_owns_the_signals() -> None:
    before, found = signal.getsignal(signal.SIGTERM), list[object]()

    def work() -> None:
        with StopSignals(grace_s=0) as stop:
            found.append(signal.getsignal(signal.SIGTERM))
            with stop.phase("x", abandonable=True):
                stop.ask()
            try:
                stop.check()
            except StopRequested as error:
                found.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [before, "stopped by SIGTERM"]


def test_a_process_forked_in_a_phase_is_not_stopped_in_our_place() -> None:
    with StopSignals(grace_s=0, last_resort_s=LONG_S) as stop, stop.phase("starting", abandonable=True):
        pid = os.fork()
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                send(signal.SIGUSR1)
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


# -- parts of a run ----------------------------------------------------------------------------
def test_a_save_and_a_publication_are_finished_and_only_learning_tears_weights() -> None:
    stop = StopSignals()
    assert {name for name in PARTS if stop.part(name).sealed} == {"publish", "save"}
    assert {name for name in PARTS if stop.part(name).tears_weights} == {"learn"}
    with pytest.raises(InvariantError, match="no part called 'lern'"):
        stop.part("lern")


# -- the last resort ---------------------------------------------------------------------------
PROGRAM = """
import ctypes, os, signal, sys, time
from surefoot.system.signals import StopSignals
with StopSignals(grace_s=0.05, last_resort_s=0.3, resume="surefoot train --resume x") as stop:
    with stop.phase("learning", tears_weights=True) if sys.argv[1] != "save" else stop.phase("saving"):
        print("up", flush=True)
        BODY
    print("saved", flush=True)
    sys.exit(75)
"""


def last_resort(body: str, *numbers: signal.Signals, kind: str = "learn") -> tuple[int, str, str]:
    argv = [sys.executable, "-c", PROGRAM.replace("BODY", body), kind]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        for number in numbers:
            running.send_signal(number)
            time.sleep(0.3 if len(numbers) > 1 else 0)
        out, err = running.communicate(timeout=LONG_S)
    finally:
        running.kill()
    return running.returncode, out, err


C_CALL = "lock = ctypes.create_string_buffer(64)\n        for _ in range(2): ctypes.CDLL(None).pthread_mutex_lock(lock)"
"""Waits for ever inside one call, so that no handler ever runs."""


def test_a_computation_that_no_signal_reaches_ends_with_75_all_the_same() -> None:
    code, _, err = last_resort(C_CALL, signal.SIGTERM)
    assert code == 75
    assert "while learning, which did not let go" in err
    assert "surefoot train --resume x" in err


def test_code_that_swallows_everything_ends_with_75_all_the_same() -> None:
    body = "while True:\n            try: time.sleep(60)\n            except BaseException: pass"
    assert last_resort(body, signal.SIGTERM)[0] == 75


def test_a_save_is_waited_for_beyond_the_last_resort_but_not_after_a_second_ctrl_c() -> None:
    code, out, _ = last_resort("time.sleep(0.8)", signal.SIGTERM, kind="save")
    assert (code, out) == (75, "saved\n")
    code, out, _ = last_resort(C_CALL, signal.SIGINT, signal.SIGINT, kind="save")
    assert (code, out) == (75, "")


def test_planted_without_the_last_resort_it_would_not_end() -> None:
    """Teeth: with the thread's last act taken away, code that never lets go outlives the limit fivefold."""
    body = (
        "type(stop._last_resort)._end = lambda self: time.sleep(60)\n"
        "        end = time.monotonic() + 1.5\n"
        "        while time.monotonic() < end:\n            try: time.sleep(0.1)\n            except BaseException: pass\n"
        "        os._exit(3)"
    )
    assert last_resort(body, signal.SIGTERM)[0] == 3


# -- any instant -------------------------------------------------------------------------------
TRIALS = """
import json, os, random, signal, sys, time
from surefoot.system.signals import StopRequested, StopSignals

folder, planted, trials = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.chdir(folder)
KINDS = {"collecting": {"abandonable": True}, "learning": {"tears_weights": True}, "saving": {}}
if planted:
    KINDS[planted] = {"abandonable": True, "grace_s": 0.0}

def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.0003)

def save(weights):
    for number, weight in enumerate(weights):  # two files that belong together: half a save is a broken state
        with open(f"weights_{number}", "w") as file:
            file.write(str(weight))
        busy(0.001)

def train(stop, weights):
    while True:
        with stop.phase("collecting", **KINDS["collecting"]):
            busy(0.003)
        with stop.phase("learning", **KINDS["learning"]):
            weights[0] += 1
            busy(0.003)
            weights[1] += 1
        with stop.phase("saving", **KINDS["saving"]):
            save(weights)

def run(report):
    weights = [0, 0]
    with StopSignals(grace_s=0.002, last_resort_s=30) as stop:
        save(weights)
        os.write(report, b"up")
        try:
            train(stop, weights)
        except StopRequested:
            if stop.may_save and planted != "saving":  # which would mend the planted half
                with stop.phase("saving"):
                    save(weights)
            os._exit(75)

def trial(seed):
    dice = random.Random(seed)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run(writing)
        finally:
            os._exit(1)
    os.close(writing)
    os.read(reading, 2)
    os.close(reading)
    time.sleep(dice.uniform(0, 0.03))
    os.kill(pid, dice.choice([signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return seed, code, [open(f"weights_{number}").read() for number in (0, 1)]

print(json.dumps([trial(seed) for seed in range(trials)]))
"""


def random_stops(folder: Path, planted: str = "", trials: int = 100) -> list[int]:
    """Seeds whose stop, at an instant that the seed decides, ended otherwise than with 75 and a whole state."""
    argv = [sys.executable, "-c", TRIALS, str(folder), planted, str(trials)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LONG_S, check=True)
    results = json.loads(done.stdout)
    assert len(results) == trials
    return [seed for seed, code, weights in results if code != 75 or len(set(weights)) != 1 or "" in weights]


def test_a_hundred_stops_at_random_instants_all_end_with_75_and_a_whole_state(tmp_path: Path) -> None:
    assert random_stops(tmp_path) == []


@pytest.mark.parametrize("phase", ["learning", "saving"])
def test_planted_a_phase_that_is_taken_for_abandonable_leaves_half_a_state(tmp_path: Path, phase: str) -> None:
    """Teeth: half-learned weights are saved, or half a save is left, at some of the same instants."""
    assert random_stops(tmp_path, planted=phase, trials=40)


# -- before a run, after it, and the end of its process -------------------------------------------
COMMAND_PROGRAM = """
import signal, sys, threading, time
from surefoot.system.signals import COMMAND, StopSignals, StopRequested
COMMAND.listen()
if "early" in sys.argv:
    print("up", flush=True)
    time.sleep(60)
try:
    with StopSignals(limit_s=2.0, grace_s=0.01) as stop:
        with stop.phase("collecting", abandonable=True):
            if "asked" in sys.argv:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(60)
except StopRequested:
    code = 75
else:
    code = 0
if "thread" in sys.argv:
    threading.Thread(target=time.sleep, args=(60,)).start()  # the interpreter would wait for it
if "late" in sys.argv:
    signal.raise_signal(signal.SIGTERM)
sys.exit(code)
"""


def command(*words: str, program: str = COMMAND_PROGRAM, patience_s: float = LONG_S) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=patience_s,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_command_that_is_asked_before_its_run_begins_ends_at_once_with_75() -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", COMMAND_PROGRAM, "early"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        assert running.stdout.readline() == "up\n"
        running.send_signal(signal.SIGTERM)
        _, err = running.communicate(timeout=LONG_S)
    finally:
        running.kill()
    assert running.returncode == 75
    assert "stopped by SIGTERM before the run began" in err


def test_a_request_after_the_run_is_over_changes_nothing() -> None:
    assert command("late") == (0, "")


def test_a_process_that_does_not_end_after_a_stopped_run_is_ended() -> None:
    code, err = command("asked", "thread", patience_s=50)  # the thread alone would take sixty
    assert code == 75
    assert "its process did not end by itself" in err


def test_planted_a_last_resort_that_leaves_with_the_run_does_not_end_the_process() -> None:
    """Teeth: without the thread that stays, the interpreter waits for somebody else's."""
    planted = COMMAND_PROGRAM.replace("COMMAND.listen()", "").replace("args=(60,)", "args=(5,)")
    began = time.monotonic()
    assert command("asked", "thread", program=planted)[0] == 75
    assert time.monotonic() - began >= 5.0


def test_a_program_that_only_imports_us_lives_on_after_a_stopped_run() -> None:
    program = COMMAND_PROGRAM.replace("COMMAND.listen()", "").replace("sys.exit(code)", "time.sleep(2.5)")
    assert command("asked", program=program)[0] == 0
