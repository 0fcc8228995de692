"""What a log said: metric names, and for each the recorded points in order of step.

Owns       `Series` (step -> value, as read) and `Metrics` (name -> Series).
Promises   nothing is dropped, rounded or turned into a number on the way: NaN, text and null stay what they are.
Never      judges a value.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

_MANY_NAMES = 2000
"""Above this, nearest names are looked for by prefix only: comparing all of them would take longer than the check."""


class Series(Mapping[int, Any]):
    """One metric: its recorded points by step, in order.

    Args:
        points: step -> value, in any order.
        single: the source gave one number without a step (`{"score": 0.3}`); it is kept under step 0.

    Example:
        >>> Series("loss", {10: 0.5, 2: 0.7}).steps
        (2, 10)
    """

    __slots__ = ("_points", "name", "single", "steps")

    def __init__(self, name: str, points: Mapping[int, Any], *, single: bool = False) -> None:
        self.name = name
        self.single = single
        self._points = {step: points[step] for step in sorted(points)}
        self.steps: tuple[int, ...] = tuple(self._points)

    def __getitem__(self, step: int) -> Any:
        return self._points[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"Series({self.name!r}, {len(self)} points)"

    def points(self) -> list[tuple[int, Any]]:
        """Every recorded point, in order of step."""
        return list(self._points.items())

    def nearest_steps(self, step: int, count: int = 3) -> list[int]:
        """The recorded steps closest to `step`, in order."""
        return sorted(sorted(self.steps, key=lambda known: (abs(known - step), known))[:count])


class Metrics(Mapping[str, Series]):
    """Every metric of one source.

    Args:
        series: name -> series.
        odd: name -> why that entry is no series; using one fails with this reason.
        notes: what a reader should know about how the source was read.
        source: what was read, for messages.
    """

    def __init__(
        self,
        series: Mapping[str, Series],
        *,
        odd: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
        source: str = "",
    ) -> None:
        self._series = dict(series)
        self.odd = dict(odd or {})
        self.notes = list(notes)
        self.source = source

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def resolve(self, name: str) -> tuple[Series | None, str]:
        """The series meant by `name`, and a note when it was found under its flat name.

        `train/NAME` stands for `NAME`, and `eval/NAME` for `eval_NAME`, when only the flat one is recorded.

        Example:
            >>> Metrics({"loss": Series("loss", {1: 0.5})}).resolve("train/loss")
            (Series('loss', 1 points), 'train/loss is recorded as loss')
        """
        if name in self._series:
            return self._series[name], ""
        for prefix, flat_prefix in (("train/", ""), ("eval/", "eval_")):
            flat = flat_prefix + name.removeprefix(prefix)
            if name.startswith(prefix) and flat in self._series:
                return self._series[flat], f"{name} is recorded as {flat}"
        return None, ""

    def nearest_names(self, name: str, count: int = 3) -> list[str]:
        """Recorded names that look like `name`."""
        known = sorted(self._series)
        if len(known) > _MANY_NAMES:
            head = name.split("/")[0]
            return [other for other in known if other.startswith(head)][:count]
        return difflib.get_close_matches(name, known, n=count, cutoff=0.4) or known[:count]


def is_number(value: object) -> bool:
    """Whether `value` is a finite number; a bool or a text that looks like one is not."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def describe(value: object) -> str:
    """A recorded value as a reader would write it, short.

    Example:
        >>> describe(float("nan")), describe(None), describe("0.5")
        ('NaN', 'null', "the text '0.5'")
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 10**30 else "a number beyond what can be computed with"
    return f"a {type(value).__name__}"


# -- A number that nobody measured: it can be computed with, and it never becomes a number, a zero or a PASS


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
