"""No two places share six lines of logic (docs/decisions/0017-system.md); `tests/support/copies.py` finds them.

What is alike but for its names is not found here: whether such lines are one logic is for a reader to say.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from copies import SHORTEST, Copy, copies, tree
from repo_tree import ROOT

FOLDERS = ("src", "harness", "scripts", "benchmarks", "tests", "examples")
ALLOWED: dict[tuple[str, str, str], str] = {}
"""Both files and the first line they share, with the reason why each keeps its own. A reason that nothing needs is red."""

RETRY = """
def {name}(call, times):
    for attempt in range(times):
        try:
            return call()
        except OSError as error:
            if attempt + 1 == times:
                raise StateError(str(error)) from error
            wait(2 ** attempt)
"""
AGAIN = RETRY.replace(
    "        try:",
    '        # once more\n        try:  # it may be back\n            """Ask."""\n            import os\n',
)


def unexplained(found: list[Copy]) -> list[str]:
    """What is found and not allowed."""
    return [str(copy) for copy in found if (copy.left, copy.right, copy.first) not in ALLOWED]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return tree(ROOT, *FOLDERS)


@pytest.fixture(scope="module")
def found(texts: dict[str, str]) -> list[Copy]:
    return copies(texts)


def test_no_two_places_share_six_lines_of_logic(found: list[Copy]) -> None:
    assert unexplained(found) == [], "let one piece of code serve both, or say in ALLOWED why each keeps its own"


def test_every_exception_is_needed_and_says_why(found: list[Copy]) -> None:
    needed = {(copy.left, copy.right, copy.first) for copy in found}
    assert [key for key, reason in ALLOWED.items() if key not in needed or len(reason.split()) < 5] == []


def test_the_whole_tree_is_looked_at(texts: dict[str, str]) -> None:
    for path in (
        "src/surefoot/loop.py",
        "harness/src/surefoot_harness/plugin.py",
        "scripts/run_unit.sh",
        "benchmarks/report.py",
    ):
        assert path in texts
    assert {path.partition("/")[0] for path in texts} == set(FOLDERS)
    assert len(texts) > 900


@pytest.mark.parametrize("second", [RETRY, AGAIN, RETRY.replace("    ", "\t")], ids=["as it is", "commented", "tabs"])
def test_a_planted_copy_is_found_whatever_it_looks_like(second: str, tmp_path: Path) -> None:
    """In two files of the tree, between other code; the name of the function is not among the lines they share."""
    planted = {
        "src/surefoot/here.py": "FIRST = 1\n" + RETRY.format(name="call_again") + "LAST = 1\n",
        "benchmarks/there.py": '"""Something else."""\nimport sys\n' + second.format(name="persist"),
    }
    for path, text in planted.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (copy,) = copies(tree(tmp_path, "src", "benchmarks"))
    assert (copy.left, copy.right) == ("benchmarks/there.py", "src/surefoot/here.py")
    assert (copy.lines, copy.first, copy.right_line) == (7, "for attempt in range(times):", 4)
    assert unexplained([copy]) != []


def test_a_copy_in_the_same_file_is_found_and_one_run_is_not_its_own_copy() -> None:
    (copy,) = copies({"one.py": RETRY.format(name="first") + RETRY.format(name="second")})
    assert (copy.left_line, copy.right_line, copy.lines) == (3, 12, 7)
    assert [copy.lines for copy in copies({"same.py": "work()\n" * 2 * SHORTEST})] != []
    assert copies({"same.py": "work()\n" * (2 * SHORTEST - 1)}) == []


def test_five_lines_imports_and_docstrings_are_no_copy() -> None:
    five = "\n".join(RETRY.format(name="x").splitlines()[2:7])
    imports = "from somewhere import (\n" + "".join(f"    name_{i},\n" for i in range(9)) + ")\n"
    words = '"""' + "\n".join(f"Line {i} of what it promises." for i in range(9)) + '"""\n'
    one, two = (
        f"{words}{imports}def {name}(call, times):\n{five}\n                {name}()\n" for name in ("one", "two")
    )
    assert copies({"one.py": one, "two.py": two}) == []
    assert len(copies({"one.py": one, "two.py": two.replace("  two()", "  one()")})) == 1
