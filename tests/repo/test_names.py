"""A class name stands for one thing in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Sequence

from repo_tree import PACKAGES, Source, parse, sources

SAME_NAME = {
    "Engine": "the recorder of foreign test runs imports nothing of surefoot, and its engines are not those that answer",
}
"""Names that two classes have, with the reason."""


def twice(found: Sequence[Source]) -> dict[str, list[str]]:
    """Class names that are defined more than once, at the top of a module or inside something, and where."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in found:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{source.name}:{node.lineno}")
    return {name: where for name, where in places.items() if len(where) > 1}


def test_a_class_name_is_used_once() -> None:
    found = sources(*PACKAGES)
    assert len(found) > 250, "the package was not found"
    repeated = twice(found)
    assert {name: where for name, where in repeated.items() if name not in SAME_NAME} == {}
    assert SAME_NAME.keys() <= repeated.keys(), "an exception that nothing needs"


def test_planted_second_class_of_a_name_is_seen() -> None:
    text = "class Recipe: ...\ndef f():\n    class Recipe: ...\n"
    assert list(twice([parse(text)])) == ["Recipe"]
    assert list(twice([parse("class Recipe: ..."), parse("class Recipe: ...")])) == ["Recipe"]
    assert twice([parse("class Recipe: ..."), parse("class Suite: ...")]) == {}
