"""Whether model-written code passes a task's tests, run in the sandbox.

Owns       finding the code in a completion, and the sandbox that this process uses.
Promises   the last code block counts; a sandbox that could not run the tests is no verdict, never a failed test;
           where the host has no sandbox, nothing is run.
Never      runs model-written code in this process.

Read next: `sandbox/code_tests.py`, which judges from outside the sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from surefoot.errors import RewardError
from surefoot.rewards.verifiers.final_answer import without_reasoning

if TYPE_CHECKING:
    from surefoot.sandbox.sandbox import Sandbox

MAX_CODE = 100_000
FENCE = "```"


def verify_code(tests: Any, completion: str) -> float:
    """1.0 when the code passes every test, else 0.0; raises when nobody could tell."""
    tests = checked_tests(tests)
    code = code_of(completion)
    if not code.strip() or len(code) > MAX_CODE:
        return 0.0
    from surefoot.sandbox.code_tests import grade_code

    verdict = grade_code(code, tests, sandbox())
    if verdict.passed is None or verdict.total < 1:
        raise RewardError(
            f"the tests of a code task gave no verdict: {verdict.reason or 'no test was run'}",
            "code is right or wrong only when its tests have run",
            "see docs/sandbox.md; `surefoot probe-reward CONFIG` runs the tests of a few tasks",
        )
    return float(verdict.passed)


def checked_tests(tests: Any) -> str | list[str]:
    """The tests of a task; none at all, or what is no test, is refused: every code would pass, or none."""
    from surefoot.sandbox.code_script import BadTestsError, plan

    listed = [json.dumps(each) if isinstance(each, Mapping) else each for each in tests] if _is_list(tests) else tests
    try:
        if not listed or not (isinstance(listed, str) or all(isinstance(each, str) for each in listed)):
            raise BadTestsError("neither a text of asserts nor a list of tests")
        plan(listed)
    except BadTestsError as error:
        raise RewardError(
            f"a code task has the tests {str(tests)[:80]!r}: {error}",
            "code that nothing tests would always be right",
            'give a "tests" column: a text of asserts, or a list of tests (docs/verifiers.md)',
        ) from error
    return listed


def _is_list(tests: Any) -> bool:
    return isinstance(tests, list | tuple)


def code_of(completion: str) -> str:
    """The last fenced block of a completion, or all of it when nothing is fenced.

    Example:
        >>> code_of("First try: ```x``` and then\\n```python\\ndef f(): return 1\\n```\\nDone.")
        'def f(): return 1\\n'
    """
    said = without_reasoning(completion)
    blocks = _fenced(said)
    return blocks[-1] if blocks else said


def _fenced(text: str) -> list[str]:
    """What stands between a line that opens a fence (a language may follow) and the next that is a fence alone."""
    blocks: list[str] = []
    inside: list[str] | None = None
    lines = text.split("\n")
    for number, line in enumerate(lines):
        is_fence = line.startswith(FENCE)
        if inside is None:
            if is_fence and "`" not in line[len(FENCE) :] and number < len(lines) - 1:
                inside = []
        elif is_fence and not line[len(FENCE) :].strip():
            blocks.append("".join(f"{each}\n" for each in inside))
            inside = None
        else:
            inside.append(line)
    return blocks


_permitted = [False]


def permit_unsafe() -> None:
    """From here on this process, and those it forks, run code without walls where the host has none."""
    _permitted[0] = True


@lru_cache(maxsize=1)
def sandbox() -> Sandbox:
    """The sandbox of this process; raises SecurityError where the host has none and nobody permitted that."""
    from surefoot.sandbox.sandbox import Sandbox

    return Sandbox(allow_unsafe=_permitted[0])


def require_sandbox() -> None:
    """Raise SecurityError now, not at the first answer, where the host has no sandbox."""
    sandbox()
