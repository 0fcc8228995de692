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

from collections.abc import Iterator

from surefoot.harness.affected.blocks import CORE
from surefoot.harness.affected.environment import difference
from surefoot.harness.affected.evidence import Block
from surefoot.harness.affected.store import Key, State, TestRecord
from surefoot.harness.affected.tree import ABSENT
from surefoot.harness.affected.view import View

_KINDS = {"core": "what importing {} runs", "file": "{}", "glob": "files matching {}"}


class Judge:
    """Compares a state with the project as it is now.

    Args:
        state: what was stored.
        view: what the files say.
        environment: of this run.
    """

    def __init__(self, state: State, view: View, environment: dict[str, str]) -> None:
        self.state, self.view = state, view
        self.moved = difference(state.environment, environment) if state.tests else None
        self._changed = {number: key for number, key in enumerate(state.keys) if self._differs(key)}
        self._renamed = {number: key for number, key in self._changed.items() if key.kind == "names"}
        self._hard = self._changed.keys() - self._renamed.keys()
        self._new = self._new_files()

    def _differs(self, key: Key) -> bool:
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

    def _describe(self, key: Key, *, inherited: bool) -> str:
        gone = self.view.hash_of(key.kind, key.path, key.name) == ABSENT
        what = f"{key.path}::{key.name}" if key.kind == "body" else _KINDS[key.kind].format(key.path)
        verb = "is gone" if gone else "appeared" if key.hash == ABSENT else "changed"
        return f"{what} {verb}" + (", which another test or an import ran for it" if inherited else "")

    def _redeclared(self, key: Key, record: TestRecord) -> Iterator[str]:
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
