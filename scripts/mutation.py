"""Small wrong edits of our own wiring, one at a time: what `scripts/mutants.py` plants.

A mutant is one changed place of one file; everything else stays as it is to the byte, so that a survivor can be read as
a line of a diff. Wires come first: a keyword that is no longer handed on, a call that is no longer made, a guard whose
condition is never true. Left out is what no test should watch: texts of errors, docstrings, annotations, `__all__`.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip
SAID = ("Error", "Warning", "warn", "view", "line", "note", "print", "failpoint", "cast")
"""Calls whose arguments are words for people, or that only tests read."""


class Mutant(NamedTuple):
    """One changed place."""

    path: str
    function: str
    what: str
    line: int
    now: str
    start: int
    end: int
    around: str
    """A digest of the function that it is in: the same edit of the same function has been tried before."""

    @property
    def name(self) -> str:
        """As it is printed and listed; without the line, which moves when something above it changes."""
        return f"{self.path} {self.function}: {self.what}"

    def applied(self, text: str) -> str:
        """The file's text with this change in it."""
        data = text.encode("utf-8")
        return (data[: self.start] + self.now.encode("utf-8") + data[self.end :]).decode("utf-8")


def sample(root: Path, files: list[Path], count: int, seed: int) -> list[Mutant]:
    """`count` mutants of all places alike, in an order that the seed and each mutant's own name decide.

    So the sample of a tree in which little has changed is nearly the same sample: what was found can be kept.
    """
    texts = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}
    every = [each for name, text in texts.items() for each in mutants_of(name, text)]
    ordered = sorted(every, key=lambda each: hashlib.sha256(f"{seed} {each.name}".encode()).digest())
    return list(islice((each for each in ordered if _compiles(each.applied(texts[each.path]))), count))


def mutants_of(name: str, text: str) -> list[Mutant]:
    """Every mutant of one file; each differs from the file, and no two have one name."""
    tree = ast.parse(text)
    starts, functions = _line_starts(text), _functions(tree)
    digests = _digests(tree, text)
    found, names = [], Counter[str]()
    for node, now, said in _changes(tree):
        start = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        was = text.encode("utf-8")[start:end].decode("utf-8")
        what = said or f"{_short(was)} -> {_short(now)}"
        line = node.lineno  # type: ignore[attr-defined]
        function = functions.get(line, "(module)")
        mutant = Mutant(name, function, what, line, now, start, end, digests.get(function, ""))
        if was != now:
            names[mutant.name] += 1
            again = names[mutant.name]
            found.append(mutant if again == 1 else mutant._replace(what=f"{what} ({again})"))
    return found


def _digests(tree: ast.Module, text: str) -> dict[str, str]:
    """A digest of the text of every function or class, by its full name, and of the rest of the file."""
    lines = text.splitlines()
    found: dict[str, str] = {"(module)": hashlib.sha256(text.encode()).hexdigest()[:12]}

    def visit(node: ast.AST, inside: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*inside, node.name)
            own = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            found[".".join(inside)] = hashlib.sha256(own.encode()).hexdigest()[:12]
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, ())
    return found


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 90 else words[:87] + "..."


def _functions(tree: ast.Module) -> dict[int, str]:
    """The innermost function or class of every line."""
    found: dict[int, str] = {}

    def visit(node: ast.AST, inside: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = (*inside, node.name)
            found.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), ".".join(inside)))
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, ())
    return found


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _line_starts(text: str) -> list[int]:
    starts = [0]
    for line in text.encode("utf-8").splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, str]]:
    """Places, what they become, and how to say that where the text itself is too long."""
    for node in _watched(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
            yield node, _with(node, "ops", [COMPARED[type(node.ops[0])](), *node.ops[1:]]), ""
        elif isinstance(node, ast.BoolOp):
            yield node, _with(node, "op", ast.And() if isinstance(node.op, ast.Or) else ast.Or()), ""
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _text(node):
            yield node, _with(node, "op", ARITHMETIC[type(node.op)]()), ""
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield node, f"({ast.unparse(node.operand)})", ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            if other != node.value:  # 1e100 + 1 is 1e100
                yield node, repr(other), ""
        elif isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant):
            yield node.test, "False", ""
        elif isinstance(node, ast.Call):
            yield from _unwired(node)
        elif isinstance(node, ast.Expr | ast.Raise):
            yield node, "pass", f"no {_short(ast.unparse(node))}"
        elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
            yield node.value, "None", f"returns None, not {_short(ast.unparse(node.value))}"


def _unwired(node: ast.Call) -> Iterator[tuple[ast.AST, str, str]]:
    """The call without one of its keywords: what it named is no longer handed on."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            rest = [each for each in node.keywords if each is not keyword]
            yield node, _with(node, "keywords", rest), f"{_short(ast.unparse(node.func))} without {keyword.arg}="


def _with(node: ast.AST, field: str, value: object) -> str:
    changed = copy.copy(node)
    setattr(changed, field, value)
    return f"({ast.unparse(changed)})" if isinstance(node, ast.expr) else ast.unparse(changed)


def _text(node: ast.AST) -> bool:
    """Whether this joins texts."""
    return any(isinstance(each, ast.JoinedStr) or _is_text(each) for each in ast.walk(node))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _watched(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, without annotations, docstrings, `__all__`, imports, and words for people."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _passed_over(child):
                continue
            yield child
            if not isinstance(child, ast.JoinedStr):
                yield from _watched(child)


def _passed_over(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom | ast.Await):
        return True
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith("failpoint("):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith(SAID)
