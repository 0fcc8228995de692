"""Attempts of a contained program to reach the network, refused one by one and counted by its sandbox's first process.

The kernel's filter does not refuse such a call by itself: it holds the program and asks us, who refuse and count.

    program --socket(internet)--> filter --tells--> Counter: EPERM, one more

Owns       the listener, and the count that was not reported yet.
Promises   every attempt is refused, counted or not; the caller hears of the first at once and of the others a few times
           a second, so that a program that does nothing else floods nobody.
Never      lets a call through. Where the kernel gives no listener the plain filter refuses, and the caller is told that
           nobody counts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time

from surefoot.envs.rewards.frames import pack
from surefoot.envs.sandboxes import sandbox_seccomp as seccomp

_NOTE = struct.Struct("QII iIQ6Q")
_ANSWER = struct.Struct("QqiI")
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_TELL_S = 0.1


class Counter:
    """Made before the program is forked; `be_told` is the program's side of it, the rest is ours."""

    def __init__(self, link: socket.socket) -> None:
        self.untold = 0
        """Attempts since the last report."""
        self._link = link
        self._ours, self._theirs = socket.socketpair()
        self._listener: int | None = None
        self._told_at = 0.0

    def be_told(self, filter_program: bytes) -> bool:
        """In the process that becomes the program: install the filter and hand its listener over."""
        try:
            listener = seccomp.install_telling(filter_program)
        except OSError:  # somebody outside listens to us already, and the kernel has room for one
            return False
        socket.send_fds(self._theirs, [b"!"], [listener])
        os.close(listener)
        return True

    def listen(self) -> list[int]:
        """What to wait for; empty where nobody can count, which the caller is told."""
        self._theirs.close()
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
        self._ours.close()
        if not descriptors:
            self._tell({"counted": False})
            return []
        self._listener = descriptors[0]
        return descriptors

    def pause(self) -> float | None:
        """Seconds until the next report is due; None when there is nothing to report."""
        return max(0.0, self._told_at + _TELL_S - time.monotonic()) if self.untold else None

    def look(self, ready: list[int]) -> None:
        """Refuse what was tried, and report it when that is due."""
        if self._listener in ready:
            self._refuse()
        if self.untold and time.monotonic() >= self._told_at + _TELL_S:
            self._tell({"egress": self.untold})
            self.untold, self._told_at = 0, time.monotonic()

    def _refuse(self) -> None:
        assert self._listener is not None, "it was ready"
        note = bytearray(_NOTE.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, note)
            number = _NOTE.unpack(note)[0]
            self.untold += 1
            fcntl.ioctl(self._listener, _SEND, bytearray(_ANSWER.pack(number, 0, -errno.EPERM, 0)))
        except OSError:  # whoever asked is gone, or was woken by a signal and asks again
            return

    def _tell(self, message: dict[str, object]) -> None:
        try:
            self._link.sendall(pack(json.dumps(message).encode()))
        except OSError:  # the caller has gone; the end of its link says so, too
            return
