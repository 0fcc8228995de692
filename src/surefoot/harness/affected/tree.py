"""The project's files as they are now: blocks of every Python file, hashes of every other one that is asked for.

Promises   content decides, never a time or a size; a file is split only when its content is new.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.harness.affected.blocks import Blocks, digest, split

NOT_OURS = frozenset(
    "__pycache__ .git .hg .svn .tox .nox .venv venv node_modules site-packages .surefoot .pytest_cache .mypy_cache "
    ".ruff_cache .hypothesis .cache .eggs".split()
)
"""Folder names that hold nothing a test should depend on: environments, caches, what tools leave behind."""

ABSENT = "absent"


def is_ours(path: str) -> bool:
    """Whether a relative path belongs to the project rather than to a cache or an environment."""
    return not any(part in NOT_OURS or part.endswith(".egg-info") for part in path.split("/"))


class Tree:
    """One look at the project folder.

    Args:
        root: the project folder.
        known: split files of an earlier run by content hash, so that unchanged files are not parsed again.
    """

    def __init__(self, root: Path, known: Mapping[str, Blocks] | None = None) -> None:
        self.root = root
        self._known = known or {}
        self._data: dict[str, str] = {}
        self.content: dict[str, str] = {}
        self.blocks: dict[str, Blocks] = {}
        self.paths = sorted(_walk(root))
        for path in self.paths:
            if path.endswith(".py"):
                self._add_python(path)

    def _add_python(self, path: str) -> None:
        try:
            source = (self.root / path).read_bytes()
        except OSError:
            return  # gone since the walk, or not readable: then it cannot be imported either
        key = self.content[path] = digest(source)
        self.blocks[path] = self._known.get(key) or split(source)

    def by_content(self) -> dict[str, Any]:
        """Split files by content hash, as JSON, for the next run."""
        return {self.content[path]: blocks.as_json() for path, blocks in self.blocks.items()}

    def state_of(self, path: str) -> str:
        """A hash of a file's bytes or of a folder's list of names; "absent" where there is nothing."""
        if path not in self._data:
            self._data[path] = self._look(path)
        return self._data[path]

    def _look(self, path: str) -> str:
        place = self.root / path
        try:
            if place.is_dir():
                names = sorted(name for name in os.listdir(place) if is_ours(name) and not name.endswith(".pyc"))
                return digest("\0".join(names))
            return digest(place.read_bytes())
        except OSError:
            return ABSENT

    def matching(self, pattern: str) -> list[str]:
        """Files that a glob means; `**` reaches any depth, none included."""
        flat = pattern.replace("**/", "*")
        return [path for path in self.paths if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, flat)]

    def edited_since(self, paths: Iterable[str]) -> set[str]:
        """Which of `paths` hold something else now than when this tree was looked at."""
        later = {path: self._look(path) for path in paths}
        return {path for path, now in later.items() if now != self.content.get(path, self._data.get(path))}


def _walk(root: Path) -> Iterator[str]:
    """Relative paths of all files, skipping what is not ours and every virtual environment, whatever its name."""
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name for name in folders if is_ours(name) and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        relative = os.path.relpath(folder, root).replace(os.sep, "/")
        start = "" if relative == "." else f"{relative}/"
        yield from (start + name for name in names if not name.endswith(".pyc"))
