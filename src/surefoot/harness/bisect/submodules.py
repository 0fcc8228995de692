"""Submodules get their whole history before the search: a commit that nobody fetched cannot be checked out."""

from __future__ import annotations

import tempfile
from pathlib import Path

from surefoot.git_calls import git_call, own_programs
from surefoot.harness.bisect.repository import Repository
from surefoot.harness.bisect.signals import Stop
from surefoot.harness.git import run_git


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
