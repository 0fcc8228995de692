"""Whether a text goes round in circles: the same words, lines or sentences over and over.

Owns       what counts as a loop, and what is only a list, a table, a refrain or a log.
Promises   time and memory grow with the length of the text; the same text always gets the same answer; what is
           measured on the corpus in tests/fixtures/repetition: false alarms and misses, both asserted.
Never      looks at tokens, rewards or other texts.

Three ways to loop are looked for:

    in a row     "Let me check. Let me check. Let me check. ..."     one unit, repeated without a gap
    shuffled     the same few sentences again and again, in any order
    counting     "Attempt 17: let me try that again."                nothing new but the number

Prose may repeat itself little; data (brackets, quotes, bars, digits) may repeat itself much, because tables do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

_TOKEN = re.compile(r"\w+|[^\w\s]")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++(?=\s|$)|[\n\u3002]")
_SPOKEN = re.compile(r"(?<!\S)[^\W\d_]{2,}(?=[,;:]?(?:\s|$))")
"""A word that stands by itself, as in speech; `walk(node.next)` has none."""
_DATA = frozenset('{}[]|";<>\\/$&#@%`')
_GRAMS = (3, 12)
"""Tokens that have to recur before a distance counts; the long one sees units that repeat within themselves."""
_LONG_WORD = 200
"""A word of this length is looked at letter by letter: nobody writes one."""


class RepeatedUnit(NamedTuple):
    """A unit that follows upon itself."""

    unit: tuple[str, ...]
    repeats: int
    chars: int


def looping(text: str) -> str | None:
    """Why `text` is a loop, or None.

    Example:
        >>> looping("Let me check that again. " * 8)
        'the same 6 words come 8 times in a row: "Let me check that again ."'
        >>> looping("one, two, three, four, five, six, seven, eight") is None
        True
    """
    tokens = _TOKEN.findall(text)
    if len(tokens) < 12 and len(text) < _LONG_WORD:
        return None
    return _in_a_row(tokens) or _within_words(tokens) or _sentences(text)


# -- in a row ----------------------------------------------------------------------


def _in_a_row(tokens: Sequence[str]) -> str | None:
    for gram in _GRAMS:
        for run in _runs(tokens, gram):
            if _too_often(run):
                shown = " ".join(run.unit)
                shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
                return f'the same {len(run.unit)} words come {run.repeats} times in a row: "{shown}"'
    return None


def _within_words(tokens: Sequence[str]) -> str | None:
    """Loops without a space, such as `hahaha...`, or scripts that write none."""
    for word in tokens:
        if len(word) < _LONG_WORD:
            continue
        for run in _runs(word, 3):
            if run.repeats >= 12 and run.chars >= _LONG_WORD:
                shown = "".join(run.unit)[:40]
                return f'the same {len(run.unit)} letters come {run.repeats} times in a row: "{shown}"'
    return None


def _runs(items: Sequence[str], gram: int) -> list[RepeatedUnit]:
    """Stretches in which every gram recurs at one and the same distance: that distance is the unit's length."""
    last: dict[int, int] = {}
    found: list[RepeatedUnit] = []
    period = length = 0
    for place in range(len(items) - gram + 1):
        key = hash(tuple(items[place : place + gram]))
        distance = place - last.get(key, place)
        last[key] = place
        if distance == period and distance:
            length += 1
            continue
        _keep(found, items, place - length, period, length + gram - 1)
        period, length = distance, 1
    _keep(found, items, len(items) - gram + 1 - length, period, length + gram - 1)
    return found


def _keep(found: list[RepeatedUnit], items: Sequence[str], start: int, period: int, length: int) -> None:
    """Note the run that begins one period before `start`, when it has come four times."""
    if period and (length + period) // period >= 4:
        begin = start - period
        chars = sum(len(item) for item in items[begin : start + length])
        found.append(RepeatedUnit(tuple(items[begin : begin + period]), (length + period) // period, chars))


def _too_often(run: RepeatedUnit) -> bool:
    words = sum(token.isalpha() for token in run.unit)
    if not any(char.isalpha() for token in run.unit for char in token):  # figures and signs: rules, borders, matrices
        return run.chars >= (2500 if any(token.isdigit() for token in run.unit) else 500)
    if _DATA & set(run.unit) or 3 * words < len(run.unit):  # rows, objects, code
        return run.repeats >= 60 and run.chars >= 400
    if words <= 3:  # very, very; la la la; step by step
        return run.repeats >= (20 if len(run.unit) > 1 else 40)
    return (run.repeats >= 6 and run.chars >= 60) or (run.repeats >= 4 and run.chars >= 600)


# -- the same sentences, shuffled or counted -----------------------------------------


def _sentences(text: str) -> str | None:
    said = [" ".join(part.split()).casefold() for part in _SENTENCE_END.split(text)]
    prose = [part for part in said if not _DATA & set(part) and len(_SPOKEN.findall(part)) >= 4]
    if len(prose) >= 12:
        repeated = len(prose) - len(set(prose))
        if repeated >= 0.7 * len(prose):
            return f"{repeated} of {len(prose)} sentences were said before"
    return _counting([part for part in prose if not part[0].isdigit()])


def _counting(prose: Sequence[str]) -> str | None:
    """Long sentences that differ in nothing but their numbers."""
    shapes = Counter(re.sub(r"\d+", "0", part) for part in prose if len(_SPOKEN.findall(part)) >= 6)
    if not shapes:
        return None
    shape, times = shapes.most_common(1)[0]
    if times >= 30 and times >= 0.5 * len(prose):
        return f'{times} sentences differ only in their numbers: "{shape[:60]}"'
    return None
