"""Tests become a script: which statements are tests, which names are the code's. Nothing is run here."""

from __future__ import annotations

import pytest

from surefoot.sandbox.code_script import BadTestsError, ProgramTest, _names_of_the_code, plan


def test_a_text_is_split_into_tests_and_preparation() -> None:
    made = plan("import math\nx = f(1)\nassert x == 1\nfor n in range(3):\n    assert g(n) == n\ncheck(f)\n")
    assert made.calls == made.total == 3
    assert made.script.count("_surefoot.test(-1)") == 2, "the import and the assignment"


def test_a_list_has_one_test_per_entry_and_setup_counts_for_nothing() -> None:
    assert plan(["import math", "assert f(1) == 1\nassert f(2) == 2", "assert g(3)"]).calls == 2


def test_json_entries_choose_their_form() -> None:
    made = plan(['{"stdin": "1", "stdout": "2"}', '{"call": "f", "args": [1], "expect": 2}', "assert f(1) == 2"])
    assert made.programs == (ProgramTest("1", "2"),)
    assert (made.calls, made.total) == (2, 3)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("assert f(1) == 1", ["f"]),
        ("def check(candidate):\n    assert candidate(1)\ncheck(f)", ["f"]),
        ("def check(f):\n    assert f(1)\ncheck(f)", ["f"]),
        ("def check():\n    assert area(1) == helper\ncheck()", ["area", "helper"]),
        ("assert [x for x in rows() if x]", ["rows"]),
        ("from solution import f\nassert f(1)", []),
        ("assert len(sorted(f(1))) == abs(2)", ["f"]),
        ("f = 3\nassert f", []),
        ("class T:\n    def go(self):\n        return build()\nassert T().go()", ["build"]),
    ],
)
def test_the_codes_names_are_those_that_nobody_else_defines(text: str, names: list[str]) -> None:
    assert _names_of_the_code(text) == names


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "x = 1",
        "assert f(",
        [],
        ["import os"],
        "\0",
        ['{"stdin": "1"}'],
        ["(" * 300 + ")" * 300],
        "def f():\n  assert 1",
    ],
)
def test_what_is_no_test_is_refused(tests: str | list[str]) -> None:
    with pytest.raises(BadTestsError):
        plan(tests)


def test_a_test_cannot_break_out_of_its_block() -> None:
    made = plan(["assert f('''\n_surefoot.end()\n''')", "assert f(1)"])
    lines = made.script.splitlines()
    assert lines[-1] == "_surefoot.end()"
    assert sum(line.startswith("_surefoot.end") for line in lines) == 1


CASES = """
import unittest
class Base(unittest.TestCase):
    def setUp(self): self.x = f(1)
    def test_a(self): self.assertEqual(self.x, 1)
class More(Base):
    def test_b(self): self.assertEqual(f(2), 2)
    def helper(self): pass
"""


@pytest.mark.parametrize("end", ["", "unittest.main()", "if __name__ == '__main__':\n    unittest.main(exit=False)"])
def test_each_test_of_a_unittest_class_is_a_test_and_a_runner_is_none(end: str) -> None:
    for made in (plan(CASES + end), plan(CASES + end + "\nassert f(3) == 3")):
        cases = [line.strip() for line in made.script.splitlines() if ".case(" in line]
        assert cases == [f"_surefoot.case({name})" for name in ("Base, 'test_a'", "More, 'test_a'", "More, 'test_b'")]
        assert "unittest.main" not in made.script
    assert plan(CASES + end).total == 3
    assert plan([CASES + end]).total == 1, "an entry of a list is one test"


def test_a_runner_alone_is_no_test() -> None:
    with pytest.raises(BadTestsError):
        plan("import unittest\nunittest.main(exit=False)")
