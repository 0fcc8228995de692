"""A tracked metric over the history of test sessions, and whether its newest value moved.

Rule       the newest value is compared with the median of the (up to) K values before it. It is flagged when it is
           further away than limit x scale, where scale is 1.4826 x the median absolute deviation of those n values
           and limit is 2.6 + 31 / n. With fewer than 8 values before it there is no verdict.
Promises   for steady normal noise the flag comes up in at most 1 of 100 looks; a step stays flagged until the new
           level fills half of the window. What is missing, not a number or not readable is never "no change".
Never      writes anything.

The scale of a few values is itself uncertain, which is why the limit shrinks with n: 6.5 at 8 values, 4.2 at 20.
"""

from __future__ import annotations

import difflib
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import read_json
from surefoot_harness.series import TAG, is_unavailable
from surefoot_harness.system.text import sparkline
from surefoot_harness.tables import table
from surefoot_harness.verdict import Verdict

NEEDED, DEFAULT_LAST = 8, 20
_MISSING = object()


@dataclass(frozen=True, slots=True)
class TrendPoint:
    """The metric in one session; `value` is None when it is missing or not a number, and `shown` says which."""

    start_time: str
    commit: str | None
    dirty: bool | None
    exit_status: int | str | None
    file: str
    value: float | None
    shown: str
    flag: str = ""
    """Why this value is a change against those before it; empty when it is not."""


@dataclass(frozen=True, slots=True)
class Trend:
    """One metric of one test through time, oldest first."""

    test: str
    metric: str
    points: tuple[TrendPoint, ...]
    status: Verdict
    """PASS: no change. FAIL: the newest value is flagged. INCOMPLETE: too little to judge by."""
    message: str

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        names = ("start_time", "commit", "dirty", "exit_status", "file", "value", "shown", "flag")
        return {
            "test": self.test,
            "metric": self.metric,
            "status": str(self.status),
            "message": self.message,
            "points": [{name: getattr(point, name) for name in names} for point in self.points],
        }

    def as_text(self, width: int | None = None) -> str:
        """A table, the sparkline and the verdict."""
        rows = [
            [point.start_time, (point.commit or "-")[:10], _yes_no(point.dirty), str(point.exit_status),
             point.shown, point.flag]
            for point in self.points
        ]  # fmt: skip
        columns = ["Start time", "Commit", "Dirty", "Exit", "Value", "Flag"]
        bars = sparkline([point.value for point in self.points], 60)
        body = table(f"{self.test}  {self.metric}", columns, rows, width)
        return f"{body}\n{bars}\n{self.status}  {self.message}"


@dataclass(frozen=True, slots=True)
class SessionHistory:
    """All sessions of a folder, oldest first, and the files that could not be read."""

    sessions: tuple[dict[str, Any], ...]
    unreadable: tuple[str, ...]


def read_history(folder: Path) -> SessionHistory:
    """Read every `*.json` of a history folder; one that cannot be read is named, not skipped."""
    if not folder.is_dir():
        raise StateError(
            f"{folder} is not a folder",
            "the history of test sessions is kept there",
            "run pytest with a test that uses `tracker`, or say --folder",
        )
    sessions, unreadable = [], []
    for file in sorted(folder.glob("*.json")):
        try:
            sessions.append(_checked(read_json(file), file))
        except StateError as error:
            unreadable.append(error.what)
    sessions.sort(key=lambda session: (session["when"], session["file"]))
    return SessionHistory(tuple(sessions), tuple(unreadable))


def trends(history: SessionHistory, metric: str, test: str | None = None, last: int = DEFAULT_LAST) -> list[Trend]:
    """The metric in every test that has it, or in one.

    Args:
        test: a key such as `test_policy::test_loss`, or a node id.
        last: K, how many values the newest one is compared with.
    """
    if last < NEEDED:
        raise ConfigError(
            f"--last {last} is too few", f"the rule needs {NEEDED} values to know the noise", "ask for more"
        )
    found = sorted({name for session in history.sessions for name in _tests_with(session, metric, test)})
    if not found:
        raise _nothing(history, metric, test)
    return [_trend(name, metric, history, last) for name in found]


def flag(value: float, before: Sequence[float]) -> str:
    """Why `value` is a change against `before`, or an empty text. The rule is at the top of this file."""
    if len(before) < NEEDED:
        return ""
    middle = statistics.median(before)
    scale = 1.4826 * statistics.median(abs(earlier - middle) for earlier in before)
    if scale == 0:  # more than half are equal: counts, mostly. The mean deviation still sees the others.
        scale = 1.2533 * statistics.fmean(abs(earlier - middle) for earlier in before)
    room = max(limit(len(before)) * scale, 1e-9 * abs(middle))
    if not math.isfinite(middle) or not math.isfinite(room):
        return "too large to compare"
    if abs(value - middle) <= room:
        return ""
    return f"{'above' if value > middle else 'below'} {_number(middle)} by more than {_number(room)}"


