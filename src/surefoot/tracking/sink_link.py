"""The driver's end of one sink's process: a bounded queue of rows, and what is known of their fate.

Owns       one process, two pipes that are never waited for, and at most `most` rows in memory.
Promises   logged = written + errors + dropped once it is closed; a row is `written` only when the sink's process has
           said so, and dropped when nobody can tell.
Never      blocks; only `end` waits, for a process that was sent SIGKILL.

    offer --> queue (bounded) --> pipe --> sink_process --> TensorBoard, W&B
                                                 |
    written, errors, first_error <--- pipe <-----+
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.child_environment import inherited

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from surefoot.tracking.sink_process import main; main()"
)  # fmt: skip
_PIPE_BYTES = 2**20
_LONGEST_ROW = 2**18
_AT_ONCE = 2**16
_AFTER_KILL_S = 0.5


class SinkLink:
    """One sink as the driver sees it."""

    def __init__(self, name: str, setup: Mapping[str, Any], most: int) -> None:
        self.name, self.most = name, most
        self.logged = self.written = self.errors = self.refused = 0
        self.first_error: str | None = None
        self.ended: str | None = None
        """How the process ended before it was asked to; None while it runs, or when it did as it was told."""
        self.done = False
        """The process has said its last word."""
        self._queue: deque[bytes] = deque()
        self._under_way = memoryview(b"")
        self._heard = b""
        self._pipes: list[int] = []
        self._process = self._start()
        self._queue.append(_line(dict(setup) | {"sink": name, "driver": os.getpid()}))
        self.move()

    @property
    def dropped(self) -> int:
        """Rows that did not fit; once the process is gone, all whose fate nobody knows."""
        over = self.done or self.ended is not None
        return self.logged - self.written - self.errors if over else self.refused

    def offer(self, row: bytes) -> None:
        """Queue one row if there is room and somebody to send it to; then move what can be moved."""
        self.logged += 1
        if self.ended is not None or len(self._queue) >= self.most or len(row) > _LONGEST_ROW:
            self.refused += 1
        else:
            self._queue.append(row)
        self.move()

    def say_goodbye(self) -> None:
        """An empty line: close the sink and go. A sink that never got a row has nothing to close."""
        if self.logged == 0:
            self.done = True
            return
        self._queue.append(b"\n")  # over the bound if need be
        self.move()

    def move(self) -> None:
        """Send what the pipe takes, hear what was reported; returns at once."""
        if self._process is not None and self.ended is None and not self.done:
            self._send()
            self._listen()

    def awaited(self) -> Iterator[tuple[int, int]]:
        """(descriptor, event of `select.poll`) for somebody who wants to wait until `move` can do something."""
        if self._process is not None and self.ended is None and not self.done:
            rows, reports = self._pipes
            yield reports, select.POLLIN
            if self._queue or self._under_way:
                yield rows, select.POLLOUT

    def end(self) -> None:
        """End the process and whatever it started; one that has said its last word has nothing left to do."""
        if self._process is None:
            return
        if not self.done and self.ended is None:
            self.ended = "it did not finish in time and was ended"
        with contextlib.suppress(ProcessLookupError, PermissionError):  # not reaped yet, so the number is still its own
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the system's hands: the kernel ends it later
            self._process.wait(_AFTER_KILL_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None

    # -- the process ----------------------------------------------------------------

    def _start(self) -> subprocess.Popen[bytes] | None:
        path = json.dumps([os.path.abspath(each) for each in sys.path])
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, path],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
                env=inherited(_needed(self.name)),
            )  # fmt: skip
        except OSError as error:
            self.ended = f"its process could not be started: {error.strerror}"
            return None
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "it was asked for"
            os.set_blocking(pipe.fileno(), False)
            self._pipes.append(pipe.fileno())
        with contextlib.suppress(OSError, AttributeError):  # more room, where the system gives it
            fcntl.fcntl(self._pipes[0], fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return process

    def _send(self) -> None:
        try:
            while self._under_way or self._queue:
                if not self._under_way:
                    self._under_way = memoryview(self._queue.popleft())
                self._under_way = self._under_way[os.write(self._pipes[0], self._under_way) :]
        except BlockingIOError:
            return
        except OSError:
            self._under_way = memoryview(b"")  # it is gone; `_listen` finds out how

    def _listen(self) -> None:
        try:
            piece = os.read(self._pipes[1], _AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        *lines, self._heard = (self._heard + piece).split(b"\n")
        if lines:
            self._take(lines[-1])  # counts only grow: the last line says it all
        if not piece and not self.done:
            self.ended = self._how()

    def _take(self, line: bytes) -> None:
        try:
            report = json.loads(line)
            self.written, self.errors = int(report["written"]), int(report["errors"])
            self.first_error, self.done = report["first_error"], bool(report["last"])
        except (ValueError, KeyError, TypeError) as error:
            self.first_error = f"a report that cannot be read: {error}"

    def _how(self) -> str:
        """The pipe is closed, so the process has ended or is about to; looked at, not reaped and not waited for."""
        assert self._process is not None, "only a process that was started is listened to"
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return "its process ended"
        code = ended.si_status
        return f"its process ended with {f'exit code {code}' if ended.si_code == os.CLD_EXITED else _signal(code)}"


def _needed(sink: str) -> list[str]:
    """Variables that W&B cannot do without: its own, the key among them, and the way out to its server."""
    if sink != "wandb":
        return []
    return [name for name in os.environ if name.startswith("WANDB_") or name.upper() in ("HTTP_PROXY", "HTTPS_PROXY")]


def _signal(number: int) -> str:
    return signal.Signals(number).name


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"
