r"""Numbers as people write them, read exactly: no float, no guess, no evaluation.

Owns       what counts as a number that is written out: sign, thousands, fraction, percent, power of ten, unit.
Promises   two readings are compared as fractions; a text that is anything but one number is None.
Never      computes: `17+25` is a question, not a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_DIGITS = 100
_CLOSE = Fraction(1, 10**6)
_DECIMALS = 6

_DECIMAL = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
)
_MIXED = r"(?P<whole>[0-9]+(?=[ \\]))? ?"
_FRAC = rf"\\frac(?:\{{ ?(?P<a>{_DECIMAL}) ?\}}\{{ ?(?P<b>{_DECIMAL}) ?\}}|(?P<a1>[0-9])(?P<b1>[0-9]))"
_OVER = re.compile(rf"{_MIXED}(?:{_FRAC}|(?P<a2>{_DECIMAL}) ?/ ?(?P<b2>{_DECIMAL}))")
_POWER = r"(?:[eE](?P<e>[+-]?[0-9]{1,3})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?(?P<p>[+-]?[0-9]{1,3})\}?)?"
_NUMBER = re.compile(rf"(?P<n>{_DECIMAL}){_POWER}")
_SIGN = re.compile(r"(?:[$€£¥]|\\\$)? ?(?P<sign>[+-]?) ?(?:[$€£¥]|\\\$)? ?")
_PERCENT = re.compile(r" ?(?:\\?%|percent\b)")
_UNIT = re.compile(
    r"(?:\\text|\\mathrm|\\textrm|\\mbox)\{([A-Za-z /.^0-9-]{1,40})\}(?:\^\{?[23]\}?)?|\^\{?\\circ\}?|°|\\degree"
)
_SHORT = r" ?(?:km|cm|mm|m|kg|g|mg|s|h|ml|l|L|N|J|W|V|K|A)(?:\^?[23])?(?:/(?:s|h|m|km|kg|l))?(?:\^?2)?"
_WORDS = re.compile(rf" (?:[A-Za-z]{{2,20}}(?: |$)){{1,3}}|{_SHORT}")
_NO_UNIT = frozenset(
    {"is", "not", "or", "and", "no", "nor", "but", "isn", "wrong", "never", "maybe", "to", "from", "than"}
)


@dataclass(frozen=True)
class PlainNumber:
    """One number that somebody wrote.

    Example:
        >>> read_number("-1,234.50").value, read_number("50%").readings(), read_number("17+25")
        (Fraction(-2469, 2), (Fraction(1, 2), Fraction(50, 1)), None)
    """

    value: Fraction
    """As written: 50 for "50%"."""
    decimals: int | None = None
    """How many digits stand behind the point; None for a fraction."""
    percent: bool = False
    unit: str = ""

    def readings(self) -> tuple[Fraction, ...]:
        """What it may mean: 50% is a half, and 50 where the question asked for a percentage."""
        return (self.value / 100, self.value) if self.percent else (self.value,)


def read_number(text: str) -> PlainNumber | None:
    """The one number that `text` is, or None."""
    text = re.sub(r"\s+", " ", _tidy(text)).strip()
    if len(text) > 2 * MAX_DIGITS or sum(char.isdigit() for char in text) > MAX_DIGITS:
        return None
    opening = _SIGN.match(text)
    start = opening.end() if opening else 0
    negative = bool(opening and opening.group("sign") == "-")
    found = _fraction(text, start) or _decimal(text, start)
    if found is None:
        return None
    value, decimals, rest = found
    ending = _ending(text[rest:])
    return None if ending is None else PlainNumber(-value if negative else value, decimals, *ending)


def same_number(gold: PlainNumber, said: PlainNumber) -> bool:
    """Whether both are the same number; six decimals or more may be rounded, fewer may not."""
    if gold.unit and said.unit and gold.unit != said.unit:
        return False
    if gold.percent and said.percent:
        return _equal(gold.value, said)
    return any(_equal(mine, said, theirs) for mine in gold.readings() for theirs in said.readings())


def _equal(gold: Fraction, said: PlainNumber, value: Fraction | None = None) -> bool:
    value = said.value if value is None else value
    rounded = said.decimals is not None and said.decimals >= _DECIMALS
    return value == gold or (rounded and abs(value - gold) <= _CLOSE * abs(gold))


def _tidy(text: str) -> str:
    for written, plain in ((r"{,}", ","), (r"\,", ""), (r"\!", ""), (r"\;", " "), (r"\ ", " "), ("\u2212", "-"),
                           (r"\dfrac", r"\frac"), (r"\tfrac", r"\frac"), ("\u00a0", " "), ("\u202f", " ")):  # fmt: skip
        text = text.replace(written, plain)
    return text


def _fraction(text: str, start: int) -> tuple[Fraction, None, int] | None:
    match = _OVER.match(text, start)
    if match is None:
        return None
    above, below = (match[a] or match[f"{a}1"] or match[f"{a}2"] for a in ("a", "b"))
    bottom = _exact(below)
    if bottom == 0:
        return None
    value = _exact(above) / bottom
    whole = Fraction(match["whole"] or 0)
    return None if match["whole"] and value >= 1 else (whole + value, None, match.end())


def _decimal(text: str, start: int) -> tuple[Fraction, int, int] | None:
    match = _NUMBER.match(text, start)
    if match is None:
        return None
    power = int(match["e"] or match["p"] or 0)
    value = _exact(match["n"]) * Fraction(10) ** power
    return value, len(match["n"].partition(".")[2]), match.end()


def _exact(written: str) -> Fraction:
    return Fraction(written.replace(",", "").replace(" ", "").rstrip("."))


def _ending(rest: str) -> tuple[bool, str] | None:
    """(percent, unit) of what follows a number; None when that is something else."""
    percent = _PERCENT.match(rest)
    rest = rest[percent.end() :] if percent else rest
    if not rest.strip():
        return percent is not None, ""
    marked = _UNIT.fullmatch(rest.strip())
    if marked:
        return percent is not None, " ".join((marked[1] or "deg").split())
    if _WORDS.fullmatch(rest) and not _NO_UNIT & set(rest.lower().split()):
        return percent is not None, " ".join(rest.split())
    return None
