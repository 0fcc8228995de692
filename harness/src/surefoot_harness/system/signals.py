"""Where the work is, how long it may take, whether it may be left: heartbeats, deadlines, signals that ask for a stop.

Owns       SIGINT, SIGTERM, SIGUSR1 and SIGHUP while `StopSignals` is entered, and SIGALRM once a stop was asked for.
Promises   the first request never interrupts a phase that has to be finished (a save), and leaves every other phase
           after its grace; a second SIGINT leaves at once; when the work does not let go (a computation of minutes
           that no signal reaches) the process ends with 75 all the same, `limit_s` after the request at the latest.
           SIGHUP changes nothing: the run goes on.
Never      saves, prints, or cleans up: it only says that, and from where, a run was asked to stop.

    with StopSignals() as stop:
        with stop.phase("collecting", abandonable=True):   # left after the grace, by StopRequested
            groups = collect()
        with stop.phase("learning", tears_weights=True):   # the same, and stop.weights_torn says so
            learn(groups)
        with stop.phase("saving"):                         # finished, whatever is asked
            save()

Entering an abandonable phase raises at once when a stop was asked for before; learning may still begin, and be
finished, within the grace.
A second SIGINT within a quarter of a second of the first is the same key press, forwarded by a wrapper.

Read next: `run/watchdog.py`, for work that stopped by itself.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from surefoot_harness.errors import InputError, InvariantError, StoppedError

# -- How much time is left -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time limit that begins now.

    Example:
        >>> deadline = Deadline(60)
        >>> deadline.expired, 59 < deadline.left <= 60, Deadline(0).expired, Deadline(-1).left
        (False, True, True, 0.0)
    """

    seconds: float
    """How long, from when this was made."""
    ends: float = field(init=False)
    """In seconds of `time.monotonic`, for what takes a moment."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", time.monotonic() + self.seconds)

    @property
    def left(self) -> float:
        """Seconds until it is over, never below 0."""
        return max(0.0, self.ends - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self.ends


# -- Where this process is, and when it last got ahead: one word and one moment, for the watchdog --
# Whoever does a long piece of work beats after every part of it. A beat costs less than a microsecond, takes no lock
# and never fails; a wait that does not end is a wait without beats, and `run.watchdog` ends it.


class Heartbeat(NamedTuple):
    """What was last said: the stage, in words that complete "stuck while ...", and when, on the monotonic clock."""

    stage: str
    moment: float


OUTSIDE = "in the caller's own code, between two steps"
"""A stage that is no stall, however long it lasts: the run waits for whoever steps it."""

_last = Heartbeat("starting", time.monotonic())


def tick(stage: str) -> None:
    """Something was done; `stage` says what is being done next."""
    global _last
    _last = Heartbeat(stage, time.monotonic())


def last_heartbeat() -> Heartbeat:
    """The newest beat of this process."""
    return _last


# -- Asked to stop ---------------------------------------------------------------------------------


# -- The end of a process that was asked to stop and did not --------------------------------------
# Promises   from the signal to the end of the process no more than `StopSignals.limit_s`, whatever it is doing: a save
# that takes longer is given up (the checkpoint before it and the journal stand), and so are threads and
# libraries that hold up the end of the interpreter. Only a call in C that keeps the interpreter's lock is out
# of reach: `run/guardian.py` ends that.


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


# -- The process of a command that trains: what a request to stop means before its run has begun, and after it is over


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


# -- Asked to stop: which signals ask, and where the work may be left -----------------------------


PARTS: Mapping[str, Mapping[str, Any]] = {
    "start": {"name": "starting", "abandonable": True, "grace_s": 0.0},
    "preflight": {"name": "looking at the baseline", "abandonable": True},
    "collect": {"name": "collecting rollouts", "abandonable": True},
    "learn": {"name": "learning", "tears_weights": True},
    "publish": {"name": "publishing weights"},
    "evaluate": {"name": "evaluating", "abandonable": True},
    "save": {"name": "saving"},
}
"""The parts of a training run: what each is called, and what a request to stop may do to it."""


class StopRequested(KeyboardInterrupt):  # noqa: N818 - not an error: somebody asked
    """Asked to stop. Not an `Exception`: no `except Exception` on its way may swallow it."""


class Phase:
    """A named part of a run, and what a request to stop may do to it. Made by `StopSignals.phase`.

    Entering and leaving it are beats of the run's pulse, under its name.
    """

    __slots__ = ("_outer", "_stop", "grace_s", "name", "sealed", "tears_weights")

    def __init__(self, stop: StopSignals, name: str, *, sealed: bool, tears_weights: bool, grace_s: float) -> None:
        self._stop, self._outer = stop, stop.current
        self.name, self.sealed, self.tears_weights, self.grace_s = name, sealed, tears_weights, grace_s

    @property
    def _abandonable(self) -> bool:
        return not self.sealed and not self.tears_weights

    def __enter__(self) -> Phase:
        if self._abandonable:
            self._stop.check()
        tick(self.name)
        self._outer = self._stop.current
        self._stop.current = self  # a signal that arrives now finds either the outer phase or this one, whole
        if self._stop.asked:
            self._use_what_is_left_of_the_grace()
        return self

    def _use_what_is_left_of_the_grace(self) -> None:
        """A step that is half prepared is better finished than thrown away, as long as there is time."""
        try:
            self._stop.settle()
        except StopRequested:
            self._stop.current = self._outer
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No call before the phase is left: a handler runs between calls, and would raise out of a phase that is over.
        if error is not None and self.tears_weights:
            self._stop.weights_torn = True
        self._stop.current = self._outer
        if self.sealed:
            self._stop.sealed_until = time.monotonic()
        tick(f"going on after {self.name}" if self._outer is None else self._outer.name)
        if error is None:
            self._stop.settle()
        elif isinstance(error, InputError | OSError) and self._abandonable and self._stop.asked:
            # The signal may have hit our workers too. The phase is given up anyway, and its failure is only the cause.
            raise StopRequested(f"{self._stop.reason}; {self.name} had failed: {error}") from error


class StopSignals:
    """Listens while it is entered; outside the main thread it listens to nobody, the caller owns the signals.

    Args:
        limit_s: seconds from the first request to the end of the process, at most; `stop_timeout_s` of a run.
        grace_s: how long a phase may go on after the first request, unless the phase says otherwise.
        last_resort_s: when the process ends by itself because nothing reacted; a save is waited for, within the limit.
        resume: the command that goes on with this run, for the last words in that case.
    """

    def __init__(
        self,
        *,
        limit_s: float = 10.0,
        grace_s: float | None = None,
        last_resort_s: float | None = None,
        resume: str = "",
    ) -> None:
        self.limit_s, self.resume = limit_s, resume
        self._grace_s, self._last_resort_s = grace_s, last_resort_s
        self.current: Phase | None = None
        self.weights_torn = False
        """Whether a phase that changes weights was left half-way: they must not be saved."""
        self.immediate = False
        """Whether a second SIGINT asked to leave at once."""
        self.hung_up = False
        """Whether the terminal went away."""
        self.sealed_until = -float("inf")
        self._by: signal.Signals | None = None
        self._asked_at = 0.0
        self._raised = False
        self._owner = os.getpid()
        self._former: dict[int, Any] = {}
        self._last_resort: LastResort | None = None

    @property
    def grace_s(self) -> float:
        """How long a phase may go on after the request."""
        return 0.4 * self.limit_s if self._grace_s is None else self._grace_s

    @property
    def last_resort_s(self) -> float:
        """How long after the request the process may not have reacted."""
        return 0.8 * self.limit_s if self._last_resort_s is None else self._last_resort_s

    @property
    def hard_s(self) -> float:
        """How long after the request it ends in the middle of anything; the rest of the limit is for a busy machine."""
        return 0.9 * self.limit_s

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self._by is not None

    @property
    def may_save(self) -> bool:
        """Whether there is time to save, and something whole to be saved."""
        return not self.immediate and not self.weights_torn

    @property
    def reason(self) -> str:
        """`stopped by SIGTERM`, with the phase it was in."""
        by = "asked to stop" if self._by is None else f"stopped by {self._by.name}"
        return by if self.current is None else f"{by} while {self.current.name}"

    def phase(
        self, name: str, *, abandonable: bool = False, tears_weights: bool = False, grace_s: float | None = None
    ) -> Phase:
        """A part of the run, for `with`; `name` completes "stopped while ...".

        Args:
            abandonable: it may be left half-way; what it did so far is thrown away.
            tears_weights: it may be left too, but its weights are then neither old nor new.
            grace_s: how long it may go on after the request; 0 leaves at once.
        """
        sealed = not (abandonable or tears_weights)
        patience = self.grace_s if grace_s is None else grace_s
        return Phase(self, name, sealed=sealed, tears_weights=tears_weights, grace_s=patience)

    def part(self, name: str) -> Phase:
        """The phase of a training run that `PARTS` describes under this name."""
        if name not in PARTS:
            raise InvariantError(
                f"a run has no part called {name!r}",
                "whether it may be interrupted is decided in one place",
                f"add it to PARTS in surefoot_harness/system/signals.py; there are {', '.join(PARTS)}",
            )
        return self.phase(**PARTS[name])

    def ask(self, by: signal.Signals = signal.SIGTERM) -> None:
        """Ask from within: the next abandonable phase is not entered."""
        if self._by is None:
            self._asked_at = time.monotonic()
            self._by = by

    def check(self) -> None:
        """Raise `StopRequested` when a stop was asked for; the loop calls it between two phases."""
        if self._by is not None:
            self._interrupt()

    def settle(self) -> None:
        """Leave the phase we are in if its grace is over; otherwise set the alarm for that moment."""
        phase = self.current
        if self._by is None or phase is None or phase.sealed or self._raised:
            return
        left = self._asked_at + phase.grace_s - time.monotonic()
        if left <= 0:
            self._interrupt()
        elif self._former:  # only where the signals are ours
            if signal.SIGALRM not in self._former:
                self._former[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
            signal.setitimer(signal.ITIMER_REAL, max(left, 0.001))

    def _interrupt(self) -> None:
        self._raised = True
        phase = self.current
        while phase is not None:
            self.weights_torn |= phase.tears_weights
            phase = phase._outer
        raise StopRequested(self.reason)

    # -- signals -------------------------------------------------------------------
    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._last_resort = LastResort(self)
            for number in (*ASKING, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # in the background, under nohup: it stays ignored
                    self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = -1  # from here on a signal of ours does nothing, least of all raise
        if signal.SIGALRM in self._former:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()
        if self._last_resort is not None:
            self._last_resort.close(process_ends=COMMAND.is_here and self.asked)
            if kind is None:
                COMMAND.over()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return  # a process forked from us: whether it goes is our decision, not its own
        if number == signal.SIGHUP:
            self.hung_up = True
        elif self._by is None:
            self.ask(signal.Signals(number))
            self.settle()
        elif number == signal.SIGINT and time.monotonic() - self._asked_at >= SAME_PRESS_S:
            self.immediate = True
            self._interrupt()

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner:
            self.settle()
