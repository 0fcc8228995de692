"""Which tests have to run, and for which reasons.

A test is left out only if all of this holds:

    it ended well the last time it ran, and nothing about that run was hidden from the recorder;
    the environment is the same;
    every block it ran, file it read and folder it listed has the same content;
    everything that importing its files runs is the same, and its imports still lead to the same files;
    no name that it mentions is declared differently, and no new file has a name that it mentions.

Read next: `remember.py`, which turns a finished session into these records.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.affected.blocks import CORE
from surefoot_harness.affected.records import AffectedState, Block, Dependency, ProjectView, TestRecord
from surefoot_harness.affected.tree import ABSENT, difference

_KINDS = {"core": "what importing {} runs", "file": "{}", "glob": "files matching {}"}


class Judge:
    """Compares a state with the project as it is now.

    Args:
        state: what was stored.
        view: what the files say.
        environment: of this run.
    """

    def __init__(self, state: AffectedState, view: ProjectView, environment: dict[str, str]) -> None:
        self.state, self.view = state, view
        self.moved = difference(state.environment, environment) if state.tests else None
        self._changed = {number: key for number, key in enumerate(state.keys) if self._differs(key)}
        self._renamed = {number: key for number, key in self._changed.items() if key.kind == "names"}
        self._hard = self._changed.keys() - self._renamed.keys()
        self._new = self._new_files()

    def _differs(self, key: Dependency) -> bool:
        return self.view.hash_of(key.kind, key.path, key.name) != key.hash

    def _new_files(self) -> dict[str, set[Block]]:
        """New files to the blocks that mention their name."""
        new = set(self.view.tree.paths) - set(self.state.paths)
        return {path: self.view.speakers([path.rpartition("/")[2]]) for path in new}

    def is_affected(self, test: str) -> bool:
        """Whether `test` has to run."""
        return next(self.reasons(test), None) is not None

    def reasons(self, test: str) -> Iterator[str]:
        """Why `test` has to run, one sentence each; nothing if it need not."""
        record = self.state.tests.get(test)
        if record is None:
            yield "it is new here: no run of it is on record"
            return
        if record.outcome == "failed":
            yield "it failed the last time it ran"
        if record.always:
            yield f"it always runs: {record.always}"
        if record.pending:
            yield f"it was chosen before and has not run since: {record.pending}"
        if self.moved:
            yield self.moved
        yield from self._changes(record)
        yield from self._new_ways(record)

    def _changes(self, record: TestRecord) -> Iterator[str]:
        mine = {*record.keys, *record.inherited}
        for number in sorted(mine & self._hard):
            yield self._describe(self._changed[number], inherited=number not in record.keys)
        for number in sorted(mine & self._renamed.keys()):
            yield from self._redeclared(self._renamed[number], record)

    def _describe(self, key: Dependency, *, inherited: bool) -> str:
        gone = self.view.hash_of(key.kind, key.path, key.name) == ABSENT
        what = f"{key.path}::{key.name}" if key.kind == "body" else _KINDS[key.kind].format(key.path)
        verb = "is gone" if gone else "appeared" if key.hash == ABSENT else "changed"
        return f"{what} {verb}" + (", which another test or an import ran for it" if inherited else "")

    def _redeclared(self, key: Dependency, record: TestRecord) -> Iterator[str]:
        """A function or constant of a file it imports is declared differently: does the test speak of it?"""
        before = self.state.declared.get(key.hash, {})
        blocks = self.view.tree.blocks.get(key.path)
        now = blocks.names if blocks is not None else {}
        mine = self._blocks(record)
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) == now.get(name):
                continue
            word = name.rpartition(".")[2]
            if mine & self.view.speakers([word]):
                yield f"{name} in {key.path} is declared differently"
            elif (name in before) != (name in now) and mine & self.view.importers(word):
                fate = "gone" if name in before else "new"
                yield f"{name} in {key.path} is {fate}, and a file it imports asks for it"

    def _new_ways(self, record: TestRecord) -> Iterator[str]:
        before = set(record.closure)
        for path in sorted(self.view.closure(record.starts) - before):
            yield f"its imports lead to {path} now"
        mine = self._blocks(record) if self._new else set()
        for path, speakers in sorted(self._new.items()):
            if mine & speakers:
                yield f"{path} is new, and code that it runs mentions that name"

    def _blocks(self, record: TestRecord) -> set[Block]:
        """Every block whose words count as the test's own: what it ran, and what its imports run."""
        keys = (self.state.keys[number] for number in [*record.keys, *record.inherited])
        ran = {(key.path, key.name) for key in keys if key.kind == "body"}
        return ran | {(path, CORE) for path in record.closure}


# -- Which of the collected tests run: those affected, those that the user named, and a few for the audit


@dataclass
class Choice:
    """The collected tests, sorted out; `to_run` keeps their order."""

    affected: list[Any] = field(default_factory=list)
    audited: list[Any] = field(default_factory=list)
    left_out: list[Any] = field(default_factory=list)
    to_run: list[Any] = field(default_factory=list)


def choose(items: list[Any], judge: Judge, config: Any, audit: int, dice: random.Random) -> Choice:
    """Sort `items` out. `-k` and node ids win: what they match runs, affected or not."""
    named = [word for word in config.args if "::" in word]
    by_name = bool(config.getoption("keyword"))
    choice = Choice()
    spare: list[Any] = []
    for item in items:
        wanted = by_name or any(_means(word, item, config.invocation_params.dir) for word in named)
        (choice.affected if wanted or judge.is_affected(item.nodeid) else spare).append(item)
    choice.audited = dice.sample(spare, min(max(audit, 0), len(spare)))
    runs = {id(item) for item in [*choice.affected, *choice.audited]}
    choice.to_run = [item for item in items if id(item) in runs]
    choice.left_out = [item for item in items if id(item) not in runs]
    return choice


def _means(word: str, item: Any, folder: Path) -> bool:
    """Whether the argument `word`, a node id, selects `item`."""
    path, _, names = word.partition("::")
    mine: str = item.nodeid.partition("::")[2]
    if (folder / path).resolve() != item.path.resolve():
        return False
    return mine == names or mine.startswith((f"{names}::", f"{names}["))


# -- `pytest --why TEST`: whether a test would run, and for which reasons -------------------------


def explain(judge: Judge, test: str) -> list[str]:
    """Lines for one test."""
    reasons = list(judge.reasons(test))
    if reasons:
        return [f"{test} would run:", *(f"  - {reason}" for reason in reasons)]
    record = judge.state.tests[test]
    kinds = [judge.state.keys[number].kind for number in {*record.keys, *record.inherited}]
    counts = f"{kinds.count('body')} function(s), {len(record.closure)} imported file(s)"
    return [
        f"{test} would not run: nothing that it depends on changed",
        f"  it depends on {counts} and {kinds.count('file') + kinds.count('glob')} other file(s) or folder(s)",
    ]


def find_test(wanted: str, tests: Collection[str]) -> list[str]:
    """The node ids that `wanted` means: itself, its parameters, or the one test that ends with it."""
    if wanted in tests:
        return [wanted]
    return [each for each in tests if each.startswith(f"{wanted}[") or each.endswith((f"/{wanted}", f"::{wanted}"))]


def nearest(wanted: str, tests: Collection[str]) -> str:
    """A hint with the most similar node ids."""
    near = difflib.get_close_matches(wanted, tests, n=3, cutoff=0.4)
    return f"nearest: {', '.join(near)}" if near else f"{len(tests)} test(s) were collected, none is similar"
