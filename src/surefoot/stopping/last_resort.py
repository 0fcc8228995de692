"""The end of a process that was asked to stop and did not."""

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

    def close(self) -> None:
        """Stop listening."""
        signal.set_wakeup_fd(self.former)
        os.write(self.writing, b"\0")
        self.thread.join()
        os.close(self.reading)
        os.close(self.writing)

    def _listen(self) -> None:
        first, end, hurry = float("inf"), float("inf"), False
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
                    first, end = now, now + self.stop.last_resort_s
                elif heard == signal.SIGINT and now - first >= SAME_PRESS_S:
                    hurry, end = True, min(end, now + _HURRY_S)
            elif not hurry and (later := self._later()) > time.monotonic():
                end = later
            else:
                self._end()

    def _later(self) -> float:
        """A save is waited for, and what follows it gets a moment."""
        phase = self.stop.current
        if phase is not None and phase.sealed:
            return time.monotonic() + 0.1
        return self.stop.sealed_until + _AFTER_SAVE_S

    def _end(self) -> None:
        error = StoppedError(
            f"{self.stop.reason}, which did not let go; nothing was saved on the way out",
            "a long computation cannot be interrupted, and whoever asks to stop does not wait for ever",
            f"go on with {self.stop.resume}" if self.stop.resume else "resume the run",
        )
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
