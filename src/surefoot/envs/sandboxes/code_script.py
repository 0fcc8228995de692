"""A task's tests, rewritten into the script that a test process runs: one guarded block per test.

Owns       reading tests without running them: which statements are tests, which names belong to the code.
Promises   a name that the tests use and nobody defines is the code's; a built-in name never is, so code that defines
           its own `len` or `sorted` changes nothing for the tests. Each test of a `unittest` class is a test.
Never      runs anything, and never sees the code.
"""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefoot.envs.sandboxes.code_intent import Intent, read_intent, root_of

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

    A text is split into its statements: asserts, bare calls and blocks with asserts are tests, and so is each test
    method of a `unittest.TestCase`; the rest is preparation.
    In a list each entry is one test: Python, or a JSON object with `stdin` and `stdout`, or with `call` and `expect`.

    Raises:
        BadTestsError: nothing to run, or not readable.
    """
    listed = (json.dumps(dict(each)) if isinstance(each, Mapping) else each for each in tests)
    return _plan(tests if isinstance(tests, str) else tuple(listed))


@lru_cache(maxsize=64)
def _plan(tests: str | tuple[str, ...]) -> Plan:
    """The same tests judge every answer of a group."""
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
    body = _statements(text)
    cases = _cases(body)
    blocks = [(_is_test(statement), [statement]) for statement in body if not _runs_cases(statement)]
    return [*blocks, *((True, [case]) for case in cases)], []


def _from_list(tests: Sequence[str]) -> tuple[list[Block], list[ProgramTest]]:
    blocks: list[Block] = []
    programs: list[ProgramTest] = []
    for test in tests:
        described = _described(test)
        if described is None:
            body = _statements(test)
            cases, body = _cases(body), [each for each in body if not _runs_cases(each)]
            if body or cases:
                blocks.append((bool(cases) or any(map(_is_test, body)), [*body, *cases]))
        elif "call" in described:
            blocks.append((True, [_call_of_tester("check_call", json.dumps(described))]))
        else:
            programs.append(ProgramTest(described["stdin"], described["stdout"]))
    return blocks, programs


def _described(test: str) -> dict[str, Any] | None:
    """A test given as JSON; None when it is Python."""
    try:
        found = json.loads(test)
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


def _cases(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """One call for each test method of the `unittest` classes; `unittest` itself would swallow what they raise."""
    methods: dict[str, list[str]] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            bases = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
            if any(base.endswith("TestCase") or base in methods for base in bases):
                own = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                inherited = [name for base in bases for name in methods.get(base, [])]
                methods[node.name] = list(
                    dict.fromkeys([*inherited, *(each for each in own if each.startswith("test"))])
                )
    return [_statement(f"{TESTER}.case({name}, {test!r})") for name, tests in methods.items() for test in tests]


def _runs_cases(statement: ast.stmt) -> bool:
    """`unittest.main()` and its kin, also below `if __name__ == ...`: they end the process, or hide every failure."""
    if isinstance(statement, ast.If):
        return all(map(_runs_cases, statement.body)) and not statement.orelse
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    node: ast.AST = statement.value
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id == "unittest"


def _script(blocks: Sequence[Block]) -> str:
    plain = ast.Module([statement for _, body in blocks for statement in body], [])
    names = _names_of_the_code(ast.unparse(plain))
    intent = read_intent(plain, names)
    known = f"{sorted(intent.objects)!r}, {sorted(intent.plain)!r}"
    head = f"from surefoot.envs.sandboxes.code_tester import Tests\n{TESTER} = Tests({known})\ndel Tests\n"
    head += "".join(f"{name} = {TESTER}.remote({name!r})\n" for name in names)
    module, number = ast.Module([], []), 0
    for is_test, body in blocks:
        body = [_Judged().visit(_Outcomes(intent).visit(statement)) for statement in body]
        guard = _expression(f"{TESTER}.test({number if is_test else -1})")
        module.body.append(ast.With([ast.withitem(guard)], body))
        number += is_test
    module.body.append(_call_of_tester("end"))
    return head + ast.unparse(ast.fix_missing_locations(module)) + "\n"


class _Outcomes(ast.NodeTransformer):
    """Marks the arguments that the code may change: `fix(xs)` becomes `fix(_surefoot.live(xs))`."""

    def __init__(self, intent: Intent) -> None:
        self.outcomes = intent.outcomes

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Calls inside it first."""
        self.generic_visit(node)
        node.args = list(map(self._marked, node.args))
        return node

    def _marked(self, word: ast.expr) -> ast.expr:
        inner = word.value if isinstance(word, ast.Starred) else word
        if not isinstance(inner, ast.Name | ast.Attribute | ast.Subscript) or not self.outcomes & {*_prefixes(inner)}:
            return word
        live = ast.Call(_expression(f"{TESTER}.live"), [inner], [])
        return ast.Starred(live, ast.Load()) if isinstance(word, ast.Starred) else live


class _Judged(ast.NodeTransformer):
    """Marks the asserts inside functions, which the code may come to call: `with _surefoot.judging: assert ...`."""

    def __init__(self) -> None:
        self.is_inside = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Its asserts, and those of functions in it."""
        before, self.is_inside = self.is_inside, True
        self.generic_visit(node)
        self.is_inside = before
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """At the top the code is not in between."""
        return self._judged(node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """The asserts of `unittest` are calls."""
        called = node.value.func if isinstance(node.value, ast.Call) else None
        is_assert = isinstance(called, ast.Attribute) and called.attr.startswith("assert")
        return self._judged(node) if is_assert else node

    def _judged(self, node: ast.stmt) -> ast.stmt:
        guard = ast.withitem(_expression(f"{TESTER}.judging"))
        return ast.With([guard], [node]) if self.is_inside else node


def _prefixes(node: ast.expr) -> Iterator[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c[0]`."""
    yield root_of(node) or ""
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        node = node.value


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


def _statement(text: str) -> ast.stmt:
    return ast.parse(text).body[0]


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
