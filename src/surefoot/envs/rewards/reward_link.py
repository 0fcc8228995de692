"""The driver's end of the sockets to the nursery and its workers.

Owns       one nursery, and one non-blocking socket per worker.
Promises   never blocks on a worker: requests and answers move as the sockets allow.
Never      decides what to call, or what a failure means.

Read next: `reward_pool.py`, which decides both.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.envs.rewards.call_frames import Forked
from surefoot.envs.rewards.frames import ANSWER_CAP, FrameError, pack, take_frame
from surefoot.envs.rewards.marks import RewardFunction
from surefoot.envs.rewards.reward_nursery import CONTROL_CAP, run_nursery
from surefoot.errors import RewardError, StorageError
from surefoot.plain_file import APPEND, plain_descriptor

_PATIENCE_S = 10.0


class WorkerGoneError(Exception):
    """The worker closed its end, or sent what no worker of ours sends."""


@dataclass
class WorkerLink:
    """One worker as the driver sees it."""

    sock: socket.socket
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))
    inbox: bytearray = field(default_factory=bytearray)

    def is_quiet(self) -> bool:
        """Whether an idle worker is alive and has nothing to say, as it should be."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def post(self, payload: bytes) -> None:
        """Put one request into the outbox; `pump` moves it."""
        self.outbox = memoryview(pack(payload))

    def pump(self) -> dict[str, Any] | None:
        """Move what can be moved without waiting; the answer when it is complete."""
        try:
            if self.outbox:
                self.outbox = self.outbox[self.sock.send(self.outbox[: 2**20]) :]
            piece = self.sock.recv(2**16)
        except BlockingIOError:
            return None
        except OSError as error:
            raise WorkerGoneError(str(error)) from error
        if not piece:
            raise WorkerGoneError("end of file")
        self.inbox += piece
        try:
            frame = take_frame(self.inbox, ANSWER_CAP)
            answer = None if frame is None else json.loads(frame)
        except (FrameError, ValueError) as error:
            raise WorkerGoneError(str(error)) from error
        if answer is not None and not isinstance(answer, dict):
            raise WorkerGoneError("not an answer")
        return answer


@dataclass(frozen=True)
class Obituary:
    """How the previous worker of a slot ended, and the last lines it printed."""

    ended: str | None
    output: str


class NurseryLink:
    """Starts the nursery, asks it for workers, and ends it."""

    def __init__(
        self, functions: Mapping[str, RewardFunction], log_path: Path | None, memory_mb: int = 0,
        forked: Forked | None = None, pass_env: Sequence[str] = (),
    ) -> None:  # fmt: skip
        log = None if log_path is None else _open_log(log_path)
        self.control, theirs = socket.socketpair()
        self.control.settimeout(_PATIENCE_S)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # what is buffered now would be printed twice
        driver = os.getpid()
        with warnings.catch_warnings():
            # Python 3.12 warns when threads are running. Every answer has a deadline, so a child
            # that inherits a locked lock is a named failure here, not a hang.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            self.control.close()
            run_nursery(theirs, functions, log, driver, memory_mb, forked, pass_env)
        theirs.close()
        if log is not None:
            os.close(log)

    def spawn(self, slot: int, *, stacks: bool = False) -> tuple[WorkerLink, Obituary]:
        """A fresh worker for a slot; whoever was there is ended first (`stacks`: after saying where it is stuck)."""
        try:
            self.control.sendall(pack(json.dumps({"slot": slot, "stacks": stacks}).encode()))
            reply, descriptors = self._reply()
        except (OSError, FrameError) as error:
            raise RewardError(
                f"the process that starts reward workers (pid {self.pid}) does not answer: {error}",
                "without it no reward can be computed, and no reward is not reward 0",
                "look for what ended it: a reward that kills its parent, or the system running out of memory",
            ) from error
        if "error" in reply:
            raise RewardError(
                f"a reward worker could not be started: {reply['error']}",
                "the system refused a new process",
                "lower reward_workers, or raise the limit on processes",
            )
        os.set_inheritable(descriptors[0], False)
        sock = socket.socket(fileno=descriptors[0])
        sock.setblocking(False)
        return WorkerLink(sock), Obituary(reply["ended"], reply["output"])

    def _reply(self) -> tuple[dict[str, Any], list[int]]:
        inbox, descriptors = bytearray(), list[int]()
        while True:
            data, received, _, _ = socket.recv_fds(self.control, CONTROL_CAP, 1)
            if not data:
                raise FrameError("it is gone")
            inbox += data
            descriptors += received
            frame = take_frame(inbox, CONTROL_CAP)
            if frame is not None:
                return json.loads(frame), descriptors

    def close(self) -> None:
        """Let the nursery end its descendants and itself; insist if it does not."""
        self.control.close()
        give_up = time.monotonic() + _PATIENCE_S
        while not self._is_buried():
            if time.monotonic() > give_up:
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.005)

    def _is_buried(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] != 0
        except ChildProcessError:
            return True  # somebody else in this program waited for it


def _open_log(path: Path) -> int:
    try:
        return plain_descriptor(path, APPEND)
    except OSError as error:
        raise StorageError(
            f"the reward log {path} cannot be opened: {error.strerror}",
            "what reward functions print is kept there",
            "create its folder, or give another log_path",
        ) from error
