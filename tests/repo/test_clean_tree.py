"""Nothing private and nothing unfinished is in the tree."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from exceptions import PRIVATE_PATHS
from repo_tree import relative, repository_files, text_of

# Written in pieces, so that this file does not accuse itself.
FORBIDDEN = {
    "a path of one machine": re.compile(
        r"/(?:home|Users)/\w+/|/ro"
        r"ot/|/wo"
        r"rk/(?:main|shared)|/tmp/(?:venv|briefs)|/opt/(?:pypi|wheels)|[A-Z]:\\Users"
    ),
    "an unfinished corner": re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b"),
    "a mail address": re.compile(r"\b[\w.+-]+@(?!example\.)[\w-]+\.(?:com|org|net|de|io|ai|edu)\b"),
    "a place that readers cannot open": re.compile(r"\bshared/(?:spec|design)\b|\bS[0-4]-\d\d\b"),
    "a merge that was not finished": re.compile(r"^(?:<{7}|>{7}) ", flags=re.MULTILINE),
}
NOT_PROSE = (".lock", ".safetensors", "tokenizer.json")


def private(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        for kind, pattern in FORBIDDEN.items():
            match = pattern.search(line)
            if match:
                yield f"{number}: {kind}: {match[0]}"


def test_nothing_private_or_unfinished_is_in_the_tree() -> None:
    found = []
    for path in repository_files():
        name, text = relative(path), text_of(path)
        if text is not None and name not in PRIVATE_PATHS and not name.endswith(NOT_PROSE):
            found += [f"{name}:{finding}" for finding in private(text)]
    assert found == []


def test_files_are_small_and_named_plainly() -> None:
    files = repository_files()
    assert [relative(path) for path in files if path.stat().st_size > 4_500_000] == []
    assert [relative(path) for path in files if not re.fullmatch(r"[\w./+-]+", relative(path))] == []


@pytest.mark.parametrize(
    "line",
    ["see /home/" + "ann/x", "/ro" + "ot/.cache", "# TO" + "DO later", "write to ann@" + "mail.org", "see S0-" + "47"],
)
def test_planted_slip_is_seen(line: str) -> None:
    assert len(list(private(line))) == 1


@pytest.mark.parametrize("line", ["/tmp/run", "huggingface/trl#3021", "@pytest.fixture", "worker", "x@example.org"])
def test_ordinary_text_is_not_accused(line: str) -> None:
    assert list(private(line)) == []
