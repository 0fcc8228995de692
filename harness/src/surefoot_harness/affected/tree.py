"""The project's files as they are now: blocks of every Python file, hashes of every other one that is asked for.

Promises   content decides, never a time or a size; a file is split only when its content is new.
"""

from __future__ import annotations

import fnmatch
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from surefoot_harness.affected.blocks import Blocks, Import, digest, split

NOT_OURS = frozenset(
    "__pycache__ .git .hg .svn .tox .nox .venv venv node_modules site-packages .surefoot .pytest_cache .mypy_cache "
    ".ruff_cache .hypothesis .cache .eggs unit_results unit_results.json .unit_results_journal".split()
)
"""Names of folders and files that hold nothing a test should depend on: environments, caches, what tools leave behind,
and so what our own `tracker` writes after each session."""

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
        yield from (start + name for name in names if is_ours(name) and not name.endswith(".pyc"))


# -- The static import graph: which project files an import of a file pulls in, however far -------
# Promises   transitive; packages' `__init__.py`, `from package import module`, relative and function-local imports
# count; where a name could mean two files, both count.


class Graph:
    """Resolves imports among `files` (paths relative to the project root, `/` between parts).

    Args:
        blocks: what each file consists of.
        roots: folders that may stand on the module search path, "" for the project root.
        extra: edges that only running showed: file to the files that it imported by a computed name.
    """

    def __init__(
        self, blocks: Mapping[str, Blocks], roots: Iterable[str], extra: Mapping[str, Iterable[str]] | None = None
    ) -> None:
        self._blocks = blocks
        self._roots = list(dict.fromkeys(["", "src", *roots]))
        self._extra = extra or {}
        self._edges: dict[str, frozenset[str]] = {}

    def closure(self, starts: Iterable[str]) -> set[str]:
        """`starts` and every project file that importing them may run."""
        seen: set[str] = set()
        waiting = [path for path in starts if path in self._blocks]
        while waiting:
            path = waiting.pop()
            if path not in seen:
                seen.add(path)
                waiting += self.edges(path) - seen
        return seen

    def edges(self, path: str) -> frozenset[str]:
        """The project files that `path` itself imports, its own packages included."""
        if path not in self._edges:
            found = {each for one in self._blocks[path].imports for each in self._resolve(one, path)}
            found.update(each for each in self._extra.get(path, ()) if each in self._blocks)
            found.update(self._packages_above(path))
            self._edges[path] = frozenset(found - {path})
        return self._edges[path]

    def find(self, name: str, importer: str = "") -> set[str]:
        """The project files that an absolute import of `name` loads, packages on the way included."""
        return set(self._resolve(Import(name, 0), importer))

    def _resolve(self, wanted: Import, importer: str) -> Iterable[str]:
        here = dirname(importer)
        if wanted.level:
            base = normpath(join(here, *[".."] * (wanted.level - 1)))
            return self._walk("" if base == "." else base, wanted.name)
        return {each for root in [*self._roots, here] for each in self._walk(root, wanted.name)}

    def _walk(self, folder: str, name: str) -> set[str]:
        """Files met on the way down from `folder` along the parts of `name`, as far as they exist."""
        found: set[str] = set()
        if folder and (init := join(folder, "__init__.py")) in self._blocks:
            found.add(init)
        place = folder
        for part in name.split("."):
            place = join(place, part)
            found.update(each for each in (f"{place}.py", join(place, "__init__.py")) if each in self._blocks)
        return found

    def _packages_above(self, path: str) -> set[str]:
        found, folder = set(), dirname(path)
        while folder and (init := join(folder, "__init__.py")) in self._blocks:
            found.add(init)
            folder = dirname(folder)
        return found


# -- What every test depends on without saying so: the Python, the platform, the installed distributions


def environment() -> dict[str, str]:
    """Name to value; a change of any reruns everything."""
    installed = sorted({name.lower() for place in sys.path for name in _distributions(place)})
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": f"{sys.platform} {platform.machine()}",
        "distributions": digest("\n".join(installed)),
    }


def _distributions(place: str) -> list[str]:
    """Names of the metadata folders in one place of the search path: each carries the name and the version."""
    try:
        return [name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []  # a zip file, or a folder that is not there


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """One sentence about what changed, or None."""
    for name, value in now.items():
        if before.get(name) != value:
            if name == "distributions":
                return "the installed distributions changed"
            return f"{name} changed from {before.get(name)} to {value}"
    return None
