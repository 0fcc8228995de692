"""Raw facts of a session become what each test ran, read, imported, and what it hid."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Block: TypeAlias = tuple[str, str]
"""A path and a qualified name; an empty name is what an import of the file runs."""

Fact: TypeAlias = tuple[str, ...]


@dataclass
class Evidence:
    """What was seen while one test (or collection) ran, in all its processes."""

    blocks: set[Block] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)  # files first imported, in a process that later tests use too
    reads: dict[str, set[Block]] = field(default_factory=dict)  # path to the project blocks that were at work
    imports: set[tuple[str, str]] = field(default_factory=set)  # importing file, module name
    problems: set[str] = field(default_factory=set)

    def add(self, other: Evidence) -> None:
        """Everything of `other` counts here as well."""
        self.blocks |= other.blocks
        self.loaded |= other.loaded
        self.imports |= other.imports
        self.problems |= other.problems
        for path, stack in other.reads.items():
            self.reads.setdefault(path, set()).update(stack)


def evidence_of(facts: Iterable[Fact], written: set[str]) -> Evidence:
    """One test's facts in order. Files that the session itself wrote are products, not inputs."""
    found = Evidence()
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


def sort_out(facts: Mapping[int, set[Fact]]) -> dict[int, Evidence]:
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
