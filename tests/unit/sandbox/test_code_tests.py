"""Verdicts on code: what passes, what fails, and what is no verdict. The cheats are in tests/faults."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sandbox_host import needs_sandbox

from surefoot.errors import ToolFailedError
from surefoot.sandbox import code_tests, host
from surefoot.sandbox.code_tests import CodeVerdict, grade_code
from surefoot.sandbox.sandbox import Sandbox, SandboxLimits

ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SandboxLimits(wall_s=20.0))


@needs_sandbox
def test_each_failed_test_is_counted(sandbox: Sandbox) -> None:
    tests = [
        "assert add(1, 2) == 3",
        "assert add(1, 2) == 4",
        "assert add('a', 1)",
        json.dumps({"call": "add", "args": [1, 1], "expect": 3}),
    ]
    assert grade_code(ADD, tests, sandbox) == CodeVerdict(False, 4, 3, "wrong_answer")


@needs_sandbox
def test_all_forms_mix_and_pass(sandbox: Sandbox) -> None:
    code = ADD + "import sys\nif __name__ == '__main__':\n    print(add(*map(int, sys.stdin.read().split())))\n"
    tests = [
        "from solution import add\nassert add(1, 2) == 3",
        "import math\nassert add(math.pi, 0) == math.pi",
        json.dumps({"call": "add", "args": [[1], [2]], "expect": [1, 2]}),
        json.dumps({"call": "add", "kwargs": {"a": 0.1, "b": 0.2}, "expect": 0.3, "tolerance": 1e-9}),
        json.dumps({"stdin": "4 5", "stdout": "9"}),
    ]
    assert grade_code(code, tests, sandbox) == CodeVerdict(True, 5, 0, None)


@needs_sandbox
@pytest.mark.parametrize(
    ("code", "tests", "reason"),
    [
        ("x = 1", "assert add(1, 2) == 3", "code_failed"),
        (ADD, "import add_what\nassert add(1, 2) == 3", "code_failed"),
        ("class A: pass\ndef add(a, b): return A()", "assert add(1, 2) == 3", "not_plain_data"),
        ("def add(a, b): return True", [json.dumps({"call": "add", "args": [1, 0], "expect": 1})], "wrong_answer"),
        ("import os\nos._exit(0)", "assert add(1, 2) == 3", "code_ended"),
        ("print('x' * 99999)", [json.dumps({"stdin": "", "stdout": "x"})], "killed_output"),
        ("raise ValueError", [json.dumps({"stdin": "", "stdout": ""})], "code_failed"),
    ],
)
def test_the_reason_of_a_failure_is_one_word(code: str, tests: Any, reason: str, sandbox: Sandbox) -> None:
    verdict = grade_code(code, tests, sandbox)
    assert (verdict.passed, verdict.reason) == (False, reason)


@needs_sandbox
@pytest.mark.parametrize(
    "tests",
    [
        "from solution import *\nassert add(1, 2) == 3",
        "import solution as s\nassert s.add(1, 2) == 3 and callable(s.add) and not hasattr(s.add, 'x')",
        "assert add and add.__name__ == 'add' and add.__doc__ is None",
        "import functools\nassert functools.reduce(add, [1, 2, 3]) == 6 and list(map(add, [1], [2])) == [3]",
    ],
)
def test_a_name_of_the_code_is_found_however_the_tests_ask(tests: str, sandbox: Sandbox) -> None:
    assert grade_code(ADD, tests, sandbox) == CodeVerdict(True, 1, 0, None)


@needs_sandbox
def test_a_name_that_the_code_lacks_is_not_taken_for_granted(sandbox: Sandbox) -> None:
    tests = [
        "assert callable(sub)",
        "assert sub",
        "assert sub.__doc__",
        "assert hasattr(sub, '__name__')",
        "assert vars(sub)",
    ]
    assert grade_code(ADD, tests, sandbox) == CodeVerdict(False, 5, 5, "code_failed")


@pytest.mark.parametrize("tests", ["", "assert add(", [], ["x = 1"], "def nothing(): pass"])
@needs_sandbox
def test_tests_that_are_none_give_no_verdict(tests: Any, sandbox: Sandbox) -> None:
    assert grade_code(ADD, tests, sandbox) == CodeVerdict(None, 0, 0, "bad_tests")


@needs_sandbox
def test_a_test_that_hangs_by_itself_is_no_verdict_on_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "_MORE_TIME_S", 0.2)
    verdict = grade_code(ADD, ["while True:\n    assert 1"], Sandbox(SandboxLimits(wall_s=0.5)))
    assert verdict == CodeVerdict(None, 1, 0, "tests_timed_out")


@needs_sandbox
def test_a_value_that_makes_the_comparison_hang_is_the_codes_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_tests, "_MORE_TIME_S", 0.2)
    tests = ["x = add(1, 2)\nwhile True:\n    assert x == 3"]  # stands for a comparison without end
    assert grade_code(ADD, tests, Sandbox(SandboxLimits(wall_s=0.8))) == CodeVerdict(False, 1, 1, "timed_out")


@needs_sandbox
def test_a_sandbox_that_fails_is_no_verdict_in_either_half(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    real, births = host.spawn, []

    def fail_at(which: int) -> None:
        def spawn(streams: Any) -> Any:
            births.append(1)
            if len(births) == which:
                raise ToolFailedError("no", "no", "no", reason="sandbox_failed")
            return real(streams)

        births.clear()
        monkeypatch.setattr(host, "spawn", spawn)

    for which in (1, 2):
        fail_at(which)
        assert grade_code(ADD, ["assert add(1, 2) == 3"], sandbox) == CodeVerdict(None, 1, 0, "sandbox_failed")


@needs_sandbox
def test_a_host_that_kills_the_code_gives_no_verdict(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(watched: Any) -> None:
        watched[1].sandboxed.kill()  # as the kernel does when the host runs out of memory
        real(watched)

    real = code_tests.attend
    monkeypatch.setattr(code_tests, "attend", attend)
    assert grade_code(ADD, ["assert add(1, 2) == 3"], sandbox).passed is None


@needs_sandbox
def test_planted_a_nonce_that_can_be_guessed_lets_anybody_write_the_verdict(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = code_tests._TESTER["surefoot/sandbox/code_tester.py"]
    forger = b"        os.write(1, b'guess 0 pass\\nguess -1 end\\n'); os._exit(0)\n"
    forged = plain.replace(b"        nonce = os.read(", forger + b"        nonce = os.read(")
    assert forged != plain
    monkeypatch.setitem(code_tests._TESTER, "surefoot/sandbox/code_tester.py", forged)
    wrong = "def add(a, b): return 0"
    assert grade_code(wrong, ["assert add(1, 2) == 3"], sandbox).passed is None
    monkeypatch.setattr(code_tests.secrets, "token_hex", lambda size: "guess")
    assert grade_code(wrong, ["assert add(1, 2) == 3"], sandbox).passed is True


def test_without_walls_code_is_graded_too_where_that_was_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(streams: object) -> None:
        raise OSError(1, "clone: no")

    monkeypatch.setattr(host, "spawn", refuse)
    host.available.cache_clear()
    try:
        unsafe = Sandbox(allow_unsafe=True)
        assert grade_code(ADD, ["assert add(1, 2) == 3"], unsafe) == CodeVerdict(True, 1, 0, None)
        assert grade_code(ADD, ["assert add(1, 2) == 4"], unsafe).passed is False
    finally:
        host.available.cache_clear()
