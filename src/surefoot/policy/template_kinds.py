"""Whether a chat template is plain: of everything it says, no single step can take long.

A template that loops can be ended between two steps. One step can only be waited for: `9 ** (9 ** 9)` is one, and so is
the comparison of two lists that hold each other sixty levels deep. What is not plain is rendered in a process that can
be ended (`template_process.py`).

Promises   every step of a plain template takes time by the size of what it handles, which the memory limit bounds.
Never      says what a template means; one that is not plain may be harmless.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

LONGEST = 100_000
"""A longer one is not plain: reading it takes time as well."""
_NODES = frozenset({
    "Add", "And", "Assign", "AssignBlock", "Break", "Call", "Compare", "Concat", "CondExpr", "Const", "Continue",
    "Dict", "Div", "ExprStmt", "Filter", "FloorDiv", "For", "Getattr", "Getitem", "If", "Keyword", "List", "Macro",
    "Mod", "NSRef", "Name", "Neg", "Not", "Operand", "Or", "Output", "Pair", "Pos", "Slice", "Sub", "Template",
    "TemplateData", "Test", "Tuple",
})  # fmt: skip
_FUNCTIONS = frozenset({"namespace", "raise_exception", "range", "strftime_now"})
_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "get", "isdigit", "items", "join", "keys", "lower", "lstrip",
    "removeprefix", "removesuffix", "replace", "rstrip", "split", "splitlines", "startswith", "strip", "upper",
    "values",
})  # fmt: skip
"""Each looks at every character once; `rfind`, `rsplit` and their like may look at some many times."""
_STRIPPING = frozenset({"lstrip", "rstrip", "strip", "trim"})
"""Every character is compared with every one that is stripped: these have to be written down."""
_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "indent", "int", "items", "join",
    "last", "length", "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "safe", "select",
    "selectattr", "string", "tojson", "trim", "upper",
})  # fmt: skip
_TESTS = frozenset({
    "boolean", "defined", "eq", "equalto", "even", "false", "float", "ge", "gt", "in", "integer", "iterable", "le",
    "lt", "mapping", "ne", "none", "number", "odd", "sequence", "string", "true", "undefined",
})  # fmt: skip
_BY_NAME = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""They take the name of another filter or test."""
_CONTAINERS = 6
"""Lists made of variables, outside of loops: each may at most double what a comparison has to look at."""
_LARGEST = 2**30


@lru_cache(maxsize=64)
def is_plain(template: str) -> bool:
    """Whether it may be rendered where only its steps can be interrupted.

    Example:
        >>> is_plain("{% for m in messages %}{{ m['content']|trim }}{% endfor %}"), is_plain("{{ 9 ** (9 ** 9) }}")
        (True, False)
    """
    from jinja2 import Environment, TemplateError, nodes

    if len(template) > LONGEST:
        return False
    try:
        tree = Environment(  # noqa: S701 - nothing is rendered with it
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        ).parse(template)
        macros = {each.name for each in tree.find_all(nodes.Macro)}
        return _Look(frozenset(macros)).passes(tree, looped=False)
    except (TemplateError, RecursionError):
        return False  # whoever renders it says what is wrong


class _Look:
    """One walk over a template's syntax."""

    def __init__(self, macros: frozenset[str]) -> None:
        self.macros, self.containers = macros, 0

    def passes(self, node: Any, *, looped: bool) -> bool:
        kind = type(node).__name__
        if kind not in _NODES or not self._allows(kind, node, looped=looped):
            return False
        again = looped or kind in ("For", "Macro")
        return all(self.passes(child, looped=again) for child in node.iter_child_nodes())

    def _allows(self, kind: str, node: Any, *, looped: bool) -> bool:
        if kind == "Const":
            return not isinstance(node.value, int) or abs(node.value) < _LARGEST
        if kind in ("Mod", "Div", "FloorDiv"):
            return type(node.right).__name__ == "Const" and isinstance(node.right.value, int)
        if kind in ("List", "Tuple", "Dict"):
            return self._may_hold(node, looped=looped)
        if kind == "Call":
            return self._may_call(node)
        if kind == "Filter":
            return node.name in _FILTERS and _constant_where_needed(node.name, node)
        if kind == "Test":
            return node.name in _TESTS
        if kind == "Name":
            taken = node.ctx != "load" and node.name in _FUNCTIONS | self.macros
            return not taken and node.name not in ("varargs", "kwargs")
        if kind == "NSRef":
            return node.attr not in _METHODS
        return not (kind == "For" and node.recursive)

    def _may_hold(self, node: Any, *, looped: bool) -> bool:
        """A list of lists of lists may be small and take for ever to compare; one that is written down is no longer."""
        if getattr(node, "ctx", "load") != "load":
            return True  # the left side of an assignment
        pairs = node.items if type(node).__name__ == "Dict" else ()
        if any(type(pair.key).__name__ != "Const" or pair.key.value in _METHODS for pair in pairs):
            return False
        if all(type(each).__name__ == "Const" for each in ([p.value for p in pairs] if pairs else node.items)):
            return True
        self.containers += 1
        return not looped and self.containers <= _CONTAINERS

    def _may_call(self, node: Any) -> bool:
        target, kind = node.node, type(node.node).__name__
        if node.dyn_args is not None or node.dyn_kwargs is not None or any(k.key in _METHODS for k in node.kwargs):
            return False
        if kind == "Name":
            return target.name in _FUNCTIONS | self.macros
        return kind == "Getattr" and target.attr in _METHODS and _constant_where_needed(target.attr, node)


def _constant_where_needed(name: str, node: Any) -> bool:
    arguments = [*node.args, *(each.value for each in node.kwargs)]
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if name in _STRIPPING:
        return all(type(each).__name__ == "Const" for each in arguments)
    if name in _BY_NAME:
        named = [each.value if type(each).__name__ == "Const" else None for each in arguments]
        known = _FILTERS - _BY_NAME - _STRIPPING if name == "map" else _TESTS
        whose = named[1:] if name in ("selectattr", "rejectattr") else named
        by_attribute = name == "map" and all(each.key in ("attribute", "default") for each in node.kwargs)
        return (by_attribute and not node.args) or (bool(named) and None not in named[:2] and _first_is(whose, known))
    return True


def _first_is(named: list[Any], known: frozenset[str]) -> bool:
    return not named or named[0] in known
