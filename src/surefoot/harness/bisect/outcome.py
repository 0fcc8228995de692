"""How a search ended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """The commits that may be the culprit; one, and `found`, when it is known."""

    candidates: tuple[str, ...]
    found: bool
    confidence: float | None = None
    """Share of the posterior, when the search was by samples; None when each answer was taken as certain."""
    runs: int = 0
    notes: tuple[str, ...] = ()
