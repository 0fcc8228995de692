"""The arguments of a call against the schema of a Python tool.

Owns       the few words of JSON schema that `function_schema` and `environments` write, `nullable` among them.
Promises   None, or one sentence that says which argument is wrong and what it should be; an argument that the tool does
           not have is wrong; 3.0 is not a whole number and true is not 1.
Never      needs a package: servers bring schemas of their own, and those are checked in the second half of this file.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from surefoot.errors import ToolError

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


# -- A tool's schema, checked before it is trusted, and the arguments of a call, checked before they are sent
# Promises   nothing is fetched, whatever a schema refers to; a schema that could keep us busy for ever (references in a
# circle, references that multiply, patterns that backtrack) is refused at the start, by tool name; checking
# arguments takes bounded time.
# Never      imports the MCP package; `jsonschema` comes with the mcp extra.


MAX_SCHEMA_BYTES = 64 * 1024
MAX_DEPTH = 32
MAX_PARTS = 10_000
"""Parts of a schema once every reference is written out: an `allOf` of references can double at each level."""
MAX_ARGUMENT_BYTES = 64 * 1024
MAX_PATTERN = 256
MAX_WORK = 30_000_000
"""Steps that matching one pattern may take at worst."""
_SHOWN_PROBLEMS = 3
_REFUSED_WORDS = ("$dynamicRef", "$recursiveRef", "$dynamicAnchor", "$recursiveAnchor", "$anchor", "$id")
_DATA_WORDS = ("default", "examples", "const", "enum")
"""What stands behind these is data, not a schema."""

Check = Callable[[Mapping[str, Any]], list[str]]
"""Arguments -> what is wrong with them, in a few words each; empty when nothing is."""


def checker(tool: str, schema: Mapping[str, Any]) -> Check:
    """A function that checks arguments against this schema; a `ToolError` when the schema is not one to rely on.

    Example:
        >>> check = checker("add", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
        >>> check({"a": 1}), check({"a": "one"})
        ([], ["a: 'one' is not of type 'integer'"])
    """
    try:
        plain = _examined(schema)
        validator = _validator(plain)
    except ValueError as error:
        raise ToolError(
            f"tool {tool}: its schema is refused: {error}",
            "arguments are checked against it before every call, and a hostile schema could stop the run",
            "correct the server's schema, or leave the tool out with the server's list of tools",
        ) from error

    certainly_right = _plain_check(plain)

    def check(arguments: Mapping[str, Any]) -> list[str]:
        problem = _too_much(arguments)
        if problem:
            return [problem]
        if certainly_right is not None and certainly_right(arguments):
            return []
        try:
            found = sorted(validator.iter_errors(dict(arguments)), key=lambda error: list(map(str, error.path)))
        except (ArithmeticError, RecursionError) as error:
            return [f"cannot be checked: {type(error).__name__}"]
        return [_said(error) for error in found[:_SHOWN_PROBLEMS]]

    return check


_NO_RULES = frozenset({"title", "description", "default", "examples"})
_PLAIN: Mapping[str, frozenset[type]] = {
    "string": frozenset({str}), "boolean": frozenset({bool}), "integer": frozenset({int}),
    "number": frozenset({int, float}),
}  # fmt: skip


def _plain_check(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], bool] | None:
    """Of a schema that asks for plain values and nothing else: whether arguments are right beyond doubt.

    Most tools have such a schema, and most calls are right: these need no walk through it. Whatever is in doubt (3.0
    for a whole number, say) is for the validator, and so is every other schema: None.
    """
    extra = schema.get("additionalProperties", True)
    if set(schema) - _NO_RULES - {"type", "properties", "required", "additionalProperties"} or type(extra) is not bool:
        return None
    kinds: dict[str, frozenset[type]] = {}
    for name, part in schema.get("properties", {}).items():
        if not isinstance(part, dict) or set(part) - _NO_RULES != {"type"} or not isinstance(part["type"], str):
            return None
        if part["type"] not in _PLAIN:
            return None
        kinds[name] = _PLAIN[part["type"]]
    required = tuple(schema.get("required", ()))

    def right(arguments: Mapping[str, Any]) -> bool:
        for name, value in arguments.items():
            allowed = kinds.get(name)
            if (not extra) if allowed is None else type(value) not in allowed:
                return False
        return all(name in arguments for name in required)

    return right


def _said(error: Any) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    text = error.message if len(error.message) <= 200 else error.message[:200] + "..."
    return f"{where}: {text}" if where else text


def _too_much(arguments: Mapping[str, Any]) -> str | None:
    try:
        size = len(json.dumps(arguments, allow_nan=False))
    except (ValueError, TypeError, RecursionError):
        return "not JSON: a number that is not finite or too long, or nested too deep"
    return f"{size} bytes, at most {MAX_ARGUMENT_BYTES}" if size > MAX_ARGUMENT_BYTES else None


# -- the schema ---------------------------------------------------------------------------
def _examined(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A plain copy, without its own address; a ValueError when it is too big, too deep or points outside."""
    try:
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({type(error).__name__})") from error
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(f"{len(text)} bytes, at most {MAX_SCHEMA_BYTES}")
    plain = json.loads(text)
    if not isinstance(plain, dict) or plain.get("type", "object") != "object":
        raise ValueError("it does not describe an object")
    plain.pop("$id", None)
    plain.setdefault("type", "object")
    _Walk(plain).parts(plain, 0, ())
    return plain


class _Walk:
    """Goes through a schema as a validator would, references followed, and counts."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self.sizes: dict[str, int] = {}

    def parts(self, node: Any, depth: int, inside: tuple[str, ...]) -> int:
        """How many parts `node` has when every reference is written out.

        Args:
            inside: the references that are being followed right now.
        """
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if isinstance(node, list):
            total = 1 + sum(self.parts(each, depth + 1, inside) for each in node)
        elif isinstance(node, dict):
            self._look_at(node)
            below = (each for word, each in node.items() if word not in _DATA_WORDS)
            total = 1 + sum(self.parts(each, depth + 1, inside) for each in below)
            if isinstance(node.get("$ref"), str):
                total += self._behind(node["$ref"], inside)
        else:
            return 1
        if total > MAX_PARTS:
            raise ValueError(f"more than {MAX_PARTS} parts once its references are written out")
        return total

    def _look_at(self, node: Mapping[str, Any]) -> None:
        for word in _REFUSED_WORDS:
            if isinstance(node.get(word), str):
                raise ValueError(f"{word} is not supported inside a schema")
        for pattern in _patterns(node):
            longest_for(pattern)

    def _behind(self, reference: str, inside: tuple[str, ...]) -> int:
        if not reference.startswith("#"):
            raise ValueError(f"it refers to {reference[:80]!r}; nothing is fetched")
        if reference in inside:
            raise ValueError(f"its reference {reference[:80]!r} leads back to itself")
        if reference not in self.sizes:
            self.sizes[reference] = self.parts(self._find(reference), len(inside) + 1, (*inside, reference))
        return self.sizes[reference]

    def _find(self, reference: str) -> Any:
        node: Any = self.root
        for step in reference[1:].split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise ValueError(f"its reference {reference[:80]!r} leads nowhere")
        if node is self.root:
            raise ValueError(f"its reference {reference[:80]!r} leads back to itself")
        return node


def _patterns(node: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(node.get("pattern"), str):
        yield node["pattern"]
    if isinstance(node.get("patternProperties"), dict):
        yield from node["patternProperties"]


# -- patterns -------------------------------------------------------------------------------
def longest_for(pattern: str) -> int:
    """How long a text this pattern may be tried on; a ValueError when no length is safe.

    Matching backtracks: with k repetitions that have no end it may take (length ** k) steps, once more times the
    length when it may begin anywhere, and a repetition inside a repetition may take 2 ** length.

    Example:
        >>> longest_for("^[a-z]+$") > longest_for("^[^@]+@[^@]+$") > 1000
        True
    """
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters, at most {MAX_PATTERN}")
    try:
        tree = re._parser.parse(pattern)  # type: ignore[attr-defined]  # the only way to see a pattern's structure
        loops = _loops(tree, within=False)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"the pattern {pattern[:80]!r} cannot be read: {error}") from error
    anchored = pattern.startswith(("^", r"\A"))
    return int(MAX_WORK ** (1 / max(1, loops + (not anchored))))


_MANY = 16


def _loops(tree: Any, *, within: bool) -> int:
    """How many repetitions without a near end there are, one after the other."""
    found = 0
    for kind, value in tree:
        name = str(kind)
        if name in ("GROUPREF", "GROUPREF_EXISTS", "ASSERT", "ASSERT_NOT"):
            raise ValueError("a pattern that looks back or ahead is not supported")
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            low, high, inner = value
            varies, many = high != low, high > _MANY
            if within and varies:
                raise ValueError("a pattern with a repetition inside a repetition can take for ever")
            found += int(varies and many) + _loops(inner, within=within or many)
        elif name == "BRANCH":
            if within:
                raise ValueError("a pattern with alternatives inside a repetition can take for ever")
            found += sum(_loops(each, within=within) for each in value[1])
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            found += _loops(value[-1] if name == "SUBPATTERN" else value, within=within)
    if found > 3:
        raise ValueError(f"a pattern with {found} repetitions without end can take too long")
    return found


# -- the validator ----------------------------------------------------------------------------
def _validator(schema: Mapping[str, Any]) -> Any:
    try:
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import extend, validator_for
        from referencing import Registry
    except ImportError as error:
        raise ToolError(
            f"arguments of tools cannot be checked: {error}", "that needs jsonschema", "pip install 'surefoot[mcp]'"
        ) from error
    base = validator_for(schema, default=Draft202012Validator)
    try:
        base.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        raise ValueError(f"it is no JSON schema: {str(getattr(error, 'message', error))[:200]}") from error
    bounded = extend(base, {"pattern": _pattern, "patternProperties": _pattern_properties})
    return bounded(schema, registry=Registry())  # an empty registry: nothing is ever fetched


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if isinstance(instance, str):
        if len(instance) > longest_for(pattern):
            yield ValidationError(f"{len(instance)} characters are too many to be checked against a pattern")
        elif not re.search(pattern, instance):
            yield ValidationError(f"{instance[:100]!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any) -> Iterator[Any]:
    if not isinstance(instance, dict):
        return
    for pattern, below in patterns.items():
        longest = longest_for(pattern)
        for name, value in instance.items():
            if len(name) <= longest and re.search(pattern, name):
                yield from validator.descend(value, below, path=name, schema_path=pattern)


def names_of(schema: Mapping[str, Any]) -> Sequence[str]:
    """The arguments that a schema names, for messages."""
    properties = schema.get("properties")
    return sorted(properties) if isinstance(properties, Mapping) else []
