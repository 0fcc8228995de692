"""The work tree under the bisect: which commit is checked out, and the way home.

Owns       every checkout, and the memory of where the user was.
Promises   the user's config stays untouched (settings travel with each call); what the command changed in tracked files
           never reaches the next commit; a file of the user's that git does not know is never overwritten; hooks and
           other programs that the repository names are not run (`system/git.py`).
Never      touches a tree that was not found clean first (`command.py`).
"""

from __future__ import annotations

import errno
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from surefoot_harness.errors import ConfigError, StateError, StoppedError
from surefoot_harness.system.git import GitError, OwnPrograms, git_call, own_programs, run_git
from surefoot_harness.system.process import Child

SETTINGS = ("submodule.recurse=true", "fetch.recurseSubmodules=on-demand", "advice.detachedHead=false")
_BRANCHES = "refs/heads/"


class Repository:
    """One work tree, by its top folder, and the programs that its config names."""

    def __init__(self, root: Path, own: OwnPrograms) -> None:
        self.root = root
        self.own = own
        self.ref = self.try_git("symbolic-ref", "--quiet", "HEAD")
        self.home = self.git("rev-parse", "--verify", "HEAD^{commit}")
        self._users = set(self._untracked())
        self.moved = False

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One git command, whatever its exit code. In a session of its own: a Ctrl-C must not cut a checkout short."""
        command, env = git_call(self.root, *words, own=self.own, fetches=True, settings=SETTINGS)
        try:
            return subprocess.run(
                command,
                cwd=self.root,
                env={**env, "GIT_OPTIONAL_LOCKS": "1"},  # the tree is ours: let git note what it has seen
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="surrogateescape",
                start_new_session=True,
                check=False,
            )
        except OSError as error:
            raise GitError(f"git cannot be started: {error.strerror}", "bisect asks git", "install git") from error

    def git(self, *words: str) -> str:
        """Standard output of a git command that has to succeed."""
        done = self.run(*words)
        if done.returncode:
            said = done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}"
            raise GitError(f"git {' '.join(words)} failed: {said}", "bisect asks git", "run it by hand to see more")
        return done.stdout.rstrip("\n")

    def try_git(self, *words: str) -> str | None:
        """Standard output, or None where git says no."""
        done = self.run(*words)
        return done.stdout.rstrip("\n") if done.returncode == 0 else None

    def commit(self, name: str) -> str | None:
        """Full id of the commit that `name` names, or None."""
        return self.try_git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")

    def subject(self, commit: str) -> str:
        """First line of the message."""
        return self.git("log", "-1", "--format=%s", commit)

    def is_ancestor(self, old: str, new: str) -> bool:
        """Whether `old` is reachable from `new` (a commit is its own ancestor)."""
        return self.run("merge-base", "--is-ancestor", old, new).returncode == 0

    def has_file(self, commit: str, path: str) -> bool:
        """Whether `path` (from the root) is a file in that commit; asks the objects, checks nothing out."""
        return self.try_git("cat-file", "-t", f"{commit}:{path}") == "blob"

    def check_out(self, commit: str) -> None:
        """Make the work tree be `commit`, without anything the last command did to tracked files."""
        self.moved = True
        self.git("reset", "--hard", "--quiet")
        first = self.run("checkout", "--quiet", "--detach", commit)
        if first.returncode and self._sweep(commit):
            first = self.run("checkout", "--quiet", "--detach", commit)
        if first.returncode:
            said = " ".join(first.stderr.split())
            self.run("reset", "--hard", "--quiet")  # half a checkout is neither commit
            raise GitError(f"{commit[:12]} cannot be checked out: {said}", "it cannot be tested", "see git's words")

    def changed_files(self) -> list[str]:
        """Tracked files that differ from the commit."""
        lines = self.git("status", "--porcelain", "-z", "--untracked-files=no").split("\0")
        return sorted(line[3:] for line in lines if line[2:3] == " ")

    def restore(self) -> None:
        """Back to the branch, or the detached commit, that the user was on."""
        if not self.moved:
            return
        self.run("reset", "--hard", "--quiet")
        for words in self._way_home():
            done = self.run(*words)
            if done.returncode:
                break
        if done.returncode or self.commit("HEAD") != self.home:
            raise StateError(
                f"{self.ref or self.home} could not be checked out again: {done.stderr.strip()}",
                "the work tree is still where the bisect left it",
                " && ".join(shlex.join(["git", *words]) for words in self._way_home()),
            )
        self.moved = False

    def _way_home(self) -> list[tuple[str, ...]]:
        """The commands, also for the user to type. Forced: the tree was clean at home, so a file in the way can only
        be the command's own leaving."""
        checkout = ("checkout", "--quiet", "--force")
        branch = (self.ref or "").removeprefix(_BRANCHES)
        if self.ref and self.ref.startswith(_BRANCHES) and not branch.startswith("-"):
            return [(*checkout, branch, "--")]  # `--`: a file may have the same name
        if self.ref:  # "-f" would be taken for an option; a full name can only be gone to in two steps
            return [(*checkout, "--detach", self.ref, "--"), ("symbolic-ref", "-m", "surefoot", "HEAD", self.ref)]
        return [(*checkout, "--detach", self.home, "--")]

    def _untracked(self) -> list[str]:
        return [name for name in self.git("ls-files", "--others", "-z").split("\0") if name]

    def _sweep(self, commit: str) -> bool:
        """Remove files that the command left behind and that stand in the way of `commit`; whether there were any."""
        left = set(self._untracked()) - self._users
        wanted = set(self.git("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit).split("\0"))
        for name in left & wanted:
            (self.root / name).unlink(missing_ok=True)
        return bool(left & wanted)


# -- Stop when asked, and never in the middle of putting things back ------------------------------
# Owns       the handlers of SIGINT, SIGTERM and SIGHUP, and the one child process that may be running.
# Promises   a signal only sets a flag and ends the child; nothing is thrown into code that is cleaning up, so a second
# or a tenth signal cannot break the way home. A child that ignores the first signal is killed by the second.
# Never      lets a terminal's Ctrl-C reach the child or git directly: each runs in a session of its own.


NOT_EXECUTABLE, NOT_FOUND = 126, 127
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """Listens while it is entered; `check()` is where a request takes effect."""

    def __init__(self) -> None:
        self.asked: int | None = None
        self._child: Child | None = None
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # under nohup a hang-up stays ignored
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `StoppedError` when a stop was asked for."""
        if self.asked is not None:
            raise StoppedError(
                f"stopped by {signal.Signals(self.asked).name}",
                "it was asked for",
                "resume with the line printed below",
            )

    def call(self, argv: Sequence[str], folder: Path, env: Mapping[str, str], output: Path) -> int:
        """Exit code of one command, its words added to `output`; 126 and 127 as a shell says, negative for a signal."""
        self.check()
        with output.open("ab") as sink:
            try:
                child = _start(argv, folder, env, sink)
            except OSError as error:
                sink.write(f"{argv[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
                return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            self._child = child
            try:
                if self.asked is not None:  # it came between the start of the child and the line above
                    self._end(signal.SIGTERM)
                return child.wait()
            finally:
                self._child = None
                child.send(signal.SIGTERM)  # what it left in the background would follow us to the next commit
                child.release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.asked is not None
        self.asked = self.asked if self.asked is not None else number
        self._end(signal.SIGKILL if again else signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self._child is not None:
            self._child.send(number)


def _start(argv: Sequence[str], folder: Path, env: Mapping[str, str], sink: Any) -> Child:
    how = {"cwd": folder, "env": dict(env), "stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
    try:
        return Child.start(argv, **how)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return Child.start(["/bin/sh", *argv], **how)  # a script without #!: what a shell would do


# -- `--good=introduced PATH`: the earliest commit in which PATH appears --------------------------


_LOG = ("log", "--full-history", "--topo-order", "--reverse", "--format=%H", "--diff-filter=A")


def introduced(repository: Repository, path: str, bad: str) -> str:
    """Full id of the earliest ancestor of `bad` that added `path` (from the root), under this very name."""
    for merges in ((), ("--diff-merges=first-parent",)):  # a file that only a merge itself added needs the second look
        lines = repository.git(*_LOG, "--no-renames", *merges, bad, "--", f":(top,literal){path}").split()
        if lines:
            return lines[0]
    raise ConfigError(
        f"--good=introduced {path}: no commit before {bad[:12]} adds it",
        "GOOD would be the commit that introduced it",
        "check the path (it is taken from the folder you are in), or name GOOD yourself",
    )


def older_name(repository: Repository, path: str, commit: str) -> str | None:
    """What `path` was called just before `commit` introduced it by a rename, or None."""
    rows = repository.git("show", "--format=", "--name-status", "-M", "-z", commit).split("\0")
    for kind, old, new in zip(rows, rows[1:], rows[2:], strict=False):
        if kind.startswith("R") and new == path:
            return old
    return None


# -- Submodules get their whole history before the search: a commit that nobody fetched cannot be checked out


def fetch_all(repository: Repository, stop: Stop) -> list[str]:
    """Unshallow and fetch every submodule that is checked out. A fetch that fails is a note, not the end: a commit
    whose submodule is then missing is skipped, with its reason."""
    notes = []
    for line in repository.git("submodule", "status", "--recursive").splitlines():
        path = line[1:].split(" ", 1)[1].rsplit(" (", 1)[0]
        if line.startswith("-"):
            continue  # not checked out by the user, so not part of what is tested
        folder = repository.root / path
        code, said = _fetch(folder, stop)
        if code:
            notes.append(f"submodule {path} could not be fetched ({said}); commits that need more of it are skipped")
    return notes


def _fetch(folder: Path, stop: Stop) -> tuple[int, str]:
    shallow = run_git(folder, "rev-parse", "--is-shallow-repository").stdout.strip() == "true"
    own = own_programs(folder)
    if own.transports:
        return 1, f"its own config names a program for it, {own.transports[0]}, which is not run"
    words = ("fetch", "--quiet", "--tags", "--no-recurse-submodules", "--unshallow" if shallow else "--all")
    command, env = git_call(folder, *words, own=own, fetches=True)
    with tempfile.TemporaryDirectory(prefix="surefoot-fetch-") as temporary:
        output = Path(temporary) / "said.txt"
        code = stop.call(command, folder, env, output)
        stop.check()
        return code, " ".join(output.read_text(errors="replace").split())[:200]


# -- git's own bisect, asked to keep the books but not to move the tree ---------------------------


GOOD, BAD, SKIP = "good", "bad", "skip"


@dataclass(frozen=True)
class SearchStatus:
    """What is known now: the culprit, the next commit, or the candidates that nobody can tell apart."""

    candidates: tuple[str, ...]
    """Commits that may still be the culprit, newest first."""
    next: str | None
    """The commit to test; None when the search is over."""

    @property
    def culprit(self) -> str | None:
        """The first bad commit, when it is known."""
        return self.candidates[0] if len(self.candidates) == 1 else None


class BisectSession:
    """One bisect in git's books."""

    def __init__(self, repository: Repository) -> None:
        self.repository = repository

    def open(self) -> None:
        """Open the books."""
        self.repository.git("bisect", "start", "--no-checkout")

    def mark(self, answer: str, commit: str) -> None:
        """Write down one answer. git's exit code also tells about the search, so the ref is what is checked."""
        said = self.repository.run("bisect", answer, commit)
        ref = f"refs/bisect/{BAD}" if answer == BAD else f"refs/bisect/{answer}-{commit}"
        if self.repository.commit(ref) != commit:
            words = " ".join((said.stderr or said.stdout).split())
            raise GitError(
                f"git bisect {answer} {commit[:12]} was refused: {words}", "git keeps the books", "see above"
            )

    def standing(self) -> SearchStatus:
        """Where the search is."""
        refs = self.repository.git("for-each-ref", "--format=%(objectname) %(refname:lstrip=2)", "refs/bisect").split(
            "\n"
        )
        named = [line.split(" ", 1) for line in refs]
        bad = next(commit for commit, name in named if name == BAD)
        goods = [commit for commit, name in named if name.startswith(f"{GOOD}-")]
        skipped = {commit for commit, name in named if name.startswith(f"{SKIP}-")}
        candidates = tuple(self.repository.git("rev-list", bad, "--not", *goods).split())
        open_ones = [commit for commit in candidates if commit != bad and commit not in skipped]
        if not open_ones:
            return SearchStatus(candidates, None)
        told = self.repository.commit("BISECT_HEAD")
        return SearchStatus(candidates, told if told in open_ones else open_ones[len(open_ones) // 2])

    def log(self) -> str:
        """git's log; '--no-checkout' was ours, and without it the log suits a plain `git bisect replay` too."""
        return (self.repository.try_git("bisect", "log") or "").replace(" '--no-checkout'", "")

    def close(self, *, keep: bool) -> None:
        """Forget the books; or keep them, as an ordinary bisect that plain git can continue or reset."""
        if keep:
            self.repository.run("update-ref", "-d", "BISECT_HEAD")
        else:
            self.repository.run("bisect", "reset")
