"""Which names a piece of code speaks of: the cheap, safe stand-in for knowing what it reads.

A name counts wherever it could be meant: as a variable, an attribute, a parameter, or a string that looks like a name
or a path (`getattr(x, "limit")`, `patch("pkg.mod.limit")`, `Path("limits.json")`). Code that computes names is "wild":
it may speak of any.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_BY_NAME = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "__import__"}
_ANY_NAME = {"globals", "vars", "dir", "eval", "exec", "getmembers", "resolve_name", "__dict__", "f_globals"}
_CHANGERS = {
    "append", "add", "update", "setdefault", "extend", "insert", "pop", "popitem", "clear", "remove", "discard",
    "appendleft", "extendleft", "put", "put_nowait", "register", "__setitem__",
}  # fmt: skip
_SPEAKING = {ast.Name, ast.Attribute, ast.arg, ast.keyword, ast.alias, ast.Constant, ast.MatchClass, ast.Call}
_WORD = re.compile(r"[^\W\d]\w*")
_LONGEST = 300  # a longer string is prose or data, not a name


class Found(NamedTuple):
    """The names spoken of, and whether names are computed."""

    words: set[str]
    wild: bool


def mentions_of(nodes: Sequence[ast.AST], *, at_import: bool) -> Found:
    """All names below `nodes`.

    At import, `from a import b` and `__all__` bind or list a name without using it; whoever uses it mentions it again.
    """
    words: set[str] = set()
    wild = False
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if at_import and (isinstance(node, ast.Import | ast.ImportFrom) or _is_all(node)):
            words.update(alias.name.split(".")[-1] for alias in getattr(node, "names", []) if alias.asname)
            continue
        if type(node) in _SPEAKING:
            words.update(_words(node))
            wild = wild or _is_wild(node)
        if type(node) is not ast.Name:
            waiting += ast.iter_child_nodes(node)
    return Found(words, wild)


def _words(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):  # by far the most frequent
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.arg | ast.keyword):
        yield node.arg or ""
    elif isinstance(node, ast.alias):
        yield from node.name.split(".")
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) <= _LONGEST:
        yield from _WORD.findall(node.value)
        yield node.value.rpartition("/")[2]  # a file is looked for by its name
    elif isinstance(node, ast.MatchClass):
        yield from node.kwd_attrs


def listed_names(tree: ast.Module) -> set[str]:
    """Names in `__all__`: taking one of them away breaks every `import *`."""
    strings = [part for node in tree.body if _is_all(node) for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return {part.value for part in strings if isinstance(part.value, str)}


def _is_all(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id == "__all__"
        and isinstance(node.value, ast.List | ast.Tuple)
    )


def _is_wild(node: ast.AST) -> bool:
    if isinstance(node, ast.Name | ast.Attribute):
        return (node.id if isinstance(node, ast.Name) else node.attr) in _ANY_NAME
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    place = 0 if name in ("attrgetter", "methodcaller", "__import__") else 1
    named = node.args[place : place + 1]
    return name in _BY_NAME and not all(isinstance(each, ast.Constant) for each in named)


def written_globals(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names through which a call may leave something behind in the process, beyond its own variables.

    Example:
        `_CACHE[key] = value` gives `_CACHE`; `cls.pool = Pool()` gives `pool`; `self.x = 1` gives nothing.
    """
    parts = [part for each in [function.args, *function.body] for part in ast.walk(each)]
    stores = [each for part in parts if (each := _store(part)) is not None]
    own = _own_names(parts) if stores else set()
    declared = {name for part in parts if type(part) is ast.Global for name in part.names}
    return declared.union(*(_target(store, own) for store in stores))


def _store(node: ast.AST) -> ast.Attribute | ast.Subscript | None:
    """The place that a node changes, if it changes one through an attribute, an index or a method such as `append`."""
    kind = type(node)
    if kind is ast.Call:
        func = node.func  # type: ignore[attr-defined]
        return func if type(func) is ast.Attribute and func.attr in _CHANGERS else None
    if kind is ast.Attribute or kind is ast.Subscript:
        return None if type(node.ctx) is ast.Load else node  # type: ignore[attr-defined,return-value]
    return None


def _own_names(parts: Sequence[ast.AST]) -> set[str]:
    stored = {part.id for part in parts if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)}
    shared = {name for part in parts if isinstance(part, ast.Global) for name in part.names}
    return (stored | {part.arg for part in parts if isinstance(part, ast.arg)}) - shared


def _target(node: ast.Attribute | ast.Subscript, own: set[str]) -> set[str]:
    """The global that a store through `node` changes, if its root is not one of the function's own names."""
    attributes: list[str] = []
    root: ast.expr = node
    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(root, ast.Attribute):
            attributes.append(root.attr)
        root = root.func if isinstance(root, ast.Call) else root.value
    if not isinstance(root, ast.Name):
        return set()
    if root.id in ("cls", "type"):  # an attribute of a class outlives every instance
        return set(attributes)
    return set() if root.id in own else {root.id, *attributes}
