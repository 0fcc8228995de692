"""What a tool said, made fit for a model to read and for a person to check.

Promises   a text that is too long is cut, and the cut names the full size; control, bidirectional and invisible
           characters are spelled out, so that what a person sees is what the model got.
"""

from __future__ import annotations

import json
from typing import Any

from surefoot.system.text import spelled_out


def shown(text: str) -> str:
    """`text` with control, bidirectional, invisible and unassigned characters spelled out; newlines and tabs stay.

    Example:
        >>> shown("safe\\u202eevil")
        'safe\\\\u202eevil'
    """
    return spelled_out(text)


def cut(text: str, limit: int, *, size: str = "") -> str:
    """At most `limit` characters, a visible mark included when something is missing.

    Args:
        size: how big the whole was, when `text` is already a part of it.

    Example:
        >>> cut("x" * 100, 60)
        'xxxxxxxxxxxx\\n[cut: the first 12 of 100 characters are shown]'
    """
    whole = size or f"{len(text)} characters"
    if len(text) <= limit and not size:
        return text
    kept = min(limit, len(text))
    for _ in range(3):  # the mark names a number whose own length it depends on
        mark = f"\n[cut: the first {kept} of {whole} are shown]"
        kept = max(0, min(limit - len(mark), len(text)))
    return text[:kept] + f"\n[cut: the first {kept} of {whole} are shown]"


def readable(text: str, limit: int, *, size: str = "") -> str:
    """Cut first, so that a huge text costs little; then spelled out; then cut again if that made it longer."""
    if len(text) > limit and not size:
        size = f"{len(text)} characters"
    part = text[: 2 * limit]
    return cut(shown(part), limit, size=size)


def refusal(kind: str, **facts: Any) -> str:
    """Why a tool was not asked, as JSON that a model can act on.

    Example:
        >>> refusal("unknown_tool", name="rm")
        '{"error": "unknown_tool", "name": "rm"}'
    """
    return json.dumps({"error": kind, **facts}, ensure_ascii=True)
