"""What was found at each commit, on disk the moment it is known: one `verdict.json` per commit, one `result.json`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from surefoot.harness.bisect.session import BAD, GOOD, SKIP
from surefoot.harness.files import write_atomic, write_json
from surefoot.harness.scrub import scrub
from surefoot.records import Verdict

STATUS = {GOOD: Verdict.PASS, BAD: Verdict.FAIL, SKIP: Verdict.SKIP, "abort": Verdict.ERROR, "": Verdict.INCOMPLETE}


@dataclass
class Visit:
    """Everything about one commit."""

    commit: str
    subject: str
    folder: Path
    answer: str = ""
    """good, bad, skip or abort; empty while nothing is known."""
    reason: str = ""
    exit_code: int | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    changed_files: list[str] = field(default_factory=list)
    """Tracked files that the command changed; they were put back."""


class Evidence:
    """The folder of one bisect."""

    def __init__(self, save_dir: Path, bad: str, command: list[str], overrides: dict[str, Any]) -> None:
        self.save_dir, self.command, self.overrides = save_dir, [scrub(word) for word in command], overrides
        self.visits: dict[str, Visit] = {}
        stem = f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{bad[:12]}"
        self.folder, number = save_dir / stem, 1
        while self.folder.exists():
            number += 1
            self.folder = save_dir / f"{stem}-{number}"

    def visit(self, commit: str, subject: str) -> Visit:
        """The record of a commit, with a folder of its own."""
        if commit not in self.visits:
            folder = self.folder / commit
            _private(self.save_dir)
            _private(self.folder)
            _private(folder)
            if not (self.save_dir / ".gitignore").exists():
                write_atomic(self.save_dir / ".gitignore", "*\n")  # our leavings are nobody's untracked files
            self.visits[commit] = Visit(commit, subject, folder)
        return self.visits[commit]

    def write(self, visit: Visit) -> None:
        """Put one verdict on disk."""
        visit.folder.mkdir(parents=True, exist_ok=True)  # the command may have cleaned the tree
        write_json(visit.folder / "verdict.json", self.as_json(visit))

    def as_json(self, visit: Visit) -> dict[str, Any]:
        """The verdict of one commit."""
        return {
            "commit": visit.commit,
            "subject": visit.subject.encode(errors="replace").decode(),
            "status": str(STATUS[visit.answer]),
            "answer": visit.answer or None,
            "reason": scrub(visit.reason).encode(errors="replace").decode(),
            "exit_code": visit.exit_code,
            "samples": visit.samples,
            "overrides": self.overrides,
            "command": [word.encode(errors="replace").decode() for word in self.command],
            "changed_files": [name.encode(errors="replace").decode() for name in visit.changed_files],
        }

    def finish(self, result: dict[str, Any]) -> None:
        """Write `result.json` beside the verdicts, when there are any."""
        if self.visits:
            write_json(self.folder / "result.json", result)


def _private(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
