"""Whether the right one of several choices was chosen.

Owns       what counts as choosing: a letter, alone or in brackets, or the words of a choice.
Promises   naming several choices is choosing none.
Never      looks for the right letter inside a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from surefoot.errors import RewardError
from surefoot.rewards.verifiers.final_answer import final_answer

_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*(?:[).:]|$)\s*(.*)", re.DOTALL)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")


def verify_choice(gold: Any, completion: str, choices: Sequence[Any] | None = None) -> float:
    """1.0 when the final answer of `completion` is the gold choice.

    Args:
        gold: a letter, the position of a choice (from 0), or the text of one.
        choices: (C,) the texts behind A, B, C ...; without them only letters are understood.

    Example:
        >>> verify_choice("B", "The answer is (B)."), verify_choice("B", "A, B, C or D")
        (1.0, 0.0)
    """
    texts = [] if choices is None else [_plain(str(choice)) for choice in choices]
    wanted = gold_letter(gold, texts)
    said = final_answer(completion)
    return 0.0 if said is None else float(_chosen(_TEXT.sub(r"\1", said), texts) == wanted)


def gold_letter(gold: Any, texts: Sequence[str]) -> str:
    """The letter of the gold choice."""
    if isinstance(gold, int) and not isinstance(gold, bool) and 0 <= gold < (len(texts) or 26):
        return chr(ord("A") + gold)
    text = str(gold).strip()
    letter = _chosen(text, texts)
    if letter is None or (texts and ord(letter) - ord("A") >= len(texts)):
        raise RewardError(
            f"the gold answer {text[:80]!r} is none of the {len(texts) or 'lettered'} choices",
            "no answer could ever be right",
            "give the letter, the position from 0, or the exact text of one choice",
        )
    return letter


def _chosen(said: str, texts: Sequence[str]) -> str | None:
    """The one letter that `said` amounts to, or None."""
    if _plain(said) in texts:
        return chr(ord("A") + texts.index(_plain(said))) if texts.count(_plain(said)) == 1 else None
    match = _LETTER.fullmatch(said.strip())
    if match is None:
        return None
    letter, words = match[1].upper(), _plain(match[2])
    position = ord(letter) - ord("A")
    fits = not words or (position < len(texts) and texts[position] == words)
    return letter if fits else None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(".")
