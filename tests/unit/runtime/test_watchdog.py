"""A run that no longer moves ends with 76 and shows where; one that moves, however slowly, is left alone.

Every stall happens in a process of its own, since it ends it. Limits are tenths of a second; nothing here asserts
how long something took, only that it ended, how, and what it left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.errors import ConfigError, MemoryLimitError, StalledError, StorageError
from surefoot.run import guardian, watchdog
from surefoot.run.watchdog import Watchdog
from surefoot.system import signals

PRELUDE = """
import ctypes, os, signal, socket, sys, threading, time
from pathlib import Path
from surefoot.system import signals
from surefoot.run.watchdog import Watchdog
dump = Path(sys.argv[1])
"""
LONG_S = 120


def program(body: str, tmp_path: Path, **how: object) -> subprocess.Popen[str]:
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
    argv = [sys.executable, "-c", PRELUDE + body, str(tmp_path / "stacks.txt")]
    return subprocess.Popen(argv, **settings)  # type: ignore[call-overload, no-any-return]


def ended(body: str, tmp_path: Path) -> tuple[int, str, str]:
    """Exit code, standard error and the dump of a program that should end by itself."""
    running = program(body, tmp_path)
    _, err = running.communicate(timeout=LONG_S)
    dump = tmp_path / "stacks.txt"
    return running.returncode, err, dump.read_text() if dump.exists() else ""


def eventually(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < give_up, "it never came true"
        time.sleep(0.01)


# -- what it ends ---------------------------------------------------------------------------
WAITS = {
    "sleep": "time.sleep(600)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "socket": "pair = socket.socketpair(); pair[0].recv(1)",
    "c call": "ctypes.CDLL(None).sleep(600)",
    "busy loop": "while True: pass",
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_that_does_not_end_is_ended_with_its_stage_and_every_stack(tmp_path: Path, wait: str) -> None:
    body = (
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "def stuck_here():\n    signals.tick('feeding the cat')\n    " + wait + "\n"
        "with Watchdog(0.3, dump=dump, resume='surefoot train --resume x'):\n    stuck_here()\n"
    )
    code, err, dump = ended(body, tmp_path)
    assert code == StalledError.exit_code == 76, err
    assert "StalledError: no progress for 0.3 s while feeding the cat" in err
    assert "surefoot train --resume x" in err
    assert str(tmp_path / "stacks.txt") in err
    assert "while feeding the cat" in dump
    assert "in stuck_here" in dump
    assert dump.count("most recent call first") >= 3  # main, the other thread, the watchdog's


def test_a_pipe_that_nobody_reads_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    """Both pipes are full, and the main thread hangs in a print: the message must not hang there too."""
    body = (
        "with Watchdog(0.3, dump=dump):\n    signals.tick('printing')\n    while True: print('x' * 1000, flush=True)\n"
    )
    reading, writing = os.pipe()
    with program(body, tmp_path, stdout=writing, stderr=writing) as running:
        os.close(writing)
        assert running.wait(LONG_S) == 76
    os.close(reading)
    assert "while printing" in (tmp_path / "stacks.txt").read_text()


@pytest.mark.parametrize("closed", ["os.close(1); os.close(2)", "sys.stderr.close(); sys.stdout.close()"])
def test_closed_output_does_not_keep_it_from_ending(tmp_path: Path, closed: str) -> None:
    code, _, dump = ended(f"with Watchdog(0.3, dump=dump):\n    {closed}\n    time.sleep(600)\n", tmp_path)
    assert code == 76
    assert "no progress for 0.3 s while starting" in dump


def test_started_without_standard_error_it_writes_to_no_file_that_took_its_number(tmp_path: Path) -> None:
    body = (
        "treasure = open(dump.with_name('treasure'), 'wb')\n"
        "assert treasure.fileno() == 2, treasure.fileno()\n"
        "with Watchdog(0.3, dump=dump):\n    time.sleep(600)\n"
    )
    argv = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", PRELUDE + body, str(tmp_path / "stacks.txt")]
    assert subprocess.run(argv, timeout=LONG_S, check=False).returncode == 76
    assert (tmp_path / "treasure").read_bytes() == b""


def test_children_and_their_daemons_go_with_it(tmp_path: Path) -> None:
    body = (
        "import subprocess\n"
        "child = 'import os, time; os.fork() or (os.setsid(), os.fork()); os.write(1, b\"%d\\\\n\" % os.getpid()); time.sleep(600)'\n"
        "running = subprocess.Popen([sys.executable, '-c', child], stdout=subprocess.PIPE)\n"
        "for _ in range(3): os.write(1, running.stdout.readline())\n"
        "with Watchdog(0.3, dump=dump):\n    time.sleep(600)\n"
    )
    running = program(body, tmp_path)
    out, err = running.communicate(timeout=LONG_S)
    assert running.returncode == 76, err
    assert len(set(out.split())) == 3
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in out.split()))


def test_a_full_disk_does_not_keep_it_from_ending(tmp_path: Path) -> None:
    body = "with Watchdog(0.3, dump=Path('/dev/full')):\n    time.sleep(600)\n"
    assert ended(body, tmp_path)[0] == 76


# -- the guardian --------------------------------------------------------------------------
def test_the_guardian_goes_when_the_process_is_killed(tmp_path: Path) -> None:
    running = program(
        "with Watchdog(60, dump=dump) as dog:\n    print(dog._guardian.pid, flush=True); time.sleep(600)\n", tmp_path
    )
    assert running.stdout is not None
    pid = int(running.stdout.readline())
    running.kill()
    running.communicate(timeout=LONG_S)
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_stopped_process_is_not_stuck(tmp_path: Path) -> None:
    assert not guardian.is_stopped(os.getpid())
    running = program("print('up', flush=True)\ntime.sleep(600)\n", tmp_path)
    try:
        assert running.stdout is not None
        running.stdout.readline()
        running.send_signal(signal.SIGSTOP)
        eventually(lambda: guardian.is_stopped(running.pid))
    finally:
        running.kill()
        running.communicate()
    assert not guardian.is_stopped(running.pid)


# -- what it leaves alone ---------------------------------------------------------------------
def fake_looks(monkeypatch: pytest.MonkeyPatch, dog: Watchdog, naps: list[float], beats: set[int]) -> list[str]:
    """Run the watchdog's loop in this thread on a fake clock: nap by nap, with a beat before some looks."""
    clock, ends, left = [1000.0], list[str](), iter(enumerate(naps))

    def nap(asked_s: float) -> bool:
        found = next(left, None)
        if found is None or ends:
            return True
        clock[0] += found[1]
        if found[0] in beats:
            signals.tick("working")
        return False

    monkeypatch.setattr(dog._closed, "wait", nap)
    monkeypatch.setattr(dog, "_tell_guardian", lambda: None)
    monkeypatch.setattr(dog, "_end", ends.append)
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: clock[0])
    signals.tick("working")
    dog._watch()
    monkeypatch.undo()
    return ends


