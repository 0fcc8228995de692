"""What a test calls: `tracker.track("loss", 0.5)`.

Promises   a value is on disk when the call returns; what cannot be kept fails here, in the test that did it.
Never      overwrites a value, or another test's, unless asked.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from surefoot.harness.tracker.journal import END, START, TRACK, JournalWriter
from surefoot.harness.tracker.memory import DefaultMonitor, MemoryMonitor
from surefoot.harness.tracker.values import NonFiniteError, plain
from surefoot.harness.unavailable import TAG, Unavailable

UNAVAILABLE = TAG
"""What is recorded when nobody can say how much memory is in use."""
_NOBODY = "no device of which anybody can say how much memory is in use"


class Tracker:
    """Records values of one test.

    Example:
        `tracker.track("accuracy", 0.93)` in `test_eval.py::test_sums[easy]` is found under
        `metrics["test_eval::test_sums[easy]"]["accuracy"]` of `unit_results.json`.
    """

    def __init__(self, test: str, journal: JournalWriter, monitor: MemoryMonitor | None = None) -> None:
        self._test, self._journal, self._monitor = test, journal, monitor or DefaultMonitor()
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._closed = False
        journal.append(START, test)
        self._started = time.monotonic()

    def track(self, name: str, value: Any, overwrite: bool = False) -> None:
        """Record `value` under `name`.

        Args:
            value: anything JSON holds: None, bool, numbers, text, lists, dicts with text keys; or `Unavailable`.
            overwrite: replace what was tracked under this name before; without it a second value is refused.

        Raises:
            TypeError: JSON cannot hold the value.
            ValueError: the name is taken or reserved, or the number is NaN or infinite. The latter is recorded
                all the same, as text such as "non-finite: nan", so that the history shows what happened.
        """
        _check_name(name)
        refused: NonFiniteError | None = None
        try:
            kept = plain(name, value)
        except NonFiniteError as error:
            kept, refused = error.tagged, error
        self._claim(name, overwrite)
        self._write(name, kept)
        if refused is not None:
            raise refused

    def get_max_mem(self) -> float | Unavailable:
        """Memory in use on the fullest device, in MiB. See `memory.py` for who is asked.

        When nobody can say it is `Unavailable`, and so is every difference with it: tracked, it stays "unavailable".
        """
        reading = self._monitor.read()
        highest = None if reading is None else reading.highest
        return Unavailable(_NOBODY) if highest is None else highest

    def log_max_mem(self, name: str) -> None:
        """Record `get_max_mem()` under `name`, or "unavailable"; the source goes to `_NAME_source`."""
        reading = self._monitor.read()
        highest = reading.highest if reading is not None else None
        self.track(name, UNAVAILABLE if highest is None else highest)
        if reading is not None and highest is not None:
            self._write(f"_{name}_source", plain("source", reading.source))

    def close(self) -> None:
        """The test is over: record `_elapsed`. Values that come later are refused."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._journal.append(END, self._test, elapsed=time.monotonic() - self._started)

    def _claim(self, name: str, overwrite: bool) -> None:
        with self._lock:
            if name in self._names and not overwrite:
                raise ValueError(f"{name!r} was already tracked by this test; fix: another name, or overwrite=True")
            self._names.add(name)

    def _write(self, name: str, value: Any) -> None:
        if self._closed:
            raise RuntimeError(f"{self._test} is over, so {name!r} has no test to belong to")
        self._journal.append(TRACK, self._test, name=name, value=value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a metric's name is text with at least one character, not {name!r}")
    plain("the name", name)
    if name.startswith("_"):
        raise ValueError(f"the name {name!r} starts with _, which marks fields that are recorded automatically")
