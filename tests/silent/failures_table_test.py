"""The tables of docs/failures.md are true: every row names a test that exists, and a planted bug that exists beside it.

The name of this file keeps it apart from the numbered ones, which are one per entry.
"""

from __future__ import annotations

import re
from pathlib import Path

import failures_table

SILENT = Path(__file__).parent
DOCUMENT = (SILENT.parents[1] / "docs" / "failures.md").read_text(encoding="utf-8")
MODES = 6


def rows(document: str, header: str) -> list[list[str]]:
    """Cells of the table that begins with this header line."""
    lines = document[document.index(header) :].splitlines()[2:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table]


def names_in(name: str) -> set[str]:
    path = SILENT / name
    return (
        set(re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
        if path.is_file()
        else set()
    )


def complaints(document: str) -> list[str]:
    found = []
    listed = rows(document, failures_table.HEADER)
    titles = re.findall(r"^## (\d+)\. (.+)$", document, flags=re.MULTILINE)
    if [(number, title) for number, title, *_ in listed] != titles:
        found.append("the table and the headings differ")
    for number, _, file, planted, _ in listed:
        if not file.startswith(f"test_{number}_") or planted not in names_in(file) or "planted" not in planted:
            found.append(f"{number}: {file} holds no planted bug {planted}")
    modes = rows(document, "| mode | test | mutation |")
    if len(modes) != MODES:
        found.append(f"{len(modes)} named modes instead of {MODES}")
    for mode, claim, mutation in modes:
        (file, test), (home, planted) = (cell.removeprefix("tests/silent/").split("::") for cell in (claim, mutation))
        if test not in names_in(file) or "planted" in test:
            found.append(f"{mode}: no live test {claim}")
        if planted not in names_in(home) or "planted" not in planted:
            found.append(f"{mode}: no mutation {mutation}")
    return found + failures_table.complaints(document)


def test_every_row_names_a_test_and_a_planted_bug_that_exist() -> None:
    assert complaints(DOCUMENT) == []


def test_planted_holes_in_the_tables_are_seen() -> None:
    second = rows(DOCUMENT, "| mode | test | mutation |")[1]
    holes = {
        "the table and the headings differ": DOCUMENT.replace("\n## 07. ", "\n## 07. Not "),
        "holds no planted bug": DOCUMENT.replace("| `test_03_", "| `test_04_"),
        "no live test": DOCUMENT.replace(f"`{second[1]}`", "`tests/silent/test_09_shifted_positions.py::test_gone`"),
        "no planted bug insists on it": DOCUMENT.replace(
            "InvariantError (`check_advantages`)", "StateError (`open`)", 1
        ),
        "the page says 'warning'": DOCUMENT.replace(f"| {failures_table.TESTS_ONLY} |", "| warning |", 1),
        "the counts above the table": DOCUMENT.replace(
            " are noticed by our tests only", "0 are noticed by our tests only"
        ),
        "no mutation": DOCUMENT.replace(f"`{second[2]}`", f"`{second[1]}`"),
        "5 named modes": DOCUMENT.replace(
            next(line for line in DOCUMENT.splitlines() if line.startswith("| 5. ")) + "\n", ""
        ),
    }
    for complaint, document in holes.items():
        found = complaints(document)
        assert found, complaint
        assert any(complaint in each for each in found), found
