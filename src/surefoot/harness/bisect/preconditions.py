"""What has to hold before the tree is touched; each refusal says how to mend it (exit 2)."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.git_calls import OwnPrograms, own_programs
from surefoot.harness.bisect.introduced import introduced, older_name
from surefoot.harness.bisect.options import INTRODUCED, Options
from surefoot.harness.bisect.repository import Repository
from surefoot.harness.git import root_of, run_git

_UNFINISHED = ("MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "rebase-merge", "rebase-apply")


def open_tree(options: Options) -> Repository:
    """The work tree, when it is clean and nobody else is bisecting, merging or rebasing in it."""
    root = root_of(options.folder)
    if root is None:
        raise ConfigError(f"{options.folder} is not in a git work tree", "commits are searched", "cd into a repository")
    if run_git(root, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", check=False).returncode:
        raise ConfigError("this repository has no commit", "commits are searched", "commit something first")
    _no_unfinished_work(root)
    own = own_programs(root)
    _no_own_filters(own)
    _no_hook_on_references(root)
    _clean(root)
    return Repository(root, own)


def _no_unfinished_work(root: Path) -> None:
    if _git_path(root, "BISECT_LOG").exists():
        raise ConfigError("a bisect is in progress here", "two would move the same tree", "git bisect reset")
    for name in _UNFINISHED:
        if _git_path(root, name).exists():
            raise ConfigError(f"{name} exists: something is half done here", "it would be lost", "finish or abort it")


def _no_own_filters(own: OwnPrograms) -> None:
    if own.filters:
        raise ConfigError(
            f"this repository's own config names programs that change files on checkout: {', '.join(own.filters)}",
            "what a repository names is not run, and without it other files would be tested than yours",
            "if you trust it, put it into your own config: git config --global NAME VALUE, with the same value",
        )


def _no_hook_on_references(root: Path) -> None:
    """`git bisect` runs this one hook even when core.hooksPath says that there are none."""
    hook = root / run_git(root, "rev-parse", "--git-common-dir").stdout.rstrip("\n") / "hooks" / "reference-transaction"
    if os.access(hook, os.X_OK):
        raise ConfigError(
            f"this repository has a hook that git bisect would run at every step: {hook}",
            "what a repository names is not run, and git can not be told to leave this one out",
            f"put it aside while you bisect: mv {shlex.quote(str(hook))} {shlex.quote(str(hook) + '.off')}",
        )


def _git_path(root: Path, name: str) -> Path:
    return root / run_git(root, "rev-parse", "--git-path", name).stdout.rstrip("\n")


def _clean(root: Path) -> None:
    words = ("status", "--porcelain", "-z", "--untracked-files=no")
    own = _names(run_git(root, *words, "--ignore-submodules=all").stdout)
    if own:
        raise ConfigError(
            f"the work tree has changes that are not committed: {', '.join(own[:5])}",
            "checkouts would mix them into every commit",
            "git stash, or commit them",
        )
    inside = _names(run_git(root, *words, "--ignore-submodules=none").stdout)
    if inside:
        raise ConfigError(
            f"submodules are not clean: {', '.join(inside[:5])}",
            "their state is part of the commit",
            "git submodule update --init --recursive, after saving what is changed in them",
        )


def _names(status: str) -> list[str]:
    return [entry[3:] for entry in status.split("\0") if entry[2:3] == " "]


def ends(repository: Repository, options: Options) -> tuple[str, str, list[str]]:
    """GOOD and BAD as commits, and notes for the user."""
    if not options.bad or not options.good:
        raise ConfigError(
            "GOOD and BAD are both needed",
            "the culprit is searched between them",
            "surefoot bisect --good v1.0 --bad HEAD -- ./t.sh (or set GOOD and BAD)",
        )
    bad = _commit(repository, options.bad, "BAD")
    notes: list[str] = []
    if options.good == INTRODUCED:
        path = os.path.relpath(options.folder / (options.good_path or ""), repository.root)
        good = introduced(repository, path, bad)
        notes.append(f"GOOD is {good[:12]}, which introduced {path}: {repository.subject(good)}")
        old = older_name(repository, path, good)
        if old:
            notes.append(f"before that it was called {old}; to search further back, name GOOD and use the old name")
    else:
        good = _commit(repository, options.good, "GOOD")
    if good == bad:
        raise ConfigError(f"GOOD and BAD are the same commit {good[:12]}", "nothing lies between", "choose two commits")
    if not repository.is_ancestor(good, bad):
        raise ConfigError(
            f"GOOD {good[:12]} is not an ancestor of BAD {bad[:12]}",
            "the change from good to bad has to lie on the way from one to the other",
            f"use their common ancestor as GOOD: git merge-base {good[:12]} {bad[:12]}",
        )
    return good, bad, notes


def _commit(repository: Repository, name: str, role: str) -> str:
    commit = repository.commit(name)
    if commit is None:
        raise ConfigError(
            f"{role} {name!r} is no commit here",
            "the search needs both ends",
            "check the name; in a shallow clone run: git fetch --unshallow",
        )
    return commit
