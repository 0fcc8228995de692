"""Every silent failure has an entry, a test that holds today, and a planted bug that turns it red; nothing is left over."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from repo_tree import ROOT, functions

AT_LEAST = 25


@dataclass(frozen=True)
class Entry:
    """`## NN. Title` of docs/failures.md with the text below it."""

    number: int
    title: str
    text: str


def entries(text: str) -> list[Entry]:
    parts = re.split(r"^## (\d+)\. (.+)$", text, flags=re.MULTILINE)
    return [Entry(int(parts[i]), parts[i + 1].strip(), parts[i + 2]) for i in range(1, len(parts), 3)]


def complaints(document: str, silent: Path) -> list[str]:
    """Both ways: entry without file, file without entry, file without claim or planted bug."""
    found, files = [], {}
    listed = entries(document)
    numbers = [entry.number for entry in listed]
    if numbers != list(range(1, len(numbers) + 1)):
        found.append(f"entries are not numbered 1, 2, 3 ...: {numbers}")
    for path in sorted(silent.glob("test_*.py")):
        match = re.fullmatch(r"test_(\d\d+)_\w+\.py", path.name)
        if not match:
            found.append(f"{path.name}: the name carries no number")
        elif int(match[1]) in files:
            found.append(f"{path.name}: number {match[1]} is taken by {files[int(match[1])].name}")
        else:
            files[int(match[1])] = path
            found += _of_file(path, int(match[1]))
    for entry in listed:
        if entry.number not in files:
            found.append(f"entry {entry.number} ({entry.title}): no test file")
        elif f"tests/silent/{files[entry.number].name}" not in entry.text:
            found.append(f"entry {entry.number} ({entry.title}): does not name tests/silent/{files[entry.number].name}")
    return found + [f"{files[number].name}: no entry" for number in sorted(set(files) - set(numbers))]


def _of_file(path: Path, number: int) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [name for name, _ in functions(tree) if name.split(".")[-1].startswith("test_")]
    planted = [name for name in tests if "planted" in name]
    found = []
    if not re.match(rf"Silent failure 0*{number}:", ast.get_docstring(tree) or ""):
        found.append(f'{path.name}: the docstring does not start with "Silent failure {number}:"')
    if not planted:
        found.append(f"{path.name}: no planted bug")
    if len(planted) == len(tests):
        found.append(f"{path.name}: no claim beside the planted bug")
    return found


def test_entries_and_tests_match_both_ways() -> None:
    document = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    assert complaints(document, ROOT / "tests" / "silent") == []


def test_there_are_enough_entries() -> None:
    assert len(entries((ROOT / "docs" / "failures.md").read_text(encoding="utf-8"))) >= AT_LEAST


GOOD_TEST = '"""Silent failure 01: x."""\ndef test_claim(): ...\ndef test_planted_bug(): ...\n'
GOOD_ENTRY = "## 1. First\n\nSee tests/silent/test_01_first.py.\n"


@pytest.mark.parametrize(
    ("files", "document", "complaint"),
    [
        ({"test_01_first.py": GOOD_TEST}, GOOD_ENTRY, None),
        ({}, GOOD_ENTRY, "no test file"),
        ({"test_01_first.py": GOOD_TEST}, "# Failures\n", "no entry"),
        ({"test_01_first.py": GOOD_TEST.replace("planted_bug", "more")}, GOOD_ENTRY, "no planted bug"),
        ({"test_01_first.py": GOOD_TEST.replace("claim", "planted")}, GOOD_ENTRY, "no claim"),
        ({"test_01_first.py": GOOD_TEST.replace("01:", "02:")}, GOOD_ENTRY, "docstring"),
        ({"test_01_first.py": GOOD_TEST}, "## 1. First\n\nNo link.\n", "does not name"),
        ({"test_first.py": GOOD_TEST}, "# Failures\n", "no number"),
        (
            {"test_02_first.py": GOOD_TEST.replace("01", "02")},
            "## 2. Second\ntests/silent/test_02_first.py\n",
            "not numbered",
        ),
    ],
)
def test_planted_gap_in_the_map_is_seen(
    tmp_path: Path, files: dict[str, str], document: str, complaint: str | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = complaints(document, tmp_path)
    assert len(found) == (complaint is not None), found
    assert complaint is None or complaint in found[0]
