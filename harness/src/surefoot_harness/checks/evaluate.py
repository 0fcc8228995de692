"""A tree and the recorded metrics to one answer: PASS or FAIL, the value that decided, and why.

Promises   missing, empty or non-finite evidence ends in a FAIL with its reason; work is counted and bounded
           (`MAX_OPERATIONS` plus `OPERATIONS_PER_POINT` for each point of the metrics named); `and` and `or` stop
           early as everywhere else, so `"x" not in data or max(data["x"]) < 3` means what it says.
Never      calls anything but the helpers in `functions.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot_harness.checks import language
from surefoot_harness.checks.functions import HELPERS, Points, Range, Share, joined, one_number, select, usable
from surefoot_harness.checks.language import (
    BOOL,
    CALL_OPERATIONS,
    MAX_OPERATIONS,
    NUMBER,
    OPERATIONS_PER_POINT,
    REQUIRED,
    CheckFailedError,
    Helper,
    UnavailableError,
    bind,
    is_whole,
    refuse,
)
from surefoot_harness.series import Metrics, Series, describe, is_number, is_unavailable

# -- What an evaluation saw on its way: the signs it knows, each comparison as it went, and how values are shown


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
class SeenComparison:
    """One comparison as it went: what the source side was, whether it held, what to say if it did not."""

    value: Any
    held: bool
    text: str


def told(given: Mapping[str, Any], answer: bool) -> SeenComparison:
    """What `finite` or `within` found."""
    if "value" in given:
        return SeenComparison(show(given["value"]), answer, f"{given['value']} is too far from {given['target']}")
    bad = [(step, value) for step, value in given["series"].items if not is_number(value)][:1]
    text = "".join(f"{given['series'].name} is {describe(value)} at step {step}" for step, value in bad)
    return SeenComparison(answer, answer, text)


def show(value: Any) -> Any:
    """A value for the report: numbers and flags as they are, steps in words."""
    if isinstance(value, Share):
        return float(value)
    if isinstance(value, frozenset):
        return f"{len(value)} steps, {min(value)} to {max(value)}" if value else "no steps"
    return value


# -- A tree and the recorded metrics to one answer: PASS or FAIL, the value that decided, and why -


Baseline = Callable[[Series, Mapping[str, Any], Range], tuple[bool, float, str]]


@dataclass
class Evaluator:
    """Evaluates one expression over one source."""

    expression: str
    metrics: Metrics
    baseline: Baseline
    seen: list[SeenComparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    looping: bool = False
    operations: int = 0
    limit: int = MAX_OPERATIONS
    named: set[str] = field(default_factory=set)

    def spend(self, node: language.Node, amount: int = 1) -> None:
        """Count work; too much of it is the expression's fault, not the run's."""
        self.operations += amount
        if self.operations > self.limit:
            allowed = f"{MAX_OPERATIONS} operations and {OPERATIONS_PER_POINT} for each point of the metrics it names"
            raise refuse(self.expression, node.at, "the check needs too much work", f"allowed are {allowed}")

    def note(self, text: str) -> None:
        """Something the row should say."""
        if text and text not in self.notes:
            self.notes.append(text)

    def saw(self, seen: SeenComparison) -> None:
        """One comparison as it went; a condition inside a loop is not what the check is about."""
        if not self.looping:
            self.seen.append(seen)

    # -- every node ---------------------------------------------------------------

    def value(self, node: language.Node) -> Any:
        """The value of `node`: a number, true or false, points, or a set of steps."""
        self.spend(node)
        match node:
            case language.Number() | language.QuotedText() | language.Flag():
                return node.value
            case language.Data():
                return self.metrics
            case language.Variable():
                return self.variable(node)
            case language.MetricName():
                return self.metric(node)
            case language.StepValue():
                return self.point(node)
            case language.Sign():
                operand = self.number(node.operand)
                return -operand if node.sign == "-" else operand
            case language.Arithmetic():
                return self.arithmetic(node)
            case language.Compare():
                return self.compare(node)
            case language.Logic():
                wanted = node.word == "or"
                return wanted if any(self.value(part) is wanted for part in node.operands) else not wanted
            case language.Not():
                return not self.value(node.operand)
            case language.HelperCall():
                return self.call(node)
            case _:
                return self.made(node)

    def number(self, node: language.Node) -> float:
        """The value of `node` as one finite number that can be computed with."""
        value = self.operand(node)
        if isinstance(value, Share):
            raise CheckFailedError(value.reason)
        return value

    def operand(self, node: language.Node) -> float:
        """Like `number`, but a share of points with NaN among them is allowed: comparisons know what to do."""
        value = self.value(node)
        found = one_number(value) if isinstance(value, Points) else value
        if isinstance(found, int | float) and not math.isfinite(found):
            raise CheckFailedError(f"the value is {found}, not a finite number")
        return found

    # -- reading the source ---------------------------------------------------------

    def variable(self, node: language.Variable) -> Any:
        """A loop's step or value; a value that is no number fails here, so no condition can drop it quietly."""
        value = self.variables[node.name]
        return usable(value)[0] if isinstance(value, Points) else value

    def series(self, name: str) -> Series | None:
        """A recorded series by name, its flat name included; naming it buys the work that its points need."""
        series, note = self.metrics.resolve(name)
        self.note(note)
        if series is None and name in self.metrics.odd:
            raise CheckFailedError(f"{name} cannot be used: {self.metrics.odd[name]}")
        if series is not None and series.name not in self.named:
            if any(map(is_unavailable, series.values())):  # before any condition on it: none may drop it quietly
                raise UnavailableError(
                    f"{series.name} is unavailable: nobody measured it, so there is nothing to judge"
                )
            self.named.add(series.name)
            self.limit += OPERATIONS_PER_POINT * len(series)
        return series

    def metric(self, node: language.MetricName) -> Points:
        """The points of a metric."""
        series = self.series(node.name)
        if series is None and node.optional:
            return Points(node.name, [])
        if series is None:
            near = ", ".join(self.metrics.nearest_names(node.name))
            raise CheckFailedError(f"key not found: {node.name!r} is not recorded; nearest: {near or 'nothing'}")
        self.spend(node, len(series))
        return Points.of(series)

    def point(self, node: language.StepValue) -> float:
        """The value at one step."""
        step = self.step(node.step)
        series = self.series(node.series.name) if isinstance(node.series, language.MetricName) else None
        if series is None:  # a made series, or a missing one, which fails here
            points = self.value(node.series)
            series = Series(points.name, dict(points.items), single=points.single)
        if series.single:
            raise CheckFailedError(f"{series.name} is one number without steps")
        if step not in series:
            near = ", ".join(map(str, series.nearest_steps(step)))
            raise CheckFailedError(f"step {step} of {series.name} was never logged; nearest: {near or 'none'}")
        return usable(Points(series.name, [(step, series[step])]))[0]

    def step(self, node: language.Node) -> int:
        """A step, quoted or computed."""
        value = self.value(node)
        if isinstance(value, str):
            return int(value)
        if not is_whole(value):
            raise refuse(self.expression, node.at, f"{value} is not a step", "steps are whole numbers")
        return int(value)

    # -- computing --------------------------------------------------------------------

    def arithmetic(self, node: language.Arithmetic) -> float:
        """One level of precedence, left to right, in floating point: nothing can grow."""
        total = float(self.number(node.first))
        for sign, part in node.rest:
            try:
                total = ARITHMETIC[sign](total, float(self.number(part)))
            except ZeroDivisionError:
                raise CheckFailedError(f"{sign} by zero") from None
            if not math.isfinite(total):
                raise CheckFailedError(f"the result of {sign} is {total}, not a finite number")
        return total

    def compare(self, node: language.Compare) -> bool:
        """A chain of comparisons; stops at the first that does not hold."""
        left_node, left = node.first, None
        for sign, right_node in node.rest:
            if sign in ("in", "not in"):
                held, right = self.member(left_node, sign, right_node), None
            else:
                left = self.operand(left_node) if left is None else left
                right = self.operand(right_node)
                low, high = self.against(left, sign, right)
                held = COMPARISON[sign](low, high)
                if not self.looping:  # saying it costs more than doing it
                    shown = left if language.reads_data(left_node) or not language.reads_data(right_node) else right
                    self.saw(SeenComparison(show(shown), held, f"{show(low)} {sign} {show(high)} is false"))
            if not held:
                return False
            left_node, left = right_node, right
        return True

    def against(self, left: Any, sign: str, right: Any) -> tuple[Any, Any]:
        """Both sides as they are compared: a NaN inside a share counts against the check, whichever way it goes."""
        if isinstance(left, Share) and sign in (">", ">="):
            self.note(left.reason)
            left = left.low
        if isinstance(right, Share) and sign in ("<", "<="):
            self.note(right.reason)
            right = right.low
        return left, right

    def member(self, left: language.Node, sign: str, right: language.Node) -> bool:
        """`in` and `not in`."""
        if isinstance(right, language.Data):
            name = str(self.value(left))
            inside = self.series(name) is not None
            what, text = f"{len(self.metrics)} metrics", f"{name!r} is {'' if inside else 'not '}recorded"
        else:
            step, place = self.step(left), self.value(right)
            known = place if isinstance(place, frozenset) else frozenset(place.steps)
            inside = step in known
            what, text = show(known), f"step {step} is {'' if inside else 'not '}recorded"
        held = inside if sign == "in" else not inside
        self.saw(SeenComparison(what, held, text))
        return held

    # -- helpers and made series ---------------------------------------------------------

    def call(self, node: language.HelperCall) -> Any:
        """A helper with its arguments."""
        self.spend(node, CALL_OPERATIONS)
        helper = HELPERS[node.name]
        given = {p.name: p.default for p in helper.parameters if p.default is not REQUIRED}
        for name, argument in bind(self.expression, node, helper).items():
            given[name] = self.argument(argument, helper, name)
        wanted = Range.of(given)
        if node.name == "within_baseline":
            return self.judge_baseline(given, wanted)
        if isinstance(given.get("series"), Points):
            self.spend(node, len(given["series"].items))
            if helper.ranged and (helper.needs_points or not wanted.everything):
                given["series"] = self.selected(given["series"], wanted)
        elif "series" in given and not wanted.everything:
            raise refuse(self.expression, node.at, "steps have no range", "give the range to steps' own series")
        try:
            answer = helper.compute(given)
        except OverflowError:
            raise CheckFailedError(f"{node.name}() overflows") from None
        if helper.result == BOOL:
            self.saw(told(given, answer))
        return answer

    def argument(self, node: language.Node, helper: Helper, name: str) -> Any:
        """One argument, its value checked where it was computed."""
        parameter = next(p for p in helper.parameters if p.name == name)
        value = self.number(node) if NUMBER in parameter.kinds else self.value(node)
        if not parameter.allowed(value):
            raise refuse(self.expression, node.at, f"{name} is {value}", f"allowed is {parameter.meaning}")
        return value

    def selected(self, points: Points, wanted: Range) -> Points:
        """The points inside a range, with a note where positions and steps are not the same thing."""
        chosen = select(points, wanted)
        if not wanted.everything and points.steps != list(range(1, len(points.items) + 1)):
            self.note(f"the range {wanted} of {points.name} means {chosen.spread()}")
        return chosen

    def judge_baseline(self, given: Mapping[str, Any], wanted: Range) -> bool:
        """Whether this run lies in the band of the stored runs."""
        series = self.series(given["metric"])
        if series is None:
            self.metric(language.MetricName(0, given["metric"]))
            raise AssertionError("a missing metric has raised by now")
        held, value, text = self.baseline(series, given, wanted)
        self.note(text)
        self.saw(SeenComparison(show(value), held, "outside of the band"))
        return held

    def made(self, node: language.Node) -> Any:
        """Series and steps that are written out in the expression."""
        match node:
            case language.Merge():
                parts: list[Points] = [self.value(part) for part in node.parts]
                return Points(" and ".join(part.name for part in parts), joined(parts))
            case language.Steps():
                start, end = self.step(node.start), self.step(node.end)
                self.spend(node, max(0, end - start))
                return frozenset(range(start, end))
            case language.Loop():
                return self.loop(node)
        raise AssertionError(f"a node without a value: {type(node).__name__}")

    def loop(self, node: language.Loop) -> Points:
        """The points that a `for` makes."""
        source = self.value(node.source)
        name = source.name if isinstance(source, Points) else "the list"
        pairs = source.items if isinstance(source, Points) else [(step, None) for step in sorted(source)]
        items: list[tuple[int, Any]] = []
        self.looping = True
        for step, value in pairs:
            self.variables[node.names[0]] = step
            if node.pairs:
                self.variables[node.names[1]] = value if is_number(value) else Points(name, [(step, value)])
            if node.condition is None or self.value(node.condition):
                key = len(items) + 1 if node.key is None else self.step(node.key)
                items.append((key, self.number(node.value)))
        self.looping = False
        return Points(name, joined([Points(name, [item]) for item in items]))