def test_the_limit_is_counted_in_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dog = Watchdog(300, dump=tmp_path / "x")
    assert fake_looks(monkeypatch, dog, [1.0] * 300, set()) == []
    assert fake_looks(monkeypatch, dog, [1.0] * 302, set()) == ["working"]
    assert fake_looks(monkeypatch, dog, [1.0] * 2000, set(range(0, 2000, 250))) == []


def test_hours_of_sleep_are_no_stall_and_reset_nothing_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dog = Watchdog(300, dump=tmp_path / "x")
    assert fake_looks(monkeypatch, dog, [1.0] * 200 + [7200.0] + [1.0] * 90, set()) == []
    assert fake_looks(monkeypatch, dog, [1.0] * 200 + [7200.0] + [1.0] * 110, set()) == ["working"]


def test_a_slow_disk_is_no_stall_while_the_limit_is_longer(tmp_path: Path) -> None:
    body = (
        "from surefoot.storage import files\n"
        "slow, real = [], os.fsync\n"
        "def fsync(fd):\n    slow.append(fd); time.sleep(0.3); real(fd)\n"
        "os.fsync = fsync\n"
        "with Watchdog(30, dump=dump):\n    signals.tick('saving'); files.atomic_write(dump.with_name('file'), 'text')\n"
        "assert slow\n"
    )
    assert ended(body, tmp_path)[0] == 0
    assert (tmp_path / "file").read_text() == "text"


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    body = (
        "now = [time.time()]\n"
        "def wild():\n    now[0] += 3600 * (-1) ** int(now[0]); return now[0]\n"
        "time.time = wild\n"
        "with Watchdog(5, dump=dump):\n    for _ in range(100): signals.tick('walking'); time.sleep(0.005)\n"
        "with Watchdog(0.3, dump=dump):\n    signals.tick('sitting'); time.sleep(600)\n"
    )
    code, err, _ = ended(body, tmp_path)
    assert code == 76
    assert "while sitting" in err


