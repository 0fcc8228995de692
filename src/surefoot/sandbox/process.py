"""The caller's end of the sandbox server: started once per process, asked for a sandbox by any thread.

Owns       the sandbox server's life, and the hand-over of descriptors.
Promises   a sandbox server that died is replaced; a process that forks does not share its parent's; nothing of this
           process's environment reaches it.
Never      interprets how a program ended; `process.py` does.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import surefoot
import surefoot_harness
from surefoot.errors import ToolError, ToolFailedError
from surefoot.sandbox.walls import ORDER, ORDER_WITH_NETWORK
from surefoot.system.frames import HEADER, FrameError, take_frame
from surefoot.system.memory import excess_mb
from surefoot.system.process import Child, family

_SOURCE = os.pathsep.join(
    dict.fromkeys(str(Path(each.__file__ or "").resolve().parents[1]) for each in (surefoot, surefoot_harness))
)
"""What the keeper of sandboxes imports from: one folder where we are installed, two in a checkout."""
_ANSWER_CAP = 2**16
_PATIENCE_S = 30.0
"""How long a birth may take on a machine that is busy."""


@dataclass(frozen=True)
class SandboxProcess:
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


class SandboxReports:
    """What the first process of a sandbox says on its link, which must not block."""

    def __init__(self) -> None:
        self._inbox = bytearray()
        self.ended = False
        """Whether nothing will come any more."""
        self.descriptors: list[int] = []
        """Handed out of the sandbox; whoever takes one off closes it."""

    def read(self, link: socket.socket) -> list[dict[str, Any]]:
        """The messages that have come whole since the last look; nonsense is no message."""
        while not self.ended:
            try:
                data, handed, _, _ = socket.recv_fds(link, _ANSWER_CAP, 1)
            except BlockingIOError:
                break
            except OSError:
                data, handed = b"", []
            for descriptor in handed:
                os.set_inheritable(descriptor, False)  # `recv_fds` of Python 3.11 does not look at its flags
            self.descriptors += handed
            self.ended = not data
            self._inbox += data
        found: list[dict[str, Any]] = []
        with contextlib.suppress(FrameError):
            while (frame := take_frame(self._inbox, _ANSWER_CAP)) is not None:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(frame))
        return found

    def close(self) -> None:
        """Give back what was handed out and nobody took."""
        while self.descriptors:
            os.close(self.descriptors.pop())


class SandboxServer:
    """The small process, and the socket on which it takes orders."""

    def __init__(self) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ["-S", "-s", "-B", "-m", "surefoot.sandbox.server", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self.process = Child.start(
                [sys.executable, *words], env={"PYTHONPATH": _SOURCE}, cwd="/", pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip

    def spawn(self, streams: Sequence[int], *, network: bool = False) -> SandboxProcess:
        """Ask for one sandbox whose program will have these descriptors as 0, 1, 2 and so on.

        Args:
            network: one that shares the network of this process.

        Raises:
            OSError: the kernel refused, and says which call.
            ConnectionError: the sandbox server is gone.
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
        return SandboxProcess(ours, answer["pid"], descriptors[0], answer["landlock"])

    def close(self) -> None:
        """Let it go; with it goes every sandbox."""
        self.control.close()
        self.process.end(_PATIENCE_S, ask=None)


def _receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(link, HEADER.size + _ANSWER_CAP, 1)
    inbox = bytearray(data)
    try:
        while (frame := take_frame(inbox, _ANSWER_CAP)) is None:
            piece = link.recv(_ANSWER_CAP)
            if not piece:
                raise ConnectionResetError("the sandbox server closed the link")
            inbox += piece
    except (OSError, FrameError):
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    answer: dict[str, Any] = json.loads(frame)
    return answer, descriptors


_lock = threading.Lock()
_current: SandboxServer | None = None
_inherited: list[SandboxServer] = []
"""Sandbox servers of the process that we were forked from: kept only so that nobody waits for them."""


