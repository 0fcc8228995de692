"""The one supervisor: a child is watched without being reaped, and ended with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

from surefoot.system import process
from surefoot.system.process import Child, descendants, exists, is_alive, start_ticks, temporary_folder, title
from surefoot.system.signals import Deadline

PYTHON = [sys.executable, "-I", "-S", "-c"]
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS
LEAVES_AN_ORPHAN = """
import os, sys, time
if os.fork() == 0:
    os.setpgid(0, 0)                      # out of the group, but not out of the session
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
time.sleep(float(sys.argv[1]))
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are found by their session, as Linux tells it")


def up(code: str, *words: str, **options: object) -> tuple[Child, bytes]:
    child = Child.start([*PYTHON, code, *words], stdout=subprocess.PIPE, **options)
    said = bytearray()
    while not said.endswith(b"\n"):
        said += child.stdout.read(1)
    return child, bytes(said)


def await_end(pid: int) -> bool:
    give_up = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < give_up:
        time.sleep(0.01)
    return not is_alive(pid)


# -- looking ----------------------------------------------------------------------------


def test_waiting_leaves_the_number_to_the_child_and_release_gives_it_back() -> None:
    child = Child.start([*PYTHON, "raise SystemExit(3)"])
    assert child.wait() == 3
    assert (child.alive, exists(child.pid), is_alive(child.pid)) == (False, True, False), "ended, and not reaped"
    assert child.release() == 3
    assert not exists(child.pid)
    assert child.end() == child.wait() == 3, "a second end is no error"


@pytest.mark.parametrize("lacks", ["nothing", "pidfd_open", "waitid"])
def test_a_wait_that_is_too_short_says_that_it_runs_on(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    if lacks != "nothing":
        monkeypatch.delattr(os, lacks)
    child, _ = up(SLEEPS)
    assert child.wait(0.05) is None
    assert child.alive
    assert child.end() == -signal.SIGKILL
    assert not exists(child.pid)


def test_a_child_that_somebody_else_reaped_is_over_and_its_number_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    child = Child.start([*PYTHON, ""])
    os.waitpid(child.pid, 0)
    assert not child.alive
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("a stranger was signalled"))
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a stranger was signalled"))
    child.send(signal.SIGTERM)
    child.end()


