"""One reward call as JSON, and back: texts and columns travel as data, never as objects that run code.

Owns       the form of a call on its way to a worker.
Promises   what comes out is equal to what went in, of the same types, and fresh for every call; a value that several
           rows share is sent once, and shared again on the other side; what has no JSON form (an image, an object of
           the user's own class) reaches workers by fork, with the tasks that were known when they were forked, and is
           copied for every call where it can be copied; anything else is refused by name.
Never      pickles, or makes an object that is not in the list below.

    plain          None, bool, int, float, str, list, dict with text keys
    tagged         tuple, set, frozenset, bytes, other dicts, dates and times, Decimal, Fraction, complex, UUID, paths,
                   numbers and arrays of numpy

Read next: `pool.py` and `worker.py`, the two ends.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Any, NamedTuple
from uuid import UUID

TAG = "$"
_INT = 1 << 63
"""Beyond this, whole numbers are sent in hexadecimal digits: long decimal ones are refused by Python itself."""

Forked = Mapping[str, Mapping[str, Any]]
"""Task id -> column (or `prompts`) -> what has no JSON form. Known before workers are forked, the same on both ends."""


class NotJson(TypeError):  # noqa: N818 - the name says what a value is
    """A value that has no form as data."""


class RewardCall(NamedTuple):
    """One call of a reward function."""

    function: str
    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]
    progress: dict[str, int] | None = None
    """What `trainer_state` is made of; None when the function is not handed one."""


def write_call(call: RewardCall, task: str = "", forked: Forked | None = None) -> bytes:
    """The call as bytes; a column that cannot be sent raises `NotJson` with its name.

    Args:
        task: whose columns these are, for those that workers have by fork.

    Example:
        >>> call = Call("f", ["1+1="], ["2"], {"answer": [("2", b"x")]})
        >>> read_call(write_call(call)) == call
        True
    """
    values: list[Any] = []
    places: dict[int, int] = {}
    known = (forked or {}).get(task, {})

    def place(name: str, value: Any) -> int:
        if id(value) not in places:
            places[id(value)] = len(values)
            if name in known:
                values.append({TAG: "forked", "v": [task, name]})
            else:
                values.append(_pack_named(name, value))
        return places[id(value)]

    body = {
        "function": call.function,
        "prompts": [place("prompts", value) for value in call.prompts],
        "completions": [place("completions", value) for value in call.completions],
        "columns": {name: [place(name, value) for value in column] for name, column in call.columns.items()},
        "values": values,
        "progress": call.progress,
    }
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


def read_call(frame: bytes, forked: Forked | None = None) -> RewardCall:
    """Back from bytes; what is not of this form is a `ValueError`."""
    body = json.loads(frame)
    if type(body) is not dict or body.keys() != {"function", "prompts", "completions", "columns", "values", "progress"}:
        raise ValueError("not a reward call")
    progress = body["progress"]
    if progress is not None and not (type(progress) is dict and all(type(n) is int for n in progress.values())):
        raise ValueError("not the progress of a run")
    values = [_unpack(value, forked or {}) for value in body["values"]]

    def rows(indices: Any) -> list[Any]:
        return [values[index] for index in indices]

    columns = {str(name): rows(column) for name, column in body["columns"].items()}
    return RewardCall(str(body["function"]), rows(body["prompts"]), rows(body["completions"]), columns, progress)


def by_fork(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Those of these columns that have no form as data."""
    found = {}
    for name, value in columns.items():
        try:
            _pack(value)
        except (NotJson, RecursionError):
            found[name] = value
    return found


def _pack_named(name: str, value: Any) -> Any:
    try:
        return _pack(value)
    except RecursionError as error:
        raise NotJson(f"{name} is nested too deeply") from error
    except NotJson as error:
        raise NotJson(f"{name} holds {error}") from error


def _pack(value: Any) -> Any:
    """JSON data; only exact types, so that what comes back is of the same."""
    kind = type(value)
    if value is None or kind in (str, bool):
        return value
    if kind is int:
        return value if -_INT < value < _INT else {TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if kind is list:
        return [_pack(item) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: _pack(item) for key, item in value.items()}
        return {TAG: "dict", "v": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if kind in _PACKED:
        name, pack = _PACKED[kind]
        return {TAG: name, "v": pack(value)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject and not value.dtype.names:
        data = [value.dtype.str, list(value.shape), _text(value.tobytes())]
        return {TAG: "numpy", "v": data, "scalar": type(value).__name__ != "ndarray"}
    raise NotJson(f"a {kind.__module__}.{kind.__qualname__}")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _items(value: Any) -> list[Any]:
    return [_pack(item) for item in value]


_PACKED: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("tuple", _items), set: ("set", _items), frozenset: ("frozenset", _items),
    bytes: ("bytes", _text), bytearray: ("bytearray", _text),
    complex: ("complex", lambda v: [repr(v.real), repr(v.imag)]),
    datetime: ("datetime", lambda v: _plain_time(v)), date: ("date", date.isoformat),
    time: ("time", lambda v: _plain_time(v)),
    timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    Decimal: ("decimal", str), Fraction: ("fraction", str), UUID: ("uuid", str), PosixPath: ("path", str),
}  # fmt: skip


def _plain_time(value: datetime | time) -> list[Any]:
    """A zone with rules of its own is more than its text says."""
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise NotJson(f"a time in the zone {value.tzinfo!r}")
    return [value.isoformat(), value.fold]


def _unpack(value: Any, forked: Forked) -> Any:
    if type(value) is list:
        return [_unpack(item, forked) for item in value]
    if type(value) is not dict:
        return value
    if TAG not in value:
        return {key: _unpack(item, forked) for key, item in value.items()}
    name, inner = value[TAG], value["v"]
    if name == "forked":
        return _copied(forked[inner[0]][inner[1]])
    if name == "dict":
        return {_unpack(key, forked): _unpack(item, forked) for key, item in inner}
    if name in ("tuple", "set", "frozenset"):
        return _COLLECTIONS[name](_unpack(item, forked) for item in inner)
    if name == "numpy":
        return _numpy(inner, scalar=value["scalar"])
    if name not in _UNPACKED:
        raise ValueError(f"a reward call with a value of kind {str(name)[:40]!r}")
    return _UNPACKED[name](inner)


_COLLECTIONS: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_UNPACKED: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16), "float": float, "bytes": base64.b64decode,
    "bytearray": lambda v: bytearray(base64.b64decode(v)), "complex": lambda v: complex(float(v[0]), float(v[1])),
    "datetime": lambda v: datetime.fromisoformat(v[0]).replace(fold=v[1]), "date": date.fromisoformat,
    "time": lambda v: time.fromisoformat(v[0]).replace(fold=v[1]),
    "timedelta": lambda v: timedelta(*v), "decimal": Decimal, "fraction": Fraction, "uuid": UUID, "path": Path,
}  # fmt: skip


def _numpy(inner: Sequence[Any], *, scalar: bool) -> Any:
    import numpy as np

    kind, shape, data = inner
    array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(kind)).reshape(shape).copy()
    return array[()] if scalar else array


def _copied(value: Any) -> Any:
    """Fresh for this call, as everything else is; what cannot be copied is handed over itself."""
    try:
        return copy.deepcopy(value)
    except (TypeError, ValueError, RecursionError) as error:
        print(f"a column of type {type(value).__name__} is not copied: {error}", file=sys.stderr)
        return value
