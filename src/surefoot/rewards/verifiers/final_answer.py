r"""Which part of a completion is its answer: one statement, the last one made.

Owns       the ways in which an answer may be announced.
Promises   at most one answer comes out of a text, however many were tried; what stands in a reasoning block is no
           answer; time grows with the length of the text.
Never      judges it, and never looks for a wanted answer inside a text.

An answer is announced by `\boxed{...}`, `<answer>...</answer>` or `#### ...`; where none of these is used, by
`answer: ...` or `answer is ...`. Of several announcements the last one counts. A text of one line that announces
nothing is an answer as a whole.

Read next: `math.py` and `choice.py`, which judge it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MAX_TEXT = 1_000_000
"""Longer completions have no answer: nobody writes one that long."""

_MARKS = re.compile(r"####|\\boxed\s{0,3}\{|<answer>", re.IGNORECASE)
_PROSE = re.compile(r"\banswer\b[\s*_]{0,4}(?:is|:|=)[\s*_]{0,4}:?", re.IGNORECASE)
_THINKING = re.compile(r"</?think(?:ing)?>", re.IGNORECASE)
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("`", "`"))


def text_of(completion: Any) -> str:
    """A completion as plain text: text itself, or what the policy said last; what a tool said is nobody's answer."""
    if isinstance(completion, str):
        return completion
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return str(said[-1].get("content") or "") if said else ""


def tagged_answer(text: str) -> str | None:
    """What stands in the last `<answer>...</answer>`, stripped; None when nothing does.

    Example:
        >>> tagged_answer("<answer>41</answer> No: <answer> 42 </answer>")
        '42'
    """
    tag = without_reasoning(text).rpartition("<answer>")
    return tag[2].partition("</answer>")[0].strip() if tag[1] and "</answer>" in tag[2] else None


def final_answer(text: str) -> str | None:
    r"""The answer that `text` ends up with, without its wrapping; None when it states none.

    Example:
        >>> final_answer(r"I first thought \boxed{41}. But no: \boxed{42}"), final_answer("17 and 25.\nSo 42, I think")
        ('42', None)
    """
    if len(text) > MAX_TEXT:
        return None
    said = without_reasoning(text).strip()
    marks = list(_MARKS.finditer(said)) or list(_PROSE.finditer(said))
    if not marks:
        return None if "\n" in said else unwrapped(said)
    return unwrapped(_announced(said, marks[-1]))


def without_reasoning(text: str) -> str:
    """What is left after reasoning blocks; nothing when the last block never ends."""
    tags = list(_THINKING.finditer(text))
    if not tags:
        return text
    return "" if not tags[-1].group().startswith("</") else text[tags[-1].end() :]


def _announced(said: str, mark: re.Match[str]) -> str:
    """What one announcement announces: a braced group, a tag's content, or the rest of the line."""
    word, rest = mark.group().lower(), said[mark.end() :]
    if word.startswith("\\boxed"):
        return _braced(rest)
    if word == "<answer>":
        return rest.partition("</answer>")[0]
    return rest.lstrip().partition("\n")[0]


def _braced(rest: str) -> str:
    """Up to the brace that closes the one before `rest`; nothing when there is none."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", rest):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return rest[: match.start()]
    return ""


def unwrapped(text: str) -> str:
    r"""Without spaces, the full stop, and signs that only set it off.

    Example:
        >>> unwrapped(" **$42$.** "), unwrapped("$5"), unwrapped("$5 + $6")
        ('42', '$5', '$5 + $6')
    """
    start, end = 0, len(text)  # places and not pieces: a copy for every sign would cost the length squared
    before = None
    while before != (start, end):
        before = start, end
        start, end = _stripped(text, start, end, str.isspace)
        start, end = _stripped(text, start, end, "*".__eq__)
        if text.endswith(".", start, end) and not text.endswith("..", start, end):
            end -= 1
        for left, right in _WRAPPERS:
            first, last = start + len(left), end - len(right)
            framed = first < last and text.startswith(left, start, end) and text.endswith(right, start, end)
            if framed and text.find(left, first, last) < 0:
                start, end = first, last
                break
    return text[start:end]


def _stripped(text: str, start: int, end: int, sets_off: Callable[[str], object]) -> tuple[int, int]:
    while start < end and sets_off(text[start]):
        start += 1
    while start < end and sets_off(text[end - 1]):
        end -= 1
    return start, end
