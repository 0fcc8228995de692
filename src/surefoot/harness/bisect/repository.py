"""The work tree under the bisect: which commit is checked out, and the way home.

Owns       every checkout, and the memory of where the user was.
Promises   the user's config stays untouched (settings travel with each call); what the command changed in tracked files
           never reaches the next commit; a file of the user's that git does not know is never overwritten; hooks and
           other programs that the repository names are not run (`git_calls.py`).
Never      touches a tree that was not found clean first (`preconditions.py`).
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from surefoot.errors import StateError
from surefoot.git_calls import GitError, OwnPrograms, git_call

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
