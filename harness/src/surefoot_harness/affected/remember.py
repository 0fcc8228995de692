"""A finished session becomes the next state: whose record is replaced, kept, dropped or marked.

Promises   only a test that ended well is stored as such; a test that depends on a file edited while the tests ran
           runs again; what one test left behind for others (a filled cache, a first import) becomes theirs as well.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot_harness.affected.blocks import CORE
from surefoot_harness.affected.records import (
    AffectedState,
    Block,
    Called,
    Dependency,
    ObservedUse,
    ProjectView,
    TestRecord,
)
from surefoot_harness.affected.select import Judge

CONFIG_FILES = ("pyproject.toml", "pytest.ini", ".pytest.ini", "pytest.toml", "setup.cfg", "tox.ini")


@dataclass
class FinishedTest:
    """One test of the session that just ended."""

    outcome: str  # "passed", "skipped" or "failed"
    path: str  # the file it stands in
    conftests: list[str] = field(default_factory=list)
    globs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    evidence: ObservedUse = field(default_factory=ObservedUse)


@dataclass
class OutsideTests:
    """What happened outside of any test, and what was there before recording began."""

    evidence: ObservedUse = field(default_factory=ObservedUse)
    early: set[str] = field(default_factory=set)  # project files that were imported before
    roots: set[str] = field(default_factory=set)  # folders of the project on the module search path
    started: float = 0.0  # wall-clock time of the session's start


class StateBuilder:
    """Builds the next state from the last one, the view the session began with, and what ran."""

    def __init__(
        self, state: AffectedState, view: ProjectView, environment: dict[str, str], outside: OutsideTests
    ) -> None:
        self.view, self.outside = view, outside
        self.numbers = {key: number for number, key in enumerate(state.keys)}
        self._imported: dict[frozenset[str], set[int]] = {}
        self._given: dict[frozenset[str], frozenset[int]] = {}
        moved = state.environment != environment
        self.state = AffectedState(
            environment=environment,
            roots=sorted({*state.roots, *outside.roots}),
            edges={path: list(many) for path, many in state.edges.items()},
            import_blocks=list(state.import_blocks),
            import_reads={path: list(many) for path, many in state.import_reads.items()},
            paths=view.tree.paths,
            keys=list(state.keys),
            declared=dict(state.declared),
            files=view.tree.by_content(),
            tests={} if moved else dict(state.tests),
        )

    # -- in order -------------------------------------------------------------------
    def learn(self, ran: Mapping[str, FinishedTest], judge: Judge, gone: Iterable[str]) -> AffectedState:
        """The next state."""
        for test in gone:
            self.state.tests.pop(test, None)
        self._mark_pending(judge, ran)
        self._note_outside()
        for one in ran.values():
            self._note_edges(one.evidence)
        self.view = ProjectView(self.view.tree, self.state.roots, self.state.edges)
        edited = self._edited(ran)
        for test, one in ran.items():
            self.state.tests[test] = self._record(one, edited)
        self._inherit()
        return self.state

    def _mark_pending(self, judge: Judge, ran: Mapping[str, FinishedTest]) -> None:
        """A test that should have run and did not stays chosen, whatever the next comparison says."""
        for test, record in self.state.tests.items():
            if test not in ran and (reason := next(judge.reasons(test), None)) and not record.pending:
                record.pending = reason

    # -- outside of tests -------------------------------------------------------------
    def _note_outside(self) -> None:
        seen = self.outside.evidence
        blocks = {(path, name) for path, name in self.state.import_blocks} | self._read_early()
        blocks |= {block for block in seen.blocks if block[1] != CORE}
        self.state.import_blocks = sorted([path, name] for path, name in blocks if path in self.view.tree.blocks)
        for path, stack in seen.reads.items():
            for reader, _ in stack:
                self._add_read(reader, path)
        self._note_edges(seen)

    def _read_early(self) -> set[Block]:
        """What importing files may have run before anybody looked: judged by the names that they mention.

        Only what was imported by then can have run: the code of other files was not there yet.
        """
        blocks = self.view.tree.blocks
        files = self.outside.early & blocks.keys()
        found: set[Block] = set()
        called = Called((path, name) for path in files for name in blocks[path].bodies)
        for path in files:
            if (path, CORE) not in self.outside.evidence.blocks:
                found |= self.view.within((path, CORE), called, dunders=False)
        return found

    def _add_read(self, reader: str, path: str) -> None:
        reads = self.state.import_reads.setdefault(reader, [])
        if path not in reads:
            reads.append(path)

    def _note_edges(self, seen: ObservedUse) -> None:
        for importer, name in seen.imports:
            many = self.state.edges.setdefault(importer, [])
            many += sorted(self.view.graph.find(name, importer) - {importer, *many})

    # -- one test ---------------------------------------------------------------------
    def _record(self, one: FinishedTest, edited: set[str]) -> TestRecord:
        seen, files = one.evidence, self.view.tree.blocks
        starts = {one.path, *one.conftests, *(path for path, _ in seen.blocks)}
        starts |= {each for importer, name in seen.imports for each in self.view.graph.find(name, importer)}
        closure = self.view.closure(starts)
        keys = {self.view.block_key(block) for block in seen.blocks}
        reads = {*seen.reads, *CONFIG_FILES} | ({one.path} if one.path not in files else set())
        keys |= {self.view.key("file", path) for path in reads}
        keys |= {self.view.key("glob", pattern) for pattern in one.globs}
        numbers = {self._number(key) for key in keys} | self._import_numbers(closure)
        return TestRecord(
            outcome=one.outcome,
            starts=sorted(starts & files.keys()),
            closure=sorted(closure),
            keys=sorted(numbers),
            loaded=sorted(seen.loaded & files.keys()),
            shared_reads=sorted([*block, path] for path, stack in seen.reads.items() for block in stack),
            always=self._hidden({key.path for key in keys} | closure, seen, edited),
            seconds=round(one.seconds, 6),
        )

    def _import_numbers(self, closure: frozenset[str]) -> set[int]:
        """Keys of all that importing these files runs and declares; many tests share one closure."""
        if closure not in self._imported:
            numbers = self._imported[closure] = set()
            for path in closure:
                names = self.view.key("names", path)
                self.state.declared[names.hash] = self.view.tree.blocks[path].names
                numbers |= {self._number(names), self._number(self.view.key("core", path))}
        return self._imported[closure]

    def _number(self, key: Dependency) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.state.keys)
            self.state.keys.append(key)
        return self.numbers[key]

    def _hidden(self, paths: set[str], seen: ObservedUse, edited: set[str]) -> str | None:
        touched = sorted(paths & edited)
        if touched:
            return f"{touched[0]} was changed while the tests ran"
        return min(seen.problems, default=None)

    def _edited(self, ran: Mapping[str, FinishedTest]) -> set[str]:
        """Files that did not stay as they were between the start of the session and now."""
        tree = self.view.tree
        found = tree.edited_since(tree.blocks)
        read = {path for one in ran.values() for path in one.evidence.reads} | set(CONFIG_FILES)
        for path in read:
            try:
                if os.stat(tree.root / path).st_ctime >= self.outside.started and not (tree.root / path).is_dir():
                    found.add(path)
            except OSError:
                continue  # absent, and recorded as absent
        return found

    # -- what tests did for each other --------------------------------------------------
    def _inherit(self) -> None:
        """Give every test what others ran or read on its behalf: cached results, first imports, import-time reads."""
        tests = self.state.tests
        bodies = {test: self._bodies(record) for test, record in tests.items()}
        gifts = self._gifts(bodies)
        for test, record in tests.items():
            inherited = self._from_imports(record)
            mine = bodies[test] | {(path, CORE) for path in record.closure}
            closure = set(record.closure)
            for (path, _), (speakers, keys) in gifts.items():
                if path in closure and (speakers is None or mine & speakers):
                    inherited |= keys
            record.inherited = sorted(inherited - set(record.keys))

    def _from_imports(self, record: TestRecord) -> set[int]:
        """Keys of what importing its files ran and read; many tests share one closure."""
        closure = frozenset(record.closure)
        if closure not in self._given:
            keys = [self.view.block_key((path, name)) for path, name in self.state.import_blocks if path in closure]
            keys += [self.view.key("file", read) for path in closure for read in self.state.import_reads.get(path, [])]
            self._given[closure] = frozenset(map(self._number, keys))
        return set(self._given[closure])

    def _bodies(self, record: TestRecord) -> set[Block]:
        keys = (self.state.keys[number] for number in record.keys)
        return {(key.path, key.name) for key in keys if key.kind == "body"}

    def _gifts(self, bodies: Mapping[str, set[Block]]) -> dict[Block, tuple[set[Block] | None, set[int]]]:
        """Shared blocks to those who can profit (None: whoever imports the file) and what came out of them."""
        gifts: dict[Block, tuple[set[Block] | None, set[int]]] = {}
        for test, record in self.state.tests.items():
            by_block = {self._place(number): number for number in record.keys}
            called = Called(bodies[test])
            for giver in self._givers(record, bodies[test]):
                keys = {by_block[block] for block in self.view.within(giver, called)}
                keys |= {by_block[giver]} if giver in by_block else set()
                keys |= self._giver_reads(record, giver)
                if giver not in gifts:
                    gifts[giver] = (self._profit(giver), set())
                gifts[giver][1].update(keys)
        return gifts

    def _place(self, number: int) -> Block | None:
        key = self.state.keys[number]
        return (key.path, key.name) if key.kind == "body" else None

    def _givers(self, record: TestRecord, ran: set[Block]) -> list[Block]:
        files = self.view.tree.blocks
        shared = [block for block in ran if block[0] in files and block[1] in files[block[0]].shared]
        return [*shared, *((path, CORE) for path in record.loaded)]

    def _giver_reads(self, record: TestRecord, giver: Block) -> set[int]:
        read = {path for block_path, name, path in record.shared_reads if (block_path, name) == giver}
        return {self._number(self.view.key("file", path)) for path in read}

    def _profit(self, giver: Block) -> set[Block] | None:
        path, name = giver
        shared = self.view.tree.blocks[path].shared.get(name) if path in self.view.tree.blocks else None
        if shared is None or shared.names is None:
            return None
        of_module = shared.names == [name]  # a function that remembers, and nothing else
        return self.view.speakers(shared.names, attributes=not of_module)


# -- What a session leaves behind, as one value that can travel: from an xdist worker to the controller as text


@dataclass
class SessionReport:
    """What one pytest process ran and saw."""

    ran: dict[str, FinishedTest] = field(default_factory=dict)
    outside: OutsideTests = field(default_factory=OutsideTests)
    collected: list[str] = field(default_factory=list)  # every test found, chosen or not
    gone: list[str] = field(default_factory=list)  # stored tests that do not exist any more
    offered: int = 0  # left by -k, -m and the like
    chosen: int = 0
    notices: list[str] = field(default_factory=list)


def merge_reports(reports: Iterable[SessionReport]) -> SessionReport:
    """One report of several workers that shared one list of tests."""
    whole = SessionReport()
    for report in reports:
        for test, one in report.ran.items():
            before = whole.ran.get(test)
            whole.ran[test] = one if before is None or before.outcome != "failed" else before
        whole.outside.evidence.add(report.outside.evidence)
        whole.outside.early |= report.outside.early
        whole.outside.roots |= report.outside.roots
        whole.collected, whole.gone = report.collected, report.gone
        whole.offered, whole.chosen, whole.notices = report.offered, report.chosen, report.notices
    return whole


def dump_report(report: SessionReport) -> str:
    """As text."""
    return json.dumps(_plain(report), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, ObservedUse):
        reads = {path: sorted(stack) for path, stack in value.reads.items()}
        return {**vars(value), "reads": reads}
    return sorted(value) if isinstance(value, set) else vars(value)


def load_report(text: str) -> SessionReport:
    """From text."""
    value = json.loads(text)
    ran = {
        test: FinishedTest(**{**one, "evidence": _evidence(one["evidence"])}) for test, one in value.pop("ran").items()
    }
    out = value.pop("outside")
    outside = OutsideTests(_evidence(out["evidence"]), set(out["early"]), set(out["roots"]), out["started"])
    return SessionReport(ran=ran, outside=outside, **value)


def _evidence(value: dict[str, Any]) -> ObservedUse:
    return ObservedUse(
        blocks={(path, name) for path, name in value["blocks"]},
        loaded=set(value["loaded"]),
        reads={path: {(a, b) for a, b in stack} for path, stack in value["reads"].items()},
        imports={(importer, name) for importer, name in value["imports"]},
        problems=set(value["problems"]),
    )
