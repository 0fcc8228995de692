"""Where numbers go beside `metrics.jsonl`: TensorBoard, W&B. They may fail; training does not notice.

Owns       one side process per sink, each with a bounded queue.
Promises   `log` returns at once whatever a sink does (hang, raise, exit, crash, fill its disk); rows that do not fit
           are dropped and counted; trouble is said once, and again in the summary; closing takes `CLOSE_S` at most.
Never      reads or writes metrics.jsonl: that file is complete without any of this.

A sink of its own process each, so that a W&B that hangs costs TensorBoard nothing.

Read next: `sink_process.py`, the other end of a queue.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.errors import ConfigError
from surefoot.system.environment import inherited
from surefoot.system.process import Child
from surefoot.system.signals import Deadline
from surefoot.system.text import redact_values

# -- The driver's end of one sink's process: a bounded queue of rows, and what is known of their fate
# Owns       one process, two pipes that are never waited for, and at most `most` rows in memory.
# Promises   logged = written + errors + dropped once it is closed; a row is `written` only when the sink's process has
# said so, and dropped when nobody can tell.
# Never      blocks; only `end` waits, for a process that was sent SIGKILL.
#
# offer --> queue (bounded) --> pipe --> sink_process --> TensorBoard, W&B
# |
# written, errors, first_error <--- pipe <-----+


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
        self._unread = b""
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
        self._process.end(give_up_s=_AFTER_KILL_S)
        self._process = None

    # -- the process ----------------------------------------------------------------

    def _start(self) -> Child | None:
        path = json.dumps([os.path.abspath(each) for each in sys.path])
        try:
            process = Child.start(
                [sys.executable, "-c", _BOOT, path], env=inherited(_needed(self.name)),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            self.ended = f"its process could not be started: {error.strerror}"
            return None
        for pipe in (process.stdin, process.stdout):
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
        *lines, self._unread = (self._unread + piece).split(b"\n")
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
        code = self._process.poll()
        if code is None:
            return "its process ended"
        return f"its process ended with {f'exit code {code}' if code >= 0 else signal.Signals(-code).name}"


def _needed(sink: str) -> list[str]:
    """Variables that W&B cannot do without: its own, the key among them, and the way out to its server."""
    if sink != "wandb":
        return []
    return [name for name in os.environ if name.startswith("WANDB_") or name.upper() in ("HTTP_PROXY", "HTTPS_PROXY")]


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode("ascii") + b"\n"


# -- Where numbers go beside `metrics.jsonl`: TensorBoard, W&B. They may fail; training does not notice


QUEUE_ROWS = 1000
CLOSE_S = 2.0
_PIP = {"tensorboard": "pip install 'surefoot[tensorboard]'", "wandb": "pip install wandb"}

Warn = Callable[[str, str], None]
"""What is wrong, and what to do about it."""


def check_sinks(names: Iterable[str]) -> None:
    """Refuse a sink whose package is not installed, before anything starts; nothing is imported."""
    for name in names:
        found = importlib.util.find_spec(name) if name in _PIP else None
        if found is None or found.origin is None:  # W&B leaves folders of its own name about, which are no package
            raise ConfigError(
                f"report_to names {name!r}, and that package is not installed"
                if name in _PIP
                else f"report_to names {name!r}, which is not a sink",
                "numbers that go nowhere are noticed too late",
                f"{_PIP[name]}, or leave it out" if name in _PIP else f"choose from: {', '.join(_PIP)}",
            )


class Sinks:
    """The sinks of one run.

    Example:
        >>> with Sinks([], Path("."), "run", {}, warn=print) as sinks:
        ...     sinks.log(1, {"loss": 0.5})
        >>> sinks.facts()
        {}
    """

    def __init__(
        self, names: Iterable[str], run_folder: Path, run_name: str, config: Mapping[str, Any], warn: Warn,
        *, queue_rows: int = QUEUE_ROWS, close_s: float = CLOSE_S,
    ) -> None:  # fmt: skip
        """Start one process per name; they warm up by themselves.

        Args:
            run_folder: their files and logs go below it.
            config: shown by sinks that can; JSON-able, and redacted here.
            warn: told of a sink's first error, its first dropped row and its untimely end, once each.
        """
        self._warn, self._close_s, self._closed = warn, close_s, False
        self._said: set[tuple[str, str]] = set()
        self._folder = run_folder
        setup = {"folder": str(run_folder.absolute()), "run": run_name, "config": redact_values(config)}
        self._links = [SinkLink(name, setup, queue_rows) for name in dict.fromkeys(names)]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one row to every sink; never waits, never raises because of a sink."""
        if not self._links or self._closed:
            return
        row = json.dumps({"step": step, "metrics": dict(metrics)}).encode("ascii") + b"\n"
        for link in self._links:
            link.offer(row)
            self._tell(link)

    def close(self) -> None:
        """Give all sinks together `close_s` seconds to take what is waiting, then end them; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(self._close_s)
        try:
            for link in self._links:
                link.say_goodbye()
            self._drain(deadline)
        finally:
            for link in self._links:
                link.end()
                self._tell(link)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Per sink: rows logged, written, dropped and refused with an error, the first error, and an untimely end."""
        return {
            link.name: {
                "logged": link.logged,
                "written": link.written,
                "dropped": link.dropped,
                "errors": link.errors,
                "first_error": link.first_error,
                "ended": link.ended,
            }
            for link in self._links
        }

    def summary(self) -> list[str]:
        """One line per sink, for the end of a run."""
        return [f"{link.name:<18} {_fate(link)}" for link in self._links]

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, deadline: Deadline) -> None:
        while (left := deadline.left) > 0:
            waits, busy = select.poll(), False
            for link in self._links:
                link.move()
                for descriptor, event in link.awaited():
                    waits.register(descriptor, event)
                    busy = True
            if not busy:
                return
            waits.poll(left * 1000)

    def _tell(self, link: SinkLink) -> None:
        if link.first_error is not None:
            self._once(link, "error", f"{link.name} failed: {link.first_error}")
        if link.ended is not None:
            self._once(link, "ended", f"{link.name} gets no more rows: {link.ended}")
        elif link.dropped:
            self._once(link, "dropped", f"{link.name} does not keep up: rows are dropped, from row {link.logged} on")

    def _once(self, link: SinkLink, kind: str, text: str) -> None:
        if (link.name, kind) not in self._said:
            self._said.add((link.name, kind))
            log = self._folder / "logs" / f"{link.name}.log"
            self._warn(text, f"nothing is lost: metrics.jsonl has every row; what {link.name} printed is in {log}")


def _fate(link: SinkLink) -> str:
    if link.written == link.logged:
        return f"{link.written} rows written"
    parts = [f"{link.written} of {link.logged} rows written", f"{link.dropped} dropped", f"{link.errors} errors"]
    why = link.first_error or link.ended
    return ", ".join(parts) + (f" ({why})" if why else "")
