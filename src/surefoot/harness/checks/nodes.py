"""What an expression is once it is read: a small tree of these."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """Something with a place in the expression."""

    at: int


@dataclass(frozen=True, slots=True)
class Number(Node):
    """A literal number."""

    value: float | int


@dataclass(frozen=True, slots=True)
class Text(Node):
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
class Metric(Node):
    """`data["NAME"]`, or `data.get("NAME", {})`, which may be missing."""

    name: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Point(Node):
    """`SERIES["9"]`: the value at one step."""

    series: Node
    step: Node


@dataclass(frozen=True, slots=True)
class Call(Node):
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
        case Point():
            return (node.series, node.step)
        case Call():
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
    if isinstance(node, Data | Metric) or (isinstance(node, Call) and node.name == "within_baseline"):
        return True
    return any(reads_data(child) for child in children(node))
