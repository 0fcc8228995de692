"""The results of one session: `unit_results.json`, and a copy per session in `unit_results/`.

    begin      sessions that died are merged into the history; an old unit_results.json is marked "not set"
    open       first use: header, lock and unit_results.json with exit_status "not set"
    refresh    unit_results.json again, with everything tracked so far, still "not set"
    finish     the true exit status; the copy; the journals are removed

Promises   unit_results.json never shows an earlier session's success; a killed session keeps what it tracked.
Never      runs git, or creates a file, in a session that tracks nothing.

Read next: `tracker.py`, the files behind it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from surefoot_harness.errors import StateError
from surefoot_harness.files import make_unseen, read_json, write_json
from surefoot_harness.system.git import GitError, git, head, root_of
from surefoot_harness.tracker.memory import gpu_names
from surefoot_harness.tracker.tracker import SUFFIX, JournalWriter, read_journals

# -- Names of tests in a results file: `module::function[parameters]`, never two tests under one name


def keys(node_ids: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Node id to key, and a note for every name that had to be made longer.

    Example:
        >>> keys(["tests/a/test_x.py::test_f[1]"])[0]
        {'tests/a/test_x.py::test_f[1]': 'test_x::test_f[1]'}
    """
    ids = sorted(set(node_ids))
    names, notes = _modules({_file(node_id) for node_id in ids})
    return {node_id: printable(names[_file(node_id)] + _rest(node_id)) for node_id in ids}, notes


