"""The state file: what each test depended on when it last ended well.

One versioned JSON file, `.surefoot/affected.json`, with paths relative to the root and content hashes; replaced as a
whole or not at all. What cannot be read is not guessed at: the reader gets an empty state and a sentence to print.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.errors import StateError
from surefoot.harness.affected.blocks import Blocks
from surefoot.harness.files import make_unseen, read_json, write_atomic

FORMAT = 1
NAME = ".surefoot/affected.json"


class Key(NamedTuple):
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
class State:
    """The whole file."""

    environment: dict[str, str] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    edges: dict[str, list[str]] = field(default_factory=dict)  # imports that only running showed
    import_blocks: list[list[str]] = field(default_factory=list)  # functions that ran outside of any test
    import_reads: dict[str, list[str]] = field(default_factory=dict)  # file to what importing it reads
    paths: list[str] = field(default_factory=list)  # all project files
    keys: list[Key] = field(default_factory=list)
    declared: dict[str, dict[str, str]] = field(default_factory=dict)  # names of a file, by their hash
    files: dict[str, Any] = field(default_factory=dict)  # split files by content hash
    tests: dict[str, TestRecord] = field(default_factory=dict)

    def known(self) -> dict[str, Blocks]:
        """Split files of the last run, by content hash."""
        return {content: Blocks.from_json(value) for content, value in self.files.items()}


def load(root: Path) -> tuple[State, str | None]:
    """The state below `root`, and a sentence to print if there was one that cannot be used."""
    path = root / NAME
    if not path.exists():
        return State(), None
    try:
        value = read_json(path)
        if not isinstance(value, dict) or value.get("tool") != "surefoot affected":
            return State(), f"{NAME} is not ours: everything runs, and it is rebuilt"
        if value.get("format") != FORMAT:
            return State(), f"{NAME} has format {value.get('format')}, this is {FORMAT}: everything runs"
        return _from_json(value), None
    except (StateError, KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        reason = error.what if isinstance(error, StateError) else f"{type(error).__name__}: {error}"
        return State(), f"{NAME} is damaged ({reason}): everything runs, and it is rebuilt"


def _from_json(value: dict[str, Any]) -> State:
    state = State(**{name: each for name, each in value.items() if name not in ("tool", "format")})
    state.keys = [Key(*each) for each in state.keys]
    state.tests = {name: TestRecord(**each) for name, each in value["tests"].items()}
    for record in state.tests.values():
        if not all(0 <= key < len(state.keys) for key in [*record.keys, *record.inherited]):
            raise IndexError("a test refers to a key that is not there")
    if value["environment"].get("python") != ".".join(map(str, sys.version_info[:3])):
        state.files = {}  # another Python writes syntax trees differently
    else:
        state.known()
    return state


def save(root: Path, state: State) -> None:
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
