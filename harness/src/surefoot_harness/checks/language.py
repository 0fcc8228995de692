"""What an expression is once it is read: a small tree of these."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot_harness.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Node:
    """Something with a place in the expression."""

    at: int


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A literal number."""

    value: float | int


@dataclass(frozen=True, slots=True)
class QuotedText(Node):
    """A quoted text."""

    value: str


@dataclass(frozen=True, slots=True)
class Flag(Node):
    """`True` or `False`."""

    value: bool


@dataclass(frozen=True, slots=True)
class Data(Node):
    """`data` itself: every metric of the source."""


@dataclass(frozen=True, slots=True)
class Variable(Node):
    """A name bound by a `for` inside the same expression."""

    name: str


@dataclass(frozen=True, slots=True)
class MetricName(Node):
    """`data["NAME"]`, or `data.get("NAME", {})`, which may be missing."""

    name: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class StepValue(Node):
    """`SERIES["9"]`: the value at one step."""

    series: Node
    step: Node


@dataclass(frozen=True, slots=True)
class HelperCall(Node):
    """`HELPER(...)`."""

    name: str
    args: tuple[Node, ...]
    keywords: tuple[tuple[str, Node], ...] = ()


@dataclass(frozen=True, slots=True)
class Sign(Node):
    """`-x` or `+x`."""

    sign: str
    operand: Node


@dataclass(frozen=True, slots=True)
class Arithmetic(Node):
    """`a + b - c`, or `a * b / c`: one level of precedence, left to right."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Compare(Node):
    """`a < b <= c`, `in` and `not in` among them."""

    first: Node
    rest: tuple[tuple[str, Node], ...]


@dataclass(frozen=True, slots=True)
class Logic(Node):
    """`a and b and c`, or `a or b or c`."""

    word: str
    operands: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Not(Node):
    """`not a`."""

    operand: Node


@dataclass(frozen=True, slots=True)
class Merge(Node):
    """`{**a, **b}`: the points of several series together."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Steps(Node):
    """`range(a, b)`: the whole numbers from a to b - 1."""

    start: Node
    end: Node


@dataclass(frozen=True, slots=True)
class Loop(Node):
    """`{key: value for names in source if condition}` or `[value for ...]`: a series made from another one."""

    key: Node | None
    value: Node
    names: tuple[str, ...]
    source: Node
    pairs: bool
    condition: Node | None = field(default=None)


def children(node: Node) -> tuple[Node, ...]:
    """The nodes directly below, in order of the text."""
    match node:
        case StepValue():
            return (node.series, node.step)
        case HelperCall():
            return (*node.args, *(value for _, value in node.keywords))
        case Sign() | Not():
            return (node.operand,)
        case Arithmetic() | Compare():
            return (node.first, *(operand for _, operand in node.rest))
        case Logic():
            return node.operands
        case Merge():
            return node.parts
        case Steps():
            return (node.start, node.end)
        case Loop():
            return tuple(part for part in (node.key, node.value, node.source, node.condition) if part is not None)
    return ()


def reads_data(node: Node) -> bool:
    """Whether the value of `node` comes from the source at all."""
    if isinstance(node, Data | MetricName) or (isinstance(node, HelperCall) and node.name == "within_baseline"):
        return True
    return any(reads_data(child) for child in children(node))


# -- How much one check may cost: counts, never seconds, so that the answer is the same on every machine


MAX_LENGTH = 4_000
"""Characters of one expression."""

MAX_TOKENS = 600
"""Tokens of one expression."""

MAX_DEPTH = 40
"""Brackets, calls, `not` and signs inside each other."""

MAX_STRING = 500
"""Characters of one quoted name."""

MAX_DIGITS = 40
"""Characters of one number."""

MAX_NUMBER = 1e300
"""Largest literal, either sign."""

MAX_STEP = 10**15
"""Largest step or range bound, either sign: exact as a float."""

MAX_OPERATIONS = 2_000
"""Evaluation steps of one check that do not come from recorded points ..."""

OPERATIONS_PER_POINT = 32
"""... and this many more for each recorded point of each metric it names."""

CALL_OPERATIONS = 5
"""What calling a helper costs, besides its points: about as much as five of the others."""

MAX_CHECKS = 10_000
"""Expressions of one run."""


# -- How a check can go wrong: it cannot be read (usage), what it reads does not hold (a FAIL), or nobody measured it


_WINDOW = 100


class CheckFailedError(Exception):
    """The evidence does not allow PASS; the text becomes the row's message."""


