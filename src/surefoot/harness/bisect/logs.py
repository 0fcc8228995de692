"""The saved log: git's own format, our records as comments; written at the end, read again to go on.

Promises   what is saved can be replayed, by surefoot or by plain git, also after an edit by hand: an answer changed, a
           line dropped, a skip appended. A log that cannot be meant is refused before anything is touched.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError
from surefoot.harness.bisect.repository import Repository
from surefoot.harness.bisect.session import BAD, GOOD, SKIP
from surefoot.harness.files import write_atomic

NOTE = "# surefoot: "
UNVERIFIED, SAMPLE, RECORD = "unverified", "sample", "record"
_WORDS = {GOOD: GOOD, "old": GOOD, BAD: BAD, "new": BAD, SKIP: SKIP}
_START_OPTIONS = {"--no-checkout", "--first-parent", "--"}


@dataclass
class Replay:
    """What a log says, with every name resolved to a commit."""

    marks: list[tuple[str, str]] = field(default_factory=list)
    """(answer, commit), in order; BAD and GOOD of the start line come first."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    unverified: bool = False

    @property
    def bad(self) -> str:
        """The last commit called bad."""
        return [commit for answer, commit in self.marks if answer == BAD][-1]

    @property
    def good(self) -> str:
        """The first commit called good."""
        return next(commit for answer, commit in self.marks if answer == GOOD)


def note(kind: str, value: Any) -> str:
    """One comment line of ours."""
    return f"{NOTE}{kind} {json.dumps(value, allow_nan=False)}"


def save(folder: Path, commit: str, reason: str, text: str) -> Path:
    """Write a log under a name that no other has."""
    stem = f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{commit[:12]}" + (f"-{reason}" if reason else "")
    path, number = folder / f"{stem}.log", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.log"
    write_atomic(path, text.encode(errors="surrogateescape"))
    return path


def read(path: Path, repository: Repository) -> Replay:
    """Parse a log and resolve its commits. Changes nothing; a problem is a `ConfigError` naming the line."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise _refused(path, 0, f"it cannot be read: {error.strerror}") from error
    replay, started = Replay(), False
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if line.startswith(NOTE):
            _take_note(replay, line.removeprefix(NOTE), path, number)
        elif line and not line.startswith("#"):
            started = _take_line(replay, line, path, number, repository) or started
    if not started:
        raise _refused(path, 0, "it has no line `git bisect start`")
    _check(replay, path, repository)
    return replay


def _take_line(replay: Replay, line: str, path: Path, number: int, repository: Repository) -> bool:
    """Understand one git line; whether it was the start."""
    try:
        words = shlex.split(line)
    except ValueError:
        raise _refused(path, number, f"not a git bisect line: {line[:80]}") from None
    if words[:2] != ["git", "bisect"] or len(words) < 3:
        raise _refused(path, number, f"not a git bisect line: {line[:80]}")
    verb, names = words[2], words[3:]
    if verb == "start":
        names = [name for name in names if name not in _START_OPTIONS]
        answers = [BAD, *[GOOD] * (len(names) - 1)] if names else []
    elif verb in _WORDS and names:
        answers = [_WORDS[verb]] * len(names)
    else:
        raise _refused(path, number, f"`git bisect {verb}` is not an answer")
    for answer, name in zip(answers, names, strict=True):
        commit = None if re.search(r"\.\.", name) else repository.commit(name)
        if commit is None:
            raise _refused(path, number, f"{name} is no commit of this repository")
        replay.marks.append((answer, commit))
    return verb == "start"


def _take_note(replay: Replay, text: str, path: Path, number: int) -> None:
    kind, _, value = text.partition(" ")
    if kind == UNVERIFIED:
        replay.unverified = True
    if kind != SAMPLE:
        return
    try:
        sample = json.loads(value)
        replay.samples.append({"commit": str(sample["commit"]), "value": float(sample["value"])})
    except (ValueError, KeyError, TypeError) as error:
        raise _refused(path, number, f"not a sample: {value[:80]}") from error


def _check(replay: Replay, path: Path, repository: Repository) -> None:
    answers = {answer for answer, _ in replay.marks}
    if not {GOOD, BAD} <= answers:
        raise _refused(path, 0, "it needs a good and a bad commit")
    both = {c for a, c in replay.marks if a == GOOD} & {c for a, c in replay.marks if a == BAD}
    if both:
        raise _refused(path, 0, f"{both.pop()[:12]} is called good and bad")
    for answer, commit in replay.marks:
        if answer == GOOD and not repository.is_ancestor(commit, replay.bad):
            raise _refused(path, 0, f"good {commit[:12]} is not before bad {replay.bad[:12]}")


def _refused(path: Path, line: int, problem: str) -> ConfigError:
    where = f"{path}, line {line}" if line else str(path)
    return ConfigError(
        f"{where}: {problem}", "a log that is misread blames the wrong commit", "correct or drop the line"
    )
