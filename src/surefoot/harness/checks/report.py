"""Rows to a verdict: as a table, as JSON, as JUnit XML."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from surefoot.errors import StateError
from surefoot.harness.tables import table
from surefoot.records import Verdict

TITLE = "Metric Checks"
COLUMNS = ("Status", "Check", "Value", "Message")
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Row:
    """One check: PASS, FAIL or, without evidence, INCOMPLETE; the value that decided, and why."""

    check: str
    status: Verdict
    value: float | int | bool | str | None
    message: str


@dataclass(frozen=True)
class Report:
    """Every row, in the order in which the checks were given.

    Example:
        >>> Report((Row("min(x) > 0", Verdict.PASS, 0.5, ""),)).status
        <Verdict.PASS: 'PASS'>
    """

    rows: tuple[Row, ...]

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


def _junit_case(row: Row) -> list[str]:
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
