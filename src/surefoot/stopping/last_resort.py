"""The end of a process that was asked to stop and did not.

Promises   from the signal to the end of the process no more than `StopSignals.limit_s`, whatever it is doing: a save
           that takes longer is given up (the checkpoint before it and the journal stand), and so are threads and
           libraries that hold up the end of the interpreter. Only a call in C that keeps the interpreter's lock is out
           of reach: `runtime/guardian.py` ends that.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from surefoot.errors import StoppedError

if TYPE_CHECKING:
    from surefoot.stopping.signals import StopSignals

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask for a stop."""
SAME_PRESS_S = 0.25
"""A second SIGINT within this time is the first one, forwarded once more."""
_HURRY_S = 2.0
_AFTER_SAVE_S = 4.0
_AFTER_RUN = 255
"""What `LastResort.close` writes to its own pipe when the process shall end as well; no signal has this number."""


class LastResort:
    """Ends the process when it was asked to stop and did not: a thread that hears of signals before Python does.

    The interpreter runs handlers between two of its own instructions; one long computation in C has none. Its low
    level writes each signal's number to a pipe at once, and this thread reads it. Ending here is as safe as a kill:
    what is on the disk is resumable at every instant.
    """

    def __init__(self, stop: StopSignals) -> None:
        self.stop = stop
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.former = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._listen, name="surefoot-stop", daemon=True)
        self.thread.start()

    def close(self, *, process_ends: bool = False) -> None:
        """Stop listening; with `process_ends`, after a request, see to it that the process does end in time."""
        signal.set_wakeup_fd(self.former)
        if process_ends:
            os.write(self.writing, bytes([_AFTER_RUN]))
            return  # the thread stays as long as the process
        os.write(self.writing, b"\0")
        self.thread.join()
        os.close(self.reading)
        os.close(self.writing)

    def _listen(self) -> None:
        first, end, hurry, over = float("inf"), float("inf"), False, False
        poll = select.poll()
        poll.register(self.reading, select.POLLIN)
        while True:
            patience_s = max(0.0, end - time.monotonic())
            if poll.poll(None if end == float("inf") else math.ceil(patience_s * 1000)):
                heard = os.read(self.reading, 1)[0]
                now = time.monotonic()
                if heard == 0:
                    return
                if heard in ASKING and first == float("inf"):
                    first, end = now, now + min(self.stop.last_resort_s, self.stop.hard_s)
                elif heard == _AFTER_RUN:
                    over, end = True, min(first, now) + self.stop.hard_s
                elif heard == signal.SIGINT and now - first >= SAME_PRESS_S:
                    hurry, end = True, min(end, now + _HURRY_S)
            elif not (hurry or over) and (later := min(self._later(), first + self.stop.hard_s)) > time.monotonic():
                end = later
            else:
                self._end(over=over)

    def _later(self) -> float:
        """A save is waited for, as long as there is time, and what follows it gets a moment."""
        phase = self.stop.current
        if phase is not None and phase.sealed:
            return time.monotonic() + 0.1
        return self.stop.sealed_until + _AFTER_SAVE_S

    def _end(self, *, over: bool) -> None:
        phase, limit = self.stop.current, f"stop_timeout_s = {self.stop.limit_s:g}"
        what = f"{self.stop.reason}, which did not let go; nothing was saved on the way out"
        why = "a long computation cannot be interrupted, and whoever asks to stop does not wait for ever"
        fix = f"go on with {self.stop.resume}" if self.stop.resume else "resume the run"
        if over:
            what = f"{self.stop.reason}; the run is over, and its process did not end by itself"
            why = f"a stop is over within {limit} s, whatever threads and libraries do at the end of an interpreter"
        elif phase is not None and phase.sealed:
            what = f"{self.stop.reason}, which took too long and was given up"
            why = f"a stop is over within {limit} s; the checkpoint before it and the journal stand"
            fix += f", and raise {limit} if this takes longer here"
        error = StoppedError(what, why, fix)
        say_without_waiting(f"StoppedError: {error}\n")
        os._exit(error.exit_code)


def say_without_waiting(text: str) -> None:
    """To standard error, unless nobody could read it now: closed, or a pipe that is full."""
    if sys.__stderr__ is None:
        return  # started without one; the number 2 may be any file by now
    with contextlib.suppress(OSError, ValueError):
        poll = select.poll()
        poll.register(descriptor := sys.__stderr__.fileno(), select.POLLOUT)
        if poll.poll(0):
            os.write(descriptor, text.encode(errors="backslashreplace")[: select.PIPE_BUF])
