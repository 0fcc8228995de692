"""SOURCE to metrics: a run folder, `metrics.jsonl`, `metrics.json`, TRL's `trainer_state.json`, TensorBoard events.

Promises   missing, unreadable or empty is a `StateError` (exit 3), never an empty answer; our own runs are read by the
           strict reader of `tracking.metrics`; a stranger's NaN, text and null stay what they are, so that the check
           that uses them can say so; whatever was passed over is in `Metrics.notes`.

    folder    metrics.jsonl, metrics.json, trainer_state.json, checkpoint-N/trainer_state.json, events below it
    *.jsonl   one object a line, with `step`, `global_step` or `_step`
    *.json    metric -> step -> value, metric -> value, an object with `log_history`, or `unit_results.json`
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import LONGEST, write_json
from surefoot_harness.metrics_file import read_metrics
from surefoot_harness.series import Metrics, Series, is_number
from surefoot_harness.system.files import read_plain
from surefoot_harness.system.json import parse

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

    if event_files(folder):
        return read_events(folder).metrics()
    raise _refused(folder, f"holds none of {', '.join(_FILES)}, and no TensorBoard events")


def _checkpoint_number(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if _STEP.fullmatch(number) else -1


def _from_file(path: Path, *, named: bool = False) -> Metrics:
    if path.name.startswith("events.out.tfevents"):
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
        return parse(data, constants=True)  # other trainers write NaN; what a check makes of it is its own affair
    except ValueError as error:
        where = "" if line is None else f" line {line}"
        raise _refused(path, f"is not JSON{where}: {str(error)[:200]}") from error


def _refused(path: Path, what: str) -> StateError:
    return StateError(
        f"{path} {what}",
        "without recorded numbers there is nothing to judge, and that is not a FAIL of the run",
        "give a run folder, metrics.jsonl, metrics.json, trainer_state.json or a folder of TensorBoard events",
    )


# -- TensorBoard event files to metrics: all of a folder, merged by the time of writing -----------
# Owns       the record framing (length, checksum, event) and which of two values for one step counts.
# Promises   order by the events' own clock, never by file times, which copying destroys; the later event wins; two
# files
# that disagree are named; of a torn file, as a killed writer leaves it, every whole event is used, and the
# loss is said.
#
# The only file that imports tensorboard.


_HEADER = 12  # 8 bytes length, 4 bytes checksum of the length
_FOOTER = 4  # checksum of the event
_MOST_CHECKED = 1 << 16
"""Longer events are images or text; their checksum would take longer than all the numbers together."""
_TENSOR_FORMS = {1: "f", 2: "d", 3: "i", 9: "q"}
"""TensorFlow's numbers for float, double, int32, int64, as struct letters."""


@dataclass(frozen=True, slots=True)
class Logged:
    """One scalar as it was written."""

    value: float
    wall_time: float
    file: Path


@dataclass
class Events:
    """What a folder of event files says."""

    folder: Path
    points: dict[str, dict[int, Logged]] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metrics(self) -> Metrics:
        """The merged scalars."""
        series = {tag: Series(tag, {s: p.value for s, p in points.items()}) for tag, points in self.points.items()}
        notes = list(self.notes)
        if self.conflicts:
            notes.append(
                f"{len(self.conflicts)} steps are in two files with two values, the later counts: {self.conflicts[0]}"
            )
        return Metrics({tag: series[tag] for tag in sorted(series)}, notes=notes)

    def add(self, tag: str, step: int, new: Logged) -> None:
        """Keep the later of two values; remember where two files disagree."""
        old = self.points.setdefault(tag, {}).get(step)
        if old is not None and old.file != new.file and not _same(old.value, new.value):
            names = sorted(_shown(path, self.folder) for path in (old.file, new.file))
            self.conflicts.append(f"{tag} step {step} in {names[0]} and {names[1]}")
        if old is None or new.wall_time >= old.wall_time:
            self.points[tag][step] = new


