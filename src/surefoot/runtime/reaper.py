"""Ends everything that a run's private cluster left behind: a script of its own, started before Ray.

Owns       every process that carries the run's random mark in its environment, wherever it hangs in the process
           tree; the cluster's temporary folder; the shared memory that they wrote weights into.
Promises   when the driver closes the pipe, or goes in any way (SIGKILL included), all of them are gone within
           seconds, those that start meanwhile too; then this process goes. SIGINT, SIGTERM and SIGHUP, which a
           terminal or a scheduler sends to everybody, do not end it sooner.
Never      imports anything of ours, touches a process without the mark, or outlives its work.

Ray alone is not enough: after a SIGKILL of the driver some of its helpers live on.

Read next: `ray_cluster.py`, which starts it and waits for it.
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
    ended = end_marked(f"{MARK}={mark}".encode())
    shutil.rmtree(folder, ignore_errors=True)
    remove_shared_memory(ended)


def await_end(parent: int) -> None:
    """Until end of file, or until somebody else is our parent: a fork of the driver may hold the pipe open."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(_LOOK_S * 1000) and not os.read(0, 4096):
            return


def end_marked(mark: bytes) -> set[int]:
    """SIGKILL to every process with the mark, until several looks in a row find none; who they were."""
    give_up, empty = time.monotonic() + _PATIENCE_S, 0
    ended: set[int] = set()
    while empty < _EMPTY_LOOKS and time.monotonic() < give_up:
        found = marked(mark)
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
