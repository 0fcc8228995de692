"""The check language: expressions over recorded metrics, parsed by us, answered with PASS or FAIL and a reason.

    text --tokens--> tokens --parser--> tree --kinds--> a tree that fits --evaluate + metrics--> row --report--> table

Promises   nothing is ever handed to Python's evaluator; work is bounded by the counts in `language.py`; all expressions
           are read before the first is judged; missing, empty or non-finite evidence is a FAIL with its reason; a
           number that is marked "unavailable" is no evidence at all (INCOMPLETE, exit 3).

Example:
    >>> from surefoot_harness.series import Metrics, Series
    >>> metrics = Metrics({"loss": Series("loss", {1: 0.9, 2: 0.5})})
    >>> report = run_checks(metrics, ['data["train/loss"]["2"] < 0.6', 'max(data["loss"]) < 0.6'])
    >>> [(str(row.status), row.value) for row in report.rows]
    [('PASS', 0.5), ('FAIL', 0.9)]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from surefoot_harness.baseline import Baselines
from surefoot_harness.checks import language
from surefoot_harness.checks.evaluate import Evaluator, show
from surefoot_harness.checks.functions import Points, Range, judge
from surefoot_harness.checks.kinds import HINTS, Kinds
from surefoot_harness.checks.language import BOOL, MAX_CHECKS, CheckFailedError, UnavailableError
from surefoot_harness.checks.parser import parse
from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.series import Metrics, Series
from surefoot_harness.tables import table
from surefoot_harness.verdict import Verdict

# -- Rows to a verdict: as a table, as JSON, as JUnit XML -----------------------------------------


TITLE = "Metric Checks"
COLUMNS = ("Status", "Check", "Value", "Message")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check: PASS, FAIL or, without evidence, INCOMPLETE; the value that decided, and why."""

    check: str
    status: Verdict
    value: float | int | bool | str | None
    message: str


