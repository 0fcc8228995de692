"""What a test has tried, noted for docs/figures.json and the table of docs/reliability.md (`scripts/figure_rows.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

Record = Callable[[str, object], None]


def note(
    record: Record,
    figure: str,
    what: str,
    n: int,
    detail: str = "",
    *,
    seconds: Sequence[float] = (),
    limit_s: float | None = None,
    seeds: range | None = None,
    bad: int = 0,
) -> None:
    """`n` trials that all went well, unless it says otherwise: a test that gets here mostly has no other kind.

    Args:
        seconds: how long each of them took, where time is what is promised.
        limit_s: how long it may take; more is a failure of the row, whatever the test thought of it.
        seeds: what replays them.
        bad: how many did not go well, where the test itself goes on.
    """
    said = {"figure": figure, "what": what, "n": n, "bad": bad, "note": detail}
    if seconds:
        said |= {"seconds": [round(one, 4) for one in seconds]}
    said |= {} if limit_s is None else {"limit_s": limit_s}
    said |= {} if seeds is None else {"seeds": [min(seeds), max(seeds)]}
    record("figure", json.dumps(said))
