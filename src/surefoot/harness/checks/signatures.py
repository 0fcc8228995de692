"""What a helper takes: parameters, their kinds, and how a call is bound to them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.harness.checks import nodes as n
from surefoot.harness.checks.limits import MAX_STEP
from surefoot.harness.checks.problems import refuse

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


def bind(expression: str, call: n.Call, helper: Helper) -> dict[str, n.Node]:
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
