"""Asked to stop: which signals ask, and where the work may be left.

Owns       SIGINT, SIGTERM, SIGUSR1 and SIGHUP while it is entered, and SIGALRM once a stop was asked for.
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

Read next: `last_resort.py`, for work that does not let go; `command.py`, before and after a run;
`runtime/watchdog.py`, for work that stopped by itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

from surefoot import pulse
from surefoot.errors import InputError, InvariantError
from surefoot.stopping.command import COMMAND
from surefoot.stopping.last_resort import ASKING, SAME_PRESS_S, LastResort

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
        pulse.beat(self.name)
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
        pulse.beat(f"going on after {self.name}" if self._outer is None else self._outer.name)
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
                f"add it to PARTS in surefoot/stopping/signals.py; there are {', '.join(PARTS)}",
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
