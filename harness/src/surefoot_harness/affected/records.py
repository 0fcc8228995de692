"""The state file: what each test depended on when it last ended well.

One versioned JSON file, `.surefoot/affected.json`, with paths relative to the root and content hashes; replaced as a
whole or not at all. What cannot be read is not guessed at: the reader gets an empty state and a sentence to print.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from surefoot_harness.affected.blocks import CORE, Blocks, digest
from surefoot_harness.affected.tree import ABSENT, Graph, Tree
from surefoot_harness.errors import StateError
from surefoot_harness.files import make_unseen, read_json, write_atomic

FORMAT = 2
NAME = ".surefoot/affected.json"


class Dependency(NamedTuple):
    """One thing a test can depend on, and its hash at the time.

    kind: "core", "body", "names" of a Python file; "file" or folder read; "glob" declared.
    """

    kind: str
    path: str
    name: str
    hash: str


@dataclass
class TestRecord:
    """What is known of one test."""

    __test__ = False  # a noun of ours, whatever its name makes pytest think

    outcome: str  # "passed", "skipped" or "failed"
    starts: list[str] = field(default_factory=list)  # files whose imports are followed
    closure: list[str] = field(default_factory=list)  # where that led
    keys: list[int] = field(default_factory=list)  # what it ran and read by itself
    inherited: list[int] = field(default_factory=list)  # what others ran or read for it: caches, imports
    loaded: list[str] = field(default_factory=list)  # files whose first import happened while it ran
    shared_reads: list[list[str]] = field(default_factory=list)  # path, name of the block; file that it read
    always: str | None = None  # why it has to run every time
    pending: str | None = None  # why it was chosen once and has not run since
    seconds: float = 0.0


@dataclass
class AffectedState:
    """The whole file."""

    environment: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    edges: dict[str, list[str]] = field(default_factory=dict)  # imports that only running showed
    import_blocks: list[list[str]] = field(default_factory=list)  # functions that ran outside of any test
    import_reads: dict[str, list[str]] = field(default_factory=dict)  # file to what importing it reads
    paths: list[str] = field(default_factory=list)  # all project files
    keys: list[Dependency] = field(default_factory=list)
    declared: dict[str, dict[str, str]] = field(default_factory=dict)  # names of a file, by their hash
    files: dict[str, Any] = field(default_factory=dict)  # split files by content hash
    tests: dict[str, TestRecord] = field(default_factory=dict)

    def known(self) -> dict[str, Blocks]:
        """Split files of the last run, by content hash."""
        return {content: Blocks.from_json(value) for content, value in self.files.items()}


def load(root: Path) -> tuple[AffectedState, str | None]:
    """The state below `root`, and a sentence to print if there was one that cannot be used."""
    path = root / NAME
    if not path.exists():
        return AffectedState(), None
    try:
        value = read_json(path)
        if not isinstance(value, dict) or value.get("tool") != "surefoot affected":
            return AffectedState(), f"{NAME} is not ours: everything runs, and it is rebuilt"
        if value.get("format") != FORMAT:
            return AffectedState(), f"{NAME} has format {value.get('format')}, this is {FORMAT}: everything runs"
        return _from_json(value), None
    except (StateError, KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        reason = error.what if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
        return AffectedState(), f"{NAME} is damaged ({reason}): everything runs, and it is rebuilt"


def _from_json(value: dict[str, Any]) -> AffectedState:
    state = AffectedState(**{name: each for name, each in value.items() if name not in ("tool", "format")})
    state.keys = [Dependency(*each) for each in state.keys]
    state.tests = {name: TestRecord(**each) for name, each in value["tests"].items()}
    for record in state.tests.values():
        if not all(0 <= key < len(state.keys) for key in [*record.keys, *record.inherited]):
            raise IndexError("a test refers to a key that is not there")
    if value["environment"].get("python") != ".".join(map(str, sys.version_info[:3])):
        state.files = {}  # another Python writes syntax trees differently
    else:
        state.known()
    return state


def save(root: Path, state: AffectedState) -> None:
    """Replace the file, with only those keys and names that a test still refers to."""
    used = sorted({key for record in state.tests.values() for key in [*record.keys, *record.inherited]})
    new = {old: number for number, old in enumerate(used)}
    value = dict(vars(state))
    value["keys"] = [list(state.keys[old]) for old in used]
    wanted = {state.keys[old].hash for old in used if state.keys[old].kind == "names"}
    value["declared"] = {key: each for key, each in state.declared.items() if key in wanted}
    value["tests"] = {
        test: {
            **vars(record),
            "keys": [new[key] for key in record.keys],
            "inherited": [new[key] for key in record.inherited],
        }
        for test, record in state.tests.items()
    }
    head = {"tool": "surefoot affected", "format": FORMAT}
    make_unseen((root / NAME).parent)
    write_atomic(root / NAME, json.dumps({**head, **value}, separators=(",", ":")) + "\n")


# -- Raw facts of a session become what each test ran, read, imported, and what it hid ------------


Block: TypeAlias = tuple[str, str]
"""A path and a qualified name; an empty name is what an import of the file runs."""

Fact: TypeAlias = tuple[str, ...]


@dataclass
class ObservedUse:
    """What was seen while one test (or collection) ran, in all its processes."""

    blocks: set[Block] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)  # files first imported, in a process that later tests use too
    reads: dict[str, set[Block]] = field(default_factory=dict)  # path to the project blocks that were at work
    imports: set[tuple[str, str]] = field(default_factory=set)  # importing file, module name
    problems: set[str] = field(default_factory=set)

    def add(self, other: ObservedUse) -> None:
        """Everything of `other` counts here as well."""
        self.blocks |= other.blocks
        self.loaded |= other.loaded
        self.imports |= other.imports
        self.problems |= other.problems
        for path, stack in other.reads.items():
            self.reads.setdefault(path, set()).update(stack)


def evidence_of(facts: Iterable[Fact], written: set[str]) -> ObservedUse:
    """One test's facts in order. Files that the session itself wrote are products, not inputs."""
    found = ObservedUse()
    for kind, *words in facts:
        if kind in ("b", "s"):
            found.blocks.add((words[0], words[1]))
            if kind == "b" and not words[1]:
                found.loaded.add(words[0])
        elif kind == "i":
            found.imports.add((words[0], words[1]))
        elif kind == "x":
            found.problems.add(words[0])
        elif kind == "f" and words[0] not in written:
            stack = found.reads.setdefault(words[0], set())
            stack.update((path, name) for path, name in json.loads(words[1]))
    return found


