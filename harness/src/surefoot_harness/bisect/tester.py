"""Run the command at a commit, and say what its exit code means.

    0            good
    1 .. 124     bad
    125          cannot tell
    126, 127     cannot tell: the command could not be started, which says nothing about the commit
    128 and up   abort: something killed it, and the next commit would be killed too

The command `surefoot ...` is bad only when it says so (1, 78, 79); its other codes are "cannot tell": a full disk,
memory that ran out, a stop, a time limit, rejected arguments. A crash (70, or a signal such as SIGSEGV) is "cannot
tell" or abort as well, and bad with `--crash-is-bad`. `surefoot suite run` is bad only when a recipe's
verdict.json says FAIL.

Also "cannot tell": a file that the command names is missing there, the commit or a submodule of it cannot be checked
out, its environment cannot be built, or it exits with 2 while EXTRA_SCRIPT_ARGS is set (the script rejects them).

Never      turns what it can see to be a failure of the surroundings into a bad commit.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.bisect import evidence as suite_evidence
from surefoot_harness.bisect import overrides
from surefoot_harness.bisect.evidence import OUT, OUT_NAME, CommitRecord, EvidenceFolder, Measure, NoValueError
from surefoot_harness.bisect.options import BisectOptions
from surefoot_harness.bisect.repository import BAD, GOOD, SKIP, Repository, Stop
from surefoot_harness.bisect.selfcopy import OURS
from surefoot_harness.errors import StateError
from surefoot_harness.system.files import sha256_number, sha256_of
from surefoot_harness.system.git import GitError

# -- The environment of a commit: rebuilt when what it depends on changed, kept when it did not ---
# Owns       virtual environments under `--venv-cache`, one per content of the lock and dependency files.
# Promises   a build counts only when it finished (a marker is written last); a failed one makes the commit "cannot
# tell"
# and is not tried again for the same content.


LOCK_FILES = ("uv.lock", "poetry.lock", "requirements*.txt", "constraints.txt", "pyproject.toml")
FORCE = "SUREFOOT_REBUILD"
"""Set for every command: a script that keeps an environment of its own has to renew it for each commit."""
_DONE = "surefoot-built"

Call = Callable[[list[str], dict[str, str], Path], int]
"""Runs words with an environment, output to a file; the exit code."""


class BuildError(Exception):
    """The environment of a commit could not be built; the commit cannot be judged."""


@dataclass
class Environments:
    """Builds what is missing and says which variables the command gets."""

    rebuild: str
    cache: Path
    call: Call
    failed: set[str] = field(default_factory=set)
    built: int = 0

    def variables(self, tree: Path, output: Path) -> dict[str, str]:
        """Variables for a command in `tree`. Raises `BuildError`."""
        base = {key: value for key, value in os.environ.items() if key not in OURS} | {FORCE: "1"}
        if not self.rebuild:
            return base
        key = lock_hash(tree)
        folder = self.cache / key
        inside = base | {
            "VIRTUAL_ENV": str(folder),
            "UV_PROJECT_ENVIRONMENT": str(folder),
            "PATH": os.pathsep.join([str(folder / "bin"), base.get("PATH", os.defpath)]),
        }
        inside.pop("PYTHONHOME", None)
        if key in self.failed:
            raise BuildError(f"the environment {key} failed to build before")
        if not (folder / _DONE).exists():
            self._build(folder, base, inside, output)
        return inside

    def _build(self, folder: Path, base: dict[str, str], inside: dict[str, str], output: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)  # what an interrupted build left
        folder.parent.mkdir(parents=True, exist_ok=True)
        self.built += 1
        for words, env in (([sys.executable, "-m", "venv", str(folder)], base), (shlex.split(self.rebuild), inside)):
            code = self.call(words, env, output)
            if code:
                self.failed.add(folder.name)
                shutil.rmtree(folder, ignore_errors=True)
                raise BuildError(f"{shlex.join(words)} exited with {code}; see {output.name}")
        (folder / _DONE).write_text(self.rebuild + "\n", encoding="utf-8")


def lock_hash(tree: Path) -> str:
    """16 hex digits of the lock and dependency files at the root of `tree`, names and contents."""
    paths = sorted({path for pattern in LOCK_FILES for path in tree.glob(pattern) if path.is_file()})
    files = ((path.name, path.read_bytes()) for path in paths)
    return sha256_of(f"{name}\0{len(content)}\0".encode() + content for name, content in files)[:16]


# -- Run the command at a commit, and say what its exit code means --------------------------------


CANNOT_TELL = 125
_FAILED, _CRASHED = 1, 70
_NO_VERDICT = {
    2: "its arguments are refused", 3: "", 4: "its input is refused", 5: "unsafe", _CRASHED: "it broke",
    74: "disk or memory ran out", 75: "it was stopped", 76: "out of time", 77: "engines or workers are gone",
}  # fmt: skip
"""Exit codes of our own commands that say "could not judge", and why."""
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that a program brings upon itself."""


