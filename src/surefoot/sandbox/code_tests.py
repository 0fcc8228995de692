"""A task's tests against model-written code, judged from outside it.

    code sandbox                 test sandbox               here
    the model's module <-pipe->  the task's asserts  -----> one line per test, with a nonce

Owns       the verdict.
Promises   expected values never enter the process that holds the code, and nothing of the code enters the process that
           compares; a program's printed answer is compared here. What goes wrong on our side, or in the tests before
           the code said anything, is no verdict (`passed` is None); what its answers do to the tests is False.
Never      believes anything that the code says about itself.
"""

from __future__ import annotations

import math
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.errors import ToolError
from surefoot.sandbox.code_script import BadTestsError, ProgramTest, ScriptPlan, plan
from surefoot.sandbox.host import python
from surefoot.sandbox.process import Watched, attend, exit_code
from surefoot.sandbox.sandbox import Sandbox

_HERE = Path(__file__).parent
_WORKER = (_HERE / "code_worker.py").read_bytes()


def _copies(*names: str) -> dict[str, bytes]:
    folders = ("surefoot", "surefoot/sandbox")
    files = {f"{folders[-1]}/{name}": (_HERE / name).read_bytes() for name in names}
    return {f"{folder}/__init__.py": b"" for folder in folders} | files


_WIRE = _copies("code_wire.py", "code_codec.py")
_TESTER = _copies("code_wire.py", "code_codec.py", "code_remote.py", "code_tester.py")
"""All of our package that exists in the sandbox of the code, and in that of the tests."""
_SOLUTION_FROM_AFAR = b"""import __main__

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return __main__._surefoot.remote(name)
"""
_MORE_TIME_S = 5.0
"""The tests may outlast the code: they have to say that it took too long."""
_VERDICT_BYTES = 4 * 2**20


@dataclass(frozen=True)
class CodeVerdict:
    """What the tests say about the code.

    Example:
        >>> from surefoot.sandbox.sandbox import Sandbox
        >>> grade_code("def double(x): return x + x", ["assert double(4) == 8"], Sandbox())
        CodeVerdict(passed=True, total=1, failed=0, reason=None)
    """

    passed: bool | None
    """None: no verdict. It is our failure or the tests', never the code's."""
    total: int
    failed: int
    reason: str | None
    """Why it did not pass, or why there is no verdict: one word that can be counted."""


def grade_code(code: str, tests: str | Sequence[str], sandbox: Sandbox) -> CodeVerdict:
    """Run `tests` against `code`, each side contained.

    Args:
        tests: asserts as one text, or a list of tests: asserts, or JSON objects with `stdin` and `stdout`, or with
            `call` and `expect`.
    """
    try:
        planned = plan(tests)
    except BadTestsError:
        return CodeVerdict(None, 0, 0, "bad_tests")
    try:
        failures = _failed_calls(code, planned, sandbox) if planned.calls else []
        failures += [why for test in planned.programs if (why := _failed_program(code, test, sandbox)) is not None]
    except _NoVerdictError as error:
        return CodeVerdict(None, planned.total, 0, str(error))
    except ToolError as error:  # the sandbox, not the code
        return CodeVerdict(None, planned.total, 0, getattr(error, "reason", "sandbox_failed"))
    return CodeVerdict(not failures, planned.total, len(failures), failures[0] if failures else None)


class _NoVerdictError(Exception):
    """The tests did not come to an end of their own accord."""


def _failed_program(code: str, test: ProgramTest, sandbox: Sandbox) -> str | None:
    """Why the whole program did not print what it should; None when it did."""
    ended = sandbox.run_python(code, test.stdin.encode("utf-8", "surrogatepass"))
    if ended.killed is not None:
        return "timed_out" if ended.timed_out else f"killed_{ended.killed}"
    if ended.exit_code != 0:
        return "code_failed"
    return None if _trimmed(ended.stdout) == _trimmed(test.stdout) else "wrong_answer"


def _trimmed(text: str) -> list[str]:
    """Lines, without blanks at their ends or empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _failed_calls(code: str, planned: ScriptPlan, sandbox: Sandbox) -> list[str]:
    """Why tests of the script failed, one word for each that did."""
    nonce = secrets.token_hex(16)
    wall_s = sandbox.limits.wall_s + _MORE_TIME_S
    cpu_s = max(sandbox.limits.cpu_s, math.ceil(wall_s) + 1)  # the deadline comes first
    longer = replace(sandbox.limits, wall_s=wall_s, cpu_s=cpu_s, output_bytes=_VERDICT_BYTES)
    of_code, of_tests = socket.socketpair()
    with of_code, of_tests:
        source = code.encode("utf-8", "surrogatepass")
        mine = {**_WIRE, "main.py": _WORKER, "solution.py": source}
        theirs = {**_TESTER, "main.py": planned.script.encode(), "solution.py": _SOLUTION_FROM_AFAR}
        worker = sandbox.start([python(), "main.py"], b"", mine, link=of_code, silent=True)
        try:
            tester = sandbox.start([python(), "main.py"], nonce.encode() + b"\n", theirs, link=of_tests, limits=longer)
        except BaseException:
            worker.close()
            raise
    try:
        attend([tester, worker])
        return _read_verdicts(tester, worker, nonce, planned.calls)
    finally:
        tester.close()
        worker.close()


def _read_verdicts(tester: Watched, worker: Watched, nonce: str, total: int) -> list[str]:
    exit_code(worker)  # raises when its sandbox, not the code, failed
    lines = [line.split() for line in bytes(tester.printed[0]).decode("utf-8", "replace").splitlines()]
    said = [(int(words[1]), words[2:]) for words in lines if len(words) > 2 and words[0] == nonce]
    failed = {number: _why(words[1], worker) for number, words in said if words[0] == "fail"}
    if exit_code(tester) == 0 and said and said[-1] == (-1, ["end"]):
        prepared = failed.pop(-1, None)
        return list(failed.values()) or ([prepared] * total if prepared else [])
    if (tester.killed or exit_code(tester) != 0) and any(words == ["value"] for _, words in said):
        why = {"deadline": "timed_out", "memory": "killed_memory"}.get(tester.killed or "", "broke_tests")
        return [why] * (total - sum(words[0] == "pass" for number, words in said if number >= 0))
    raise _NoVerdictError("tests_timed_out" if tester.killed == "deadline" else "tests_failed")


def _why(error: str, worker: Watched) -> str:
    """One word for a failed test, from what the test process caught and from how the code's process ended."""
    if error == "CodeGoneError":
        if worker.killed in ("deadline", "memory"):
            return "timed_out" if worker.killed == "deadline" else "killed_memory"
        return "code_ended"
    return _WORDS.get(error, "code_failed")


_WORDS = {
    "AssertionError": "wrong_answer", "NotPlainError": "not_plain_data", "NoLengthError": "not_plain_data",
    "NotLentError": "not_lent",
}  # fmt: skip
