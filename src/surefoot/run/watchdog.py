"""Ends a run that no longer moves, and shows where it is stuck.

Owns       one thread, one small process (`guardian.py`), one dump file; and SIGUSR2: "write down where you are".
Promises   when the newest beat (`surefoot.system.signals`) is older than the limit, the stage is named on standard
           error and in the dump file, the stacks of all threads follow there, every child is ended, and the process
           exits with 76, whatever the main thread waits for and whoever does not read our output. A call that never
           gives the interpreter's lock back is ended by the guardian (SIGKILL; a shell says 137), with the stacks in
           the file.
Never      looks at the clock on the wall; takes time in which this process was stopped or suspended for a stall.

A file that is still empty at the end is removed: it held nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from surefoot.errors import ConfigError, MemoryLimitError, StalledError, StorageError
from surefoot.system.environment import inherited
from surefoot.system.files import APPEND
from surefoot.system.process import Child, adopt_orphans, end_all_children
from surefoot.system.signals import OUTSIDE, last_heartbeat, say_without_waiting

STACKS = signal.SIGUSR2
_GUARDIAN = Path(__file__).with_name("guardian.py")


class Watchdog:
    """Watches the pulse of this process while it is entered.

    Args:
        timeout_s: seconds without a beat that count as stuck.
        dump: where the stacks go. SIGUSR2 writes them there too, and the run goes on.
        resume: the command that goes on with this run, for the message.
    """

    def __init__(self, timeout_s: float, *, dump: Path, resume: str = "") -> None:
        if not timeout_s > 0:
            raise ConfigError(
                f"the watchdog waits {timeout_s} s", "every run would be stuck at once", "use more than 0"
            )
        self.timeout_s, self.dump, self.resume = timeout_s, dump, resume
        self.interval_s = min(1.0, timeout_s / 10)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="surefoot-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._descriptor = _open(self.dump)
        try:
            self._guardian = _start_guardian(self.timeout_s, self._descriptor)
        except MemoryLimitError:
            os.close(self._descriptor)
            raise
        faulthandler.register(STACKS, file=self._descriptor, all_threads=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
        self._guardian.end()
        faulthandler.unregister(STACKS)
        empty = os.fstat(self._descriptor).st_size == 0
        os.close(self._descriptor)
        if empty:
            with contextlib.suppress(OSError):  # its folder is gone, or read-only by now: no reason to end badly
                self.dump.unlink()

    def _watch(self) -> None:
        seen, quiet_s, looked = last_heartbeat(), 0.0, time.monotonic()
        while not self._closed.wait(self.interval_s):
            self._tell_guardian()
            last, now = last_heartbeat(), time.monotonic()
            # A look that came late was itself stopped or suspended: that time counts for nobody.
            waits = last is seen and last.stage != OUTSIDE
            quiet_s = quiet_s + min(now - looked, 2 * self.interval_s) if waits else 0.0
            seen, looked = last, now
            if quiet_s > self.timeout_s:
                self._end(last.stage)

    def _tell_guardian(self) -> None:
        """One beat; a guardian that is gone or does not listen leaves us the first line of defence."""
        with contextlib.suppress(OSError):
            os.write(self._guardian.stdin.fileno(), b".")

    def _end(self, stage: str) -> None:
        error = self.error(stage)
        text = f"StalledError: {error}\n"
        say_without_waiting(text)
        with contextlib.suppress(OSError):  # a full disk must not keep a stuck run alive
            os.write(self._descriptor, text.encode())
            faulthandler.dump_traceback(file=self._descriptor, all_threads=True)
        adopt_orphans()  # what a child leaves behind becomes ours, and ends too
        end_all_children()
        os._exit(error.exit_code)

    def error(self, stage: str) -> StalledError:
        """What is said of a run that is stuck in `stage`."""
        after = f", then {self.resume}" if self.resume else ", then resume the run"
        return StalledError(
            f"no progress for {self.timeout_s:g} s while {stage}",
            f"a wait that does not end looks like slow training; where every thread was is in {self.dump}",
            f"repair what the stacks show, or raise stall_timeout_s if this stage really takes longer{after}",
        )


def _open(path: Path) -> int:
    try:
        return os.open(path, APPEND, 0o600)  # a pipe that nobody reads is refused, not waited for
    except OSError as error:
        raise StorageError(
            f"the watchdog cannot open {path}: {error.strerror}",
            "a run that gets stuck could not show where",
            "make its folder writable",
        ) from error


def _start_guardian(timeout_s: float, dump: int) -> Child:
    """A session of its own: neither Ctrl-C nor Ctrl-Z of the terminal reaches it."""
    limit_s = timeout_s + max(1.0, timeout_s / 10)  # the thread comes first
    argv = [sys.executable, "-I", "-S", str(_GUARDIAN), str(os.getpid()), repr(limit_s)]
    try:
        child = Child.start(argv, stdin=subprocess.PIPE, stdout=dump, stderr=subprocess.DEVNULL, env=inherited())
    except OSError as error:
        raise MemoryLimitError(
            f"the watchdog's helper process cannot be started: {error.strerror}",
            "a run whose interpreter gets stuck would never end",
            "free some memory, or raise the limit on processes (ulimit -u)",
        ) from error
    os.set_blocking(child.stdin.fileno(), False)
    return child
