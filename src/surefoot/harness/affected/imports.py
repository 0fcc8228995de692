"""Which modules a file imports, read from its source: anywhere in it, function bodies included."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

_DOTTED = re.compile(r"[^\W\d]\w*([.:][^\W\d]\w*)+")
_IMPORTERS = {"import_module", "importorskip", "__import__", "find_spec", "run_module"}


class Import(NamedTuple):
    """One imported name: `from ..a import b` is `Import("a.b", 2)`; the resolver takes the longest part that exists."""

    name: str
    level: int


def imports_of(tree: ast.AST) -> list[Import]:
    """Every import, and every string that names a module (`patch("pkg.mod.x")`, `pytest_plugins`).

    Example:
        >>> imports_of(ast.parse("from . import a"))
        [Import(name='a', level=1)]
    """
    found: set[Import] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(Import(alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            found.update(Import(f"{start}{alias.name}", node.level) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if len(node.value) < 300 and _DOTTED.fullmatch(node.value):
                found.add(Import(node.value.replace(":", "."), 0))
        elif isinstance(node, ast.Call | ast.Assign):
            found.update(Import(name, 0) for name in _named_modules(node))
    return sorted(found)


def _named_modules(node: ast.Call | ast.Assign) -> list[str]:
    """Modules named by a plain string where a module is certainly meant, so one word is enough."""
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        strings: list[ast.expr] = list(node.args[:1]) if name in _IMPORTERS else []
    else:
        named = any(isinstance(target, ast.Name) and target.id == "pytest_plugins" for target in node.targets)
        strings = [*getattr(node.value, "elts", []), node.value] if named else []
    return [each.value for each in strings if isinstance(each, ast.Constant) and isinstance(each.value, str)]
