"""What the harness asks of git: which commit, how dirty, where the root is.

Promises   argv lists only, no pager, no prompt, English messages, nothing of the repository's own is run
           (`system/git.py`); a failing call is a `GitError` with git's own words.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from surefoot_harness.system.files import sha256_of
from surefoot_harness.system.git import GitError, git_call

__all__ = ["GitError", "dirty_hash", "git", "head", "is_dirty", "root_of", "run_git"]


def git(folder: Path, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
    """Standard output of one git command in `folder`, without the last newline."""
    return run_git(folder, *words, check=check, env=env).stdout.rstrip("\n")


def run_git(
    folder: Path, *words: str, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One git command in `folder`; a non-zero exit is a `GitError` unless `check` is off."""
    command, settled = git_call(folder, *words)
    try:
        done = subprocess.run(
            command,
            env={**settled, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
    except OSError as error:
        raise GitError(f"git cannot be started: {error.strerror}", "the harness asks git", "install git") from error
    if check and done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}"
        raise GitError(f"git {' '.join(words)} failed: {said}", "the harness asks git", "run it by hand to see more")
    return done


def root_of(folder: Path) -> Path | None:
    """Top folder of the work tree that holds `folder`, or None outside of one."""
    done = run_git(folder, "rev-parse", "--show-toplevel", check=False)
    return Path(done.stdout.rstrip("\n")) if done.returncode == 0 else None


def head(folder: Path) -> str | None:
    """Full id of the current commit, or None where there is none."""
    done = run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def is_dirty(folder: Path) -> bool:
    """Whether tracked files differ from the commit or untracked ones (not ignored) lie about."""
    return bool(git(folder, "status", "--porcelain", "--untracked-files=normal"))


def dirty_hash(folder: Path) -> str | None:
    """12 hex digits of what differs from HEAD, untracked files with content; None for a clean tree.

    Example:
        two trees at one commit with different edits give two hashes, so one's result is never taken for the other's.
    """
    if not is_dirty(folder):
        return None
    root = Path(git(folder, "rev-parse", "--show-toplevel"))
    return sha256_of(_differences(root))[:12]


def _differences(root: Path) -> Iterator[bytes]:
    yield git(root, "diff", "HEAD", "--binary", "--no-ext-diff").encode(errors="surrogateescape")
    for name in sorted(filter(None, git(root, "ls-files", "-o", "--exclude-standard", "-z").split("\0"))):
        path = root / name
        yield name.encode(errors="surrogateescape") + b"\0"
        yield os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""
