"""The check language: expressions over recorded metrics, parsed by us, answered with PASS or FAIL and a reason.

    text --tokens--> tokens --parser--> tree --kinds--> a tree that fits --evaluate + metrics--> row --report--> table

Promises   nothing is ever handed to Python's evaluator; work is bounded by the counts in `limits.py`; all expressions
           are read before the first is judged; missing, empty or non-finite evidence is a FAIL with its reason; a
           number that is marked "unavailable" is no evidence at all (INCOMPLETE, exit 3).

Example:
    >>> from surefoot.harness.series import Metrics, Series
    >>> metrics = Metrics({"loss": Series("loss", {1: 0.9, 2: 0.5})})
    >>> report = run_checks(metrics, ['data["train/loss"]["2"] < 0.6', 'max(data["loss"]) < 0.6'])
    >>> [(str(row.status), row.value) for row in report.rows]
    [('PASS', 0.5), ('FAIL', 0.9)]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.errors import ConfigError
from surefoot.harness.baseline import Baselines
from surefoot.harness.checks import nodes
from surefoot.harness.checks.banded import judge
from surefoot.harness.checks.evaluate import Evaluator
from surefoot.harness.checks.kinds import HINTS, Kinds
from surefoot.harness.checks.limits import MAX_CHECKS
from surefoot.harness.checks.parser import parse
from surefoot.harness.checks.points import Points, Range
from surefoot.harness.checks.problems import CheckFailedError, UnavailableError
from surefoot.harness.checks.report import Report, Row
from surefoot.harness.checks.signatures import BOOL
from surefoot.harness.checks.trace import show
from surefoot.harness.series import Metrics, Series
from surefoot.records import Verdict

__all__ = ["Check", "Report", "Row", "parse_check", "run_checks"]


class Check:
    """One expression, read and found to make sense."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tree = parse(expression)
        self.kind = Kinds(expression).of(self.tree)

    def judge(self, metrics: Metrics, baselines: Baselines | None = None) -> Row:
        """The row of this check over one source."""

        def baseline(series: Series, given: Mapping[str, Any], wanted: Range) -> tuple[bool, float, str]:
            return judge(series, given, wanted, baselines)

        evaluator = Evaluator(self.expression, metrics, baseline)
        try:
            answer = evaluator.value(self.tree)
            passed, message = self._verdict(answer, evaluator)
        except UnavailableError as missing:
            return Row(self.expression, Verdict.INCOMPLETE, None, str(missing))
        except CheckFailedError as failure:
            passed, message = False, str(failure)
        failing = [seen for seen in evaluator.seen if not seen.held]
        chosen = (failing if not passed and failing else evaluator.seen)[:1]
        value = chosen[0].value if chosen else None
        if not passed and self.kind != BOOL and not chosen:
            value = _bare(evaluator, self.tree)
        text = "; ".join(part for part in (message, *evaluator.notes) if part)
        return Row(self.expression, Verdict.PASS if passed else Verdict.FAIL, value, text)

    def _verdict(self, answer: Any, evaluator: Evaluator) -> tuple[bool, str]:
        if self.kind != BOOL:
            return False, f"not a comparison: this is {self.kind}, and a bare value proves nothing ({HINTS[self.kind]})"
        if not nodes.reads_data(self.tree):
            return False, "the check reads no metric, so it proves nothing"
        if answer is True:
            return True, ""
        failing = [seen for seen in evaluator.seen if not seen.held]
        return False, failing[0].text if failing else "the condition is false"


def _bare(evaluator: Evaluator, tree: nodes.Node) -> Any:
    """The value of a check without a comparison, where it has one."""
    try:
        value = evaluator.value(tree)
    except (CheckFailedError, ConfigError):
        return None
    return None if isinstance(value, Points | Metrics) else show(value)


def parse_check(expression: str) -> Check:
    """Read one expression; `ConfigError` (exit 2) names the place where it stops making sense."""
    return Check(expression)


def run_checks(metrics: Metrics, expressions: Sequence[str], baselines: Baselines | None = None) -> Report:
    """Judge every expression over `metrics`.

    All of them are read first, so an expression that makes no sense stops everything before anything is judged.
    """
    if not expressions:
        raise ConfigError("no checks were given", "a run without checks is not judged", "give at least one expression")
    if len(expressions) > MAX_CHECKS:
        raise ConfigError(f"{len(expressions)} checks", f"at most {MAX_CHECKS} are judged at once", "split them")
    checks = [parse_check(expression) for expression in expressions]
    return Report(tuple(check.judge(metrics, baselines) for check in checks))
