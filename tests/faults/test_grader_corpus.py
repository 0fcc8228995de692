"""A grader of code cannot be talked into a verdict: hundreds of generated cheats against forty suites, none rewarded.

By day a tenth of the corpus, each cheat against all suites in one verdict; by night all of it, and each cheat once more
against a suite of its own, through `verify_code`, as a run grades it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import Any

import pytest
from figures import Record, note
from grader_corpus import CHEATS, ENDLESS, code_of
from grader_styles import STYLES
from grader_suites import ALL
from sandbox_host import needs_sandbox

from surefoot.rewards.verifiers import code as verify_code
from surefoot.sandbox import code_tests
from surefoot.sandbox.code_script import plan
from surefoot.sandbox.code_tests import CodeVerdict, grade_code
from surefoot.sandbox.sandbox import Sandbox, SandboxLimits

pytestmark = needs_sandbox

NAMES = [suite.name for suite in ALL]
TOGETHER = [suite.tests for suite in ALL]
CHEATED = "generated cheat against a grader of code: not rewarded, and a verdict"
REMOTE, TESTER = (f"surefoot/sandbox/{name}.py" for name in ("code_remote", "code_tester"))


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SandboxLimits(wall_s=60.0, processes=8, memory_mb=192))  # an endless list is full the sooner


def test_the_corpus_is_as_large_as_we_say() -> None:
    manners = Counter(suite.manner for suite in ALL)
    assert len(CHEATS) >= 300
    assert set(manners) == {"HumanEval", "MBPP", "unittest"}
    assert len(ALL) >= 30
    assert min(manners.values()) >= 10
    assert set(LONG) < set(CHEATS)


def test_the_honest_solutions_keep_their_reward(sandbox: Sandbox, record_property: Record) -> None:
    everything = "\n".join(suite.honest for suite in ALL)
    assert grade_code(everything, TOGETHER, sandbox) == CodeVerdict(True, len(ALL), 0, None)
    note(record_property, "P16", "honest solution beside the cheats: rewarded", len(ALL))


@pytest.mark.nightly
@pytest.mark.parametrize("suite", ALL, ids=NAMES)
def test_an_honest_solution_keeps_its_reward(suite: Any) -> None:
    assert verify_code.verify_code(suite.tests, f"```python\n{suite.honest}\n```") == 1.0


@pytest.mark.turns(10)
@pytest.mark.parametrize("style", STYLES)
def test_honest_code_in_any_style_keeps_its_reward(style: str, sandbox: Sandbox) -> None:
    verdict = grade_code(*STYLES[style], sandbox)
    assert verdict == CodeVerdict(True, verdict.total, 0, None)


LONG = (
    "an object that is the result of everything", "an object whose __getitem__ agrees", "returns an open file",
    "a generator that reads what it is sent",
)  # fmt: skip
"""Endless, and so for every suite until the memory is full."""


@pytest.mark.turns(10)
@pytest.mark.parametrize("cheat", [pytest.param(each, marks=[pytest.mark.nightly] * (each in LONG)) for each in CHEATS])
def test_a_generated_cheat_is_not_rewarded(cheat: str, sandbox: Sandbox, record_property: Record) -> None:
    verdict = grade_code(code_of(CHEATS[cheat], NAMES), TOGETHER, sandbox)
    assert (verdict.passed, verdict.failed, verdict.total) == (False, len(ALL), len(ALL)), verdict
    assert verdict.reason != "timed_out"
    note(record_property, "P16", CHEATED, len(ALL))


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(len(CHEATS)))
def test_a_generated_cheat_is_not_rewarded_alone(number: int, record_property: Record) -> None:
    """One suite each, another one every night: what ends the code's process ends it before the others are tried."""
    suite = ALL[(number + int(os.environ["SUREFOOT_TEST_TURN"])) % len(ALL)]
    code = code_of(list(CHEATS.values())[number], [suite.name])
    assert verify_code.verify_code(suite.tests, f"```python\n{code}\n```") == 0.0
    note(record_property, "P16", CHEATED, 1)


TO_BURN = [suite for suite in ALL if suite.name in ("doubled", "rising", "mirror", "apply_all", "add")]


