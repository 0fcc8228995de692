"""Whether the parts of an expression fit together, decided before any metric is read.

Promises   an expression is accepted or refused whatever the data say; after this, evaluation can only meet missing or
           unusable values, which are FAILs, never surprises.
"""

from __future__ import annotations

import difflib
import re

from surefoot_harness.checks import language
from surefoot_harness.checks.functions import HELPERS
from surefoot_harness.checks.language import BOOL, DATA, MAX_STEP, NUMBER, SERIES, STEPS, TEXT, Parameter, bind, refuse

_STEP = re.compile(r"-?[0-9]{1,15}", re.ASCII)
_CHOICES = {"stat": ("mean", "median", "last", "min", "max"), "side": ("both", "low", "high")}
HINTS = {
    STEPS: "max(steps(x)) is the last step, count(x) how many there are",
    TEXT: "a metric is data[...]",
    DATA: 'name a metric: data["train/loss"]',
    BOOL: "true and false can be combined by and, or, not",
    SERIES: "a helper makes one number of a series: last(x), mean(x), min(x)",
    NUMBER: "compare it: ... < 1.5",
}


def step_of(text: str) -> int | None:
    """The step that a quoted text means, or None."""
    return int(text) if _STEP.fullmatch(text) else None


class Kinds:
    """The kind of every part of one expression."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self._known: dict[int, str] = {}

    def of(self, node: language.Node) -> str:
        """The kind of `node`; `ConfigError` where its parts do not fit."""
        # Remembered, because a comparison asks for its sides more than once: nested, that would double each time.
        if id(node) not in self._known:
            self._known[id(node)] = self._of_simple(node)
        return self._known[id(node)]

    def _of_simple(self, node: language.Node) -> str:
        match node:
            case language.Number() | language.Variable():
                return NUMBER
            case language.QuotedText():
                return TEXT
            case language.Flag():
                return BOOL
            case language.Data():
                return DATA
            case language.MetricName():
                return SERIES
            case language.StepValue():
                self.need(node.series, SERIES)
                self.need_step(node.step)
                return NUMBER
            case language.Sign():
                self.number(node.operand)
                return NUMBER
            case language.Arithmetic():
                for part in language.children(node):
                    self.number(part)
                return NUMBER
            case _:
                return self._of_larger(node)

    def _of_larger(self, node: language.Node) -> str:
        match node:
            case language.Compare():
                left = node.first
                for operator, right in node.rest:
                    self.pair(left, operator, right)
                    left = right
                return BOOL
            case language.Logic() | language.Not():
                for part in language.children(node):
                    self.need(part, BOOL)
                return BOOL
            case language.Merge():
                for part in node.parts:
                    self.need(part, SERIES)
                return SERIES
            case language.Steps():
                self.number(node.start)
                self.number(node.end)
                return STEPS
            case language.Loop():
                return self.loop(node)
            case language.HelperCall():
                return self.call(node)
        raise AssertionError(f"a node without a kind: {type(node).__name__}")

    def need(self, node: language.Node, *wanted: str) -> None:
        """Refuse a node of another kind."""
        kind = self.of(node)
        if kind not in wanted:
            raise refuse(self.expression, node.at, f"this is {kind}, wanted is {' or '.join(wanted)}", HINTS[kind])

    def number(self, node: language.Node) -> None:
        """A number, or a metric whose source may have given just one number."""
        if not isinstance(node, language.MetricName):
            self.need(node, NUMBER)

    def need_step(self, node: language.Node) -> None:
        """A step: a whole number, quoted or not."""
        if isinstance(node, language.QuotedText) and step_of(node.value) is None:
            raise refuse(self.expression, node.at, "this is not a step", 'steps are whole numbers, such as "9"')
        if isinstance(node, language.Number) and (node.value != node.value // 1 or abs(node.value) > MAX_STEP):
            raise refuse(self.expression, node.at, "this is not a step", f"whole numbers up to {MAX_STEP:.0e}")
        self.need(node, NUMBER, TEXT)

    def pair(self, left: language.Node, operator: str, right: language.Node) -> None:
        """The two sides of one comparison."""
        if operator in ("in", "not in"):
            self.need(right, DATA, SERIES, STEPS)
            if self.of(right) == DATA:
                self.need(left, TEXT)
            else:
                self.need_step(left)
        elif operator in ("==", "!=") and self.of(left) in (BOOL, STEPS):
            self.need(right, self.of(left))
        else:
            self.number(left)
            self.number(right)

    def loop(self, node: language.Loop) -> str:
        """A series made from another one."""
        self.need(node.source, *((SERIES,) if node.pairs else (SERIES, STEPS)))
        if node.key is not None:
            self.need(node.key, NUMBER)
        self.number(node.value)
        if node.condition is not None:
            self.need(node.condition, BOOL)
        return SERIES

    def call(self, node: language.HelperCall) -> str:
        """A helper, its arguments bound and of the right kind."""
        helper = HELPERS.get(node.name)
        if helper is None:
            near = difflib.get_close_matches(node.name, HELPERS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise refuse(
                self.expression, node.at, f"unknown helper {node.name[:40]}{hint}", f"helpers: {' '.join(HELPERS)}"
            )
        bound = bind(self.expression, node, helper)
        if node.name == "within" and ("tolerance" in bound) == ("rel" in bound):
            raise refuse(self.expression, node.at, "within() needs tolerance or rel=", "give one of the two")
        for parameter in helper.parameters:
            if parameter.name in bound:
                self.argument(bound[parameter.name], parameter)
        return helper.result

    def argument(self, node: language.Node, parameter: Parameter) -> None:
        """One argument: its kind, and its value where that is written out."""
        if NUMBER in parameter.kinds:
            self.number(node)
        else:
            self.need(node, *parameter.kinds)
        value = literal(node)
        if value is not None and not parameter.allowed(value):
            raise refuse(self.expression, node.at, f"{parameter.name} is {value}", f"allowed is {parameter.meaning}")
        choices = _CHOICES.get(parameter.name)
        if choices and isinstance(node, language.QuotedText) and node.value not in choices:
            raise refuse(self.expression, node.at, f"{parameter.name} is {node.value!r}", f"one of {' '.join(choices)}")


def literal(node: language.Node) -> float | int | None:
    """The number that is written out here, sign included."""
    if isinstance(node, language.Number):
        return node.value
    if isinstance(node, language.Sign) and isinstance(node.operand, language.Number):
        return -node.operand.value if node.sign == "-" else node.operand.value
    return None