def test_a_quiet_end_leaves_no_file_no_thread_and_no_process(tmp_path: Path) -> None:
    import threading

    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Watchdog(60, dump=tmp_path / "stacks.txt") as dog:
        assert (tmp_path / "stacks.txt").stat().st_mode & 0o777 == 0o600
        pid = dog._guardian.pid
    assert not (tmp_path / "stacks.txt").exists()
    assert not Path(f"/proc/{pid}").exists()
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, files)


# -- asked for the stacks ---------------------------------------------------------------------
def test_sigusr2_writes_the_stacks_of_a_living_run(tmp_path: Path) -> None:
    dump = tmp_path / "stacks ü.txt"
    with Watchdog(60, dump=dump):
        os.kill(os.getpid(), signal.SIGUSR2)
        eventually(lambda: "in test_sigusr2_writes_the_stacks_of_a_living_run" in dump.read_text())
    assert dump.exists(), "a file with stacks in it stays"


# -- refusals ---------------------------------------------------------------------------------
@pytest.mark.parametrize("limit", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(tmp_path: Path, limit: float) -> None:
    with pytest.raises(ConfigError, match="the watchdog waits"):
        Watchdog(limit, dump=tmp_path / "x")


def test_a_dump_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for dump in (tmp_path / "missing" / "stacks.txt", tmp_path / "link"):
        with pytest.raises(StorageError, match="the watchdog cannot open"), Watchdog(1, dump=dump):
            pytest.fail("it started")
    assert not (tmp_path / "elsewhere").exists()


def test_no_room_for_the_helper_process_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    files = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(MemoryLimitError, match="Resource temporarily"), Watchdog(1, dump=tmp_path / "x"):
        pytest.fail("it started")
    assert len(os.listdir("/proc/self/fd")) == files


SLOW_TO_ANSWER = """
import os, signal, sys, time
def answer(*_):
    time.sleep(0.6)
    os.write(1, b"stacks, late\\n")
signal.signal(signal.SIGUSR2, answer)
os.write(2, b"ready\\n")
while True:
    time.sleep(60)
"""


def test_stacks_that_are_slow_to_come_are_waited_for(tmp_path: Path) -> None:
    """A process with hundreds of threads needs longer than a tenth of a second to write where they all are."""
    with (tmp_path / "dump").open("ab") as dump:
        stuck = subprocess.Popen([sys.executable, "-c", SLOW_TO_ANSWER], stdout=dump, stderr=subprocess.PIPE)
        assert stuck.stderr is not None
        assert stuck.stderr.readline() == b"ready\n"
        code = f"import runpy; runpy.run_path({str(guardian.__file__)!r})['end']({stuck.pid}, 7.0)"
        subprocess.run([sys.executable, "-I", "-S", "-c", code], stdout=dump, stderr=subprocess.DEVNULL, check=True)
        assert stuck.wait(LONG_S) == -signal.SIGKILL
        stuck.stderr.close()
    said = (tmp_path / "dump").read_text()
    assert said.startswith("StalledError: the interpreter did not run for 7 s")
    assert said.endswith("stacks, late\n")