def spawn(streams: Sequence[int], *, network: bool = False) -> SandboxProcess:
    """One sandbox from the sandbox server of this process, which is started or replaced when needed."""
    for _ in range(2):
        server = _server()
        try:
            return server.spawn(streams, network=network)
        except (ConnectionError, FrameError, TimeoutError):
            _forget(server)
    raise ToolFailedError(
        "no sandbox could be started: the process that starts them ended twice",
        "code that is not contained is not run",
        "look for a memory limit on this machine; `python -m surefoot.sandbox` says what works",
        reason="sandbox_failed",
    )


def _server() -> SandboxServer:
    global _current
    with _lock:
        if _current is None:
            _current = SandboxServer()
        return _current


def _forget(server: SandboxServer) -> None:
    global _current
    with _lock:
        if _current is server:
            _current = None
            server.close()


def close_server() -> None:
    """End the sandbox server of this process, if there is one. The next sandbox starts another."""
    global _current
    with _lock:
        server, _current = _current, None
    if server is not None:
        server.close()


def _after_fork() -> None:
    """In a forked child: the sandbox server is our parent's. Only our copy of its socket is closed."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _inherited.append(_current)
        with contextlib.suppress(OSError):
            _current.control.close()
        _current.process.disown()
        _current = None


atexit.register(close_server)
os.register_at_fork(after_in_child=_after_fork)


# -- One or more contained programs, watched to their end: what they print, what they take, when they must stop
# Owns       the pipes, the deadline, and the verdict on why a program ended.
# Promises   returns only when the program and all that it started are gone; no more than the cap is ever kept of what
# it
# prints; memory is counted over all its processes together.
# Never      starts anything; `process.py` does.


_WEIGH_S = 0.05
_GRACE_S = 10.0
"""How long a killed sandbox may take to be gone: the kernel has to free what it held."""


@dataclass
class Watched:
    """One program under watch."""

    sandboxed: SandboxProcess
    stdin: memoryview
    feed: int | None
    """Write end of its stdin."""
    outputs: dict[int, bytearray]
    """Read ends of what it prints, and what arrived."""
    deadline: float
    memory_mb: int
    output_bytes: int
    reports: SandboxReports = field(default_factory=SandboxReports)
    report: dict[str, Any] | None = None
    killed: str | None = None
    cut: bool = False
    gone: bool = False
    weighed_at: float = 0.0
    printed: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.printed = list(self.outputs.values())

    def kill(self, why: str) -> None:
        """End it and all that it started; the first reason stands."""
        if self.killed is None and not self.gone:
            self.killed = why
            self.deadline = time.monotonic() + _GRACE_S
            self.sandboxed.kill()

    def check(self, now: float) -> None:
        """Deadline and memory."""
        if now >= self.deadline and not self.gone:
            if self.killed is not None:
                raise _failed(f"a killed sandbox was still there after {_GRACE_S:g} s", "sandbox_stuck")
            self.kill("deadline")
        elif self.killed is None and not self.gone and now >= self.weighed_at + _WEIGH_S:
            self.weighed_at = now
            inside = self.sandboxed.members()
            if inside and excess_mb(inside, self.memory_mb, 0) is not None:
                self.kill("memory")

    def close(self) -> None:
        """Give every descriptor back."""
        self.sandboxed.close()
        for descriptor in [*self.outputs, *([] if self.feed is None else [self.feed])]:
            os.close(descriptor)


def attend(watched: Sequence[Watched]) -> None:
    """Watch until the first is done; the others, which only serve it, are ended with it."""
    try:
        selector = selectors.DefaultSelector()
    except OSError as error:
        raise _failed(f"a sandbox cannot be watched: {error.strerror}", "sandbox_failed") from error
    with selector:
        for each in watched:
            _register(selector, each)
        while not all(each.gone for each in watched):
            for key, _ in selector.select(_pause(watched)):
                each, handle = key.data
                handle(selector, each, key.fd)
            now = time.monotonic()
            for each in watched:
                each.check(now)
            if watched[0].gone:
                for each in watched[1:]:
                    each.kill("no longer needed")


def _pause(watched: Sequence[Watched]) -> float:
    nearest = min((each.deadline for each in watched if not each.gone), default=time.monotonic() + _WEIGH_S)
    return max(0.0, min(_WEIGH_S, nearest - time.monotonic()))


def _register(selector: selectors.BaseSelector, each: Watched) -> None:
    each.sandboxed.link.setblocking(False)
    selector.register(each.sandboxed.link, selectors.EVENT_READ, (each, _on_report))
    selector.register(each.sandboxed.pidfd, selectors.EVENT_READ, (each, _on_exit))
    for output in each.outputs:
        selector.register(output, selectors.EVENT_READ, (each, _read))
    if each.feed is not None:
        selector.register(each.feed, selectors.EVENT_WRITE, (each, _feed))


def _on_report(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    """What init reports; its first word is the ending."""
    said = each.reports.read(each.sandboxed.link)
    if each.reports.ended and descriptor in selector.get_map():
        selector.unregister(descriptor)
    each.report = each.report or next(iter(said), None)  # none: that is said later


def _on_exit(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    """Init is gone, and with it everybody who could report or print: what is in the pipes now is all there will be.

    Their end is not waited for. Another thread of ours may have forked meanwhile, and its child holds copies.
    """
    selector.unregister(descriptor)
    _on_report(selector, each, each.sandboxed.link.fileno())
    each.report = each.report or each.sandboxed.last_word()
    each.sandboxed.kill()
    _stop_feeding(selector, each)
    for output in list(each.outputs):
        with contextlib.suppress(BlockingIOError):
            while output in each.outputs:
                _read(selector, each, output)
        _stop_reading(selector, each, output)
    each.gone = True


def _read(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    if descriptor not in each.outputs:
        return  # closed by an earlier event of the same moment
    kept, data = each.outputs[descriptor], os.read(descriptor, 2**16)
    room = each.output_bytes - len(kept)
    kept += data[:room]
    if len(data) > room:
        each.cut = True
        each.kill("output")
    if not data or len(data) > room:
        _stop_reading(selector, each, descriptor)


def _stop_reading(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    if descriptor in each.outputs:
        selector.unregister(descriptor)
        os.close(descriptor)
        del each.outputs[descriptor]


def _feed(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    if each.feed is None:
        return
    try:
        each.stdin = each.stdin[os.write(descriptor, each.stdin[: 2**16]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:  # it does not want to hear more
        each.stdin = memoryview(b"")
    if not each.stdin:
        _stop_feeding(selector, each)


def _stop_feeding(selector: selectors.BaseSelector, each: Watched) -> None:
    if each.feed is not None:
        selector.unregister(each.feed)
        os.close(each.feed)
        each.feed = None


def exit_code(each: Watched) -> int | None:
    """The program's own exit code; None when it was we who ended it. Refuses an ending that nobody reported."""
    if each.killed is not None:
        return None
    if each.report is None:
        raise _failed("a sandbox ended without a report: something outside it killed it", "sandbox_failed")
    if "failed" in each.report:
        if each.report.get("program"):
            raise ToolError(
                f"{each.report['failed']} (inside the sandbox)",
                "the sandbox shows /usr, the running Python and what `read_only` names; nothing else exists there",
                "give the whole path of a program that is there, or name its folder in `read_only`",
            )
        raise _failed(f"a sandbox could not be built: {each.report['failed']}", "sandbox_failed")
    return int(each.report["exit"])


def _failed(what: str, reason: str) -> ToolFailedError:
    return ToolFailedError(
        what,
        "a program without a complete sandbox is not run, and an ending that nobody saw is no result",
        "run `python -m surefoot.sandbox`: it says what this host can contain",
        reason=reason,
    )