def printable(text: str) -> str:
    """Text that UTF-8 can hold: a file name that is no text is spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _modules(files: set[str]) -> tuple[dict[str, str], list[str]]:
    """A name for each file: the shortest of its forms that no other file has."""
    form = dict.fromkeys(sorted(files), 0)
    notes: list[str] = []
    while True:
        owners = defaultdict(list)
        for file, number in form.items():
            owners[_forms(file)[number]].append(file)
        clashes = {name: group for name, group in owners.items() if len(group) > 1}
        if not clashes:
            return {group[0]: name for name, group in owners.items()}, notes
        for name, group in clashes.items():
            notes.append(printable(f"{name} names {len(group)} files ({', '.join(group)}): their keys carry more"))
            form |= {file: min(form[file] + 1, 2) for file in group}


def _forms(file: str) -> tuple[str, str, str]:
    return PurePosixPath(file).stem, file.removesuffix(".py").replace("/", "."), file


def _file(node_id: str) -> str:
    return node_id.partition("::")[0]


def _rest(node_id: str) -> str:
    _, mark, rest = node_id.partition("::")
    return mark + rest


# -- The results of one session: `unit_results.json`, and a copy per session in `unit_results/` ---


LATEST, HISTORY, JOURNALS = "unit_results.json", "unit_results", ".unit_results_journal"
NOT_SET = "not set"
"""The exit status of a session that is still running or died."""


@dataclass(frozen=True, slots=True)
class TrackedSession:
    """Who is running, told to worker processes as plain text.

    Example:
        `Session(Path("."), Path("."), "20260101-120000-000000-4242", "2026-01-01T12:00:00+00:00", ("-q",))`
    """

    root: Path
    folder: Path
    id: str
    started: str
    args: tuple[str, ...]

    @classmethod
    def new(cls, root: Path, folder: Path, args: Sequence[str]) -> TrackedSession:
        """A session that starts now, in this process."""
        from surefoot_harness.scrub import scrub

        now = datetime.now().astimezone()
        name = f"{now:%Y%m%d-%H%M%S-%f}-{os.getpid()}"
        return cls(root, folder, name, now.isoformat(), tuple(scrub(str(word)) for word in args))

    def as_text(self) -> dict[str, Any]:
        """What a worker needs to join in."""
        return {"root": str(self.root), "folder": str(self.folder), "id": self.id, "started": self.started,
                "args": list(self.args)}  # fmt: skip

    @classmethod
    def from_text(cls, values: dict[str, Any]) -> TrackedSession:
        """The session that `as_text` described."""
        return cls(Path(values["root"]), Path(values["folder"]), values["id"], values["started"], tuple(values["args"]))


@dataclass(slots=True)
class Results:
    """The files of one session, as one process sees them."""

    session: TrackedSession
    process: str = "main"
    written: list[str] = field(default_factory=list)
    """Names of the files that `finish` wrote, for the summary."""
    notes: list[str] = field(default_factory=list)
    _writer: JournalWriter | None = None
    _lock: int | None = None
    _due: int = 1
    _seen: int = 0

    @property
    def journals(self) -> Path:
        """The journal folder of this session."""
        return self.session.folder / JOURNALS / self.session.id

    @property
    def is_open(self) -> bool:
        """Whether some process of this session has tracked something."""
        return self.journals.is_dir()

    def begin(self, *, wanted: bool) -> None:
        """Start of the main process: merge sessions that died; results are on if wanted or if there were some."""
        self.notes += recover(self.session.folder)
        if wanted or (self.session.folder / LATEST).exists():
            self.open()

    def open(self) -> JournalWriter:
        """The journal of this process; the first process of the session also writes the header."""
        if self._writer is None:
            try:
                self._hold()
                if not (self.journals / "header.json").exists():
                    write_json(self.session.folder / LATEST, _unset(self.session))
                    write_json(self.journals / "header.json", header(self.session))
            except OSError as error:
                raise StateError(
                    f"test results cannot be written to {self.session.folder}: {error.strerror}",
                    "a value that is tracked has to be on disk before the test goes on",
                    "make the folder writable, or set surefoot_results_dir in the pytest configuration",
                ) from error
            self._writer = JournalWriter(self.journals / f"{self.process}-{os.getpid()}{SUFFIX}")
        return self._writer

    def refresh(self) -> None:
        """After each test: write unit_results.json when one in ten tests is new, so the cost stays small."""
        self._seen += 1
        if self._seen < self._due or not self.is_open:
            return
        self._due = self._seen + max(1, self._seen // 10)
        self._hold()
        if (self.journals / "header.json").exists():  # another process may be writing it just now
            write_json(self.session.folder / LATEST, merged(self.journals))

    def finish(self, exit_status: int, coverage: float | None, coverage_reason: str | None) -> None:
        """End of the main process: the whole file, its copy, and no journal any more."""
        if not self.is_open:
            return

        self.open()  # a worker that died early may have left no header
        outcome = {
            "exit_status": exit_status,
            "gpu_types": gpu_types(),
            "coverage": coverage,
            "coverage_reason": coverage_reason,
        }
        result = merged(self.journals) | outcome
        self.notes += [*result["key_notes"], *result["problems"]]
        copy = self.session.folder / HISTORY / f"{self.session.id}.json"
        make_unseen(copy.parent)
        write_json(copy, result)
        write_json(self.session.folder / LATEST, result)
        self.close()
        _remove(self.journals)
        self.written = [LATEST, f"{HISTORY}/{copy.name}"]

    def close(self) -> None:
        """Let go of this process's journal and lock."""
        if self._writer is not None:
            self._writer.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _hold(self) -> None:
        """A shared lock says that a process of this session lives; the kernel takes it back, also after kill -9."""
        if self._lock is None:
            make_unseen(self.journals)
            self._lock = os.open(self.journals / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_SH)


def merged(journals: Path) -> dict[str, Any]:
    """The results so far: the header, and every tracked value under its test's key."""
    journal = read_journals(journals)
    names, notes = keys(journal.metrics)
    header: dict[str, Any] = read_json(journals / "header.json")
    return header | {
        "metrics": {names[node_id]: values for node_id, values in sorted(journal.metrics.items())},
        "node_ids": {names[node_id]: printable(node_id) for node_id in sorted(journal.metrics)},
        "key_notes": notes,
        "problems": journal.problems,
    }


def recover(folder: Path) -> list[str]:
    """Merge the journals of sessions that died into the history; a note for each."""
    notes = []
    parent = folder / JOURNALS
    for journals in sorted(parent.iterdir()) if parent.is_dir() else []:
        if not (journals / "header.json").is_file():
            continue  # just being made, or died before anything was tracked
        with _claimed(journals) as dead:
            if dead:
                notes.append(_recover(folder, journals))
    return notes