def event_files(path: Path) -> list[Path]:
    """Every event file at or below `path`, sorted by name."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.rglob("events.out.tfevents*") if each.is_file() and not each.is_symlink())


def read_events(path: Path) -> Events:
    """All scalars at or below `path`; `StateError` when there is no event file."""
    files = event_files(path)
    if not files:
        raise StateError(
            f"{path} holds no TensorBoard event files", "there is nothing to read", "give the folder that was logged to"
        )
    events = Events(path if path.is_dir() else path.parent)
    for file in files:
        for wall_time, step, tag, value in _scalars(file, events.notes):
            events.add(tag, step, Logged(value, wall_time, file))
    return events


def dump(folder: Path, output: Path, *, error_on_conflicts: bool = False, required: tuple[str, ...] = ()) -> list[str]:
    """Write the merged scalars as metric -> step -> value; a summary line for each metric, then the notes."""
    events = read_events(folder)
    metrics = events.metrics()
    if error_on_conflicts and events.conflicts:
        raise StateError(
            f"{len(events.conflicts)} steps have two values: {'; '.join(events.conflicts[:3])}",
            "two files disagree on what was measured",
            "remove one of them, or leave out --error-on-conflicts: the later event counts",
        )
    missing = [prefix for prefix in required if not any(tag.startswith(prefix) for tag in metrics)]
    if missing or not metrics:
        what = f"tags that begin with {', '.join(missing)}" if missing else "scalars"
        raise StateError(f"{folder} holds no {what}", f"it holds {len(metrics)} metrics", "check what the run logs")
    content = {tag: {str(s): _json_number(v) for s, v in series.items()} for tag, series in metrics.items()}
    try:
        write_json(output, content)
    except OSError as error:
        raise StateError(f"{output} cannot be written: {error.strerror}", "-o names it", "choose another") from error
    return [_summary(series) for series in metrics.values()] + metrics.notes


def _summary(series: Series) -> str:
    values = [value for value in series.values() if math.isfinite(value)]
    odd = len(series) - len(values)
    spread = (
        f"min {min(values):.6g}, max {max(values):.6g}, last {series[series.steps[-1]]:.6g}"
        if values
        else "no finite value"
    )
    steps = f"steps {series.steps[0]} to {series.steps[-1]}"
    return f"{series.name}: {len(series)} points, {steps}, {spread}{f', {odd} not finite' if odd else ''}"


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _shown(path: Path, folder: Path) -> str:
    return str(path.relative_to(folder)) if path.is_relative_to(folder) else path.name


# -- one file ---------------------------------------------------------------------------


def _scalars(file: Path, notes: list[str]) -> Iterator[tuple[float, int, str, float]]:
    event_type = _event_type()
    for record in _records(file, notes):
        try:
            event = event_type.FromString(record)
        except Exception as error:  # protobuf's DecodeError lies elsewhere in every version
            raise _damaged(file, f"an event cannot be decoded: {error}") from error
        for value in event.summary.value:
            number = _scalar(value)
            if number is not None:
                yield event.wall_time, event.step, value.tag, number


def _records(file: Path, notes: list[str]) -> Iterator[bytes]:
    """The framed events of one file; stops at a torn end, refuses damage in the middle."""
    checksum = _checksum()
    try:
        data = read_plain(file.resolve(), LONGEST)
    except OSError as error:
        raise _damaged(file, f"it cannot be read: {error.strerror}") from error
    at = 0
    while at < len(data):
        whole = len(data) >= at + _HEADER
        size = struct.unpack_from("<Q", data, at)[0] if whole else 0
        if whole and checksum(data[at : at + 8]) != struct.unpack_from("<I", data, at + 8)[0]:
            raise _damaged(file, f"the length at byte {at} does not match its checksum")
        end = at + _HEADER + size + _FOOTER
        if not whole or end > len(data):
            notes.append(
                f"{file.name} ends in the middle of an event: the {len(data) - at} bytes at its end are left out"
            )
            return
        record = data[at + _HEADER : end - _FOOTER]
        if size <= _MOST_CHECKED and checksum(record) != struct.unpack_from("<I", data, end - _FOOTER)[0]:
            raise _damaged(file, f"the event at byte {at} does not match its checksum")
        yield record
        at = end


def _scalar(value: Any) -> float | None:
    """The number in a summary value: written plainly, or as a tensor of one element; None for images and the like."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return float(value.simple_value)
    if kind != "tensor" or value.metadata.plugin_data.plugin_name not in ("", "scalars"):
        return None
    tensor = value.tensor
    form = _TENSOR_FORMS.get(tensor.dtype)
    if form is None or any(dim.size != 1 for dim in tensor.tensor_shape.dim):
        return None
    if tensor.tensor_content:
        content = bytes(tensor.tensor_content)
        return float(struct.unpack(f"<{form}", content)[0]) if len(content) == struct.calcsize(form) else None
    fields = {"f": tensor.float_val, "d": tensor.double_val, "i": tensor.int_val, "q": tensor.int64_val}
    return float(fields[form][0]) if len(fields[form]) == 1 else None


def _damaged(file: Path, why: str) -> StateError:
    return StateError(
        f"{file} is damaged: {why}", "a judgement over damaged numbers is no judgement", "restore the file or rerun"
    )


def _event_type() -> Any:
    try:
        from tensorboard.compat.proto.event_pb2 import Event
    except ImportError as error:
        raise _not_installed() from error
    return Event


def _checksum() -> Any:
    try:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
    except ImportError as error:
        raise _not_installed() from error
    return masked_crc32c


def _not_installed() -> ConfigError:
    return ConfigError(
        "tensorboard is not installed", "it defines the format of event files", "pip install tensorboard"
    )
