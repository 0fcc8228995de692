r"""Whether a mathematical answer equals the gold answer.

Owns       what "equal" means: numbers as exact fractions, words as words, everything else by math-verify.
Promises   one answer per text is looked at (see `final_answer.py`); a gold number is matched only by a number that is
           written out, so that repeating the question (`17+25`) earns nothing; what is too long, too deep or too
           large is wrong before anything tries to compute it; text is never evaluated as Python.
Never      bounds its own time: a caller that cannot kill this process uses `MultiVerifier`, which can.

    1/2 = 0.5 = \frac{1}{2} = 50\%     {1, 2} = {2, 1}     (1, 2) != (2, 1)     1,234 = 1234     x = 42 is 42

Read next: `plain_numbers.py`.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from typing import Any

from surefoot.envs.verify.final_answer import final_answer, unwrapped
from surefoot.envs.verify.plain_numbers import read_number, same_number
from surefoot.errors import RewardError

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
