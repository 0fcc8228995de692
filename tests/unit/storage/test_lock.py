"""One driver per folder; the second is told who, and a dead owner's lock is free."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import surefoot
from surefoot.errors import StateError, StorageError
from surefoot.storage import lock as module
from surefoot.storage.lock import LOCK, Owner, RunLock
from surefoot.system.process import boot_id, start_ticks

HOLD = """
import sys, pathlib
from surefoot.storage.lock import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print(lock.note, flush=True)
sys.stdin.read()
lock.close()
"""
FORK = """
import os, sys, pathlib, signal
from surefoot.storage.lock import RunLock
if "planted" in sys.argv:
    RunLock.forget = lambda self: None
lock = RunLock(pathlib.Path(sys.argv[1]))
ready = os.pipe()
if os.fork() == 0:
    lock.close()  # not its own to give back
    os.write(ready[1], b"x")
    sys.stdin.read()  # lives on
    os._exit(0)
os.read(ready[0], 1)
try:
    RunLock(pathlib.Path(sys.argv[1]))
    print("free", flush=True)
except Exception as error:
    print(error, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the folder until its input ends; returns once it does."""
    environment = {**os.environ, "PYTHONPATH": str(Path(surefoot.__file__).parents[1])}
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert child.stdout is not None
    assert child.stdout.readline(), "the other process could not lock"
    return child


def end(child: subprocess.Popen[str], *, kill: bool = False) -> None:
    if kill:
        child.send_signal(signal.SIGKILL)
    child.communicate()


def test_a_second_driver_is_refused_by_name_and_the_first_is_unharmed(tmp_path: Path) -> None:
    child = hold(tmp_path)
    try:
        with pytest.raises(StateError, match=rf"in use by process {child.pid} on .* since 20\d\d-") as caught:
            RunLock(tmp_path)
        assert caught.value.exit_code == 3
        assert str(tmp_path) in caught.value.what
        with pytest.raises(StateError):
            RunLock(tmp_path)
    finally:
        end(child)
    with RunLock(tmp_path) as lock:
        assert lock.note is None, "a lock that was given back leaves nothing to note"


def test_the_lock_of_a_killed_driver_is_taken_over_with_a_note(tmp_path: Path) -> None:
    child = hold(tmp_path)
    end(child, kill=True)
    with RunLock(tmp_path) as lock:
        assert lock.note is not None
        assert f"process {child.pid} " in lock.note
        assert "has ended" in lock.note
        with pytest.raises(StateError, match=f"process {os.getpid()} "):
            RunLock(tmp_path)


def test_release_leaves_nothing_and_closing_twice_is_nothing(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
    assert lock.held
    lock.close()
    lock.close()
    assert not lock.held
    assert list(tmp_path.iterdir()) == []


def forked(folder: Path, *words: str) -> None:
    """A driver forks, its child closes the lock and lives on; the driver still holds it, and is killed."""
    environment = {**os.environ, "PYTHONPATH": str(Path(surefoot.__file__).parents[1])}
    command = [sys.executable, "-c", FORK, str(folder), *words]
    driver = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdin is not None
    try:
        assert f"in use by process {driver.pid} " in driver.stdout.readline()
        assert driver.wait() == -signal.SIGKILL
        with RunLock(folder) as lock:
            assert "has ended" in (lock.note or "")
    finally:
        driver.stdin.close()
        driver.stdout.close()
        driver.wait()


def test_a_forked_child_neither_frees_its_parents_lock_nor_outlives_it_with_one(tmp_path: Path) -> None:
    forked(tmp_path)


def test_planted_lock_that_stays_open_in_children_is_caught(tmp_path: Path) -> None:
    with pytest.raises((AssertionError, StateError)):
        forked(tmp_path, "planted")


def record(folder: Path, **changes: object) -> None:
    """A lock file as somebody else left it."""
    path = folder / LOCK
    path.touch()
    mine = {"pid": os.getpid(), "started": start_ticks(os.getpid()), "host": os.uname().nodename,
            "boot": boot_id(), "since": "2020-01-01T00:00:00+00:00", "inode": path.stat().st_ino}  # fmt: skip
    path.write_text(json.dumps(mine | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"host": "elsewhere"}, "another machine, 'elsewhere'"),
        ({"boot": "0-0"}, "started again"),
        ({"started": 1}, "has ended"),
        ({"pid": 2**22 + 5}, "has ended"),
        ({"inode": 1}, "copy"),
    ],
    ids=str,
)
def test_a_lock_that_nobody_can_hold_is_taken_over_and_the_note_says_why(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    record(tmp_path, **changes)
    with RunLock(tmp_path) as lock:
        assert reason in (lock.note or "")


def test_a_copy_of_a_folder_in_use_is_free(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with RunLock(tmp_path / "a"):
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with RunLock(tmp_path / "b") as second:
            assert "copy" in (second.note or "")


def test_a_file_system_that_does_not_lock_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunLock(tmp_path):
        monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
        with pytest.raises(StateError, match="let us lock it all the same"):
            RunLock(tmp_path)
        assert (tmp_path / LOCK).exists(), "the holder's file is not ours to remove"


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff" * 9000, b"[" * 4000, b'{"pid": "x"}', b'{"a": 1}'])
def test_a_strange_lock_file_is_no_obstacle(tmp_path: Path, text: bytes) -> None:
    (tmp_path / LOCK).write_bytes(text)
    with RunLock(tmp_path) as lock:
        assert (lock.note is None) == (text == b"")


def test_a_holder_that_has_not_signed_yet_still_holds(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StateError, match="has not signed"):
        RunLock(tmp_path)
    os.close(descriptor)


def test_a_grandchild_that_kept_the_lock_of_a_dead_owner_is_named_as_such(tmp_path: Path) -> None:
    record(tmp_path, started=1)
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(StateError, match="a process that it started still holds"):
        RunLock(tmp_path)
    os.close(descriptor)


def test_a_lock_file_that_is_removed_while_we_wait_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last owner removes the file between our opening and our locking it: locking the dead file is worth nothing."""
    removed: list[int] = []

    def owner_lets_go(name: str) -> None:
        if name == "lock.opened" and not removed:
            removed.append(1)
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr(module, "failpoint", owner_lets_go)
    with RunLock(tmp_path):
        assert (tmp_path / LOCK).exists()
        with pytest.raises(StateError, match="in use"):
            RunLock(tmp_path)


def test_links_are_not_followed_and_a_missing_folder_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(StorageError):
            RunLock(folder)
    assert (tmp_path / "precious").read_text() == "x"


def test_a_full_disk_gives_a_typed_error_and_frees_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space"):
            RunLock(tmp_path)
    RunLock(tmp_path).close()


def test_a_process_is_known_by_its_start_even_if_its_name_is_odd() -> None:
    assert start_ticks(os.getpid()) is not None
    assert Owner.me(1).started == start_ticks(os.getpid())
    assert Owner.me(1).gone(1) is None
