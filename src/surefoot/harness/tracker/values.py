"""What a results file can hold: JSON values, checked and copied at the moment they are tracked."""

from __future__ import annotations

import math
from typing import Any

from surefoot.harness.unavailable import TAG, Unavailable

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
