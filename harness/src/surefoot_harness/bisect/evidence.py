"""What was found at each commit, on disk the moment it is known: one `verdict.json` per commit, one `result.json`."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from surefoot_harness.bisect.repository import BAD, GOOD, SKIP, Repository
from surefoot_harness.errors import ConfigError, StateError, SurefootError
from surefoot_harness.files import read_json, write_atomic, write_json
from surefoot_harness.scrub import scrub
from surefoot_harness.verdict import Verdict

STATUS = {GOOD: Verdict.PASS, BAD: Verdict.FAIL, SKIP: Verdict.SKIP, "abort": Verdict.ERROR, "": Verdict.INCOMPLETE}


@dataclass
class CommitRecord:
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


class EvidenceFolder:
    """The folder of one bisect."""

    def __init__(self, save_dir: Path, bad: str, command: list[str], overrides: dict[str, Any]) -> None:
        self.save_dir, self.command, self.overrides = save_dir, [scrub(word) for word in command], overrides
        self.visits: dict[str, CommitRecord] = {}
        stem = f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{bad[:12]}"
        self.folder, number = save_dir / stem, 1
        while self.folder.exists():
            number += 1
            self.folder = save_dir / f"{stem}-{number}"

    def visit(self, commit: str, subject: str) -> CommitRecord:
        """The record of a commit, with a folder of its own."""
        if commit not in self.visits:
            folder = self.folder / commit
            _private(self.save_dir)
            _private(self.folder)
            _private(folder)
            if not (self.save_dir / ".gitignore").exists():
                write_atomic(self.save_dir / ".gitignore", "*\n")  # our leavings are nobody's untracked files
            self.visits[commit] = CommitRecord(commit, subject, folder)
        return self.visits[commit]

    def write(self, visit: CommitRecord) -> None:
        """Put one verdict on disk."""
        visit.folder.mkdir(parents=True, exist_ok=True)  # the command may have cleaned the tree
        write_json(visit.folder / "verdict.json", self.as_json(visit))

    def as_json(self, visit: CommitRecord) -> dict[str, Any]:
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


# -- How a search ended ---------------------------------------------------------------------------


@dataclass(frozen=True)
class BisectOutcome:
    """The commits that may be the culprit; one, and `found`, when it is known."""

    candidates: tuple[str, ...]
    found: bool
    confidence: float | None = None
    """Share of the posterior, when the search was by samples; None when each answer was taken as certain."""
    runs: int = 0
    notes: tuple[str, ...] = ()


# -- What a suite left behind at a commit: exit 1 is believed only where a recipe's `verdict.json` says FAIL


OUT_NAME = "suites"
OUT = f"$SUREFOOT_BISECT_DIR/{OUT_NAME}"
"""The word that stands, in the command as it is recorded, for the folder that each commit has of its own."""


@dataclass(frozen=True, slots=True)
class SuiteVerdicts:
    """The verdicts of one commit, of recipes that ran there."""

    verdicts: int
    failed: str = ""
    """The first recipe that is FAIL, with its last reason."""


def read_suite_verdicts(out: Path, commit: str) -> SuiteVerdicts:
    """Read every verdict below `out` that is about `commit`; one that another commit left says nothing about this."""
    records = [_read(trial / "verdict.json") for trial in trials(out)]
    records = [record for record in records if record.get("commit") == commit]
    failed = [record for record in records if record.get("status") == Verdict.FAIL]
    return SuiteVerdicts(len(records), _words(failed[0]) if failed else "")


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


# -- One number out of the metrics that a run left behind; an old, missing or non-finite one is no number


Look = dict[str, tuple[int, int]]


class NoValueError(Exception):
    """The run left nothing that can be compared, for the reason in the message."""


@dataclass(frozen=True)
class Measure:
    """Which metric, where it lies, and how a series becomes one number."""

    metric: str
    stat: str
    at: Path | None
    """Where the run leaves its metrics; None is the folder given to it as SUREFOOT_BISECT_DIR."""
    inside: str | None = None
    """The same below SUREFOOT_BISECT_DIR, where it is looked for first: `suites/SUITE/RECIPE` of a suite."""

    def look(self, folder: Path) -> Look:
        """What lies there before the run, so that a leftover of another commit is not taken for a result."""
        return _look(self.at or folder)

    def _own(self, folder: Path) -> Path | None:
        """Where in the folder of this very run the numbers are; None when they are somewhere else."""
        if self.inside is not None:
            return folder / self.inside if (folder / self.inside).exists() else None
        recipes = trials(folder / OUT_NAME) if self.at is None else []
        if len(recipes) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in recipes)
            raise NoValueError(f"several recipes ran; name one with --metrics-at: {names}")
        return recipes[0] if recipes else None

    def value(self, folder: Path, before: Look | None) -> float:
        """The number of the run that has just ended."""
        from surefoot_harness.series import is_number
        from surefoot_harness.sources import load_metrics

        own = self._own(folder)
        where = own or self.at or folder
        if own is None and self.at is not None and _look(where) == before:
            raise NoValueError(f"{where.name} was not written by this run")
        try:
            metrics = load_metrics(where)
        except SurefootError as error:
            raise NoValueError(error.what) from error
        series, _ = metrics.resolve(self.metric)
        if not series:
            names = ", ".join(metrics.nearest_names(self.metric))
            raise NoValueError(f"{self.metric} was not logged; nearest: {names}")
        points = list(series.values())
        if not all(is_number(point) for point in points):
            raise NoValueError(f"{self.metric} is not a finite number everywhere")
        return _STATS[self.stat]([float(point) for point in points])


_STATS: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "mean": lambda values: math.fsum(values) / len(values),
    "median": statistics.median,
    "min": min,
    "max": max,
}


def _look(path: Path) -> Look:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    found = {}
    for file in files:
        stat = file.stat()
        found[str(file)] = (stat.st_mtime_ns, stat.st_size)
    return found


# -- The saved log: git's own format, our records as comments; written at the end, read again to go on
# Promises   what is saved can be replayed, by surefoot or by plain git, also after an edit by hand: an answer
# changed, a
# line dropped, a skip appended. A log that cannot be meant is refused before anything is touched.


NOTE = "# surefoot: "
UNVERIFIED, SAMPLE, RECORD = "unverified", "sample", "record"
_WORDS = {GOOD: GOOD, "old": GOOD, BAD: BAD, "new": BAD, SKIP: SKIP}
_START_OPTIONS = {"--no-checkout", "--first-parent", "--"}


@dataclass
class LogReplay:
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


def save_log(folder: Path, commit: str, reason: str, text: str) -> Path:
    """Write a log under a name that no other has."""
    stem = f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{commit[:12]}" + (f"-{reason}" if reason else "")
    path, number = folder / f"{stem}.log", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.log"
    write_atomic(path, text.encode(errors="surrogateescape"))
    return path


def read_log(path: Path, repository: Repository) -> LogReplay:
    """Parse a log and resolve its commits. Changes nothing; a problem is a `ConfigError` naming the line."""
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise _refused(path, 0, f"it cannot be read: {error.strerror}") from error
    replay, started = LogReplay(), False
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


def _take_line(replay: LogReplay, line: str, path: Path, number: int, repository: Repository) -> bool:
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


def _take_note(replay: LogReplay, text: str, path: Path, number: int) -> None:
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


def _check(replay: LogReplay, path: Path, repository: Repository) -> None:
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
