"""SOURCE to metrics: a run folder, `metrics.jsonl`, `metrics.json`, TRL's `trainer_state.json`, TensorBoard events.

Promises   missing, unreadable or empty is a `StateError` (exit 3), never an empty answer; our own runs are read by the
           strict reader of `tracking.log`; a stranger's NaN, text and null stay what they are, so that the check that
           uses them can say so; whatever was passed over is in `Metrics.notes`.

    folder    metrics.jsonl, metrics.json, trainer_state.json, checkpoint-N/trainer_state.json, events below it
    *.jsonl   one object a line, with `step`, `global_step` or `_step`
    *.json    metric -> step -> value, metric -> value, an object with `log_history`, or `unit_results.json`
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.harness.files import LONGEST
from surefoot.harness.series import Metrics, Series, is_number
from surefoot.plain_file import read_plain
from surefoot.tracking.log import read_metrics

STEP_KEYS = ("step", "global_step", "_step")
_TAGGED = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
_STEP = re.compile(r"-?[0-9]{1,15}", re.ASCII)
MAX_STEP = 10**15
TORN = object()
_FILES = ("metrics.jsonl", "metrics.json", "trainer_state.json")


def load_metrics(path: Path | str) -> Metrics:
    """Every metric of one source.

    Raises:
        StateError: nothing readable is there, or it holds no point at all.
    """
    path = Path(path)
    # A file that is named may be a link or a pipe, as its caller likes; one that is found in a folder may not.
    named = not path.is_dir()
    metrics = _from_file(path.resolve() if path.is_symlink() else path, named=True) if named else _from_folder(path)
    metrics.source = str(path)
    if not any(len(series) for series in metrics.values()):
        reasons = "; ".join(f"{name}: {why}" for name, why in list(metrics.odd.items())[:3])
        raise _refused(path, f"holds no recorded value{': ' + reasons if reasons else ''}")
    return metrics


def _from_folder(folder: Path) -> Metrics:
    for name in _FILES:
        if (folder / name).is_file():
            return _from_file(folder / name)
    states = sorted(folder.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_number)
    if states:
        metrics = _from_file(states[-1])
        metrics.notes.append(f"read {states[-1].relative_to(folder)}")
        return metrics
    from surefoot.harness.events import event_files, read_events

    if event_files(folder):
        return read_events(folder).metrics()
    raise _refused(folder, f"holds none of {', '.join(_FILES)}, and no TensorBoard events")


def _checkpoint_number(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if _STEP.fullmatch(number) else -1


def _from_file(path: Path, *, named: bool = False) -> Metrics:
    if path.name.startswith("events.out.tfevents"):
        from surefoot.harness.events import read_events

        return read_events(path).metrics()
    if path.suffix == ".jsonl":
        ours = any((path.parent / name).is_file() for name in ("environment.json", "verdict.json"))
        return _from_rows(path, _own_rows(path) if ours else _foreign_rows(path, named))
    content = _json(path, _bytes(path, named))
    if isinstance(content, dict) and isinstance(content.get("log_history"), list):
        return _from_rows(path, enumerate(content["log_history"], 1))
    if isinstance(content, list):
        return _from_rows(path, enumerate(content, 1))
    if isinstance(content, dict):
        return _from_mapping(_of_tests(content) or content)
    raise _refused(path, "is neither metric -> step -> value nor a list of rows")


# -- rows: one object for each logged step -------------------------------------------


def _own_rows(path: Path) -> Iterable[tuple[int, Any]]:
    return enumerate(read_metrics(path), 1)


def _foreign_rows(path: Path, named: bool) -> Iterable[tuple[int, Any]]:
    lines = _bytes(path, named).split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, _json(path, line, number)
        except StateError:
            if number < len(lines) or number == 1:
                raise
            yield number, TORN  # the writer was killed in the middle of its last line


def _from_rows(path: Path, rows: Iterable[tuple[int, Any]]) -> Metrics:
    points: dict[str, dict[int, Any]] = {}
    skipped: list[int] = []
    again: set[str] = set()
    notes: list[str] = []
    for number, row in rows:
        step = _step_of_row(row)
        if row is TORN:
            notes.append(f"row {number} is torn and was left out: the writer was stopped in the middle of it")
        elif step is None:
            skipped.append(number)
        else:
            again |= _add_row(points, step, row)
    if skipped:
        notes.append(f"{len(skipped)} rows without a step were passed over, first row {skipped[0]}")
    if again:
        notes.append(f"some steps were logged twice, the later row counts: {', '.join(sorted(again)[:5])}")
    if skipped and not points:
        raise _refused(path, f"has rows without any of {', '.join(STEP_KEYS)}")
    return Metrics({name: Series(name, series) for name, series in points.items()}, notes=notes)


def _add_row(points: dict[str, dict[int, Any]], step: int, row: Mapping[str, Any]) -> set[str]:
    """Add one row; the names that had this step already. Nested objects are no metrics."""
    again = set()
    for name, value in row.items():
        if name in STEP_KEYS or isinstance(value, dict | list):
            continue
        series = points.setdefault(name, {})
        if step in series:
            again.add(name)
        series[step] = _as_recorded(value)
    return again


def _step_of_row(row: Any) -> int | None:
    if not isinstance(row, dict):
        return None
    for key in STEP_KEYS:
        value: Any = row.get(key)
        if is_number(value) and abs(value) <= MAX_STEP and value == int(value):
            return int(value)
    return None


# -- metric -> step -> value ----------------------------------------------------------


def _from_mapping(content: Mapping[str, Any]) -> Metrics:
    series: dict[str, Series] = {}
    odd: dict[str, str] = {}
    for name, value in content.items():
        if not isinstance(value, dict):
            if isinstance(value, list):
                odd[name] = "it is a list, not step -> value"
            else:
                series[name] = Series(name, {0: _as_recorded(value)}, single=True)
            continue
        strange = [step for step in value if not _STEP.fullmatch(step)]
        if strange:
            odd[name] = f"{strange[0][:40]!r} is not a step"
        elif len({int(step) for step in value}) != len(value):
            odd[name] = "one step is there twice, in two spellings"
        else:
            series[name] = Series(name, {int(step): _as_recorded(point) for step, point in value.items()})
    return Metrics(series, odd=odd)


def _of_tests(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The numbers of a `unit_results.json` as `TEST/NAME`; None when it is another kind of file."""
    metrics = content.get("metrics")
    if "exit_status" not in content or not isinstance(metrics, dict):
        return None
    if not all(isinstance(values, dict) for values in metrics.values()):
        return None
    return {f"{test}/{name}": value for test, values in metrics.items() for name, value in values.items()}


def _as_recorded(value: Any) -> Any:
    """The value as it is; JSON has no NaN, so the three usual spellings of one are read as what they mean."""
    return _TAGGED.get(value, value) if isinstance(value, str) else value


# -- reading ----------------------------------------------------------------------------


def _bytes(path: Path, named: bool) -> bytes:
    try:
        return path.read_bytes() if named else read_plain(path, LONGEST)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error


def _json(path: Path, data: bytes, line: int | None = None) -> Any:
    try:
        return json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        where = "" if line is None else f" line {line}"
        raise _refused(path, f"is not JSON{where}: {str(error)[:200]}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:60]!r} is there twice")
    return found


def _refused(path: Path, what: str) -> StateError:
    return StateError(
        f"{path} {what}",
        "without recorded numbers there is nothing to judge, and that is not a FAIL of the run",
        "give a run folder, metrics.jsonl, metrics.json, trainer_state.json or a folder of TensorBoard events",
    )
