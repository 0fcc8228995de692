"""A few whole rollouts: the best, the worst and some by chance, of the last step and of the first.

Promises   prompt and completion are told apart; a rollout without a verdict is shown as such, never as reward 0.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.tracking.report_text import esc, foreign
from surefoot.tracking.text import counted, number

Rollout = Mapping[str, Any]


def rollouts(kept: Sequence[tuple[int, Sequence[Rollout]]]) -> str:
    """All that are chosen, the last step first."""
    cards = []
    for place, (step, rows) in enumerate(reversed(kept)):
        chosen = list(choose(rows, step, more=place == 0))
        if chosen:
            shown = "".join(_card(why, row) for why, row in chosen)
            cards.append(f'<h3>Step {step}</h3><div class="rollouts">{shown}</div>')
    return "".join(cards) or '<p class="none">No rollout was kept.</p>'


def choose(rows: Sequence[Rollout], step: int, *, more: bool = True) -> Iterator[tuple[str, Rollout]]:
    """(why, rollout); the same ones whenever the report is written again."""
    left = [row for row in rows if isinstance(row.get("text"), str)]
    graded = [row for row in left if _reward(row) is not None]
    failed = [row for row in left if _reward(row) is None]
    chance = random.Random(step)
    picks: list[tuple[str, Rollout]] = []
    if graded and more:
        best = max(graded, key=lambda row: _reward(row) or 0.0)
        worst = min(graded, key=lambda row: _reward(row) or 0.0)
        picks = [("best reward", best)] if worst is best else [("best reward", best), ("worst reward", worst)]
    if failed:
        picks.append(("no verdict", chance.choice(failed)))
    taken = {id(row) for _, row in picks}
    others = [row for row in left if id(row) not in taken]
    picks += [("by chance", row) for row in chance.sample(others, min(2, len(others)))]
    yield from picks


def _card(why: str, row: Rollout) -> str:
    reward = _reward(row)
    facts = [f"reward {number(reward)}" if reward is not None else f"no verdict: {row.get('failure') or 'unknown'}"]
    facts += [f"{name} {_part(value)}" for name, value in _parts(row)]
    for label, name in (
        ("task", "task"),
        ("rollout", "rollout"),
        ("version", "version"),
    ):
        if row.get(name) is not None:
            facts.append(f"{label} {row[name]}")
    if how := row.get("ended") or row.get("finish_reason"):  # of a rollout with tools; of its only turn
        facts.append("answered" if how == "answered" else f"ended by {how}")
    tokens, turns = row.get("completion_ids"), row.get("turns")
    if isinstance(tokens, list):
        facts.append(counted(len(tokens), "token"))
    if isinstance(turns, list):
        facts.append(counted(len(turns), "turn"))
    chips = "".join(f"<span>{esc(fact, 120)}</span>" for fact in facts)
    prompt = row.get("prompt")
    shown = foreign(prompt) if isinstance(prompt, str) else esc(prompt, 4000)
    return (
        f'<article class="rollout"><p class="chips"><b>{esc(why)}</b>{chips}</p>'
        f'<div class="said prompt"><h4>prompt</h4><pre dir="ltr">{shown}</pre></div>'
        f"{_said(row)}</article>"
    )


def _said(row: Rollout) -> str:
    """One completion, or turn after turn with what tools answered; masks are told in words: trained or not."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return _block("completion", "completion", row["text"])
    parts = []
    for number_, turn in enumerate(turns, 1):
        tokens = turn.get("completion_ids")
        trained = f", {counted(len(tokens), 'token')}, trained" if isinstance(tokens, list) else ""
        parts.append(_block("completion", f"turn {number_}{trained}", turn.get("text", "")))
        calls = turn.get("calls")
        after = turns[number_]["read_ids"] if number_ < len(turns) and "read_ids" in turns[number_] else None
        read = f"; {counted(len(after), 'token')} read, masked" if isinstance(after, list) else ""
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, Mapping):
                title = f"{call.get('name') or 'unreadable call'} ({call.get('outcome')}){read}"
                parts.append(_block("tool", title, call.get("answer", "")))
    return "".join(parts)


def _block(kind: str, title: str, text: object) -> str:
    shown = foreign(text) if isinstance(text, str) else esc(text, 4000)
    if isinstance(text, str) and not text.strip():
        shown = f'<span class="none">({"empty" if not text else "white space only"})</span>{shown}'
    return f'<div class="said {kind}"><h4>{esc(title, 160)}</h4><pre dir="ltr">{shown}</pre></div>'


def _parts(row: Rollout) -> list[tuple[str, Any]]:
    parts = row.get("reward_parts")
    return list(parts.items())[:12] if isinstance(parts, Mapping) and len(parts) > 1 else []


def _part(value: object) -> str:
    return number(value) if isinstance(value, int | float) else "no verdict"


def _reward(row: Rollout) -> float | None:
    value = row.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