def _recover(folder: Path, journals: Path) -> str:
    copy = folder / HISTORY / f"{journals.name}.json"
    try:
        make_unseen(copy.parent)
        write_json(copy, merged(journals) | {"recovered": True})
    except StateError as error:
        return f"an earlier session died and its journal cannot be read ({error.what}); look into {journals}"
    _remove(journals)
    return f"an earlier session died; what it tracked is in {HISTORY}/{copy.name}"


@contextlib.contextmanager
def _claimed(journals: Path) -> Iterator[bool]:
    """Whether no process of that session lives; while in here, nobody else recovers it."""
    try:
        descriptor = os.open(journals / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False  # another session has just recovered it
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        dead = (journals / "header.json").is_file()
    except BlockingIOError:
        dead = False
    try:
        yield dead
    finally:
        os.close(descriptor)


def _remove(journals: Path) -> None:
    shutil.rmtree(journals)
    with contextlib.suppress(OSError):  # another session's journals are in there
        journals.parent.rmdir()


def _unset(session: TrackedSession) -> dict[str, Any]:
    """What unit_results.json says before anything else is known, in case git or the disk is slow."""
    return {"exit_status": NOT_SET, "session": session.id, "metrics": {}}


# -- What a results file says about its session besides the metrics: commit, host, packages, GPUs, coverage


FORMAT = 1


def header(session: TrackedSession) -> dict[str, Any]:
    """The fields known at the start; a session that dies keeps these."""
    started = datetime.fromisoformat(session.started)
    return {
        "format": FORMAT,
        "exit_status": NOT_SET,
        **commit_of(session.root, session.folder),
        "start_time": f"{started:%Y-%m-%d %H:%M:%S}",
        "metrics": {},
        "gpu_types": [],
        "coverage": None,
        "coverage_reason": "the session did not end",
        "session": session.id,
        "started_at": session.started,
        "host": platform.node(),
        "python": platform.python_version(),
        "packages": packages(),
        "pytest_args": list(session.args),
    }


def commit_of(root: Path, results: Path) -> dict[str, Any]:
    """`git_commit` and `dirty`; null for both, and why, where git has no answer."""
    try:
        top = root_of(root)
        if top is None:
            return {"git_commit": None, "dirty": None, "git_reason": "not a git repository"}
        # Our own files are no edit of the code: a project that does not ignore them would be dirty for ever.
        inside = results.resolve().is_relative_to(top.resolve())
        ours = [f":(exclude,literal){name}" for name in (LATEST, HISTORY, JOURNALS)] if inside else []
        words = ("status", "--porcelain", "--untracked-files=normal", "--", ":/", *ours)
        changes = git(results if inside else root, *words)
        return {"git_commit": head(root), "dirty": bool(changes), "git_reason": None}
    except GitError as error:
        return {"git_commit": None, "dirty": None, "git_reason": error.what}


def packages() -> dict[str, str]:
    """Every installed distribution and its version, by the names of their folders: reading each file takes long."""
    found: dict[str, str] = {}
    for place in sys.path:
        with contextlib.suppress(OSError):  # an entry that is no folder has no packages
            for entry in os.scandir(place or "."):
                name, _, version = entry.name.removesuffix(".dist-info").rpartition("-")
                if entry.name.endswith(".dist-info") and name:
                    found.setdefault(name, version)  # the first on the path is the one that is imported
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def gpu_types() -> list[str]:
    """Each kind of GPU once."""
    return sorted(set(gpu_names()))


def coverage_of(plugin: Any) -> tuple[float | None, str | None]:
    """Total coverage in percent by pytest-cov's plugin object, or None and why not."""
    if plugin is None:
        return None, "coverage was not asked for (pytest --cov)"
    total = getattr(plugin, "cov_total", None)
    if not isinstance(total, int | float) or total != total:
        return None, "pytest-cov gave no total"
    return float(total), None