def sort_out(facts: Mapping[int, set[Fact]]) -> dict[int, ObservedUse]:
    """Evidence by test number. A Python process that was started but never reported is a problem of its test."""
    written = {fact[1] for seen in facts.values() for fact in seen if fact[0] == "w"}
    evidence = {number: evidence_of(seen, written) for number, seen in facts.items()}
    for number, missing in _silent(facts).items():
        evidence[number].problems.add(f"started {missing} Python process(es) that did not report what they ran")
    return evidence


def _silent(facts: Mapping[int, set[Fact]]) -> dict[int, int]:
    """How many started Python processes never said hello, by the test that started them."""
    started = {number: Counter(fact[1] for fact in seen if fact[0] == "l") for number, seen in facts.items()}
    greeted = {number: Counter(fact[1] for fact in seen if fact[0] == "h") for number, seen in facts.items()}
    totals = sum(started.values(), Counter()) - sum(greeted.values(), Counter())
    missing = {}
    for number, counts in started.items():
        short = sum(((counts - greeted[number])[pid] for pid in totals), 0)
        if short:
            missing[number] = short
    return missing


# -- The project as it stands, in the terms that records are written in: hashes by key, closures, who mentions a name


class ProjectView:
    """Answers questions about one `Tree`; remembers the answers."""

    def __init__(self, tree: Tree, roots: Iterable[str], edges: Mapping[str, Iterable[str]]) -> None:
        self.tree = tree
        self.graph = Graph(tree.blocks, roots, edges)
        self._closures: dict[frozenset[str], frozenset[str]] = {}
        self._speakers: dict[str, set[Block]] | None = None
        self._wild: set[Block] = set()
        self._wild_self: set[Block] = set()
        self._answers: dict[tuple[bool, tuple[str, ...]], set[Block]] = {}
        self._mentioned: dict[Block, frozenset[str]] = {}
        self._importers: dict[str, set[Block]] | None = None
        self._keys: dict[tuple[str, str, str], Dependency] = {}

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

    def key(self, kind: str, path: str, name: str = "") -> Dependency:
        """The key for a thing as it is now."""
        wanted = (kind, path, name)
        if wanted not in self._keys:
            self._keys[wanted] = Dependency(*wanted, self.hash_of(*wanted))
        return self._keys[wanted]

    def block_key(self, block: Block) -> Dependency:
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
    def speakers(self, names: Iterable[str], *, attributes: bool = True) -> set[Block]:
        """Blocks that mention one of `names`, and those that compute names and so may mention any.

        Args:
            attributes: whether one of them may be an attribute of a class; else who computes names of `self` is none.
        """
        wanted = tuple(names)
        if (attributes, wanted) not in self._answers:
            index = self._index()
            wild = self._wild if attributes else self._wild - self._wild_self
            self._answers[attributes, wanted] = wild.union(*(index.get(name, set()) for name in wanted))
        return self._answers[attributes, wanted]

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
            self._wild_self.update((path, name) for name in blocks.wild_self)
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
