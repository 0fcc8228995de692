"""The caller's end of the keeper: started once per process, asked for a sandbox by any thread.

Owns       the keeper's life, and the hand-over of descriptors.
Promises   a keeper that died is replaced; a process that forks does not share its parent's keeper; nothing of this
           process's environment reaches the keeper.
Never      interprets how a program ended; `sandbox_watch.py` does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.envs.rewards.frames import HEADER, FrameError, take_frame
from surefoot.envs.rewards.process_tree import family
from surefoot.envs.sandboxes.sandbox_kernel import ORDER, ORDER_WITH_NETWORK
from surefoot.errors import ToolFailedError

_SOURCE = str(Path(__file__).resolve().parents[3])
_ANSWER_CAP = 2**16
_PATIENCE_S = 30.0
"""How long a birth may take on a machine that is busy."""


@dataclass(frozen=True)
class Born:
    """A sandbox that waits for its request."""

    link: socket.socket
    pid: int
    """Of its first process, which is not the program."""
    pidfd: int
    landlock: int

    def members(self) -> list[int]:
        """Every process in it but the first."""
        return family(self.pid)[1:]

    def kill(self) -> None:
        """SIGKILL to the first process; the kernel ends all others with it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def last_word(self) -> dict[str, Any] | None:
        """What there is to say about its ending when nobody reported one."""
        return None

    def close(self) -> None:
        """End it, and give its descriptors back."""
        self.kill()
        self.link.close()
        os.close(self.pidfd)


class Reports:
    """What the first process of a sandbox says on its link, which must not block."""

    def __init__(self) -> None:
        self._inbox = bytearray()
        self.ended = False
        """Whether nothing will come any more."""

    def read(self, link: socket.socket) -> list[dict[str, Any]]:
        """The messages that have come whole since the last look; nonsense is no message."""
        while not self.ended:
            try:
                data = link.recv(_ANSWER_CAP)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            self._inbox += data
        found: list[dict[str, Any]] = []
        with contextlib.suppress(FrameError):
            while (frame := take_frame(self._inbox, _ANSWER_CAP)) is not None:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(frame))
        return found


class Keeper:
    """The small process, and the socket on which it takes orders."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [
            "-S",
            "-s",
            "-B",
            "-m",
            "surefoot.envs.sandboxes.sandbox_keeper",
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *words], env={"PYTHONPATH": _SOURCE}, cwd="/", pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def bear(self, streams: Sequence[int], *, network: bool = False) -> Born:
        """Ask for one sandbox whose program will have these descriptors as 0, 1, 2 and so on.

        Args:
            network: one that shares the network of this process.

        Raises:
            OSError: the kernel refused, and says which call.
            ConnectionError: the keeper is gone.
        """
        ours, theirs = socket.socketpair()
        ours.settimeout(_PATIENCE_S)
        try:
            with theirs:
                order = ORDER_WITH_NETWORK if network else ORDER
                socket.send_fds(self.control, [order], [theirs.fileno(), *streams])
            answer, descriptors = _receive(ours)
        except BaseException:
            ours.close()
            raise
        if "failed" in answer:
            ours.close()
            raise OSError(answer["errno"], answer["failed"])
        if not descriptors:
            ours.close()  # init reads the end of its link and leaves
            raise OSError(errno.EMFILE, "no descriptor left to watch a sandbox with")
        return Born(ours, answer["pid"], descriptors[0], answer["landlock"])

    def close(self) -> None:
        """Let it go; with it goes every sandbox."""
        self.control.close()
        try:
            self.process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(link, HEADER.size + _ANSWER_CAP, 1)
    inbox = bytearray(data)
    try:
        while (frame := take_frame(inbox, _ANSWER_CAP)) is None:
            piece = link.recv(_ANSWER_CAP)
            if not piece:
                raise ConnectionResetError("the keeper of the sandboxes closed the link")
            inbox += piece
    except (OSError, FrameError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    answer: dict[str, Any] = json.loads(frame)
    return answer, descriptors


_lock = threading.Lock()
_current: Keeper | None = None
_inherited: list[Keeper] = []
"""Keepers of the process that we were forked from: kept only so that nobody waits for them."""


def bear(streams: Sequence[int], *, network: bool = False) -> Born:
    """One sandbox from the keeper of this process, which is started or replaced when needed."""
    for _ in range(2):
        keeper = _keeper()
        try:
            return keeper.bear(streams, network=network)
        except (ConnectionError, FrameError, TimeoutError):
            _forget(keeper)
    raise ToolFailedError(
        "no sandbox could be started: the process that starts them ended twice",
        "code that is not contained is not run",
        "look for a memory limit on this machine; `python -m surefoot.envs.sandbox` says what works",
        reason="sandbox_failed",
    )


def _keeper() -> Keeper:
    global _current
    with _lock:
        if _current is None:
            _current = Keeper()
        return _current


def _forget(keeper: Keeper) -> None:
    global _current
    with _lock:
        if _current is keeper:
            _current = None
            keeper.close()


def close_keeper() -> None:
    """End the keeper of this process, if there is one. The next sandbox starts another."""
    global _current
    with _lock:
        keeper, _current = _current, None
    if keeper is not None:
        keeper.close()


def _after_fork() -> None:
    """In a forked child: the keeper is our parent's. Only our copy of its socket is closed."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        with contextlib.suppress(OSError):
            _current.control.close()
        _current.process.returncode = 0  # never ours to wait for
        _current = None


atexit.register(close_keeper)
os.register_at_fork(after_in_child=_after_fork)
