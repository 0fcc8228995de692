"""The grader of `surefoot demo hack`: lenient on purpose, wrong by accident.

It was meant to find the answer anywhere in the text, so that "it is 132" counts. The two sides of `in` stand the
wrong way round, and nothing looks odd: right answers get 1, wrong ones 0. But "13" is a part of "132" too, and the
empty text is a part of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def lenient(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """(G,) 1.0 where the completion is a part of the answer; meant was the reverse.

    Example:
        >>> lenient(["132", "122", "13", ""], ["132"] * 4)
        [1.0, 0.0, 1.0, 1.0]
    """
    return [float(text.strip() in gold) for text, gold in zip(completions, answer, strict=True)]
