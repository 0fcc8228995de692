"""What the text of a task's tests says about the code: which of its names give objects, which arguments are outcomes.

Owns       reading intent from the syntax tree: nothing is run, and the code is not looked at, so it has no say in this.
Promises   a name gives objects only where the tests use what it gives as plain data cannot be used (`s.push(1)`, or
           `Stack()` and `s.pop()`); an argument is an outcome only where a verdict compares it with something that is
           not the code's own (`fix(xs)` and `xs == [1, 2]`, but not `fix(xs) == sorted(xs)`).
Never      tells two variables of the same name apart: what one shows holds for the other.
"""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import json
import symtable
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

_FIXED = (
    str, bytes, int, float, complex, tuple, frozenset, range, fractions.Fraction, decimal.Decimal, datetime.date,
    datetime.datetime, datetime.timedelta,
)  # fmt: skip
_CHANGING = (list, dict, set, bytearray, collections.deque, collections.Counter, collections.OrderedDict)
_BUILT_IN = frozenset(dir(builtins))
_PASSES = 3
"""Often enough for a value that goes through a helper of the tests and back."""


def _public(kinds: Sequence[type]) -> frozenset[str]:
    return frozenset(name for kind in kinds for name in dir(kind) if not name.startswith("_"))


_OF_FIXED, OF_PLAIN = _public(_FIXED), _public(_FIXED + _CHANGING)
"""Attributes of plain data that never changes, and of all plain data."""


@dataclass(frozen=True)
class Intent:
    """What the tests show.

    Example:
        >>> intent = read_intent(ast.parse("s = Stack()\\ns.push(1)\\nassert s.pop() == 1"), ["Stack"])
        >>> (sorted(intent.objects), sorted(intent.plain))
        (['Stack'], ['pop'])
    """

    objects: frozenset[str]
    """Names of the code that give objects with methods of their own."""
    outcomes: frozenset[str]
    """Variables that the code may change: what it did to them is what the tests look at."""
    plain: frozenset[str]
    """Words of the tests that are attributes of plain data."""


