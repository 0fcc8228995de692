"""A number that nobody measured: it can be computed with, and it never becomes a number, a zero or a PASS."""

from __future__ import annotations

from typing import Any, NoReturn

TAG = "unavailable"
"""How it is written down in results and metrics."""


class Unavailable:
    """Stands where a number would; sums and differences with it are unavailable too.

    It is false, as None is. Comparing its size, or making a number of it, is a `TypeError`: there is no answer.

    Example:
        >>> Unavailable("no GPU") - 5.0
        Unavailable('no GPU')
        >>> bool(Unavailable("no GPU")), str(Unavailable("no GPU"))
        (False, 'unavailable')
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason
        """Why nobody could say."""

    def __repr__(self) -> str:
        return f"Unavailable({self.reason!r})"

    def __str__(self) -> str:
        return TAG

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unavailable)

    def __hash__(self) -> int:
        return hash(TAG)

    def _same(self, *_: Any) -> Unavailable:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _same
    __neg__ = __pos__ = __abs__ = __round__ = _same

    def _no_answer(self, *_: Any) -> NoReturn:
        raise TypeError(f"{self!r} is no number: nobody measured it; fix: skip what needs it, or measure it")

    __lt__ = __le__ = __gt__ = __ge__ = __float__ = __int__ = __index__ = _no_answer


def is_unavailable(value: object) -> bool:
    """Whether a recorded value is the mark of a number that nobody measured."""
    return isinstance(value, Unavailable) or (isinstance(value, str) and value == TAG)
