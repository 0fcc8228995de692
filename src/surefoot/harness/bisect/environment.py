"""The environment of a commit: rebuilt when what it depends on changed, kept when it did not.

Owns       virtual environments under `--venv-cache`, one per content of the lock and dependency files.
Promises   a build counts only when it finished (a marker is written last); a failed one makes the commit "cannot tell"
           and is not tried again for the same content.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.harness.bisect.selfcopy import OURS

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
    digest = hashlib.sha256()
    for path in sorted({path for pattern in LOCK_FILES for path in tree.glob(pattern) if path.is_file()}):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