def limit(count: int) -> float:
    """How many scales away is a change, when the scale comes from `count` values."""
    return 2.6 + 31 / count


def _trend(name: str, metric: str, history: SessionHistory, last: int) -> Trend:
    points: list[TrendPoint] = []
    aliases = {key for session in history.sessions for key, node_id in session["node_ids"].items() if node_id == name}
    for session in history.sessions:
        for key, values in session["metrics"].items():
            if _name(session, key) == name or (key in aliases and key not in session["node_ids"]):
                before = [point.value for point in points if point.value is not None][-last:]
                points.append(_point(session, values, metric, before))
    newest = points[-1]
    earlier = len([point for point in points[:-1] if point.value is not None])
    if newest.shown == TAG:
        status, message = Verdict.INCOMPLETE, "the newest value is unavailable: nobody measured it"
    elif newest.flag:
        status, message = Verdict.FAIL, f"the newest value is {newest.flag}"
    elif history.unreadable:
        status, message = Verdict.INCOMPLETE, f"{len(history.unreadable)} files of the history cannot be read"
    elif earlier < NEEDED:
        status, message = Verdict.INCOMPLETE, f"{earlier} earlier values; {NEEDED} are needed to know the noise"
    else:
        status, message = Verdict.PASS, f"no change against the last {min(earlier, last)} values"
    return Trend(name, metric, tuple(points), status, message)


def _point(session: dict[str, Any], values: dict[str, Any], metric: str, before: Sequence[float]) -> TrendPoint:
    raw = values.get(metric, _MISSING)
    number = float(raw) if isinstance(raw, int | float) and not isinstance(raw, bool) else None
    if number is not None and not math.isfinite(number):
        number = None
    if number is None:
        shown = "missing" if raw is _MISSING else str(raw)
        why = "missing" if raw is _MISSING else "" if is_unavailable(raw) else "not a number"
        return TrendPoint(*_about(session), None, shown, why)
    return TrendPoint(*_about(session), number, _number(number), flag(number, before))


def _about(session: dict[str, Any]) -> tuple[str, str | None, bool | None, int | str | None, str]:
    names = ("start_time", "git_commit", "dirty", "exit_status", "file")
    start, commit, dirty, status, file = (session.get(name) for name in names)
    return str(start), commit, dirty, status, str(file)


def _name(session: dict[str, Any], key: str) -> str:
    """A test's node id where it is known: its key can be longer in one session than in another."""
    return str(session["node_ids"].get(key, key))


def _tests_with(session: dict[str, Any], metric: str, test: str | None) -> Iterator[str]:
    for key, values in session["metrics"].items():
        if metric in values and (test is None or test in (key, _name(session, key))):
            yield _name(session, key)


def _checked(session: Any, file: Path) -> dict[str, Any]:
    if not isinstance(session, dict) or not isinstance(session.get("start_time"), str):
        raise StateError(f"{file} is no results file: it has no start_time", "", "")
    metrics = session.get("metrics")
    if not isinstance(metrics, dict) or not all(isinstance(values, dict) for values in metrics.values()):
        raise StateError(f"{file} is no results file: its metrics are not a table of tables", "", "")
    ids = session.get("node_ids")
    known = {"file": file.name, "when": _when(session, file), "node_ids": ids if isinstance(ids, dict) else {}}
    return {**session, **known}


def _when(session: dict[str, Any], file: Path) -> float:
    """Seconds since the epoch: machines in two time zones may share a history."""
    try:
        return datetime.fromisoformat(str(session.get("started_at") or session["start_time"])).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise StateError(f"{file} is no results file: its start time is {session['start_time']!r}", "", "") from error


def _nothing(history: SessionHistory, metric: str, test: str | None) -> StateError:
    names = {name for session in history.sessions for values in session["metrics"].values() for name in values}
    near = difflib.get_close_matches(metric, sorted(names), 5)
    where = f" in {test}" if test else ""
    damaged = f"; {len(history.unreadable)} could not be read" if history.unreadable else ""
    return StateError(
        f"no session has a metric {metric}{where} ({len(history.sessions)} sessions{damaged})",
        "there is nothing to show a trend of",
        f"did you mean {', '.join(near)}?" if near else f"tracked are: {', '.join(sorted(names)[:20]) or 'none'}",
    )


def _number(value: float) -> str:
    return f"{value:.6g}"


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[value]
