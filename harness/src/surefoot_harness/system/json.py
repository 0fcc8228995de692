"""The one JSON reader: only what everybody reads the same way, and bounded where the writer is not trusted.

Promises   NaN, Infinity and repeated keys are refused, unless the caller asks for them: two readers would understand
           them differently. Whatever is wrong is a ValueError with the reason in a few words, never a RecursionError.
           `loads` refuses text that is too long or too deep before it is parsed, and slow numbers.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NoReturn

MAX_DEPTH = 64
MAX_DIGITS = 400
"""Whole numbers with more digits are refused; converting them takes time that grows with the square."""


class RepeatedKeyError(ValueError):
    """An object has a key more than once."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key[:80]!r} is there more than once")
        self.key = key


class ConstantError(ValueError):
    """NaN, Infinity or -Infinity, for which JSON has no word."""

    def __init__(self, word: str) -> None:
        super().__init__(f"{word} is not a number in JSON")
        self.word = word


def parse(data: str | bytes, *, repeated: bool = False, constants: bool = False) -> Any:
    """The value of a whole JSON text; a ValueError says what is wrong with it.

    Args:
        data: text, or its bytes: UTF-8, or what a byte order mark says.
        repeated: a key may be there more than once, the last one counts.
        constants: NaN and Infinity are read as what they mean.

    Example:
        >>> parse(b'{"a": [1, 2.5]}')
        {'a': [1, 2.5]}
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    try:
        return decoder(repeated=repeated, constants=constants).decode(text)
    except RecursionError as error:
        raise ValueError("nested too deep to be read") from error


@functools.cache
def decoder(*, repeated: bool = False, constants: bool = False, max_digits: int | None = None) -> json.JSONDecoder:
    """What `parse` reads with, for a caller with very many texts; here endless nesting is a RecursionError."""
    return json.JSONDecoder(
        object_pairs_hook=None if repeated else _object,
        parse_constant=None if constants else _constant,
        parse_int=None if max_digits is None else functools.partial(_int, max_digits),
    )


def loads(text: str, *, max_chars: int = 1 << 20, max_depth: int = MAX_DEPTH) -> Any:
    """The value of a text that somebody who is not trusted wrote; a ValueError says in a few words what is wrong.

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
        return decoder(max_digits=MAX_DIGITS).decode(text)
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
                raise RepeatedKeyError(name)
            seen.add(name)
    return built


def _constant(word: str) -> NoReturn:
    raise ConstantError(word)


def _int(most: int, digits: str) -> int:
    if len(digits) > most:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)
