"""A task's tests, rewritten into the script that a test process runs: one guarded block per test.

Owns       reading tests without running them: which statements are tests, which names belong to the code.
Promises   a name that the tests use and nobody defines is the code's; a built-in name never is, so code that defines
           its own `len` or `sorted` changes nothing for the tests.
Never      runs anything, and never sees the code.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TESTER = "_surefoot"


class BadTestsError(Exception):
    """The tests are no tests: not Python, or none at all."""


@dataclass(frozen=True)
class ProgramTest:
    """Run the whole program on an input, compare what it prints."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class Plan:
    """What there is to do for one task."""

    script: str
    """Of the test process; empty when there is nothing for it."""
    calls: int
    """Tests in the script."""
    programs: tuple[ProgramTest, ...]

    @property
    def total(self) -> int:
        """How many tests there are."""
        return self.calls + len(self.programs)


def plan(tests: str | Sequence[str]) -> Plan:
    """Sort the tests by kind, and write the script.

    A text is split into its statements: asserts, bare calls and blocks with asserts are tests, the rest is preparation.
    In a list each entry is one test: Python, or a JSON object with `stdin` and `stdout`, or with `call` and `expect`.

    Raises:
        BadTestsError: nothing to run, or not readable.
    """
    try:
        blocks, programs = _from_text(tests) if isinstance(tests, str) else _from_list(tests)
        numbers = sum(is_test for is_test, _ in blocks)
        if numbers + len(programs) == 0:
            raise BadTestsError("there is no test")
        return Plan(_script(blocks) if numbers else "", numbers, tuple(programs))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadTestsError(f"{type(error).__name__}: {error}") from error


Block = tuple[bool, list[ast.stmt]]


def _from_text(text: str) -> tuple[list[Block], list[ProgramTest]]:
    return [(_is_test(statement), [statement]) for statement in _statements(text)], []


def _from_list(tests: Sequence[str]) -> tuple[list[Block], list[ProgramTest]]:
    blocks: list[Block] = []
    programs: list[ProgramTest] = []
    for test in tests:
        described = _described(test)
        if described is None:
            body = _statements(test)
            if body:
                blocks.append((any(map(_is_test, body)), body))
        elif "call" in described:
            blocks.append((True, [_call_of_tester("check_call", json.dumps(described))]))
        else:
            programs.append(ProgramTest(described["stdin"], described["stdout"]))
    return blocks, programs


def _described(test: str | Mapping[str, object]) -> dict[str, Any] | None:
    """A test given as JSON; None when it is Python."""
    found = dict(test) if isinstance(test, Mapping) else None
    if found is None:
        try:
            found = json.loads(test) if isinstance(test, str) else None
        except ValueError:
            return None
    if not isinstance(found, dict):
        return None
    if isinstance(found.get("call"), str) and "expect" in found:
        return found
    if isinstance(found.get("stdin"), str) and isinstance(found.get("stdout"), str):
        return found
    raise BadTestsError(f"a test has `stdin` and `stdout`, or `call` and `expect`; this one has {sorted(found)}")


def _statements(text: str) -> list[ast.stmt]:
    body = ast.parse(text).body
    return [each for each in body if not (isinstance(each, ast.ImportFrom) and each.module == "__future__")]


def _is_test(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call)
    return any(isinstance(node, ast.Assert) for node in ast.walk(statement))


def _script(blocks: Sequence[Block]) -> str:
    head = f"from surefoot.envs.sandboxes.code_wire import Tests\n{TESTER} = Tests()\ndel Tests\n"
    plain = "\n".join(ast.unparse(ast.Module(body, [])) for _, body in blocks)
    names = "".join(f"{name} = {TESTER}.remote({name!r})\n" for name in _names_of_the_code(plain))
    module, number = ast.Module([], []), 0
    for is_test, body in blocks:
        guard = _expression(f"{TESTER}.test({number if is_test else -1})")
        module.body.append(ast.With([ast.withitem(guard)], body))
        number += is_test
    module.body.append(_call_of_tester("end"))
    return head + names + ast.unparse(ast.fix_missing_locations(module)) + "\n"


def _names_of_the_code(text: str) -> list[str]:
    """Names that are used as globals, that the tests do not define, and that are not built in."""
    top = symtable.symtable(text, "tests", "exec")
    own = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
    return sorted(_globals_used(top, is_top=True) - own - set(dir(builtins)) - {TESTER, "__file__"})


def _globals_used(table: symtable.SymbolTable, *, is_top: bool) -> set[str]:
    used = {each.get_name() for each in table.get_symbols() if each.is_referenced() and (is_top or each.is_global())}
    return used.union(*(_globals_used(child, is_top=False) for child in table.get_children()))


def _call_of_tester(method: str, *words: str) -> ast.stmt:
    return ast.Expr(ast.Call(_expression(f"{TESTER}.{method}"), [ast.Constant(word) for word in words], []))


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