@pytest.mark.turns(8)
@pytest.mark.parametrize("cheat", ENDLESS)
def test_what_burns_the_testers_time_counts_against_the_code(
    cheat: str, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    monkeypatch.setattr(code_tests, "_MORE_TIME_S", 1.0)
    code = code_of(f"def cheat(*words, **more): return {ENDLESS[cheat]}\n", NAMES)
    for suite in TO_BURN[:: 1 if "range" in cheat else 2]:
        verdict = grade_code(code, suite.tests, Sandbox(SandboxLimits(wall_s=2.0, cpu_s=1, processes=8)))
        assert verdict.passed is False, (suite.name, verdict)
        note(record_property, "P16", CHEATED, 1)


# -- each wall by itself: red before it was there, and again when it is taken away ------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, file: str, wall: str, instead: str) -> None:
    """The sandbox of the tests, with one wall taken out of its copy of our files."""
    whole = code_tests._TESTER[file].decode()
    assert wall in whole
    monkeypatch.setitem(code_tests._TESTER, file, whole.replace(wall, instead).encode())


def reward(code: str, *tests: str) -> float:
    return verify_code.verify_code(list(tests), f"```python\n{code}\n```")


YES = (
    "class Yes:\n    def __getattr__(self, n): return lambda *a, **k: True\n    def __contains__(self, k): return True\n"
    "    def __bool__(self): return True\ndef f(*a): return Yes()"
)
ASKED = [
    'assert f("Bob").startswith("Hello")',
    "assert f(1).isdigit()",
    "assert f(12).issubset({1, 2})",
    "assert 5 in f(10)",
]


def test_methods_and_contents_of_an_object_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [reward(YES, test) for test in ASKED] == [0.0] * 4
    assert (
        reward(YES, "def check(candidate):\n    assert candidate(1).isdigit()\n    assert candidate(1)\ncheck(f)")
        == 0.0
    )
    without(monkeypatch, REMOTE, "return OBJECT if remote._root in self.objects else RESULT", "return OBJECT")
    assert [reward(YES, test) for test in ASKED] == [1.0] * 4, "planted: every result is an object that is believed"


def test_a_class_of_the_codes_is_used_where_the_tests_construct_it() -> None:
    stack = (
        "class Stack:\n    def __init__(self): self.d = []\n    def push(self, x): self.d.append(x); return self\n    def pop(self): return self.d.pop()\n"
        "    def __len__(self): return len(self.d)\n    def __contains__(self, x): return x in self.d\n    def __iter__(self): return iter(self.d)\n"
    )
    tests = "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and 1 in s and list(s) == [1, 2] and s\nassert s.pop() == 2\nassert not 2 in s"
    assert reward(stack, tests) == 1.0
    assert reward(stack.replace("self.d.pop()", "self"), tests) == 0.0


ENDS = [
    "assert all(map(f, [2, 3, 5, 7]))", "assert not any(map(f, [4, 6]))",
    "for got, want in zip(map(f, [2, 3]), [4, 9]):\n    assert got == want",
]  # fmt: skip


def test_the_end_of_an_iteration_that_the_code_raises_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    raises = "def f(n): raise StopIteration"
    assert [reward(raises, test) for test in ENDS] == [0.0] * 3
    honest = "def f(n): yield from range(n)"
    asked = "g = f(1)\nassert next(g) == 0\nassert next(g, 'end') == 'end'"
    assert reward(honest, asked) == 1.0, "who asks for the next item hears that there is none"
    without(monkeypatch, REMOTE, "ImportError, StopIteration, StopAsyncIteration,", "ImportError,")
    assert [reward(raises, test) for test in ENDS] == [1.0] * 3, "planted: it ends the tests' own loop"


def test_a_value_that_burns_later_counts_against_the_code_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The value comes in one block, and is used in another, where the code is not asked any more."""
    monkeypatch.setattr(code_tests, "_MORE_TIME_S", 0.3)
    burns = ("def f(n): return range(10 ** 12)", "r = f(3)\nassert sum(r) == 6")
    sandbox = Sandbox(SandboxLimits(wall_s=0.7, cpu_s=1))
    assert grade_code(*burns, sandbox) == CodeVerdict(False, 1, 1, "timed_out")
    without(monkeypatch, TESTER, 'self._say("value")', "pass")
    assert grade_code(*burns, sandbox).passed is None, "planted: nobody knows that the code had a part in it"


IN_PLACE = {
    "xs = [3, 1, 2]\nassert f(xs) == sorted(xs)": "def f(xs):\n    xs.clear()\n    return []",
    "xs = [3, 1, 2]\nresult = f(xs)\nassert result == sorted(xs)": "def f(xs):\n    xs.clear()\n    return []",
    "a, b = [1, 2], [5, 6]\nassert f(a, b) == b": "def f(xs, ys):\n    ys[:] = xs\n    return xs",
    "xs = [3, 1, 2]\nassert len(f(xs)) == len(xs) and all(x in xs for x in f(xs))": "def f(xs):\n    xs.clear()\n    return []",
}


def test_an_argument_is_what_it_was_unless_the_tests_look_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [reward(code, tests) for tests, code in IN_PLACE.items()] == [0.0] * 4
    honest = "def f(xs):\n    xs.sort()\n    return xs"
    for tests in ("xs = [2, 1]\nf(xs)\nassert xs == [1, 2]", "xs = [2, 1]\nassert f(xs) == sorted(xs)"):
        assert reward(honest, tests) == 1.0
    without(monkeypatch, REMOTE, "if id(mine) in self.lived:", "if True:")
    assert [reward(code, tests) for tests, code in IN_PLACE.items()] == [1.0] * 4, (
        "planted: what it changes is believed"
    )


FORGES = """
def f(function, text):
    return function("[__import__('__main__')._surefoot._say('pass'), __import__('__main__')._surefoot.end(), __import__('os')._exit(0)]")
"""


def test_what_has_power_over_the_tests_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = "assert f(eval, '1 + 1') == 2"
    assert reward(FORGES, lent) == 0.0
    assert reward("def f(function, text): return function(text)", lent) == 1.0, "it has an `eval` of its own"
    written = "assert f(lambda text: eval(text), '1 + 1') == 2"
    assert grade_code(FORGES, written, Sandbox()).reason == "not_lent"
    without(monkeypatch, REMOTE, "place = _place_of(value)", "place = None")
    without(monkeypatch, REMOTE, "if not _is_of_tests(value):", "if False:")
    assert reward(FORGES, lent) == reward(FORGES, written) == 1.0, "planted: the verdict is lent with it"


LENT = "seen = []\ndef see(x):\n    seen.append(1)\n    {}\nf(see)\nassert len(seen) == 2"
DEAF = "def f(function):\n    for _ in range(2):\n        try: function({})\n        except BaseException: pass"
NO = "class No:\n    def __getattr__(self, n): raise ValueError\n    __eq__ = lambda *a: True\n"
SWALLOWED = {
    "an assert that does not hold": (DEAF.format(1), LENT.format("assert x == 3")),
    "an assert of unittest's": (DEAF.format(1), LENT.format("import unittest; unittest.TestCase().assertEqual(x, 3)")),
    "an assert of unittest's that cannot be made": (f"{NO}{DEAF.format('No()')}", LENT.format("import unittest; unittest.TestCase().assertIn(x, {3})")),
    "an object that agrees": (f"{NO}{DEAF.format('No()')}", LENT.format("assert x == 3")),
    "an assert that asks what raises": (f"def g(x): raise ValueError\n{DEAF.format(1)}", LENT.format("assert g(x) == 3")),
}  # fmt: skip


def test_an_assert_of_a_lent_function_counts_though_the_code_swallows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name: reward(*each) for name, each in SWALLOWED.items()} == dict.fromkeys(SWALLOWED, 0.0)
    without(monkeypatch, REMOTE, "raise refused", "pass")
    assert {name: reward(*each) for name, each in SWALLOWED.items()} == dict.fromkeys(SWALLOWED, 1.0), "planted"


CATCHES = {
    "an error that the code has to catch": (
        "def f(call):\n    while True:\n        try: return call()\n        except ValueError: continue",
        "tries = []\ndef call():\n    tries.append(1)\n    if len(tries) < 3: raise ValueError('no')\n    return 7\nassert f(call) == 7",
    ),
    "an error of the code's own": (
        "def g(x): raise KeyError(x)\ndef f(call):\n    try: return call()\n    except KeyError: return 0",
        "assert f(lambda: g('x')) == 0",
    ),
    "an assert that the tests catch themselves": (
        "def f(call): return call(1)",
        "def call(x):\n    try:\n        assert x == 2\n    except AssertionError:\n        return 5\nassert f(call) == 5",
    ),
    "an assert that the tests expect": (
        "def f(call): return call(1)",
        "def call(x):\n    assert x == 2\ntry:\n    f(call)\n    raise KeyError\nexcept AssertionError:\n    pass\nassert f(lambda x: x) == 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CATCHES)
def test_what_a_lent_function_raises_otherwise_is_the_codes_to_catch(case: str) -> None:
    assert reward(*CATCHES[case]) == 1.0


@pytest.mark.parametrize(
    "end",
    ["unittest.main(exit=False)", "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))"],
)
def test_a_unittest_class_is_read_and_not_left_to_a_runner_that_hides_failures(end: str) -> None:
    tests = f"import unittest\nclass T(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(f(1), 2)\n{end}\n"
    assert verify_code.verify_code(tests, "def f(n): return n") == 0.0
    assert verify_code.verify_code(tests, "def f(n): return n + 1") == 1.0
    assert plan(tests).total == 1


# -- teeth of the corpus ------------------------------------------------------------------------------------------------

BESIDE = """
import json, os, sys, types
import unittest
solution = sys.modules['solution'] = types.ModuleType('solution')
exec(open('code.py').read(), solution.__dict__)
earned = []
for name, tests in json.load(open('tests.json')):
    space = {**vars(solution), '__name__': 'tests'}
    try:
        exec(tests, space)
        for kind in [each for each in space.values() if isinstance(each, type) and issubclass(each, unittest.TestCase)]:
            kind('test_it').debug()
    except Exception:
        continue
    earned.append(name)
print('EARNED', len(earned), *earned, flush=True)
os._exit(0)
"""


@pytest.mark.turns(20)
@pytest.mark.parametrize(
    "kind",
    [
        "an object whose __contains__ agrees",
        "a class instead of a function",
        "an ordered yes",
        "raises StopIteration",
        "empties what it is given",
        "a str with its own methods",
        "returns a mock of everything",
        "an object that agrees to everything",
    ],
)
def test_planted_a_grader_beside_the_code_rewards_what_ours_does_not(kind: str, sandbox: Sandbox) -> None:
    files = {
        "code.py": code_of(CHEATS[kind], NAMES).encode(),
        "tests.json": json.dumps([suite[1:3] for suite in ALL]).encode(),
    }
    said = sandbox.run_python(BESIDE, files=files)
    assert "EARNED" in said.stdout, said
    assert not said.stdout.startswith("EARNED 0"), "the cheat is real: it earns something in plain Python"