class AbortError(StateError):
    """The command was killed; going on would only kill it again."""


class SkipError(Exception):
    """This commit cannot be judged, for the reason in the message."""


def classify(code: int, options: BisectOptions) -> tuple[str, str]:
    """What an exit code says about the commit, and why. A code that means abort is an `AbortError`."""
    if options.crash_is_bad and _is_crash(code, options):
        return BAD, f"exit {code}: it crashed (--crash-is-bad)"
    if code < 0 or code >= 128:
        what = f"signal {-code}" if code < 0 else f"exit {code}"
        raise AbortError(
            f"the command was aborted ({what})",
            "128 and above say that something killed it, not that the commit is bad",
            "remove the cause, then resume with the line printed below",
        )
    if code == CANNOT_TELL or code in options.skip_codes:
        return SKIP, f"exit {code}: the command cannot tell"
    if code in (126, 127):
        return SKIP, f"exit {code}: the command could not be started"
    if code == 2 and options.extra_args:
        return SKIP, "exit 2: the script rejects EXTRA_SCRIPT_ARGS"
    if code in _NO_VERDICT and overrides.is_surefoot(options.command):
        why = _NO_VERDICT[code]
        return SKIP, f"exit {code}: surefoot gave no verdict" + (f" ({why})" if why else "")
    return (GOOD, "exit 0") if code == 0 else (BAD, f"exit {code}")


def _is_crash(code: int, options: BisectOptions) -> bool:
    number = -code if code < 0 else code - 128
    return number in _CRASHES or (code == _CRASHED and overrides.is_surefoot(options.command))


