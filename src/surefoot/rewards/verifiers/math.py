"""Whether a mathematical answer equals the gold answer; numbers are read exactly: no float, no guess, no evaluation.

Owns       what counts as a number that is written out: sign, thousands, fraction, percent, power of ten, unit.
Promises   two readings are compared as fractions; a text that is anything but one number is None.
Never      computes: `17+25` is a question, not a number.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from surefoot.errors import RewardError
from surefoot.rewards.verifiers.final_answer import final_answer, unwrapped

MAX_DIGITS = 100
_CLOSE = Fraction(1, 10**6)
_DECIMALS = 6

_DECIMAL = (
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]{1,3}(?: [0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
)
_MIXED = r"(?P<whole>[0-9]+(?=[ \\]))? ?"
_FRAC = rf"\\frac(?:\{{ ?(?P<a>{_DECIMAL}) ?\}}\{{ ?(?P<b>{_DECIMAL}) ?\}}|(?P<a1>[0-9])(?P<b1>[0-9]))"
_OVER = re.compile(rf"{_MIXED}(?:{_FRAC}|(?P<a2>{_DECIMAL}) ?/ ?(?P<b2>{_DECIMAL}))")
_POWER_OF_TEN = (
    r"(?:[eE](?P<e>[+-]?[0-9]{1,3})|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*\{?(?P<p>[+-]?[0-9]{1,3})\}?)?"
)
_NUMBER = re.compile(rf"(?P<n>{_DECIMAL}){_POWER_OF_TEN}")
_SIGN = re.compile(r"(?:[$€£¥]|\\\$)? ?(?P<sign>[+-]?) ?(?:[$€£¥]|\\\$)? ?")
_PERCENT = re.compile(r" ?(?:\\?%|percent\b)")
_UNIT = re.compile(
    r"(?:\\text|\\mathrm|\\textrm|\\mbox)\{([A-Za-z /.^0-9-]{1,40})\}(?:\^\{?[23]\}?)?|\^\{?\\circ\}?|°|\\degree"
)
_SHORT = r" ?(?:km|cm|mm|m|kg|g|mg|s|h|ml|l|L|N|J|W|V|K|A)(?:\^?[23])?(?:/(?:s|h|m|km|kg|l))?(?:\^?2)?"
_UNIT_WORDS = re.compile(rf" (?:[A-Za-z]{{2,20}}(?: |$)){{1,3}}|{_SHORT}")
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
        return _equal_numbers(gold.value, said)
    return any(_equal_numbers(mine, said, theirs) for mine in gold.readings() for theirs in said.readings())


def _equal_numbers(gold: Fraction, said: PlainNumber, value: Fraction | None = None) -> bool:
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
    if _UNIT_WORDS.fullmatch(rest) and not _NO_UNIT & set(rest.lower().split()):
        return percent is not None, " ".join(rest.split())
    return None


# -- Whether a mathematical answer equals the gold answer -----------------------------------------
# Owns       what "equal" means: numbers as exact fractions, words as words, everything else by math-verify.
# Promises   one answer per text is looked at (see `final_answer.py`); a gold number is matched only by a number that is
# written out, so that repeating the question (`17+25`) earns nothing; what is too long, too deep or too
# large is wrong before anything tries to compute it; text is never evaluated as Python.
# Never      bounds its own time: a caller that cannot kill this process uses `MultiVerifier`, which can.
#
# 1/2 = 0.5 = \frac{1}{2} = 50\%     {1, 2} = {2, 1}     (1, 2) != (2, 1)     1,234 = 1234     x = 42 is 42


MAX_ANSWER, MAX_DEPTH, MAX_POWERS = 400, 16, 12

_SIGNS = str.maketrans({
    "\u2212": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ", "\u00f7": "/", "\u03c0": r"\pi ", "\u221e": r"\infty ",
    "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u2208": r"\in ",
    "\u00b0": r"^\circ ", "\u00a0": " ", "\u202f": " ", "\u00b2": "^2", "\u00b3": "^3", "\u20ac": "", "\u00a3": "",
})  # fmt: skip
"""Signs of mathematics that may stand for their LaTeX. Any other character beyond ASCII is no mathematics."""
_UNFINISHED = re.compile(r"\\(?:int|iint|oint|sum|prod|lim|binom|det|frac\s*\{\s*d|partial|pmod|bmod|mod|gcd|lcm)|!")
_LONG_NUMBER = re.compile(r"[0-9]{31,}|[0-9]{4,}\s*\)*!")
_POWER = re.compile(r"(?:\^|\*\*)\s*(?:[{(]+[^{}()^]*|[0-9]+)")
_TOWER = re.compile(r"(?:\^|\*\*)(?:[0-9.\s]++|\s*+[({]++[0-9.\s]++[)}]?+)(?:\^|\*\*|!)")
MAX_POWER = 10_000
"""All numbers in all exponents of an answer, multiplied: what a number could be raised to."""
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[ '-][A-Za-z]+)*")
_ASSIGNED = re.compile(r"([A-Za-z])\s*=\s*(.+)", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")


def verify_math(gold: Any, completion: str) -> float:
    """1.0 when the final answer of `completion` equals `gold`, else 0.0; a gold that cannot be read is an error."""
    wanted = gold_answer(gold)
    said = final_answer(completion)
    if said is None or not said.strip() or len(said) > MAX_ANSWER:
        return 0.0
    return float(_equal(wanted, said))


def gold_answer(gold: Any) -> str:
    """The answer inside a gold column: after `####` or inside `\\boxed` when the column holds a whole solution."""
    text = str(gold)
    answer = final_answer(text)
    if isinstance(gold, bool) or answer is None or not answer.strip():
        raise RewardError(
            f"the gold answer {text[:80]!r} of a math task cannot be read",
            "an answer can only be right where it is known what is right",
            "give a number or a LaTeX expression, or a solution that ends in #### ANSWER or \\boxed{ANSWER}",
        )
    return answer


def check_gold(gold: Any) -> None:
    """Refuse a gold answer that cannot be read; load the library for one that needs it, before workers are forked."""
    wanted = gold_answer(gold)
    if read_number(_assignment(wanted)[1]) is None and _words(wanted) is None:
        _refuse_too_much(wanted)
        load_library()


def _equal(gold: str, said: str) -> bool:
    gold_name, gold_value = _assignment(gold)
    said_name, said_value = _assignment(said)
    if gold_name and said_name and gold_name != said_name:
        return False
    number = read_number(gold_value)
    if number is not None:
        spoken = read_number(_last_side(said_value))
        return spoken is not None and same_number(number, spoken)
    gold_words, said_words = _words(gold), _words(said)
    if gold_words is not None or said_words is not None:  # to the library a word is a product: Paris would be Pairs
        return gold_words == said_words
    return _symbolic(gold, said)


def _assignment(text: str) -> tuple[str, str]:
    """("x", "42") for `x = 42`, ("", text) otherwise."""
    match = _ASSIGNED.fullmatch(text.strip())
    return (match[1], match[2].strip()) if match and "=" not in match[2] and "," not in match[2] else ("", text)


def _last_side(text: str) -> str:
    """What a chain such as `17+25 = 42` arrives at."""
    return unwrapped(text.rpartition("=")[2]) if not re.search(r"[<>!]=|,\s|;", text) else text


def _words(text: str) -> str | None:
    plain = _TEXT.sub(r" \1 ", text).strip()
    return " ".join(plain.casefold().split()) if _WORDS.fullmatch(" ".join(plain.split())) else None


# -- expressions, by the library ------------------------------------------------


def _symbolic(gold: str, said: str) -> bool:
    wanted, spoken = _refuse_too_much(gold), said.translate(_SIGNS)
    if too_much(spoken) or (_UNFINISHED.search(spoken) and not _UNFINISHED.search(wanted)):
        return False
    right = _parsed(wanted)
    if right is None:
        raise RewardError(
            f"the gold answer {gold[:80]!r} is not an expression that can be read",
            "no answer could ever equal it",
            'correct it, or grade the task with verifier_type = "exact"',
        )
    mine = _parsed(spoken)
    return mine is not None and _same(right, mine)


def _refuse_too_much(gold: str) -> str:
    """The gold answer with plain signs, ready for the library."""
    wanted = gold.translate(_SIGNS)
    if problem := too_much(wanted):
        raise RewardError(
            f"the gold answer {gold[:80]!r} is refused: {problem}",
            "comparing with it could take for ever",
            "write it in a shorter form",
        )
    return wanted


def too_much(text: str) -> str | None:
    """Why nobody should try to compute with `text`; None when it is harmless."""
    if len(text) > MAX_ANSWER:
        return f"{len(text)} characters"
    if not text.isascii():
        return "characters that are no mathematics"
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"{deepest} nested brackets"
    if text.count("^") + text.count("**") > MAX_POWERS or text.count("!") > 1:
        return "too many powers or factorials"
    if _LONG_NUMBER.search(text) or _TOWER.search(text) or _raised_to(text) > MAX_POWER:
        return "numbers too large to write down"
    return "dollar signs, quotes or underscores of another language" if re.search(r"[$'\"`@;]|__", text) else None


def _raised_to(text: str) -> int:
    """An upper bound of the power in `((9^{99})^{99})` or `9^{9+9*9}`, where no power has a power."""
    bound = 1
    for exponent in _POWER.findall(text):
        for number in re.findall(r"[0-9]{1,31}", exponent):
            bound *= max(1, int(number))
    return bound


def load_library() -> None:
    """Import math-verify; called in the parent of worker processes, which then need not."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise RewardError(
            f"math-verify cannot be imported: {error}",
            'tasks with verifier_type = "math" compare expressions with it',
            'install it: pip install "surefoot[verifiers]"',
        ) from error
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)  # it warns that we bound its time ourselves


@lru_cache(maxsize=256)
def _parsed(text: str) -> Any:
    """(1,) the expression; None when the library reads none. Its own timeout uses SIGALRM, so it is left off."""
    load_library()
    from math_verify import LatexExtractionConfig, parse

    found = parse(
        f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True
    )
    return found[0] if found else None


def _same(gold: Any, said: Any) -> bool:
    from math_verify import verify

    return bool(verify(gold, said, timeout_seconds=None, raise_on_error=True))
