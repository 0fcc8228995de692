"""`pytest --why TEST`: whether a test would run, and for which reasons."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from surefoot.harness.affected.select import Judge


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
