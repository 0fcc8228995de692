"""What a test calls: `tracker.track("loss", 0.5)`.

Promises   a value is on disk when the call returns; what cannot be kept fails here, in the test that did it.
Never      overwrites a value, or another test's, unless asked.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.errors import StateError
from surefoot_harness.series import TAG, Unavailable
from surefoot_harness.system.journal import FramedJournal, SystemFile, first_record, salvage
from surefoot_harness.tracker.memory import DefaultMonitor, MemoryMonitor

# -- What a results file can hold: JSON values, checked and copied at the moment they are tracked -


NON_FINITE = "non-finite: "
"""How NaN and infinity are written down: `"non-finite: nan"`. JSON has no such numbers."""
_DEPTH = 50


class NonFiniteError(ValueError):
    """A tracked number is NaN or infinite; `tagged` is the value with that number spelled out."""

    def __init__(self, message: str, tagged: Any) -> None:
        super().__init__(message)
        self.tagged = tagged


def plain(name: str, value: Any) -> Any:
    """A deep copy of `value` made of JSON's own types.

    Raises:
        TypeError: JSON cannot hold it, and where it lies.
        NonFiniteError: it holds NaN or infinity.
    """
    found: list[str] = []
    copy = _copy(value, name, 0, found)
    if found:
        raise NonFiniteError(f"{found[0]} is not finite; fix: track it only when it is a number", copy)
    return copy


def _copy(value: Any, where: str, depth: int, found: list[str]) -> Any:
    if depth > _DEPTH:
        raise TypeError(f"{where} is nested more than {_DEPTH} deep, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Unavailable):
        return TAG
    if isinstance(value, int):
        return _whole(int(value), where)
    if isinstance(value, float):
        return _number(float(value), where, found)
    if isinstance(value, str):
        return _text(str(value), where)
    if isinstance(value, list | tuple):
        return [_copy(item, f"{where}[{i}]", depth + 1, found) for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(k, where): _copy(v, f"{where}[{k!r}]", depth + 1, found) for k, v in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold; "
        "fix: pass a number, text, list or dict, for example float(x) or x.tolist()"
    )


def _whole(value: int, where: str) -> int:
    if value.bit_length() > 1024:
        raise TypeError(f"{where} is a whole number of {value.bit_length()} bits; fix: pass float(x) or str(x)")
    return value


def _number(value: float, where: str, found: list[str]) -> float | str:
    if math.isfinite(value):
        return value
    found.append(f"{where} = {value}")
    return f"{NON_FINITE}{value}"


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TypeError(f"{where} holds half a character at position {error.start}, which JSON cannot hold") from error
    return value


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r} of type {type(key).__name__}; JSON's keys are text: use str(key)")
    return _text(str(key), f"a key of {where}")


# -- What a session tracked so far, on disk after every call: a killed process loses at most what it was writing
# <results>/.unit_results_journal/<session>/
# lock              held by the session's main process while it lives
# header.json       what is known at the start: commit, dirty, host, packages
# <process>.journal one framed record per event, one file per process, so that workers never share a file
#
# Owns       those files, and turning them back into metrics.
# Promises   a torn last record is expected, any other damage is named and what lies around it is kept; files of format
#            1 (<process>.jsonl, one JSON object per line) are read as well.
# Never      decides where results go: that is `results.py`.


START, TRACK, END = "start", "track", "end"
KIND, FORMAT = "tracked", 2
SUFFIX, OLD_SUFFIX = ".journal", ".jsonl"


class JournalWriter:
    """Appends events of this process. Opened on the first one, so a session without trackers leaves nothing.

    A fork that goes on tracking gets a file of its own, `<process>-<its number>.journal`.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._process = file, os.getpid()
        self._journal: FramedJournal | None = None
        self._lock = threading.Lock()

    def append(self, event: str, test: str, **values: Any) -> None:
        """One event as one record; it outlives this process when the call returns."""
        with self._lock:
            if self._process != os.getpid():
                self._process = os.getpid()
                self._file = self._file.with_name(f"{self._file.stem}-{self._process}{SUFFIX}")
                self._journal = None  # the parent's, whose file it alone writes to
            if self._journal is None:
                self._journal = _begun(self._file)
            self._journal.append({"event": event, "test": test, **values}, durable=False)

    def close(self) -> None:
        """Let go of the file; a later event opens it again."""
        with self._lock:
            if self._journal is not None and self._process == os.getpid():
                self._journal.close()
            self._journal = None