def test_threads_that_wait_hear_the_same_code_as_whoever_ends_it() -> None:
    child, _ = up(SLEEPS)
    heard: list[int] = []
    threads = [threading.Thread(target=lambda: heard.append(child.wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert child.end() == -signal.SIGKILL
    for thread in threads:
        thread.join()
    assert heard == [-signal.SIGKILL] * 8


def test_of_what_it_complains_the_last_is_kept_and_it_never_waits_for_a_reader() -> None:
    code = "import sys; sys.stderr.write('x' * 300_000 + 'the end'); sys.stderr.flush(); print('done', flush=True)"
    child, _ = up(code, keep_stderr=10)
    child.end()
    assert child.printed() == b"xxxthe end"


def test_a_pipe_that_was_not_asked_for_is_named() -> None:
    with Child.start([*PYTHON, ""]) as child, pytest.raises(AssertionError, match="stdout was not asked for"):
        child.stdout.read()


# -- ending -----------------------------------------------------------------------------


def test_whoever_is_asked_may_end_by_itself_and_whoever_does_not_is_killed() -> None:
    polite = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os._exit(7)); " + SLEEPS
    assert up(polite)[0].end(30) == 7
    assert up(STUBBORN)[0].end(0.1) == -signal.SIGKILL
    assert up(polite)[0].end(0.05, ask=None) == -signal.SIGKILL, "nobody asked it"


def test_an_interrupt_during_the_patience_does_not_keep_it_alive() -> None:
    child, _ = up(STUBBORN)
    threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        child.end(60)
    assert time.monotonic() - began < 30
    assert child.code == -signal.SIGKILL
    assert not exists(child.pid)


@linux
@pytest.mark.parametrize("seconds", ["0", "600"], ids=["after it has ended", "while it runs"])
def test_an_orphan_in_its_session_is_ended_too(seconds: str) -> None:
    child, said = up(LEAVES_AN_ORPHAN, seconds)
    if seconds == "0":
        child.wait()
    assert is_alive(int(said))
    child.end()
    assert await_end(int(said)), f"{int(said)} is still there"


@linux
def test_planted_end_that_knows_the_group_only_leaves_an_orphan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_session", lambda leader: ())
    with pytest.raises(AssertionError, match="is still there") as left:
        test_an_orphan_in_its_session_is_ended_too("0")
    os.kill(int(str(left.value).split()[0]), signal.SIGKILL)


def test_a_block_that_is_left_by_an_error_ends_what_it_started() -> None:
    with pytest.raises(RuntimeError):
        with up(SLEEPS)[0] as child:
            raise RuntimeError
    assert not exists(child.pid)


def test_what_the_kernel_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    child, _ = up(SLEEPS)
    with monkeypatch.context() as patch:
        patch.setattr(process, "kill_tree", lambda pid: None)
        assert child.end(give_up_s=0.05) is None
    assert child.end() == -signal.SIGKILL


def test_a_signal_reaches_the_group_or_the_child_alone() -> None:
    code = (
        "import os, signal, subprocess, sys\n"
        "other = subprocess.Popen(['sleep', '600'])\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print('up', flush=True)\n"
        "sys.exit(-other.wait())\n"
    )
    child, _ = up(code)
    child.send(signal.SIGTERM, group=False)
    assert child.wait(0.2) is None, "it waits for the other, whom nobody told"
    child.send(signal.SIGTERM)
    assert child.wait(20) == signal.SIGTERM
    child.end()


# -- forks ------------------------------------------------------------------------------


def test_a_fork_does_its_body_and_nothing_else() -> None:
    def body() -> NoReturn:
        os._exit(5)

    child = Child.fork(body)
    assert child.wait() == 5
    child.release()

    def broken() -> NoReturn:
        raise RuntimeError("it does not come back into our stack")

    assert Child.fork(broken).release() == 70


def test_a_child_of_our_parent_is_not_ours_to_end() -> None:
    child, _ = up(SLEEPS)
    copy = Child(child.pid)
    copy.disown()
    copy.end()
    assert child.alive
    child.end()


# -- who is there -------------------------------------------------------------------------


def test_a_process_is_known_by_its_start_even_if_its_name_is_odd(tmp_path: Path) -> None:
    odd = tmp_path / "a ) b 1 2 3"
    odd.symlink_to("/bin/sleep")
    with Child.start([str(odd), "600"]) as child:
        assert start_ticks(child.pid) == start_ticks(child.pid) != start_ticks(os.getpid())
        assert start_ticks(child.pid) is not None
        deadline = Deadline(10)  # `start` returns while the kernel still lays the words out
        while not title(child.pid) and not deadline.expired:
            time.sleep(0.01)
        assert title(child.pid).endswith("a ) b 1 2 3 600")
    assert start_ticks(child.pid) is None
    assert title(child.pid) == ""


@pytest.mark.parametrize("pid", [2**22 + 5, 2**70])
@pytest.mark.parametrize("asked", [exists, is_alive, start_ticks, descendants])
def test_a_number_that_nobody_has_is_nobody(asked: Callable[[int], object], pid: int) -> None:
    assert not asked(pid)


@linux
def test_descendants_are_found_where_other_users_processes_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(self: psutil.Process, recursive: bool = False) -> NoReturn:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "children", hidden)
    with up(SLEEPS)[0] as child:
        assert child.pid in descendants(os.getpid())


def test_a_temporary_folder_outlives_its_process_only_until_the_next_is_made(tmp_path: Path) -> None:
    script = f"from surefoot.system.process import temporary_folder as make; make('kind-', {str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    (left,) = tmp_path.iterdir()
    for kept in ("kind-none", f"kind-{os.getpid()}-x", "other-1-x"):
        (tmp_path / kept).mkdir()
    made = temporary_folder("kind-", str(tmp_path))
    assert made.name.startswith(f"kind-{os.getpid()}-")
    assert made.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in tmp_path.iterdir()} == {made.name, "kind-none", f"kind-{os.getpid()}-x", "other-1-x"}
    assert not left.exists(), "of a process that is gone"
