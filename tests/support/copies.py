"""Finds code that stands twice: runs of six or more lines of logic that are the same in two places of the tree.

White space is folded. Blank lines, comments, docstrings, imports and lines of punctuation alone do not count and do not
end a run, so a copy that was only laid out anew is still found; one with other names is not.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

SHORTEST = 6
_COMMENT = re.compile(r"(^|\s)#( |!|$).*")
_WORD = re.compile(r"\w")
_Line = tuple[int, str]


@dataclass(frozen=True)
class Copy:
    """Two places that share `lines` lines of logic, of which `first` is the first."""

    left: str
    left_line: int
    right: str
    right_line: int
    lines: int
    first: str

    def __str__(self) -> str:
        places = f"{self.left}:{self.left_line} ~ {self.right}:{self.right_line}"
        return f"{places} share {self.lines} lines from {self.first!r}"


def logic_lines(text: str, *, python: bool = True) -> list[_Line]:
    """The lines that count, each with its number and with its white space folded.

    Example:
        >>> logic_lines("import os\\n\\ndef f(a):  # why\\n    '''What.'''\\n    return  (\\n        a\\n    )\\n")
        [(3, 'def f(a):'), (5, 'return ('), (6, 'a')]
    """
    skipped = _imports_and_docstrings(ast.parse(text).body) if python else set()
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        folded = " ".join(_COMMENT.sub("", line).split())
        if number not in skipped and _WORD.search(folded):
            found.append((number, folded))
    return found


def _imports_and_docstrings(body: Iterable[ast.AST]) -> set[int]:
    """The lines of every import and of every string that is a statement, at any depth."""
    skipped: set[int] = set()
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt), "only statements have lines of their own"
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):  # `body` of a lambda is one expression
                waiting.extend(inner)
    return skipped


def copies(texts: dict[str, str], shortest: int = SHORTEST) -> list[Copy]:
    """Every pair of places that share a run, each run as long as it gets; places of one pair do not overlap."""
    files = {path: logic_lines(text, python=path.endswith(".py")) for path, text in sorted(texts.items())}
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, lines in files.items():
        words = [line for _, line in lines]
        for at in range(len(words) - shortest + 1):
            places[tuple(words[at : at + shortest])].append((path, at))
    return [copy for found in places.values() if len(found) > 1 for copy in _pairs(files, found)]


def _pairs(files: dict[str, list[_Line]], found: list[tuple[str, int]]) -> Iterator[Copy]:
    for index, (left, i) in enumerate(found):
        for right, j in found[index + 1 :]:
            a, b = files[left], files[right]
            if i and j and a[i - 1][1] == b[j - 1][1]:
                continue  # the run began before this window
            length = 0
            while i + length < len(a) and j + length < len(b) and a[i + length][1] == b[j + length][1]:
                length += 1
            if left == right:
                length = min(length, j - i)
            if length >= SHORTEST:
                yield Copy(left, a[i][0], right, b[j][0], length, a[i][1])


def tree(root: Path, *folders: str) -> dict[str, str]:
    """The programs below these folders, by path from `root`."""
    paths = [path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".sh")]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}
