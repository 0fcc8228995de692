"""Small enough to hold: files, functions, and the median function."""

from __future__ import annotations

import statistics

import pytest
from exceptions import FILE_LINES, FUNCTION_LINES
from repo_tree import PACKAGES, ROOT, Source, functions, parse, sources

FILE_HARD, FUNCTION_HARD, MEDIAN = 800, 60, 12
OURS = sources(*PACKAGES, ROOT / "scripts", ROOT / "benchmarks")


def function_lengths(source: Source) -> dict[str, int]:
    """Lines from `def` to the last one, docstring included: that is what a reader scrolls through."""
    return {
        f"{source.name}::{name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, node in functions(source.tree)
    }


def too_long(source: Source) -> list[str]:
    findings = []
    lines = source.text.count("\n")
    if lines > FILE_HARD and source.name not in FILE_LINES:
        findings.append(f"{source.name}: {lines} lines, at most {FILE_HARD}; what are its two purposes?")
    for name, length in function_lengths(source).items():
        if length > FUNCTION_HARD and name not in FUNCTION_LINES:
            findings.append(f"{name}: {length} lines, at most {FUNCTION_HARD}")
    return findings


def test_no_file_and_no_function_is_too_long() -> None:
    assert OURS, "no source file was found"
    assert [finding for source in OURS for finding in too_long(source)] == []


def test_the_median_function_is_short() -> None:
    lengths = [length for source in sources(*PACKAGES) for length in function_lengths(source).values()]
    assert statistics.median(lengths) < MEDIAN, f"median of {len(lengths)} functions"


def test_every_exception_is_still_needed() -> None:
    lengths = {name: length for source in OURS for name, length in function_lengths(source).items()}
    files = {source.name: source.text.count("\n") for source in OURS}
    assert [name for name in FUNCTION_LINES if lengths.get(name, 0) <= FUNCTION_HARD] == []
    assert [name for name in FILE_LINES if files.get(name, 0) <= FILE_HARD] == []
    assert all(reason.strip() for reason in (FILE_LINES | FUNCTION_LINES).values()), "an exception needs a reason"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("x = 1\n" * 801, "801 lines"),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * 60, "A.f: 61 lines"),
    ],
)
def test_planted_giant_is_seen(text: str, word: str) -> None:
    (finding,) = too_long(parse(text))
    assert word in finding


def test_the_limit_itself_is_allowed() -> None:
    assert too_long(parse("x = 1\n" * 340 + "def f():\n" + "    x = 1\n" * 59)) == []