@dataclass
class Tester:
    """Everything needed to test one commit after another."""

    repository: Repository
    options: BisectOptions
    stop: Stop
    evidence: EvidenceFolder
    files: list[str]
    """Files that the command names; a commit without one of them cannot be judged."""
    measure: Measure | None = None
    here: str | None = None
    earlier: dict[str, int] = field(default_factory=dict)
    """Samples of a commit that a replayed log holds: numbers and seeds go on from there."""
    _variables: dict[str, str] | None = None

    def __post_init__(self) -> None:
        self._own_cache = self.options.venv_cache is None and bool(self.options.rebuild)
        cache = self.options.venv_cache or Path(tempfile.gettempdir())
        if self._own_cache:
            cache = Path(tempfile.mkdtemp(prefix="surefoot-venvs-"))
        self.environments = Environments(self.options.rebuild, cache, self._call)

    def close(self) -> None:
        """Remove environments that nobody asked to keep."""
        if self._own_cache:
            shutil.rmtree(self.environments.cache, ignore_errors=True)

    def missing(self, commit: str) -> str | None:
        """A file that the command names and the commit does not have."""
        return next((name for name in self.files if not self.repository.has_file(commit, name)), None)

    def test(self, commit: str) -> CommitRecord:
        """Judge one commit by its exit code, by vote when `--repeat` asks for it."""
        visit = self.visit(commit)
        try:
            visit.answer, visit.reason = self._vote(visit)
        except SkipError as error:
            visit.answer, visit.reason = SKIP, str(error)
        except AbortError:
            visit.answer, visit.reason = "abort", f"exit {visit.exit_code}"
            raise
        finally:
            self.evidence.write(visit)
        return visit

    def visit(self, commit: str) -> CommitRecord:
        """The record of a commit."""
        return self.evidence.visit(commit, self.repository.subject(commit))

    def _vote(self, visit: CommitRecord) -> tuple[str, str]:
        wanted = self.options.repeat
        votes = {GOOD: 0, BAD: 0}
        answer, reason = "", ""
        while sum(votes.values()) < wanted:
            answer, reason = self.sample(visit)
            if answer == SKIP:
                return SKIP, reason
            votes[answer] += 1
            if 4 * max(votes.values()) >= 3 * wanted:
                break
        if wanted == 1:
            return answer, reason
        said = f"{votes[BAD]} of {sum(votes.values())} runs failed"
        winner = max(votes, key=lambda name: votes[name])
        return (winner, said) if 4 * votes[winner] >= 3 * wanted else (SKIP, f"{said}: no decisive vote")

    def sample(self, visit: CommitRecord) -> tuple[str, str]:
        """Run the command once. Raises `SkipError` when it could not be run, `AbortError` when it was killed."""
        variables = self._prepare(visit)
        number = self.earlier.get(visit.commit, 0) + len(visit.samples) + 1
        folder = visit.folder / f"sample-{number}" if self.options.noisy or self.options.repeat > 1 else visit.folder
        folder.mkdir(parents=True, exist_ok=True)
        seed = _seed(visit.commit, number)
        before = self.measure.look(folder) if self.measure else None
        code = self._run(variables | self._about(folder, number, seed), folder / "output.txt")
        self.stop.check()
        visit.exit_code = code
        entry: dict[str, Any] = {"sample": number, "seed": seed, "exit_code": code}
        visit.samples.append(entry)
        self._tidy(visit)
        answer, reason = self._judge(code, visit.commit, folder)
        if self.measure is not None and answer != SKIP:
            if answer == BAD:
                raise SkipError(f"exit {code}: a run that failed has no metric")
            try:
                entry["value"] = self.measure.value(folder, before)
            except NoValueError as error:
                raise SkipError(str(error)) from error
        return answer, reason

    def _judge(self, code: int, commit: str, folder: Path) -> tuple[str, str]:
        """What the exit code says; a suite's "failed" is believed only with the verdict that it left."""
        answer, reason = classify(code, self.options)
        if code != _FAILED or answer != BAD or not overrides.is_suite_run(self.options.command):
            return answer, reason
        found = suite_evidence.read_suite_verdicts(self._suite_out(folder), commit)
        if found.failed:
            return BAD, f"exit 1: {found.failed}"
        if not found.verdicts and self.options.crash_is_bad:
            return BAD, "exit 1: surefoot crashed before it judged anything (--crash-is-bad)"
        return SKIP, "exit 1: surefoot left no recipe with the verdict FAIL"

    def _suite_out(self, folder: Path) -> Path:
        given = overrides.given_out(self.options.command)
        return folder / OUT_NAME if given is None else self.options.folder / given

    def _run(self, variables: dict[str, str], output: Path) -> int:
        path = overrides.script(self.repository, self.options, self.files)[0] if self.options.sed else None
        try:
            with overrides.edited(path, self.options.sed):
                return self._call(self._words(output.parent), variables, output)
        except overrides.OverrideError as error:
            raise SkipError(error.what) from error

    def _words(self, folder: Path) -> list[str]:
        return [str(folder / OUT_NAME) if word == OUT else word for word in overrides.argv(self.options)]

    def _prepare(self, visit: CommitRecord) -> dict[str, str]:
        """Check the commit out and build its environment, unless that is where we are."""
        if self.here == visit.commit and self._variables is not None:
            return self._variables
        self.stop.check()
        name = self.missing(visit.commit)
        if name is not None:
            raise SkipError(f"{name} does not exist there")
        self.here, self._variables = None, None
        try:
            self.repository.check_out(visit.commit)
        except GitError as error:
            raise SkipError(error.what) from error
        if not self.options.folder.is_dir():
            raise SkipError("the folder that the command is run in does not exist there")
        try:
            self._variables = self.environments.variables(self.repository.root, visit.folder / "build.txt")
        except BuildError as error:
            self.stop.check()
            raise SkipError(str(error)) from error
        self.here = visit.commit
        return self._variables

    def _about(self, folder: Path, number: int, seed: int) -> dict[str, str]:
        told = {"SUREFOOT_BISECT_DIR": str(folder), "SUREFOOT_SAMPLE": str(number), "SUREFOOT_SEED": str(seed)}
        if overrides.is_suite_run(self.options.command):
            told["EXTRA_SCRIPT_ARGS"] = ""  # they are words of the command by now, and a suite on Slurm adds them too
        return told | {"SUREFOOT_OVERRIDES": json.dumps(overrides.as_json(self.options))}

    def _call(self, words: list[str], variables: dict[str, str], output: Path) -> int:
        return self.stop.call(words, self.options.folder, variables, output)

    def _tidy(self, visit: CommitRecord) -> None:
        """Take back what the command did to tracked files; the next sample starts from the commit as well."""
        changed = self.repository.changed_files()
        if changed:
            visit.changed_files = sorted({*visit.changed_files, *changed})
            self.repository.git("reset", "--hard", "--quiet")


def _seed(commit: str, number: int) -> int:
    """Different for each sample of each commit, the same in every repetition of the bisect."""
    return sha256_number(f"{commit}/{number}", size=4) >> 1
