"""Code is judged by its tests; where nobody could run them there is no verdict."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import RewardError, SecurityError
from surefoot.records import Task
from surefoot.rewards.verifiers import code as verify_code
from surefoot.rewards.verifiers.multi import MultiVerifier, verifier_scorer
from surefoot.sandbox import code_tests

PROBLEM = {"verifier_type": "code", "tests": ["assert add(1, 2) == 3"]}


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the tests say next, instead of a sandbox; and what was asked."""
    asked: list[Any] = [code_tests.CodeVerdict(True, 1, 0, None)]

    def grade(code: str, tests: Any, sandbox: object) -> code_tests.CodeVerdict:
        asked.append((code, tests))
        return asked[0]

    monkeypatch.setattr(code_tests, "grade_code", grade)
    monkeypatch.setattr(verify_code, "sandbox", lambda: None)
    return asked


@pytest.mark.parametrize(
    ("said", "code"),
    [("```python\na = 1\n```", "a = 1\n"), ("x\n```\na = 1\n```\ny\n```py\nb = 2\n```\nz", "b = 2\n"), ("a = 1", "a = 1"),
     ("<think>```\nno\n```</think>yes", "yes"), ("```a = 1```", "```a = 1```")],
)  # fmt: skip
def test_the_last_block_is_the_code(said: str, code: str) -> None:
    assert verify_code.code_of(said) == code


@pytest.mark.parametrize(
    ("passed", "total", "score", "reason"),
    [(True, 1, 1.0, None), (False, 1, 0.0, None), (None, 0, None, "raised"), (True, 0, None, "raised")],
)
def test_no_verdict_of_the_tests_is_no_verdict_of_ours(
    judged: list[Any], passed: bool | None, total: int, score: float | None, reason: str | None
) -> None:
    judged[0] = code_tests.CodeVerdict(passed, total, 0, "planted")
    found = MultiVerifier(isolate=False).verify(PROBLEM, "def add(a, b): return a + b")
    assert (found.score, found.reason) == (score, reason)


@pytest.mark.parametrize("said", ["", " \n", "<think>def add(a, b): return a + b", "x" * 200_000])
def test_no_code_or_too_much_of_it_is_wrong_without_running_anything(judged: list[Any], said: str) -> None:
    assert verify_code.verify_code(PROBLEM["tests"], said) == 0.0
    assert len(judged) == 1


def test_tests_may_be_objects(judged: list[Any]) -> None:
    verify_code.verify_code([{"call": "add(1, 2)", "expect": 3}], "code")
    assert judged[1] == ("code", ['{"call": "add(1, 2)", "expect": 3}'])


@pytest.mark.parametrize("tests", [None, "", [], " ", "x = 1", ["assert ("], [3], {"a": 1}, [None]], ids=str)
def test_what_is_no_test_is_refused(tests: Any) -> None:
    with pytest.raises(RewardError, match="code task has the tests"):
        verify_code.checked_tests(tests)


def test_without_a_sandbox_the_scorer_is_refused_before_anything_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here() -> None:
        raise SecurityError("this host cannot contain model-written code", "planted", "use another host")

    monkeypatch.setattr(verify_code, "sandbox", none_here)
    with pytest.raises(SecurityError, match="cannot contain"):
        verifier_scorer([Task("a", "?", PROBLEM)])
    with MultiVerifier() as verifier, pytest.raises(SecurityError, match="cannot contain"):
        verifier.verify(PROBLEM, "def add(a, b): return a + b")
