"""JSON from somebody who is not trusted: bounded, and only what everybody reads the same way.

Promises   text that is too long or too deep is refused before it is parsed, so no RecursionError and no slow number;
           NaN, Infinity and repeated keys are refused: two readers would understand them differently.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_DIGITS = 400
"""Whole numbers with more digits are refused; converting them takes time that grows with the square."""


def loads(text: str, *, max_chars: int = 1 << 20, max_depth: int = MAX_DEPTH) -> Any:
    """The value; a ValueError says in a few words what is wrong.

    Example:
        >>> loads('{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    if len(text) > max_chars:
        raise ValueError(f"{len(text)} characters, at most {max_chars} are read")
    few = text.count("[") + text.count("{") <= max_depth  # then there is no need to walk through it
    if not few and (depth := nesting(text)) > max_depth:
        raise ValueError(f"nested {depth} deep, at most {max_depth} is read")
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_int=_int)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None


def nesting(text: str) -> int:
    """How deep brackets go, those inside strings left out."""
    deepest = depth = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]}":
            depth -= 1
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:80]!r} is there more than once")
            seen.add(name)
    return built


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
