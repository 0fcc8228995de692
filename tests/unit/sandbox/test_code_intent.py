"""What the tests' text shows: which names give objects, which arguments are outcomes. Nothing is run here."""

from __future__ import annotations

import ast

import pytest

from surefoot.sandbox.code_script import _names_of_the_code, plan, read_intent


def objects(text: str) -> list[str]:
    return sorted(read_intent(ast.parse(text), _names_of_the_code(text)).objects)


def outcomes(text: str) -> set[str]:
    return set(read_intent(ast.parse(text), _names_of_the_code(text)).outcomes)


@pytest.mark.parametrize(
    "text",
    [
        "s = Stack()\ns.push(1)\nassert s.pop() == 1",
        "s = Stack()\ns.append(1)\nassert s.pop() == 1",
        "assert Stack([1]).peek() == 1",
        "from solution import Stack\nassert Stack([1]).peek() == 1",
        "from solution import Stack as Pile\nassert Pile([1]).peek() == 1",
        "import solution\nassert solution.Stack([1]).peek() == 1",
        "assert Stack.of(1).size == 1",
        "assert Stack(1).year == 2020",
        "def make():\n    return Stack()\ns = make()\ns.push(1)\nassert s.pop() == 1",
        "def check(candidate):\n    s = candidate()\n    s.push(1)\n    assert s.top == 1\ncheck(Stack)",
        "class T(TestCase):\n    def setUp(self):\n        self.s = Stack()\n    def test(self):\n        self.s.push(1)\n        self.assertEqual(self.s.pop(), 1)\nfrom unittest import TestCase",
        "for s in [Stack(), Stack()]:\n    s.push(1)\n    assert s.pop() == 1",
        "piles = {'a': Stack()}\nfor key in piles:\n    pile = piles.get(key)\n    assert pile.peek() is None",
        "s = Stack()\nassert isinstance(s, Stack)",
    ],
)
def test_a_class_that_tests_construct_and_use_gives_objects(text: str) -> None:
    assert objects(text) == ["Stack"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("c = counter()\nc.increment()\nassert c.value == 1", ["counter"]),
        ("def values(node):\n    while node:\n        yield node.val\n        node = node.next\nassert list(values(reverse(1))) == [1]", ["reverse"]),
        ("assert [p.name for p in people()] == ['a']", ["people"]),
        ("assert midpoint(Point(0, 0), Point(2, 2)).x == 1", ["midpoint"]),
    ],
)  # fmt: skip
def test_a_function_gives_objects_where_its_result_is_used_as_nothing_plain_can_be(text: str, names: list[str]) -> None:
    assert objects(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "assert f('Bob').startswith('Hello')",
        "assert Greeting('Bob').startswith('Hello')",
        "assert Split([1]) == [1]",
        "assert 5 in Split(10)",
        "r = f(1)\nr.sort()\nassert r == [1]",
        "def check(candidate):\n    assert candidate(1).isdigit()\ncheck(f)",
        "f.cache_clear()\nassert f(3) == 2",
        "import math\nassert math.isclose(f(1), math.pi)",
        "assert f(1).real == 1",
        "assert sorted(f({}).items()) == []",
    ],
)
def test_what_plain_data_can_do_shows_no_object(text: str) -> None:
    assert objects(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "xs = [2, 1]\nfix(xs)\nassert xs == [1, 2]",
        "xs = [2, 1]\nassert fix(xs) is None and xs == [1, 2]",
        "xs = [2, 1]\nassert (fix(xs), xs) == (None, [1, 2])",
        "xs = [2, 1]\nn = fix(xs)\nassert n == 2\nassert xs[:n] == [1, 2]",
        "for xs, want in [([2, 1], [1, 2])]:\n    fix(xs)\n    assert xs == want",
        "def check(candidate):\n    xs = [2, 1]\n    candidate(xs)\n    assert xs == [1, 2]\ncheck(fix)",
        "xs = [2, 1]\nfix(xs)\nassert all(x > 0 for x in xs)",
        "xs = [2, 1]\nfix(xs)\nfirst = xs[0]\nassert first == 1",
        "xs = [2, 1]\nfix(xs)\nassert not xs",
        "def same(a, b):\n    assert a == b\nxs = [2, 1]\nfix(xs)\nsame(xs, [1, 2])",
        "def after(xs):\n    fix(xs)\n    return xs\nxs = [2, 1]\nassert after(xs) == [1, 2]",
        "import unittest\nt = unittest.TestCase()\nxs = [2, 1]\nfix(xs)\nt.assertEqual(xs, [1, 2])",
        "xs = [2, 1]\nbefore = xs[:]\nassert fix(xs) == sorted(before)\nassert xs == before",
        "xs = [2, 1]\nfix(xs)\nif xs != [1, 2]:\n    raise AssertionError",
    ],
)
def test_an_argument_that_is_compared_with_the_tests_own_is_an_outcome(text: str) -> None:
    assert "xs" in outcomes(text)
    assert "_surefoot.live(xs)" in plan(text if "assert" in text.split("\n")[-1] else text + "\nassert 1").script


@pytest.mark.parametrize(
    "text",
    [
        "xs = [2, 1]\nassert fix(xs) == sorted(xs)",
        "xs = [2, 1]\nassert sorted(xs) == fix(xs)",
        "xs = [2, 1]\nr = fix(xs)\nassert r == sorted(xs)",
        "xs = [2, 1]\nr = fix(xs)\nwant = sorted(xs)\nassert r == want",
        "xs = [2, 1]\nassert fix([1], xs) == xs",
        "xs = [2, 1]\nassert all(x in xs for x in fix(xs))",
        "xs = [2, 1]\nassert fix(xs) == [x for x in xs if x > 0]",
        "xs = [2, 1]\nr = fix(xs)\nfor i in range(len(xs)):\n    assert r[i] == xs[i] + 1",
        "xs = [2, 1]\nassert len(fix(xs)) == len(xs)",
        "def check(candidate):\n    xs = [2, 1]\n    assert candidate(xs) == sorted(xs)\ncheck(fix)",
        "def same(a, b):\n    assert a == b\nxs = [2, 1]\nsame(fix(xs), sorted(xs))",
        "def right(xs):\n    return sorted(xs)\nxs = [2, 1]\nassert fix(xs) == right(xs)",
        "def ok(f, xs):\n    return f(xs) == sorted(xs)\nxs = [2, 1]\nassert ok(fix, xs)",
        "import unittest\nt = unittest.TestCase()\nxs = [2, 1]\nt.assertEqual(fix(xs), sorted(xs))",
    ],
)
def test_an_argument_that_is_compared_with_what_the_code_gave_is_none(text: str) -> None:
    assert "xs" not in outcomes(text)
    assert "live(" not in plan(text if "assert" in text.split("\n")[-1] else text + "\nassert 1").script
