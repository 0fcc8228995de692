"""Hints for the self-distillation channel: what the teacher is told and the student is not.

Owns       the text of a hint, where it goes in a prompt, and the hinted prompts as padded tokens.
Promises   one hint or None per rollout, in their order; None and empty text mean that there is no teacher for that row.
Never      touches a completion: student and teacher score the very same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import InputError
from surefoot.trl_bridge.problems import refused


@dataclass(frozen=True)
class HintRow:
    """One rollout, as a hint function sees it.

    Example:
        >>> HintRow({"prompt": "2 + 2 =", "answer": "4"}, completion=" 5", advantage=-0.7).example["answer"]
        '4'
    """

    example: Mapping[str, Any]
    """The line of the dataset, every column."""
    completion: str
    advantage: float


HintFn = Callable[[Sequence[HintRow]], Sequence[str | None]]


def hint_function(source: Any, columns: Sequence[str] | None = None) -> HintFn:
    """A function from what the user gave: the name of one of `columns` (where they are known), or a function."""
    if isinstance(source, str) and columns is not None and source not in columns:
        raise refused(
            f"sdpo_hints is {source!r}, and the training data has no such column",
            "no row would ever have a teacher",
            f"use one of {', '.join(columns)}",
        )
    if isinstance(source, str) and source:
        return lambda rows: [row.example.get(source) for row in rows]
    if callable(source):
        return source  # type: ignore[no-any-return]
    raise refused(
        f"alpha_sdpo is above 0 and sdpo_hints is {source!r}",
        "the teacher is the model itself with a hint in its context; without a source of hints the term would be 0",
        "pass the name of a dataset column, a function of the rows, or surefoot.trl_bridge.sibling_hints",
    )


def sibling_hints(rows: Sequence[HintRow]) -> list[str | None]:
    """Show each rollout that did no better than its group the best attempt of that group, where that was better.

    Siblings are looked for among the rollouts of this process.

    Example:
        >>> rows = [HintRow({"prompt": "2 + 2 ="}, " 5", -1.0), HintRow({"prompt": "2 + 2 ="}, " 4", 1.0)]
        >>> sibling_hints(rows)
        ['A correct attempt: 4', None]
    """
    best: dict[str, HintRow] = {}
    for row in rows:
        key = _prompt_key(row)
        if row.advantage > 0 and (key not in best or row.advantage > best[key].advantage):
            best[key] = row
    return [
        f"A correct attempt: {best[_prompt_key(row)].completion.strip()}"
        if row.advantage <= 0 and _prompt_key(row) in best
        else None
        for row in rows
    ]


def _prompt_key(row: HintRow) -> str:
    return json.dumps(row.example.get("prompt"), sort_keys=True, default=str)


def ask(hints: HintFn, rows: Sequence[HintRow]) -> list[str | None]:
    """One hint per row, checked; empty text becomes None."""
    given: list[Any] = list(hints(rows))
    wrong = next((hint for hint in given if hint is not None and not isinstance(hint, str)), None)
    if len(given) != len(rows) or wrong is not None:
        what = f"gave {len(given)} hints for {len(rows)} rollouts" if wrong is None else f"gave {wrong!r} as a hint"
        raise InputError(
            f"sdpo_hints {what}",
            "a hint that stands in another row teaches the answer to another question",
            "return one text or None per row, in the order of the rows",
        )
    return [hint if hint and hint.strip() else None for hint in given]


def hinted(prompt: Any, hint: str | None) -> Any:
    """The prompt with the hint after it; in a conversation, at the end of the last message.

    Example:
        >>> hinted("2 + 2 =", "Count the fingers."), hinted([{"role": "user", "content": "2 + 2?"}], "Four.")
        ('2 + 2 =\\n\\nCount the fingers.', [{'role': 'user', 'content': '2 + 2?\\n\\nFour.'}])
    """
    if hint is None:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n\n{hint}"
    last = dict(prompt[-1])
    if not isinstance(last.get("content"), str):
        raise InputError(
            "a prompt ends in a message that is not plain text",
            "the hint is added to that text",
            "train with alpha_sdpo=0, or with text prompts",
        )
    return [*prompt[:-1], last | {"content": f"{last['content']}\n\n{hint}"}]


def padded_left(rows: Sequence[Sequence[int]], pad: int, device: Any = None) -> tuple[Tensor, Tensor]:
    """(B, P) token ids and (B, P) mask of rows of unequal length, so that all of them end in the last column."""
    width = max((len(row) for row in rows), default=0)
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(mask, dtype=torch.long, device=device)
