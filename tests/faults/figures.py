"""What a test has tried, noted for the table of docs/reliability.md (`scripts/reliability_table.py` makes it)."""

from __future__ import annotations

import json
from collections.abc import Callable

Record = Callable[[str, object], None]


def note(record: Record, figure: str, what: str, n: int, detail: str = "") -> None:
    """`n` trials that all went well: a test that gets here has no other kind."""
    record("figure", json.dumps({"figure": figure, "what": what, "n": n, "bad": 0, "note": detail}))
