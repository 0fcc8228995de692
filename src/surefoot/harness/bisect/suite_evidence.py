"""What a suite left behind at a commit: exit 1 is believed only where a recipe's `verdict.json` says FAIL.

Python itself ends with 1 when an import fails, and a suite of an older surefoot when its trainer crashed or the disk
was full. Neither says that the commit's numbers are bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.harness.files import read_json
from surefoot.records import Verdict

OUT_NAME = "suites"
OUT = f"$SUREFOOT_BISECT_DIR/{OUT_NAME}"
"""The word that stands, in the command as it is recorded, for the folder that each commit has of its own."""


@dataclass(frozen=True, slots=True)
class Found:
    """The verdicts of one commit, of recipes that ran there."""

    verdicts: int
    failed: str = ""
    """The first recipe that is FAIL, with its last reason."""


def look(out: Path, commit: str) -> Found:
    """Read every verdict below `out` that is about `commit`; one that another commit left says nothing about this."""
    records = [_read(trial / "verdict.json") for trial in trials(out)]
    records = [record for record in records if record.get("commit") == commit]
    failed = [record for record in records if record.get("status") == Verdict.FAIL]
    return Found(len(records), _words(failed[0]) if failed else "")


def trials(out: Path) -> list[Path]:
    """The folders of recipes and seeds that ran below `out`, `SUITE/RECIPE[/seed_N]`; former ones left out."""
    found = [*out.glob("*/*/provenance.json"), *out.glob("*/*/seed_*/provenance.json")]
    return sorted(path.parent for path in found if not path.parent.name.endswith(".previous"))


def _read(path: Path) -> dict[str, Any]:
    try:
        record = read_json(path)
    except StateError:
        return {}  # torn: no evidence
    return record if isinstance(record, dict) and "recipe" in record else {}


def _words(record: dict[str, Any]) -> str:
    reasons = record.get("reasons") or [""]
    return f"{record['recipe']} is FAIL: {reasons[-1]}"