class UnavailableError(CheckFailedError):
    """A number that the check asks for was never measured: no evidence, for PASS or for FAIL."""


class CheckSyntaxError(ConfigError):
    """The expression is refused before or while it is evaluated: exit 2."""


def refuse(expression: str, at: int, problem: str, allowed: str) -> CheckSyntaxError:
    """The error for a place in an expression, with a caret under it.

    Example:
        >>> print(refuse("mean(x", 5, "unknown name x", "data").what)
        unknown name x, at character 6 of this check:
            mean(x
                 ^
    """
    start = max(0, min(at, len(expression)) - _WINDOW // 2)
    window = "".join(c if c.isprintable() else "�" for c in expression[start : start + _WINDOW])
    head, tail = "..." if start else "", "..." if start + _WINDOW < len(expression) else ""
    caret = " " * (len(head) + at - start) + "^"
    return CheckSyntaxError(
        f"{problem}, at character {at + 1} of this check:\n    {head}{window}{tail}\n    {caret}",
        "a check that cannot be read judges nothing, and that must not look like a FAIL of the run",
        f"{allowed}; the grammar is in docs/checks.md",
    )


# -- What a helper takes: parameters, their kinds, and how a call is bound to them ----------------


NUMBER, TEXT, BOOL, SERIES, STEPS, DATA = "a number", "a quoted text", "true or false", "a series", "steps", "data"
REQUIRED = object()


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of a helper."""

    name: str
    kinds: tuple[str, ...]
    default: Any = REQUIRED
    keyword_only: bool = False
    aliases: tuple[str, ...] = ()
    allowed: Callable[[Any], bool] = lambda value: True
    meaning: str = ""
    """What `allowed` allows, in words."""


@dataclass(frozen=True, slots=True)
class Helper:
    """A function of the check language."""

    name: str
    result: str
    parameters: tuple[Parameter, ...]
    compute: Callable[[Mapping[str, Any]], Any]
    meaning: str
    ranged: bool = False
    """Takes start, end, from_step, to_step: the evaluator hands over the points inside them."""
    needs_points: bool = True
    """Fails on a series without any point; `count` says 0 instead."""

    def usage(self) -> str:
        """The call as one would write it."""
        shown = [_shown(parameter) for parameter in self.parameters]
        return f"{self.name}({', '.join(shown)})"


def _shown(parameter: Parameter) -> str:
    if parameter.default is REQUIRED:
        return parameter.name
    return f"{parameter.name}={parameter.default!r}"


def is_whole(value: Any) -> bool:
    """Whether `value` can be a step or a position."""
    return isinstance(value, int | float) and value == value // 1 and abs(value) <= MAX_STEP


_WHOLE = f"a whole number up to {MAX_STEP:.0e}"

RANGE = (
    Parameter("start", (NUMBER,), 1, False, ("range_start",), is_whole, _WHOLE),
    Parameter("end", (NUMBER,), 0, False, ("range_end",), is_whole, _WHOLE),
    Parameter("from_step", (NUMBER,), None, True, (), is_whole, _WHOLE),
    Parameter("to_step", (NUMBER,), None, True, (), is_whole, _WHOLE),
)


def bind(expression: str, call: HelperCall, helper: Helper) -> dict[str, Node]:
    """Parameter name -> the node given for it; left-out ones are left out here too."""
    positional = [parameter for parameter in helper.parameters if not parameter.keyword_only]
    usage = f"write {helper.usage()}"
    if len(call.args) > len(positional):
        raise refuse(expression, call.args[len(positional)].at, f"{helper.name}() takes no further argument", usage)
    bound = {parameter.name: node for parameter, node in zip(positional, call.args, strict=False)}
    names = {alias: parameter.name for parameter in helper.parameters for alias in (parameter.name, *parameter.aliases)}
    for word, node in call.keywords:
        if word not in names:
            near = difflib.get_close_matches(word, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise refuse(expression, node.at, f"{helper.name}() has no argument {word[:40]}{hint}", usage)
        if names[word] in bound:
            raise refuse(expression, node.at, f"{word} is given twice", usage)
        bound[names[word]] = node
    for parameter in helper.parameters:
        if parameter.default is REQUIRED and parameter.name not in bound:
            raise refuse(expression, call.at, f"{helper.name}() needs {parameter.name}", usage)
    if {"start", "end"} & bound.keys() and {"from_step", "to_step"} & bound.keys():
        raise refuse(expression, call.at, "a range by position and one by step", "give one of the two")
    return bound
