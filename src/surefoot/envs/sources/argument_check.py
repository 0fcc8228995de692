"""The arguments of a call against the schema of a Python tool.

Owns       the few words of JSON schema that `function_schema` and `gym_world` write, `nullable` among them.
Promises   None, or one sentence that says which argument is wrong and what it should be; an argument that the tool does
           not have is wrong; 3.0 is not a whole number and true is not 1.
Never      needs a package: servers bring schemas of their own, and those are `tool_schema.py`'s.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any

_KINDS: Mapping[str, tuple[str, Any]] = {
    "string": ("text", str), "integer": ("a whole number", int), "number": ("a number", (int, float)),
    "boolean": ("true or false", bool), "null": ("null", type(None)), "array": ("a list", list),
    "object": ("an object", dict),
}  # fmt: skip


def wrong(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments; None when nothing is.

    Example:
        >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        >>> wrong({"n": 1}, schema), wrong({"n": "1"}, schema), wrong({"m": 1}, schema)
        (None, "n: '1' is not a whole number", "there is no argument 'm'; did you mean n?")
    """
    known = schema.get("properties", {})
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
            return f"there is no argument {_shown(name)}" + (f"; did you mean {near[0]}?" if near else "")
    missing = [name for name in schema.get("required", ()) if name not in arguments]
    if missing:
        return f"the argument {missing[0]!r} is missing"
    problems = (_problem(value, known[name], name) for name, value in arguments.items())
    return next(filter(None, problems), None)


def _problem(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    if value is None and schema.get("nullable"):
        return None
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        return f"{where}: {_shown(value)} is not one of {_shown(schema['enum'])}"
    if "anyOf" in schema:
        found = [_problem(value, each, where) for each in schema["anyOf"]]
        return None if None in found else found[0]
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        wanted = " or ".join(_KINDS[kind][0] if kind in _KINDS else kind for kind in kinds)
        return f"{where}: {_shown(value)} is not {wanted}"
    return _bounds(value, schema, where) or _inside(value, schema, where)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return kind in _KINDS and isinstance(value, _KINDS[kind][1])


def _bounds(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    size = len(value) if isinstance(value, list) else value
    if isinstance(size, bool) or not isinstance(size, int | float):
        return None
    low, high = ("minItems", "maxItems") if isinstance(value, list) else ("minimum", "maximum")
    if size < schema.get(low, -math.inf) or size > schema.get(high, math.inf):
        what = f"{size} entries are" if isinstance(value, list) else f"{_shown(value)} is"
        return f"{where}: {what} not between {schema.get(low)} and {schema.get(high)}"
    return None


def _inside(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    parts: list[tuple[Any, Mapping[str, Any], str]] = []
    if isinstance(value, list):
        fixed = schema.get("prefixItems", ())
        if fixed and len(value) != len(fixed):
            return f"{where}: {len(value)} entries, {len(fixed)} are needed"
        rest = schema.get("items", {})
        parts = [(each, fixed[i] if fixed else rest, f"{where}[{i}]") for i, each in enumerate(value)]
    elif isinstance(value, dict) and isinstance(schema.get("additionalProperties"), Mapping):
        parts = [(each, schema["additionalProperties"], f"{where}.{name}") for name, each in value.items()]
    return next(filter(None, (_problem(*part) for part in parts)), None)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
