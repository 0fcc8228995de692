"""The process of a command that trains: what a request to stop means before its run has begun, and after it is over.

Owns       SIGINT, SIGTERM and SIGUSR1 of such a process wherever no `StopSignals` is entered.
Promises   a request before the run ends the process at once, with 75 and without a file; one after its verdict was
           written changes nothing: the exit code is the verdict's.
Never      touches a process that only imports us: there the caller owns the signals, and the end of the process.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from surefoot.errors import StoppedError
from surefoot.stopping.last_resort import ASKING, say_without_waiting


class Command:
    """Whether this process is such a command."""

    def __init__(self) -> None:
        self._owner = -1
        self._over = False

    @property
    def is_here(self) -> bool:
        """Whether this very process listens, not one that it was forked from."""
        return self._owner == os.getpid()

    def listen(self) -> None:
        """From here on; a signal that somebody else answers, or that is ignored (nohup), stays as it is."""
        self._owner, self._over = os.getpid(), False
        for number in ASKING:
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, self._on_signal)

    def over(self) -> None:
        """The run has its verdict."""
        self._over = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.is_here:  # forked from us: the system's own rule
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._over:
            error = StoppedError(
                f"stopped by {signal.Signals(number).name} before the run began", "asked to stop", "start it again"
            )
            say_without_waiting(f"StoppedError: {error}\n")
            os._exit(error.exit_code)


COMMAND = Command()
"""That of this process."""