def read_intent(tests: ast.Module, names: Sequence[str]) -> Intent:
    """Read the tests; `names` are those that they expect the code to define."""
    reader = _Reader(tests, names)
    words = {node.attr for node in reader.nodes if isinstance(node, ast.Attribute)}
    words |= {node.value for node in reader.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return Intent(frozenset(reader.objects()), frozenset(_Outcomes(reader).found()), OF_PLAIN & words)


Origin = tuple[str, bool]
"""A name of the code's, and whether this is something that it gave (else it is the thing of that name itself)."""


class _Reader:
    """Follows what comes from the code through the variables and helpers of the tests."""

    def __init__(self, tests: ast.Module, names: Sequence[str]) -> None:
        self.nodes = list(ast.walk(tests))
        self.names = {name: name for name in names}
        self.modules: set[str] = set()
        self.functions = {node.name: node for node in self.nodes if isinstance(node, ast.FunctionDef)}
        self.variables: dict[str, set[Origin]] = defaultdict(set)
        self.returns: dict[str, set[Origin]] = defaultdict(set)
        self.imported = set(self._imports())
        for _ in range(_PASSES):
            for target, value in self.bindings():
                self._bind(target, self.origins(value))
            for name, function in self.functions.items():
                self.returns[name].update(*(self.origins(value) for value in returned(function)))
        self.helpers = {name for name, function in self.functions.items() if self._goes_to_code(function)}
        """Functions of the tests that call something of the code's."""

    def _imports(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    if isinstance(node, ast.ImportFrom) and node.module == "solution":
                        self.names[bound] = alias.name
                    elif isinstance(node, ast.Import) and alias.name == "solution":
                        self.modules.add(bound)
                    else:
                        yield bound

    def bindings(self) -> Iterator[tuple[ast.expr | str, ast.expr]]:
        """Every target, and the expression that it is bound to, or is an element of."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, ast.AnnAssign | ast.AugAssign | ast.NamedExpr) and node.value is not None:
                yield node.target, node.value
            elif isinstance(node, ast.For | ast.comprehension):
                yield node.target, node.iter
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield node.optional_vars, node.context_expr
            elif isinstance(node, ast.Call) and (helper := self.helper(node)) is not None:
                yield from self._parameters(helper, node)

    def helper(self, call: ast.Call) -> ast.FunctionDef | None:
        """The function of the tests that is called, by its name or as a method of a test class."""
        is_method = isinstance(call.func, ast.Attribute) and _name(call.func.value) in ("self", "cls")
        return self.functions.get(_last_name(call.func)) if is_method or isinstance(call.func, ast.Name) else None

    def _parameters(self, function: ast.FunctionDef, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        yield from zip(names[isinstance(call.func, ast.Attribute) :], call.args, strict=False)
        yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None)

    def _bind(self, target: ast.expr | str, origins: set[Origin]) -> None:
        for key in keys_of(target):
            self.variables[key] |= origins

    def origins(self, node: ast.AST) -> set[Origin]:
        """Names of the code from which the value of an expression may come."""
        if isinstance(node, ast.Name):
            known = {(self.names[node.id], False)} if node.id in self.names else set()
            return known | self.variables.get(node.id, set())
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self.modules:
                return {(node.attr, False)}
            return self.variables.get(ast.unparse(node), set()) | self.origins(node.value)
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Compare | ast.Lambda | ast.JoinedStr | ast.Constant):
            return set()
        if isinstance(node, ast.Subscript):
            return self.origins(node.value)
        return set().union(*(self.origins(child) for child in ast.iter_child_nodes(node)))

    def _of_call(self, node: ast.Call) -> set[Origin]:
        given = {(name, True) for name, _ in self.origins(node.func)}
        if (helper := self.helper(node)) is not None:
            given |= self.returns.get(helper.name, set())
        if _name(node.func) in _BUILT_IN:  # `list`, `next`, `zip` ... hand through what they were given
            given = given.union(*(self.origins(each) for each in node.args))
        return given

    def objects(self) -> set[str]:
        """Names that give objects."""
        called = {id(node.func) for node in self.nodes if isinstance(node, ast.Call)}
        found, loose = set(), False
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
                origins = self.origins(node.value)
                found |= {name for name, given in origins if _shows(name, given, node.attr, id(node) in called)}
                loose = loose or (not origins and node.attr not in OF_PLAIN and self._is_of_tests(node))
            elif isinstance(node, ast.Call) and _name(node.func) in ("isinstance", "issubclass"):
                found |= {name for each in node.args[1:] for name, _ in self.origins(each) if _is_capital(name)}
        return found | ({name for name in self.names.values() if _is_capital(name)} if loose else set())

    def _is_of_tests(self, node: ast.Attribute) -> bool:
        """Whether an attribute whose origin is unknown may be one of an object of the code's."""
        root = root_of(node)
        return root not in (*self.imported, "self", "cls") and not node.attr.startswith("assert")

    def asks_code(self, node: ast.Call) -> bool:
        """Whether a call goes to the code, or to a helper that goes there."""
        if self.origins(node.func):
            return True
        helper = self.helper(node)
        return helper is not None and helper.name in self.helpers

    def _goes_to_code(self, function: ast.FunctionDef) -> bool:
        return any(isinstance(each, ast.Call) and bool(self.origins(each.func)) for each in ast.walk(function))


def _shows(name: str, given: bool, attribute: str, is_called: bool) -> bool:
    """Whether the use of an attribute shows that a name gives objects.

    Nothing plain has `push`. A capital letter makes it a class where the attribute could also be a list's or a dict's,
    or is only read; `Greeting("Bob").startswith("Hello")` shows nothing.
    """
    if attribute not in OF_PLAIN and (given or _is_capital(name)):
        return True
    return _is_capital(name) and (attribute not in _OF_FIXED or not is_called)


def _is_capital(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


class _Outcomes:
    """Which variables are compared, in a verdict, with something that the code did not make."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader
        self.made: set[str] = set()
        self.sources: dict[str, set[str]] = defaultdict(set)
        for _ in range(_PASSES):
            for target, value in reader.bindings():
                for key in keys_of(target):
                    self.sources[key] |= self._reads(value)
                    if self._is_made(value):
                        self.made.add(key)

    def found(self) -> set[str]:
        """Their names, and the names that these were made of."""
        known: set[str] = set()
        fresh = {name for sides in self._verdicts() for name in self._outcomes(sides)}
        while fresh:
            known |= fresh
            fresh = set().union(*(self.sources.get(name, set()) for name in fresh)) - known - self.made
        return known

    def _verdicts(self) -> Iterator[list[ast.expr]]:
        for node in self.reader.nodes:
            if isinstance(node, ast.Assert | ast.If):
                yield from self._parts(node.test)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                yield from self._parts(node.value) if self._is_check(node.value) else ()
            elif isinstance(node, ast.FunctionDef) and node.name in self.reader.helpers:
                yield from ([value] for value in returned(node))

    def _parts(self, test: ast.expr) -> Iterator[list[ast.expr]]:
        """The sides of each comparison that decides a test."""
        if isinstance(test, ast.BoolOp):
            for each in test.values:
                yield from self._parts(each)
        elif isinstance(test, ast.UnaryOp):
            yield from self._parts(test.operand)
        elif isinstance(test, ast.Compare):
            yield [test.left, *test.comparators]
        elif isinstance(test, ast.Call) and _name(test.func) in ("all", "any") and len(test.args) == 1:
            inner = test.args[0]
            yield from self._parts(inner.elt) if isinstance(inner, ast.GeneratorExp | ast.ListComp) else [[inner]]
        elif isinstance(test, ast.Call) and self._is_check(test):
            yield [*test.args, *(keyword.value for keyword in test.keywords)]
        else:
            yield [test]

    def _is_check(self, call: ast.Call) -> bool:
        """Whether a call compares its arguments. A helper that goes to the code does so inside, where it is read."""
        helper = self.reader.helper(call)
        return _last_name(call.func).startswith("assert") if helper is None else helper.name not in self.reader.helpers

    def _outcomes(self, sides: list[ast.expr]) -> Iterator[str]:
        made = [self._is_made(side) for side in sides]
        for place, side in enumerate(sides):
            others = made[:place] + made[place + 1 :]
            if not any(others) and (others or not made[place]):
                yield from self._reads(side) - self.made

    def _is_made(self, node: ast.AST) -> bool:
        """Whether the code had a part in the value of an expression."""
        if isinstance(node, ast.Call) and self.reader.asks_code(node):
            return True
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node) in self.made:
            return True
        return any(self._is_made(child) for child in ast.iter_child_nodes(node))

    def _reads(self, node: ast.AST) -> set[str]:
        """Variables whose content an expression shows: not those that it hands to the code, or uses as an index."""
        if isinstance(node, ast.Call):
            inner = [] if self.reader.asks_code(node) else [*node.args, *(each.value for each in node.keywords)]
            inner += [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return set().union(*map(self._reads, inner))
        if isinstance(node, ast.Name):
            return {node.id}
        if isinstance(node, ast.Attribute):
            return {ast.unparse(node)} | self._reads(node.value)
        if isinstance(node, ast.Subscript):
            return self._reads(node.value)
        return set().union(*(self._reads(child) for child in ast.iter_child_nodes(node)))


def keys_of(target: ast.expr | str) -> Iterator[str]:
    """What a target binds: variables, and attributes such as `self.stack`."""
    if isinstance(target, str):
        yield target
    elif isinstance(target, ast.Name | ast.Attribute):
        yield ast.unparse(target)
    elif isinstance(target, ast.Tuple | ast.List):
        for each in target.elts:
            yield from keys_of(each)
    elif isinstance(target, ast.Starred):
        yield from keys_of(target.value)


def returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function returns or yields."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value is not None:
            yield node.value


def root_of(node: Any) -> str | None:
    """The variable at the beginning of `a.b[c].d`."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
        node = node.value
    return _name(node)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else _name(node) or ""


def _name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


# -- A task's tests, rewritten into the script that a test process runs: one guarded block per test
# Owns       reading tests without running them: which statements are tests, which names belong to the code.
# Promises   a name that the tests use and nobody defines is the code's; a built-in name never is, so code that defines
# its own `len` or `sorted` changes nothing for the tests. Each test of a `unittest` class is a test.
# Never      runs anything, and never sees the code.


TESTER = "_surefoot"


class BadTestsError(Exception):
    """The tests are no tests: not Python, or none at all."""


@dataclass(frozen=True)
class ProgramTest:
    """Run the whole program on an input, compare what it prints."""

    stdin: str
    stdout: str


@dataclass(frozen=True)
class ScriptPlan:
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


def plan(tests: str | Sequence[str]) -> ScriptPlan:
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
def _plan(tests: str | tuple[str, ...]) -> ScriptPlan:
    """The same tests judge every answer of a group."""
    try:
        blocks, programs = _from_text(tests) if isinstance(tests, str) else _from_list(tests)
        numbers = sum(is_test for is_test, _ in blocks)
        if numbers + len(programs) == 0:
            raise BadTestsError("there is no test")
        return ScriptPlan(_script(blocks) if numbers else "", numbers, tuple(programs))
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
    head = f"from surefoot.sandbox.code_tester import Tests\n{TESTER} = Tests({known})\ndel Tests\n"
    head += "".join(f"{name} = {TESTER}.remote({name!r})\n" for name in names)
    module, number = ast.Module([], []), 0
    for is_test, body in blocks:
        body = [_Judged().visit(_OutcomeMarker(intent).visit(statement)) for statement in body]
        guard = _expression(f"{TESTER}.test({number if is_test else -1})")
        module.body.append(ast.With([ast.withitem(guard)], body))
        number += is_test
    module.body.append(_call_of_tester("end"))
    return head + ast.unparse(ast.fix_missing_locations(module)) + "\n"


class _OutcomeMarker(ast.NodeTransformer):
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
