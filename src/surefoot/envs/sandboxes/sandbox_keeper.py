"""The small process that gives birth to sandboxes.

A trainer holds gigabytes and runs many threads: neither may be copied for every little program. This process is
single-threaded, a few megabytes, started once, and knows nothing: no environment, no secrets, no open files.

    caller --4 or more descriptors--> keeper --clone--> init of a sandbox
    caller <==== pid and pidfd of init, on the first of those descriptors ====

Owns       the births, and the map of user ids (which only somebody outside the new namespace may write).
Promises   when the caller goes (close, exit, SIGKILL) this process goes, and with it every sandbox.
Never      reads what is to be run.

Read next: `sandbox_init.py`.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from surefoot.envs.rewards.frames import pack
from surefoot.envs.sandboxes import sandbox_kernel as kernel
from surefoot.envs.sandboxes import sandbox_landlock as landlock
from surefoot.envs.sandboxes import sandbox_seccomp as seccomp
from surefoot.envs.sandboxes.sandbox_init import NOBODY, live

LEAST_STREAMS, MOST_STREAMS = 4, 8
_LOOK_UP_S = 2.0


def serve(control: socket.socket, parent: int) -> None:
    """Give birth on request until the caller closes its end, or is no longer our parent."""
    mother = _Mother()
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    with contextlib.suppress(OSError):  # a fork of the caller may hold the other end open after the caller is gone
        selector.register(os.pidfd_open(parent), selectors.EVENT_READ)
    while os.getppid() == parent:
        if not any(key.fileobj is control for key, _ in selector.select(_LOOK_UP_S)):
            continue
        data, descriptors, _, _ = socket.recv_fds(control, 32, MOST_STREAMS)
        if not data:
            return
        try:
            if len(descriptors) >= LEAST_STREAMS:  # fewer: we ran out of them, and the caller hears its link close
                link = socket.socket(fileno=os.dup(descriptors[0]))
                mother.bear(link, descriptors[1:], network=data == kernel.ORDER_WITH_NETWORK)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


class _Mother:
    """All that is the same for every sandbox, worked out once."""

    def __init__(self) -> None:
        self.facts = {"landlock": landlock.version()}
        self.filters = seccomp.programs()
        self.own = os.pidfd_open(os.getpid())
        self.flags = sum(kernel.NEW_NAMESPACES.values())
        if os.path.exists("/proc/self/ns/cgroup"):
            self.flags |= kernel.NEW_CGROUP
        self.switch_user = os.geteuid() == 0 and _is_mapped("uid", NOBODY) and _is_mapped("gid", NOBODY)

    def bear(self, link: socket.socket, streams: list[int], *, network: bool) -> None:
        """One sandbox. It waits for its request, which comes only after our answer: its ids are mapped by then.

        Args:
            network: leave it in our own network. It is then the request's filter that says which sockets it may have.
        """
        with link:
            try:
                pid = kernel.clone(self.flags & ~kernel.NEW_NAMESPACES["net"] if network else self.flags)
                if pid == 0:
                    live(link, streams, self.filters, keeper=self.own, switch_user=self.switch_user)
                self._map_ids(pid)
                _write(pid, "oom_score_adj", "1000")  # when memory runs out, these go first
                pidfd = os.pidfd_open(pid)
            except OSError as error:
                _tell(link, {"failed": error.strerror or str(error), "errno": error.errno})
                return
            _tell(link, {"pid": pid, **self.facts}, pidfd)
            os.close(pidfd)

    def _map_ids(self, pid: int) -> None:
        """Who is who inside: root (to build with) and nobody, or one ordinary user under nobody's name."""
        if not self.switch_user:
            if os.geteuid() == 0 and _outside_of_root() == 0:
                raise OSError(errno.EPERM, "give up root: no other user id can be mapped here")
            _write(pid, "setgroups", "deny")
        for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
            lines = f"0 0 1\n{NOBODY} {NOBODY} 1\n" if self.switch_user else f"{NOBODY} {own} 1\n"
            _write(pid, f"{kind}_map", lines)


def _write(pid: int, name: str, text: str) -> None:
    try:
        with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, f"write {name} of a new user namespace: {error.strerror}") from error


def _is_mapped(kind: str, wanted: int) -> bool:
    """Whether an id exists in the user namespace that we are in ourselves."""
    return any(first <= wanted < first + count for first, _, count in _map_of(kind))


def _outside_of_root() -> int:
    return next((outside for first, outside, _ in _map_of("uid") if first == 0), 0)


def _map_of(kind: str) -> list[tuple[int, int, int]]:
    with open(f"/proc/self/{kind}_map", encoding="ascii") as file:
        lines = [[int(field) for field in line.split()] for line in file]
    return [(line[0], line[1], line[2]) for line in lines]


def _tell(link: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    data = pack(json.dumps(message).encode())
    with contextlib.suppress(OSError):  # the caller gave up meanwhile: init reads the end of its link and leaves
        socket.send_fds(link, [data], list(descriptors))


def main() -> None:
    """`python -m surefoot.envs.sandboxes.sandbox_keeper DESCRIPTOR PARENT`."""
    descriptor, parent = map(int, sys.argv[1:3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the caller decides when to stop, and closes its end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody here waits for anybody: no zombies
    gc.disable()
    gc.freeze()
    serve(socket.socket(fileno=descriptor), parent)


if __name__ == "__main__":
    main()
