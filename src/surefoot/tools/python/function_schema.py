"""A Python function as a tool: name, description and the JSON schema of its arguments.

Owns       the way from type hints and a Google docstring to a schema, in the form that chat templates know.
Promises   what cannot be described truthfully (no hint, no description, `*args`) is a `SchemaError` that names the
           argument; nothing is called.
Never      imports anything but the standard library: it also runs inside foreign interpreters.

Read next: `instances.py`, which calls what is described here.
"""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_PLAIN: dict[Any, str] = {
    int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null",
    list: "array", tuple: "array", dict: "object",
}  # fmt: skip
_ARGS = ("Args:", "Arguments:")
_SECTIONS = (*_ARGS, "Returns:", "Return:", "Raises:", "Yields:", "Example:", "Examples:", "Note:", "Notes:")
_ENDS_DESCRIPTION = (*_ARGS, "Returns:", "Return:", "Raises:")
_ENTRY = re.compile(r"(\w+)[ \t]*(?:\([^)]*\)[ \t]*)?:(.*)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class SchemaError(ValueError):
    """A function that cannot be offered as a tool, and why."""


def describe(function: Callable[..., Any]) -> dict[str, Any]:
    """Name, description and parameters of a function or bound method.

    Example:
        >>> def double(number: int) -> int:
        ...     '''Twice as much.
        ...
        ...     Args:
        ...         number: what to double.
        ...     '''
        ...     return 2 * number
        >>> describe(double)["parameters"]["properties"]
        {'number': {'type': 'integer', 'description': 'what to double.'}}
    """
    name = tool_name(function)
    doc = inspect.getdoc(function)
    if not doc:
        raise SchemaError(f"{name} has no docstring, and the model would not know what it is for")
    hints = _hints(function, name)
    described = _described_arguments(doc.splitlines())
    properties, required = {}, []
    for parameter in _parameters(function, name):
        if parameter.name not in described:
            raise SchemaError(f"the docstring of {name} says nothing of its argument {parameter.name!r} under Args:")
        schema = _schema(hints[parameter.name], f"argument {parameter.name!r} of {name}")
        properties[parameter.name] = _with_description(schema, described[parameter.name], name)
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {"name": name, "description": _description(doc.splitlines()), "parameters": parameters}


def tool_name(function: Callable[..., Any]) -> str:
    """The function's own name, if a model can write it."""
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise SchemaError(f"{function!r} has no name of its own: give a function or a method")
    if not _NAME.fullmatch(name):
        raise SchemaError(f"{name!r} is not a tool name: up to 64 letters, digits and underscores")
    return name


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError) as error:
        raise SchemaError(f"the type hints of {name} cannot be read: {error}") from error


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    if found and found[0].name in ("self", "cls") and found[0].annotation is inspect.Parameter.empty:
        del found[0]  # a method that was taken from its class
    for parameter in found:
        if parameter.kind not in _BY_NAME:
            raise SchemaError(f"{name} takes {parameter}: a model can only give arguments by name")
        if parameter.annotation is inspect.Parameter.empty:
            raise SchemaError(f"argument {parameter.name!r} of {name} has no type hint")
    return found


# -- type hints ---------------------------------------------------------------


def _schema(hint: Any, what: str) -> dict[str, Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is None:
        return {"type": _PLAIN.get(hint, "object")}
    if origin is Union or origin is types.UnionType:
        return _union(inner, what)
    if origin is Literal:
        return _literal(inner, what)
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], what)} if inner else {"type": "array"}
    if origin is tuple:
        return _tuple(inner, what)
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], what)} if inner else {"type": "object"}
    raise SchemaError(f"{what} has the type {hint}, which JSON does not have: use list, dict, a union or a literal")


def _union(members: Sequence[Any], what: str) -> dict[str, Any]:
    schemas = [_schema(member, what) for member in members if member is not type(None)]
    if len(schemas) == 1:
        union = schemas[0]
    elif all(set(schema) == {"type"} for schema in schemas):
        kinds = sorted({schema["type"] for schema in schemas})
        union = {"type": kinds[0] if len(kinds) == 1 else kinds}
    else:
        union = {"anyOf": schemas}
    return {**union, "nullable": True} if type(None) in members else union


def _literal(values: Sequence[Any], what: str) -> dict[str, Any]:
    if any(type(value) not in (int, float, str, bool, type(None)) for value in values):
        raise SchemaError(f"{what} is a literal of something that JSON does not have")
    kinds = list(dict.fromkeys(_PLAIN[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(values)}


def _tuple(members: Sequence[Any], what: str) -> dict[str, Any]:
    if not members:
        return {"type": "array"}
    if len(members) == 1 or Ellipsis in members:
        raise SchemaError(f"{what} is a tuple of one or of any length: use list[...]")
    return {"type": "array", "prefixItems": [_schema(member, what) for member in members]}


# -- docstrings ---------------------------------------------------------------


def _description(lines: Sequence[str]) -> str:
    """Everything before the first section."""
    end = next((i for i, line in enumerate(lines) if line.strip() in _ENDS_DESCRIPTION), len(lines))
    return "\n".join(lines[:end]).strip()


def _described_arguments(lines: Sequence[str]) -> dict[str, str]:
    """Argument name -> description; an argument stands at the indentation of the first one, its text may go on."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    block = _argument_lines(lines)
    base = min((_indent(line) for line in block[:1]), default=0)
    for line in block:
        entry = _ENTRY.fullmatch(line.strip()) if _indent(line) <= base else None
        if entry:
            current = found.setdefault(entry[1], [])
        current.append(entry[2].strip() if entry else line.strip())
    return {name: " ".join(filter(None, pieces)) for name, pieces in found.items()}


def _argument_lines(lines: Sequence[str]) -> list[str]:
    start = next((i for i, line in enumerate(lines) if line.strip() in _ARGS), len(lines))
    block: list[str] = []
    for line in lines[start + 1 :]:
        if not line.strip():
            continue
        if line.strip() in _SECTIONS or (block and _indent(line) < _indent(block[0])):
            break
        block.append(line)
    return block


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _with_description(schema: dict[str, Any], text: str, name: str) -> dict[str, Any]:
    """`(choices: ["tea", "coffee"])` at the end of a description lists what is allowed."""
    start = text.lower().rfind("(choices:")
    if start < 0 or not text.endswith(")"):
        return {**schema, "description": text}
    choices = text[start + len("(choices:") : -1]
    try:
        allowed = [each.strip() if isinstance(each, str) else each for each in json.loads(choices)]
    except ValueError as error:
        raise SchemaError(f"the choices {choices} in the docstring of {name} are not JSON: {error}") from error
    return {**schema, "enum": allowed, "description": text[:start].strip()}