@dataclass(frozen=True)
class CheckReport:
    """Every row, in the order in which the checks were given.

    Example:
        >>> Report((Row("min(x) > 0", Verdict.PASS, 0.5, ""),)).status
        <Verdict.PASS: 'PASS'>
    """

    rows: tuple[CheckRow, ...]

    @property
    def status(self) -> Verdict:
        """PASS when there are rows and all of them passed; INCOMPLETE when none failed and some have no evidence."""
        found = {row.status for row in self.rows}
        if found == {Verdict.PASS}:
            return Verdict.PASS
        return Verdict.INCOMPLETE if found and found <= {Verdict.PASS, Verdict.INCOMPLETE} else Verdict.FAIL

    @property
    def exit_code(self) -> int:
        """0 when all passed, 1 when one failed, 3 when what could decide was never measured."""
        return {Verdict.PASS: 0, Verdict.INCOMPLETE: StateError.exit_code}.get(self.status, 1)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints, as objects."""
        checks = [
            {"check": row.check, "status": str(row.status), "value": _json_value(row.value), "message": row.message}
            for row in self.rows
        ]
        return {"checks": checks, "status": str(self.status)}

    def as_json(self) -> str:
        """What `--json` prints."""
        return json.dumps(self.as_dict(), indent=2, allow_nan=False)

    def as_table(self, width: int | None = None) -> str:
        """The table; nothing is cut, and `width` only wraps the last column."""
        rows = [[str(row.status), row.check, _text(row.value), row.message] for row in self.rows]
        return table(TITLE, COLUMNS, rows, width)

    def as_junit(self) -> str:
        """The rows as one JUnit test suite."""
        failed = sum(row.status is not Verdict.PASS for row in self.rows)
        counts = f'tests="{len(self.rows)}" failures="{failed}" errors="0"'
        lines = [
            '<?xml version="1.0" encoding="utf-8"?>',
            f"<testsuites {counts}>",
            f'  <testsuite name={quoteattr(TITLE)} {counts} skipped="0">',
            *(line for row in self.rows for line in _junit_case(row)),
            "  </testsuite>",
            "</testsuites>",
        ]
        return "\n".join(lines) + "\n"


def _junit_case(row: CheckRow) -> list[str]:
    name, value, message = (_clean(part) for part in (row.check, _text(row.value), row.message))
    head = f'    <testcase classname="surefoot.check" name={quoteattr(name)}'
    if row.status is Verdict.PASS:
        return [head + "/>"]
    return [
        head + ">",
        f'      <failure type="{row.status}" message={quoteattr(message)}>{escape(f"value: {value}")}</failure>',
        "    </testcase>",
    ]


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold in any spelling."""
    return _NOT_XML.sub("�", text)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _json_value(value: Any) -> Any:
    """JSON has no NaN: such a value is named in the message, not shown as a number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -- The check language: expressions over recorded metrics, parsed by us, answered with PASS or FAIL and a reason


class Check:
    """One expression, read and found to make sense."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tree = parse(expression)
        self.kind = Kinds(expression).of(self.tree)

    def judge(self, metrics: Metrics, baselines: Baselines | None = None) -> CheckRow:
        """The row of this check over one source."""

        def baseline(series: Series, given: Mapping[str, Any], wanted: Range) -> tuple[bool, float, str]:
            return judge(series, given, wanted, baselines)

        evaluator = Evaluator(self.expression, metrics, baseline)
        try:
            answer = evaluator.value(self.tree)
            passed, message = self._verdict(answer, evaluator)
        except UnavailableError as missing:
            return CheckRow(self.expression, Verdict.INCOMPLETE, None, str(missing))
        except CheckFailedError as failure:
            passed, message = False, str(failure)
        failing = [seen for seen in evaluator.seen if not seen.held]
        chosen = (failing if not passed and failing else evaluator.seen)[:1]
        value = chosen[0].value if chosen else None
        if not passed and self.kind != BOOL and not chosen:
            value = _bare(evaluator, self.tree)
        text = "; ".join(part for part in (message, *evaluator.notes) if part)
        return CheckRow(self.expression, Verdict.PASS if passed else Verdict.FAIL, value, text)

    def _verdict(self, answer: Any, evaluator: Evaluator) -> tuple[bool, str]:
        if self.kind != BOOL:
            return False, f"not a comparison: this is {self.kind}, and a bare value proves nothing ({HINTS[self.kind]})"
        if not language.reads_data(self.tree):
            return False, "the check reads no metric, so it proves nothing"
        if answer is True:
            return True, ""
        failing = [seen for seen in evaluator.seen if not seen.held]
        return False, failing[0].text if failing else "the condition is false"


def _bare(evaluator: Evaluator, tree: language.Node) -> Any:
    """The value of a check without a comparison, where it has one."""
    try:
        value = evaluator.value(tree)
    except (CheckFailedError, ConfigError):
        return None
    return None if isinstance(value, Points | Metrics) else show(value)


def parse_check(expression: str) -> Check:
    """Read one expression; `ConfigError` (exit 2) names the place where it stops making sense."""
    return Check(expression)


def run_checks(metrics: Metrics, expressions: Sequence[str], baselines: Baselines | None = None) -> CheckReport:
    """Judge every expression over `metrics`.

    All of them are read first, so an expression that makes no sense stops everything before anything is judged.
    """
    if not expressions:
        raise ConfigError("no checks were given", "a run without checks is not judged", "give at least one expression")
    if len(expressions) > MAX_CHECKS:
        raise ConfigError(f"{len(expressions)} checks", f"at most {MAX_CHECKS} are judged at once", "split them")
    checks = [parse_check(expression) for expression in expressions]
    return CheckReport(tuple(check.judge(metrics, baselines) for check in checks))


__all__ = ["Check", "CheckReport", "CheckRow", "parse_check", "run_checks"]
