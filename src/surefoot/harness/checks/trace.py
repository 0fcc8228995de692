"""What an evaluation saw on its way: the signs it knows, each comparison as it went, and how values are shown."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.harness.checks.functions import Share
from surefoot.harness.series import describe, is_number

ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
}
COMPARISON: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclass
class Seen:
    """One comparison as it went: what the source side was, whether it held, what to say if it did not."""

    value: Any
    held: bool
    text: str


def told(given: Mapping[str, Any], answer: bool) -> Seen:
    """What `finite` or `within` found."""
    if "value" in given:
        return Seen(show(given["value"]), answer, f"{given['value']} is too far from {given['target']}")
    bad = [(step, value) for step, value in given["series"].items if not is_number(value)][:1]
    text = "".join(f"{given['series'].name} is {describe(value)} at step {step}" for step, value in bad)
    return Seen(answer, answer, text)


def show(value: Any) -> Any:
    """A value for the report: numbers and flags as they are, steps in words."""
    if isinstance(value, Share):
        return float(value)
    if isinstance(value, frozenset):
        return f"{len(value)} steps, {min(value)} to {max(value)}" if value else "no steps"
    return value
