"""What the report knows of a run: read from its folder, bounded, with a note for everything that is not there.

Promises   a torn, odd or missing file costs its own part of the page and nothing else; reading is
           bounded.
Never      fills a gap: what could not be read is listed in `missing`.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.system.files import bounded_lines, linked, open_plain
from surefoot.tracking import live
from surefoot.tracking.live import read_bounded
from surefoot.tracking.metrics import EVALUATION, LINE_BYTES, headlines, kind_of

MAX_ROWS = 4000
"""Training steps that are looked at; of a longer run every k-th is, and all its evaluations."""
METRICS_BYTES = 64_000_000
"""Of those that are looked at: what a hundred thousand evaluations do not reach."""
SMALL = 4_000_000
ROLLOUT_BYTES = 8_000_000

Row = dict[str, float]
Point = tuple[float, float]


@dataclass
class RunData:
    """One run, as far as it could be read."""

    root: Path
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    verdict: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    train: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    every: int = 1
    """Of the training steps, every so many-th was read."""
    windows: list[live.Window] = field(default_factory=list)
    rollouts: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """(step, rollouts) of the first and the last step that were kept."""
    missing: list[str] = field(default_factory=list)

    def series(self, name: str) -> list[Point]:
        """(step, value) of one metric over training steps, or evaluations for names that only those have."""
        rows = self.evals if name.startswith(EVALUATION) or name == "timing/eval" else self.train
        return [(row["step"], row[name]) for row in rows if name in row]

    def sets(self) -> list[str]:
        """The headline metric of each evaluation set, in the order of the log."""
        return headlines(name for row in self.evals for name in row)

    def names(self, prefix: str) -> list[str]:
        """The training metrics with this prefix, in order."""
        return sorted({name for row in self.train for name in row if name.startswith(prefix)})


def read_run(root: Path) -> RunData:
    """Everything the report shows; only a folder that is no run is an error."""
    if not (root / "config.toml").is_file():
        raise StateError(
            f"{root} is not a run folder",
            "it has no config.toml" if root.is_dir() else "it is a file" if root.exists() else "it does not exist",
            "give the folder that `surefoot train` named at its end",
        )
    data = RunData(root)
    data.config_text = (_bytes(data, "config.toml") or b"").decode("utf-8", errors="replace")
    try:
        data.config = tomllib.loads(data.config_text)
    except (ValueError, RecursionError):
        data.missing.append("config.toml cannot be parsed")
    data.verdict = _object(data, "verdict.json", "the run has not ended, or was killed")
    data.environment = _object(data, "environment.json", "versions and machine are unknown")
    data.status = _object(data, live.STATUS_FILE, "")
    _read_metrics(data)
    _read_timeline(data)
    _read_rollouts(data)
    return data


def _bytes(data: RunData, name: str, limit: int = SMALL) -> bytes | None:
    try:
        return read_bounded(data.root / name, limit)
    except StateError as error:
        data.missing.append(error.what)
        return b""


def _object(data: RunData, name: str, absent: str) -> dict[str, Any]:
    text = _bytes(data, name)
    if text is None:
        if absent:
            data.missing.append(f"{name} is not there: {absent}")
        return {}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        data.missing.append(f"{name} cannot be read")
        return {}
    return found


def _read_metrics(data: RunData) -> None:
    path, odd, left = data.root / "metrics.jsonl", 0, METRICS_BYTES
    try:
        with open_plain(path) as file:
            size, first = os.fstat(file.fileno()).st_size, len(file.readline(LINE_BYTES)) or 1
            data.every = max(1, math.ceil(size / first / MAX_ROWS))
            file.seek(0)
            for number, line in enumerate(bounded_lines(file, LINE_BYTES)):
                if number % data.every and not (b'"eval_' in line or b'"eval/' in line):
                    continue
                left -= len(line)
                if left < 0:
                    data.missing.append(f"metrics.jsonl: lines from {number + 1} on are left out, it is too long")
                    break
                odd += not _take(data, line)
    except FileNotFoundError:
        data.missing.append("metrics.jsonl is not there: no curves")
    except OSError as error:
        data.missing.append(f"metrics.jsonl cannot be read: {error.strerror}")
    if odd:
        data.missing.append(f"metrics.jsonl: {odd} lines cannot be read (a killed run may leave a torn last one)")


def _take(data: RunData, line: bytes) -> bool:
    """Add one line; whether it could be."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict) or not _is_number(row.get("step")):
        return False
    numbers = {str(name): float(value) for name, value in row.items() if _is_number(value)}
    (data.evals if kind_of(numbers) == "eval" else data.train).append(numbers)
    return len(numbers) == len(row)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _read_timeline(data: RunData) -> None:
    text = _bytes(data, live.TIMELINE_FILE)
    if text is None:
        data.missing.append(f"{live.TIMELINE_FILE} is not there: no step on the clock")
        return
    data.windows, odd = live.read_timeline(text)
    if odd:
        data.missing.append(f"{live.TIMELINE_FILE}: {odd} lines cannot be read")


def _read_rollouts(data: RunData) -> None:
    found = {}
    if linked(data.root, "rollouts"):
        data.missing.append("rollouts/ is a link, which leads out of the run folder: it was not looked at")
        return
    for path in (data.root / "rollouts").glob("step_*.jsonl"):
        if match := re.fullmatch(r"step_(\d{1,12})\.jsonl", path.name):
            found[int(match[1])] = path
    if not found:
        data.missing.append("rollouts/ is empty: save_rollouts was off, or no step was made")
    for step in sorted({min(found), max(found)} if found else ()):
        rows, odd = _rollouts_of(found[step])
        data.rollouts.append((step, rows))
        if odd:
            data.missing.append(f"rollouts/{found[step].name}: {odd} lines cannot be read")


def _rollouts_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rollouts of one step, up to a limit of bytes; a line that goes over it is not counted as odd."""
    rows, odd = [], 0
    try:
        with open_plain(path) as file:
            text = file.read(ROLLOUT_BYTES)
            whole = not file.read(1)
    except OSError:
        return [], 1
    lines = text.split(b"\n")
    for line in lines if whole else lines[:-1]:
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, Mapping):
            rows.append(dict(row))
        else:
            odd += 1
    return rows, odd
