"""The side process of one sink: reads rows, hands them to TensorBoard or W&B, reports what became of them.

Owns       everything that a sink may do wrong: raise, hang, print, exit, take its process down.
Promises   the terminal is never written to, and no signal of the terminal is obeyed: the driver decides; printed text
           goes to RUN/logs, capped, without secrets; files are 0600, folders 0700; gone when the driver is gone.
Never      imports torch, or reads anything but rows.

The only file that imports tensorboard to write, and wandb. Read next: `sinks.py`, the driver's end.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, Protocol

from surefoot.system.files import APPEND, plain_descriptor
from surefoot.system.process import die_with_parent
from surefoot.system.text import printable
from surefoot.tracking.process_logs import PrintedLines

LOG_CAP = 2**20
_LOOK_UP_S = 1.0
_ERROR_LIMIT = 500


class Sink(Protocol):
    """Where rows go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep one row."""

    def close(self) -> None:
        """Keep what is still under way, and let go."""


class TensorBoardSink:
    """One event file below RUN/tensorboard, a scalar per metric under the name it has in metrics.jsonl.

    The package's own file writer has a thread, and names the file after the machine; here a full disk is noticed at
    the row that did not fit.
    """

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        place = folder / "tensorboard"
        place.mkdir(mode=0o700, exist_ok=True)
        now = time.time()
        path = place / f"events.out.tfevents.{int(now)}.surefoot.{os.getpid()}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._file = io.FileIO(descriptor, "w")
        self._records = RecordWriter(_Whole(self._file))
        self._records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all numbers of the row."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """The last row is already with the system."""
        self._file.close()


class _Whole:
    """A file that takes a record whole or not at all: after a full disk the next record still starts at its place."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def write(self, record: bytes) -> None:
        """RecordWriter writes one record in one call."""
        place = self._file.tell()
        if self._file.write(record) != len(record):
            self._file.truncate(place)
            self._file.seek(place)
            raise OSError(28, "No space left on device")


class WandbSink:
    """One W&B run, offline unless WANDB_MODE says otherwise; its files are below RUN/wandb."""

    def __init__(self, folder: Path, run: str, config: Mapping[str, Any]) -> None:
        for name, value in WANDB_QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        self._wandb = wandb
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "surefoot"),
            name=os.environ.get("WANDB_NAME", run),
            config=dict(config),
            dir=str(folder),
            mode=os.environ["WANDB_MODE"],
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Rows of one step, training and evaluation, share it."""
        self._wandb.log(dict(metrics), step=step)

    def close(self) -> None:
        """Let W&B finish its file."""
        self._wandb.finish()


WANDB_QUIET = {
    "WANDB_MODE": "offline",  # no network unless the user asks for it
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_DISABLE_GIT": "true",  # the address of a remote may hold a password
    "WANDB_DISABLE_CODE": "true",
}
"""What W&B is told unless the user's environment says otherwise."""
SINKS: dict[str, Callable[[Path, str, Mapping[str, Any]], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
}


def main() -> NoReturn:
    """Serve the driver until it says so, or is gone. Rows come in on descriptor 0, reports go out on 1."""
    code = 1
    try:
        rows, reports = _own_descriptors()
        code = _serve(_lines(rows), Reports(reports))
    finally:
        os._exit(code)  # a sink's threads and exit hooks have had their chance in close()


class Reports:
    """Counts and the first error, to the driver; never waits for it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.written = self.errors = 0
        self.first_error: str | None = None

    def attempt(self, action: Callable[[], object], *, counted: bool = True) -> bool:
        """Do one thing of the sink's; whatever it raises is kept, and counted as an error."""
        try:
            action()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - reported, which is all we can do
            self.errors += counted
            self.first_error = self.first_error or printable(f"{type(error).__name__}: {error}")[:_ERROR_LIMIT]
            self.send()
            return False
        self.written += counted
        self.send()
        return True

    def send(self, *, last: bool = False) -> None:
        """One line, whole or not at all: a pipe takes this much in one piece. Counts only grow, so one may get lost."""
        line = {"written": self.written, "errors": self.errors, "first_error": self.first_error, "last": last}
        os.set_blocking(self.descriptor, last)  # the driver listens to the last word, or ends this process
        try:
            os.write(self.descriptor, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except OSError:
            return  # the driver is busy or gone; the next line says the same and more


def _serve(lines: Iterator[bytes], reports: Reports) -> int:
    """Open the sink as the first line says, then one row per line until the one that is empty."""
    setup = json.loads(next(lines))
    _end_only_with(setup["driver"])
    folder = Path(setup["folder"])
    log = _keep_what_is_printed(folder / "logs" / f"{setup['sink']}.log")
    sinks: list[Sink] = []
    opened = reports.attempt(
        lambda: sinks.append(SINKS[setup["sink"]](folder, setup["run"], setup["config"])), counted=False
    )
    if opened:
        for row in map(json.loads, takewhile(bool, lines)):
            reports.attempt(partial(sinks[0].write, row["step"], row["metrics"]))
        reports.attempt(sinks[0].close, counted=False)
    log.end()
    reports.send(last=True)
    return 0 if opened else 1


def _own_descriptors() -> tuple[int, int]:
    """Take both pipes away from descriptors 0 and 1, where a library could print into them."""
    rows, reports = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(nowhere, target)
    os.set_blocking(reports, False)
    return rows, reports


def _end_only_with(driver: int) -> None:
    """End with the driver, and with nothing else."""
    die_with_parent(driver)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # a handler, not "ignore": what the sink starts is not to inherit it
    os.umask(0o077)
    warnings.simplefilter("ignore")


def _lines(descriptor: int) -> Iterator[bytes]:
    """Lines from the driver; ends when the driver does."""
    driver, waiting = os.getppid(), b""
    while os.getppid() == driver:
        if not select.select([descriptor], [], [], _LOOK_UP_S)[0]:
            continue
        piece = os.read(descriptor, 2**16)
        if not piece:
            return
        *whole, waiting = (waiting + piece).split(b"\n")
        yield from whole


class _LogStream(io.TextIOBase):
    """Stands in for stdout and stderr: safe lines into a capped file."""

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = None if descriptor is None else path
        self.descriptor, self.left = descriptor, 0 if descriptor is None else LOG_CAP
        self._printed = PrintedLines()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.left > 0:  # after that not even looked at: looking for secrets takes time
            self._keep(self._printed.feed(text.encode(errors="backslashreplace")))
        return len(text)

    def flush(self) -> None:
        """Only of whole lines is it sure that they hold no half of a secret, so nothing happens before the end."""

    def end(self) -> None:
        """Keep the line that was not finished; an empty log is no log."""
        self._keep(self._printed.rest())
        if self.path is not None and self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink(missing_ok=True)

    def _keep(self, data: bytes) -> None:
        if self.left <= 0 or self.descriptor is None or not data:
            return
        note = b"\n[more output was discarded]\n" if len(data) > self.left else b""
        try:
            os.write(self.descriptor, data[: self.left] + note)
            self.left -= len(data)
        except OSError:
            self.left = 0  # a full disk ends the log, not the sink


def _keep_what_is_printed(path: Path) -> _LogStream:
    """Give stdout, stderr and the stacks of a crash a file; without one they are dropped, and the sink still works."""
    descriptor: int | None
    try:
        descriptor = plain_descriptor(path, APPEND)
        faulthandler.enable(file=descriptor)
    except OSError:
        descriptor = None
    stream = _LogStream(path, descriptor)
    sys.stdout = sys.stderr = stream
    return stream
