"""A result folder: one JSON per part, its output beside it; the overall verdict is the worst required part.

    FOLDER/NAME.json          success, return_code, output, command, name, timestamp, duration, verdict, required,
                              warnings
           NAME.stdout.txt    what the part said
           NAME.stderr.txt    what the judge said about it

Promises   no percentages: six parts of which one failed is FAIL; a warning on the deny list turns its part red;
           secrets are taken out before anything is stored; the report is made from the JSON files only.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.harness.files import read_json, write_atomic, write_json
from surefoot.harness.scrub import scrub
from surefoot.harness.tables import table
from surefoot.records import Verdict

LONGEST = 50_000_000
"""Bytes of a log's end that a text file keeps at most."""
_KEPT = 20_000
"""Characters of output inside the JSON; the text file has more."""
_WARNING = re.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL|[A-Z]\w*Warning)\b")
_ORDER = (Verdict.PASS, Verdict.SKIP, Verdict.INCOMPLETE, Verdict.FAIL, Verdict.ERROR)
"""From best to worst."""
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str, "success": bool, "return_code": int, "output": str, "command": list, "timestamp": str,
    "duration": (int, float), "verdict": str, "required": bool, "warnings": list,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a test session, as it goes into its JSON file."""

    name: str
    verdict: Verdict
    return_code: int
    command: Sequence[str]
    duration: float
    stdout: str = ""
    stderr: str = ""
    required: bool = True


def new_folder_name(moment: datetime.datetime | None = None) -> str:
    """`test_results_YYYYMMDD_HHMMSS`, in UTC."""
    return f"test_results_{moment or datetime.datetime.now(datetime.UTC):%Y%m%d_%H%M%S}"


def refuse_stale(folder: Path, names: Sequence[str]) -> None:
    """A part that is there already is refused before anything runs: old and new results must not mix."""
    old = [name for name in names if part_path(folder, name).exists()]
    if old:
        raise StateError(
            f"{folder} already has {', '.join(old)}", "old and new results would mix", "choose another folder"
        )


def write_part(folder: Path, part: Part, deny: Sequence[str]) -> dict[str, Any]:
    """Store one part; the record as written."""
    stdout, stderr = scrub(part.stdout), scrub(part.stderr)
    warnings = denied(stdout + "\n" + stderr, deny)
    success = part.verdict == Verdict.PASS and part.return_code == 0 and not warnings
    verdict = Verdict.FAIL if part.verdict == Verdict.PASS and not success else part.verdict
    record: dict[str, Any] = {
        "name": part.name,
        "success": success,
        "verdict": str(verdict),
        "return_code": part.return_code,
        "required": part.required,
        "command": [scrub(word) for word in part.command],
        "timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "duration": round(part.duration, 3),
        "warnings": warnings,
        "output": stdout[-_KEPT:],
    }
    path = part_path(folder, part.name)
    write_atomic(path.with_suffix(".stdout.txt"), stdout.encode(errors="replace"))
    write_atomic(path.with_suffix(".stderr.txt"), stderr.encode(errors="replace"))
    write_json(path, record)  # last: a part without its texts is never there
    return record


def denied(text: str, deny: Sequence[str]) -> list[str]:
    """Lines that are warnings by their level and match the deny list; a prompt that talks of a fallback is neither."""
    patterns = [re.compile(pattern, re.IGNORECASE) for pattern in deny]
    return [
        line.strip()[:500]
        for line in text.splitlines()
        if _WARNING.search(line) and any(pattern.search(line) for pattern in patterns)
    ]


def part_path(folder: Path, name: str) -> Path:
    """The JSON file of a part; dots in names stay what they are, slashes become two underscores."""
    return folder / (name.replace("/", "__") + ".json")


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """Every part of a folder, by name; none, or one that is not a part, is a `StateError`."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise StateError(f"{folder} holds no results", "nothing was judged there", "give a folder made by --results")
    return [_checked(path, read_json(path)) for path in paths]


def overall(parts: Sequence[dict[str, Any]]) -> Verdict:
    """The worst verdict of the required parts; without any, nothing was shown: FAIL."""
    verdicts = [_of(part) for part in parts if part["required"]]
    return max(verdicts, key=_ORDER.index, default=Verdict.FAIL)


def report(folder: Path) -> tuple[str, Verdict]:
    """The folder as text, and its overall verdict."""
    parts = read_parts(folder)
    rows = [
        [
            str(_of(part)), part["name"], "yes" if part["required"] else "no", str(part["return_code"]),
            f"{part['duration']:.1f} s", "; ".join(map(str, part["warnings"])),
        ]
        for part in parts
    ]  # fmt: skip
    verdict = overall(parts)
    lines = table(f"Results in {folder.name}", ["Status", "Part", "Required", "Exit", "Time", "Warnings"], rows)
    return f"{lines}\n\noverall  {verdict}  (the worst of {sum(p['required'] for p in parts)} required parts)", verdict


def _of(part: dict[str, Any]) -> Verdict:
    """A part's verdict; one that contradicts its own facts is not a PASS."""
    verdict = Verdict(part["verdict"])
    good = part["success"] and part["return_code"] == 0 and not part["warnings"]
    return Verdict.FAIL if verdict == Verdict.PASS and not good else verdict


def _checked(path: Path, record: Any) -> dict[str, Any]:
    wrong = (
        [key for key, kind in _FIELDS.items() if not isinstance(record.get(key), kind)]
        if isinstance(record, dict)
        else list(_FIELDS)
    )
    if not wrong and record["verdict"] not in [str(verdict) for verdict in Verdict]:
        wrong = ["verdict"]
    if wrong:
        raise StateError(
            f"{path} is not a part: {', '.join(wrong)}", "half a result is no result", "restore it or run again"
        )
    return dict(record)