def _begun(path: Path) -> FramedJournal:
    """The journal at `path`, made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = SystemFile(path, create=True)
    try:
        if first_record(file, str(path)) is None:
            return FramedJournal.begin(file, {"kind": KIND, "format": FORMAT}, str(path))
        return FramedJournal(file, str(path))
    except BaseException:
        file.close()
        raise


@dataclass(slots=True)
class SessionJournal:
    """Everything that the processes of one session wrote."""

    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Node id to tracked values; `_elapsed` when the test ended, `_unfinished` when it did not."""
    problems: list[str] = field(default_factory=list)
    """Records that could not be read, each with its file and place."""


def read_journals(folder: Path) -> SessionJournal:
    """Merge the journals of one session, a fork's behind that of the process it came from."""
    journal = SessionJournal()
    for file in sorted(folder.iterdir(), key=lambda file: file.stem):
        if file.suffix == SUFFIX:
            _read_frames(file, journal)
        elif file.suffix == OLD_SUFFIX:
            _read_lines(file, journal)
    return journal


def _read_frames(file: Path, journal: SessionJournal) -> None:
    if not file.stat().st_size:
        return  # being made, or its process died before it said anything
    try:
        found = salvage(file)
    except StateError as error:
        journal.problems.append(f"{file.name}: it cannot be read, {error.why}")
        return
    for entry in found.records:
        if entry.record.get("kind") != KIND:
            _apply(entry.record, f"{file.name}, record {entry.number}", journal)
        elif entry.record.get("format") != FORMAT:
            written = entry.record.get("format")
            journal.problems.append(f"{file.name}: it has format {written}, and this version reads format {FORMAT}")
            return
    journal.problems += [f"{file.name}: {problem}; what they said is lost" for problem in found.problems]


def _read_lines(file: Path, journal: SessionJournal) -> None:
    """Format 1: one JSON object per line, and the last one without its end if the process died."""
    whole, _, torn = file.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.splitlines(), 1):
        _apply(line, f"{file.name}, line {number}", journal)
    if torn:
        lost = f"{file.name}: the last line is torn after {len(torn)} bytes; what it said is lost"
        journal.problems.append(lost)


def _apply(told: bytes | dict[str, Any], where: str, journal: SessionJournal) -> None:
    try:
        _event(json.loads(told) if isinstance(told, bytes) else told, journal)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        journal.problems.append(f"{where}: {error}")


def _event(record: dict[str, Any], journal: SessionJournal) -> None:
    event, test = record["event"], record["test"]
    if event == START:
        again = journal.metrics.get(test)  # a test that is run again starts over; how often is kept
        journal.metrics[test] = {"_unfinished": True} | ({"_runs": again.get("_runs", 1) + 1} if again else {})
        return
    values = journal.metrics.setdefault(test, {"_unfinished": True})
    if event == TRACK:
        values[record["name"]] = record["value"]
    elif event == END:
        values.pop("_unfinished", None)
        values["_elapsed"] = record["elapsed"]
    else:
        raise ValueError(f"unknown event {event!r}")


# -- What a test calls: `tracker.track("loss", 0.5)` ----------------------------------------------


UNAVAILABLE = TAG
"""What is recorded when nobody can say how much memory is in use."""
_NOBODY = "no device of which anybody can say how much memory is in use"


class MetricTracker:
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
