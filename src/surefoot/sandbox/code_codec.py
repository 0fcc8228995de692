"""Plain data between the sandboxes of tests and code: to JSON, and back into built-in types.

Owns       which types are plain: numbers, text, bytes, the built-in collections, and a few of the standard library's.
Promises   what arrives has exactly these types, whatever subclass was sent: its comparisons are Python's own.
Never      imports anything of ours: this file is copied into the sandboxes and runs there.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:  # two interpreters load this file for every verdict: `typing` would cost them more than all the rest
    from collections.abc import Callable
    from typing import Any

_DEEPEST = 64
_COLLECTIONS: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_SIMPLE = (type(None), bool, str)


class NotPlainError(Exception):
    """A value that is not plain data was to be compared, or to be sent as such."""


class PlainCodec:
    """Values to JSON and back. What is not plain is handed to `keep`, which gives it a name, or refuses.

    Args:
        kept: types that are never plain, and must not be asked what they are.
    """

    def __init__(self, keep: Callable[[Any], Any], find: Callable[[Any], Any], kept: tuple[type, ...] = ()) -> None:
        self.keep, self.find, self.kept = keep, find, kept

    def pack(self, value: Any, depth: int = 0) -> Any:
        """Plain data, tagged where JSON has no word for it. A subclass travels as what it is built on."""
        if depth > _DEEPEST:
            raise NotPlainError(f"data nested deeper than {_DEEPEST}")
        if type(value) in _SIMPLE:
            return value
        if type(value) in self.kept:
            return {"o": self.keep(value)}
        if isinstance(value, int):
            return {"i": hex(int(value))}
        if isinstance(value, float):
            return {"f": float(value).hex()}
        if isinstance(value, complex):
            return {"c": [value.real.hex(), value.imag.hex()]}
        if isinstance(value, bytes | bytearray):
            return {"b": bytes(value).hex()}
        if isinstance(value, str):
            return str.__str__(value)
        for tag, kind in _COLLECTIONS.items():
            if isinstance(value, kind):
                return {tag: [self.pack(each, depth + 1) for each in kind.__iter__(value)]}
        if isinstance(value, dict):
            pairs = dict.items(value)
            return {"d": [[self.pack(key, depth + 1), self.pack(each, depth + 1)] for key, each in pairs]}
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _PARTS:
            return {"m": [name, self.pack(_PARTS[name](value), depth + 1)]}
        return {"o": self.keep(value)}

    def unpack(self, data: Any) -> Any:
        """Built-in objects, and nothing else but what `find` makes of a name."""
        if type(data) in _SIMPLE:
            return data
        ((tag, body),) = data.items()
        return _UNPACK[tag](self, body)

    def each(self, items: list[Any]) -> list[Any]:
        """A list of values."""
        return [self.unpack(item) for item in items]


_UNPACK: dict[str, Callable[[PlainCodec, Any], Any]] = {
    "i": lambda codec, body: int(body, 16),
    "f": lambda codec, body: float.fromhex(body),
    "c": lambda codec, body: complex(float.fromhex(body[0]), float.fromhex(body[1])),
    "b": lambda codec, body: bytes.fromhex(body),
    "l": lambda codec, body: codec.each(body),
    "t": lambda codec, body: tuple(codec.each(body)),
    "s": lambda codec, body: set(codec.each(body)),
    "z": lambda codec, body: frozenset(codec.each(body)),
    "d": lambda codec, body: {codec.unpack(key): codec.unpack(value) for key, value in body},
    "m": lambda codec, body: _made(body[0], codec.unpack(body[1])),
    "o": lambda codec, body: codec.find(body),
}
_PARTS: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "collections.deque": lambda value: [list(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "decimal.Decimal": lambda value: [str(value)],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime.date": lambda value: [value.isoformat()],
    "datetime.datetime": lambda value: [value.isoformat()],
}
"""Types of the standard library that are plain enough, and what they are made of."""


def _made(name: str, parts: list[Any]) -> Any:
    """One of them, made of its parts. Imports happen here: few answers need them."""
    if name in ("builtins.range", "fractions.Fraction", "datetime.timedelta") and {type(each) for each in parts} != {
        int
    }:
        raise ValueError(f"{name} is not made of {parts!r}")  # a text would be read, and may stand for a huge number
    if name == "builtins.range":
        return range(*parts)
    if name == "collections.deque":
        import collections

        return collections.deque(*parts)
    if name == "fractions.Fraction":
        import fractions

        return fractions.Fraction(*parts)
    if name == "decimal.Decimal":
        import decimal

        return decimal.Decimal(*parts)
    import datetime

    if name == "datetime.timedelta":
        return datetime.timedelta(*parts)
    kinds = {"datetime.date": datetime.date, "datetime.datetime": datetime.datetime}
    return kinds[name].fromisoformat(*parts)
