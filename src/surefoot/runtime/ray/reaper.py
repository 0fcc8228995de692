"""Ends everything that a run's private cluster left behind: a script of its own, started before Ray.

Owns       every process that carries the run's random mark in its environment, or has a file of the cluster's folder
           open, wherever it hangs in the process tree; that folder; the shared memory that they wrote weights into.
Promises   when the driver closes the pipe, or goes in any way (SIGKILL included), all of them are gone within
           seconds, those that start meanwhile too; then this process goes. SIGINT, SIGTERM and SIGHUP, which a
           terminal or a scheduler sends to everybody, do not end it sooner.
Never      imports anything of ours, touches the driver, its children or a stranger, or outlives its work.

Ray alone is not enough: after a SIGKILL of the driver some of its helpers live on. Their environment is not enough
either: they write their title over the beginning of it, and with it over the mark. Their log files stay open.

Read next: `cluster.py`, which starts it and waits for it.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

MARK = "SUREFOOT_FLEET_MARK"
"""Environment variable that all descendants of a private cluster inherit."""
READY = b"ready\n"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - where the system keeps shared memory; nothing is created here
WEIGHTS = "surefoot-weights-"
_LOOK_S = 0.2
_PAUSE_S = 0.03
_EMPTY_LOOKS = 3
"""A process in the middle of starting shows no environment for a moment: one look is not enough."""
_PATIENCE_S = 60.0


def main(mark: str, folder: str, parent: int) -> None:
    """Wait until the driver closes our standard input or is gone, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, READY)
    await_end(parent)
    ended = end_marked(f"{MARK}={mark}".encode(), folder, parent)
    shutil.rmtree(folder, ignore_errors=True)
    remove_shared_memory(ended)


def await_end(parent: int) -> None:
    """Until end of file, or until somebody else is our parent: a fork of the driver may hold the pipe open."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(_LOOK_S * 1000) and not os.read(0, 4096):
            return


def end_marked(mark: bytes, folder: str, driver: int) -> set[int]:
    """SIGKILL to every process of the cluster, until several looks in a row find none; who they were."""
    give_up, empty = time.monotonic() + _PATIENCE_S, 0
    ended: set[int] = set()
    while empty < _EMPTY_LOOKS and time.monotonic() < give_up:
        found = [*marked(mark), *(pid for pid in holding(folder) if not _is_drivers(pid, driver))]
        ended.update(found)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue  # gone already
        empty = 0 if found else empty + 1
        time.sleep(_PAUSE_S)
    return ended


def marked(mark: bytes) -> list[int]:
    """Processes that were started with this entry in their environment; never ourselves."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and mark in _environment(int(name)):
            found.append(int(name))
    return found


def holding(folder: str) -> list[int]:
    """Processes with a file below this folder open, removed or not; never ourselves."""
    found = []
    for name in os.listdir("/proc"):
        if (
            name.isdigit()
            and int(name) != os.getpid()
            and any(link.startswith(f"{folder}/") for link in _open_files(name))
        ):
            found.append(int(name))
    return found


def _open_files(pid: str) -> list[str]:
    """Empty for what has ended, and for what belongs to somebody else."""
    try:
        return [os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return []


def _is_drivers(pid: int, driver: int) -> bool:
    """The driver itself, which may live on, and what it has forked."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return pid == driver or int(file.read().rpartition(b")")[2].split()[1]) == driver
    except (OSError, IndexError, ValueError):
        return False


def _environment(pid: int) -> list[bytes]:
    """Empty for what has ended, and for what belongs to somebody else."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def remove_shared_memory(owners: set[int]) -> None:
    """Weights whose writer was ended before it could unlink them; the writer's number is in the name."""
    try:
        names = os.listdir(SHARED_MEMORY)
    except OSError:
        return
    for name in names:
        owner = name.removeprefix(WEIGHTS).partition("-")[0]
        if name.startswith(WEIGHTS) and owner.isdigit() and int(owner) in owners:
            try:
                os.unlink(os.path.join(SHARED_MEMORY, name))
            except OSError:
                continue


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
