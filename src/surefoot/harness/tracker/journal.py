"""What a session tracked so far, on disk after every call: a killed process loses at most the line it was writing.

    <results>/.unit_results_journal/<session>/
        lock            held by the session's main process while it lives
        header.json     what is known at the start: commit, dirty, host, packages
        <process>.jsonl one line per event, one file per process, so that workers never share a file

Owns       those files, and turning them back into metrics.
Promises   appending is one write call; a torn last line is expected, any other damage is named.
Never      decides where results go: that is `results.py`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START, TRACK, END = "start", "track", "end"


class JournalWriter:
    """Appends events of this process. Opened on the first one, so a session without trackers leaves nothing."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def append(self, event: str, test: str, **values: Any) -> None:
        """One event as one line."""
        line = json.dumps({"event": event, "test": test, **values}, allow_nan=False) + "\n"
        with self._lock:
            if self._descriptor is None:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            data = line.encode()
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(f"{self._file}: only {written} of {len(data)} bytes could be written; is the disk full?")

    def close(self) -> None:
        """Let go of the file; a later event opens it again."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


@dataclass(slots=True)
class Journal:
    """Everything that the processes of one session wrote."""

    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Node id to tracked values; `_elapsed` when the test ended, `_unfinished` when it did not."""
    problems: list[str] = field(default_factory=list)
    """Lines that could not be read, each with its file and number."""


def read_journals(folder: Path) -> Journal:
    """Merge the journals of one session."""
    journal = Journal()
    for file in sorted(folder.glob("*.jsonl")):
        whole, _, torn = file.read_bytes().rpartition(b"\n")
        _apply(whole.splitlines(), file.name, journal)
        if torn:  # the line that was being written when the process died
            lost = f"{file.name}: the last line is torn after {len(torn)} bytes; what it said is lost"
            journal.problems.append(lost)
    return journal


def _apply(lines: Iterable[bytes], name: str, journal: Journal) -> None:
    for number, line in enumerate(lines, 1):
        try:
            _event(json.loads(line), journal)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            journal.problems.append(f"{name}, line {number}: {error}")


def _event(record: dict[str, Any], journal: Journal) -> None:
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
