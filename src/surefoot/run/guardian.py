"""Ends a process whose interpreter itself is stuck: a script of its own, started by `watchdog.py`.

Owns       nothing of the process it watches: it reads beats from standard input, and writes to the dump file, which
           is its standard output.
Promises   a process that is stopped (Ctrl-Z, SIGSTOP) or frozen together with this one is not stuck; a stuck one
           is asked for its stacks (SIGUSR2, which needs no interpreter) and then killed.
Never      imports anything of ours: it starts in a hundredth of a second and sees no site packages. It goes with the
           process it watches.

A thread cannot do this: while one thread holds the interpreter's lock no other runs. And a timer inside the process
cannot tell being stuck from having been stopped for an hour.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

STACKS = signal.SIGUSR2
_STACKS_S = 2.0


def main(parent: int, limit_s: float) -> None:
    """Watch `parent` until it closes our standard input, is gone, or has sent no beat for `limit_s` seconds."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    interval_s = min(1.0, limit_s / 10)
    quiet_s, looked = 0.0, time.monotonic()
    while os.getppid() == parent:
        heard = poll.poll(interval_s * 1000)
        if heard and not os.read(0, 4096):
            return
        now = time.monotonic()
        # A look that came late was itself stopped or suspended: that time counts for nobody.
        quiet_s = 0.0 if heard or is_stopped(parent) else quiet_s + min(now - looked, 2 * interval_s)
        looked = now
        if quiet_s > limit_s:
            end(parent, limit_s)
            return


def is_stopped(pid: int) -> bool:
    """Whether somebody stopped it (Ctrl-Z, SIGSTOP, a debugger); False where there is no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def end(parent: int, limit_s: float) -> None:
    """Say why, have it write its stacks behind that, then kill it."""
    text = (
        f"StalledError: the interpreter did not run for {limit_s:g} s\n"
        "  why: one call holds its lock and does not come back, so that nothing else can run, not even the watchdog\n"
        "  fix: the stacks below show the call; the run can be resumed\n"
    )
    os.write(1, text.encode())
    before = os.fstat(1).st_size
    os.kill(parent, STACKS)
    give_up = time.monotonic() + _STACKS_S
    while os.fstat(1).st_size == before and time.monotonic() < give_up:
        time.sleep(0.01)
    time.sleep(0.1)  # the dump is written line by line
    os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
