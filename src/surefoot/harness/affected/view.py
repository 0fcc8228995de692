"""The project as it stands, in the terms that records are written in: hashes by key, closures, who mentions a name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from surefoot.harness.affected.blocks import CORE, digest
from surefoot.harness.affected.evidence import Block
from surefoot.harness.affected.graph import Graph
from surefoot.harness.affected.store import Key
from surefoot.harness.affected.tree import ABSENT, Tree


class View:
    """Answers questions about one `Tree`; remembers the answers."""

    def __init__(self, tree: Tree, roots: Iterable[str], edges: Mapping[str, Iterable[str]]) -> None:
        self.tree = tree
        self.graph = Graph(tree.blocks, roots, edges)
        self._closures: dict[frozenset[str], frozenset[str]] = {}
        self._speakers: dict[str, set[Block]] | None = None
        self._wild: set[Block] = set()
        self._answers: dict[tuple[str, ...], set[Block]] = {}
        self._mentioned: dict[Block, frozenset[str]] = {}
        self._importers: dict[str, set[Block]] | None = None
        self._keys: dict[tuple[str, str, str], Key] = {}

    # -- hashes ---------------------------------------------------------------------
    def hash_of(self, kind: str, path: str, name: str) -> str:
        """What a key's hash would be now; "absent" if the thing is gone."""
        if kind == "file":
            return self.tree.state_of(path)
        if kind == "glob":
            return digest("\0".join(f"{each}\0{self.tree.state_of(each)}" for each in self.tree.matching(path)))
        blocks = self.tree.blocks.get(path)
        if blocks is None:
            return ABSENT
        if kind == "core":
            return blocks.core
        if kind == "names":
            return names_hash(blocks.names)
        return blocks.bodies.get(name, ABSENT)

    def key(self, kind: str, path: str, name: str = "") -> Key:
        """The key for a thing as it is now."""
        wanted = (kind, path, name)
        if wanted not in self._keys:
            self._keys[wanted] = Key(*wanted, self.hash_of(*wanted))
        return self._keys[wanted]

    def block_key(self, block: Block) -> Key:
        """The key of a block that ran; code outside of a function belongs to the file's core."""
        path, name = block
        blocks = self.tree.blocks.get(path)
        if blocks is not None and name not in blocks.bodies:
            # a class body, a lambda at the top: part of what an import runs
            return self.key("core", path)
        return self.key("body", path, name)

    # -- imports --------------------------------------------------------------------
    def closure(self, starts: Iterable[str]) -> frozenset[str]:
        """All files that importing `starts` may run."""
        wanted = frozenset(starts)
        if wanted not in self._closures:
            self._closures[wanted] = frozenset(self.graph.closure(wanted))
        return self._closures[wanted]

    # -- mentions -------------------------------------------------------------------
    def speakers(self, names: Iterable[str]) -> set[Block]:
        """Blocks that mention one of `names`, and those that compute names and so may mention any."""
        wanted = tuple(names)
        if wanted not in self._answers:
            index = self._index()
            self._answers[wanted] = self._wild.union(*(index.get(name, set()) for name in wanted))
        return self._answers[wanted]

    def importers(self, name: str) -> set[Block]:
        """Files that import `name` from somewhere or promise it in `__all__`: they break when it goes."""
        if self._importers is None:
            self._importers = defaultdict(set)
            for path, blocks in self.tree.blocks.items():
                for word in {*blocks.listed, *(each.name.rpartition(".")[2] for each in blocks.imports)}:
                    self._importers[word].add((path, CORE))
        return self._importers.get(name, set())

    def _index(self) -> dict[str, set[Block]]:
        if self._speakers is not None:
            return self._speakers
        index: dict[str, set[Block]] = defaultdict(set)
        for path, blocks in self.tree.blocks.items():
            for name, words in blocks.mentions.items():
                for word in words:
                    index[word].add((path, name))
            self._wild.update((path, name) for name in blocks.wild)
        self._speakers = dict(index)
        return self._speakers

    def within(self, start: Block, ran: Called, *, dunders: bool = True) -> set[Block]:
        """Those of the blocks `ran` that `start` may have called, judged by the names it mentions, and so on down.

        Methods such as `__eq__` are called without being named: with `dunders` all of them count, otherwise those of
        classes that are mentioned.
        """
        found: set[Block] = set(ran.special) if dunders else set()
        waiting = [start, *found]
        while waiting:
            path, name = waiting.pop()
            blocks = self.tree.blocks.get(path)
            if blocks is None or name in blocks.wild:
                return set(ran.blocks)
            for word in ran.by_name.keys() & self._words(path, name):
                called = ran.by_name[word] - found
                waiting += called
                found |= called
        return found

    def _words(self, path: str, name: str) -> frozenset[str]:
        """What a block mentions, as a set: asked for again and again."""
        if (path, name) not in self._mentioned:
            self._mentioned[path, name] = frozenset(self.tree.blocks[path].mentions.get(name, ()))
        return self._mentioned[path, name]


class Called:
    """Blocks that ran, found by the names they are called by; made once for all questions about one test."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self.blocks = frozenset(blocks)
        self.by_name: dict[str, set[Block]] = defaultdict(set)
        self.special: set[Block] = set()
        for block in self.blocks:
            owner, _, name = block[1].rpartition(".")
            self.by_name[name].add(block)
            if name.startswith("__"):
                self.by_name[owner.rpartition(".")[2]].add(block)
                self.special.add(block)


def names_hash(names: Mapping[str, str]) -> str:
    """One hash for all declarations of a file."""
    return digest("\0".join(f"{name}\0{value}" for name, value in sorted(names.items())))
