"""The static import graph: which project files an import of a file pulls in, however far.

Promises   transitive; packages' `__init__.py`, `from package import module`, relative and function-local imports
           count; where a name could mean two files, both count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from posixpath import dirname, join, normpath

from surefoot.harness.affected.blocks import Blocks
from surefoot.harness.affected.imports import Import


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
