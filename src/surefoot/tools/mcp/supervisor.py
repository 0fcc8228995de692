"""Stands between the driver and one tool server: starts it, and lets nothing of it live on. A script of its own.

Owns       the server, and every process that descends from it, however it tried to get away.
Promises   when the server ends, when the driver says so on the control pipe or closes it, or when the driver is gone
           in any way, all of them are killed and reaped; then this process ends with the server's own status. If
           somebody kills this process, the server dies with it.
Never      imports anything of ours, reads a byte of what is said, or outlives its work.

A process group is not enough: a daemon leaves it by `setsid`. An orphan is handed to the nearest ancestor that asked
for orphans, and that is this process, so nothing slips away by a double fork.

Read next: `stdio.py`, which starts it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time

LOOK_S = 0.2
"""A fork of the driver may hold the control pipe open after the driver is gone: so we also look who our parent is."""
PATIENCE_S = 5.0
NOT_STARTED = 127
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(parent: int, control: int, folder: str, command: list[str]) -> int:
    """Start the command with our own standard streams, wait for an end, clean up; the server's exit status.

    Args:
        parent: the driver's process id.
        control: what is readable here, or closed, means: end it.
        folder: the server's private folder; removed here only if the driver is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    server = os.fork()
    if server == 0:
        become(command, supervisor, control)
    let_go_of_streams()
    ended, driver_is_gone = wait_for_an_end(server, parent, control)
    end_children(server)
    if driver_is_gone:
        remove(folder)
    return 128 + signal.SIGKILL if ended is None else status_of(ended)


def become(command: list[str], supervisor: int, control: int) -> None:
    """In the child: a session of its own, dies with its supervisor, then the server's program. Never returns."""
    os.close(control)
    os.setsid()
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    if os.getppid() == supervisor:
        try:
            os.execvp(command[0], command)  # noqa: S606 - an explicit argv is what we promise
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="replace"))
    os._exit(NOT_STARTED)


def let_go_of_streams() -> None:
    """Whoever reads from the server must see its end, so nobody else may hold its pipes."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    os.close(nothing)


def wait_for_an_end(server: int, parent: int, control: int) -> tuple[int | None, bool]:
    """The server's wait status, None when it is to be ended; and whether that is because the driver is gone."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    watch = os.pidfd_open(server) if hasattr(os, "pidfd_open") else None
    if watch is not None:
        poll.register(watch, select.POLLIN)
    while os.getppid() == parent:
        ready = [descriptor for descriptor, _ in poll.poll(LOOK_S * 1000 if watch is not None else 20)]
        ended = reap(server)
        if ended is not None:
            return ended, False
        if control in ready:
            return None, not os.read(control, 1)  # told to, or closed by whoever is no more
    return None, True


def reap(server: int) -> int | None:
    """Reap what has ended, orphans too; the server's wait status if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == server:
            found = status


def end_children(server: int) -> None:
    """Kill and reap until there is no child left; what a dead child leaves behind becomes ours, and is next."""
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        kill_group(server)
        for pid in children():
            kill(pid)
        reap(server)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.002)


def remove(folder: str) -> None:
    """The server's private folder, which the driver cannot remove any more."""
    import shutil  # seldom needed, and slow to import

    shutil.rmtree(folder, ignore_errors=True)


def children() -> list[int]:
    """Our children as the kernel lists them; by a look at the whole process table where it does not."""
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return [int(name) for name in (os.listdir("/proc") if os.path.isdir("/proc") else ()) if parent_of(name) == own]


def parent_of(name: str) -> int:
    """Parent of a process in /proc; 0 for what is no process or has ended."""
    try:
        with open(f"/proc/{int(name)}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def kill(pid: int) -> None:
    """SIGKILL; nothing when it is gone."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_group(leader: int) -> None:
    """SIGKILL to a process group; nothing when it is gone."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def status_of(wait_status: int) -> int:
    """As a shell would say it: 128 and the signal's number for a process that was killed."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code


def prctl(option: int, value: int) -> None:
    """Ask the Linux kernel; elsewhere the process group has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]))
