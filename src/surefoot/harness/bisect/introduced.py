"""`--good=introduced PATH`: the earliest commit in which PATH appears.

A file that was deleted and added again has several; the earliest is meant. A rename to PATH introduces PATH: under its
older name the command could not have been run. That older name is worth a note.
"""

from __future__ import annotations

from surefoot.errors import ConfigError
from surefoot.harness.bisect.repository import Repository

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
