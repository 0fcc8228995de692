"""What a session leaves behind, as one value that can travel: from an xdist worker to the controller as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from surefoot.harness.affected.evidence import Evidence
from surefoot.harness.affected.remember import Outside, Ran


@dataclass
class Report:
    """What one pytest process ran and saw."""

    ran: dict[str, Ran] = field(default_factory=dict)
    outside: Outside = field(default_factory=Outside)
    collected: list[str] = field(default_factory=list)  # every test found, chosen or not
    gone: list[str] = field(default_factory=list)  # stored tests that do not exist any more
    offered: int = 0  # left by -k, -m and the like
    chosen: int = 0
    notices: list[str] = field(default_factory=list)


def merge(reports: Iterable[Report]) -> Report:
    """One report of several workers that shared one list of tests."""
    whole = Report()
    for report in reports:
        for test, one in report.ran.items():
            before = whole.ran.get(test)
            whole.ran[test] = one if before is None or before.outcome != "failed" else before
        whole.outside.evidence.add(report.outside.evidence)
        whole.outside.early |= report.outside.early
        whole.outside.roots |= report.outside.roots
        whole.collected, whole.gone = report.collected, report.gone
        whole.offered, whole.chosen, whole.notices = report.offered, report.chosen, report.notices
    return whole


def dumps(report: Report) -> str:
    """As text."""
    return json.dumps(_plain(report), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Evidence):
        reads = {path: sorted(stack) for path, stack in value.reads.items()}
        return {**vars(value), "reads": reads}
    return sorted(value) if isinstance(value, set) else vars(value)


def loads(text: str) -> Report:
    """From text."""
    value = json.loads(text)
    ran = {test: Ran(**{**one, "evidence": _evidence(one["evidence"])}) for test, one in value.pop("ran").items()}
    out = value.pop("outside")
    outside = Outside(_evidence(out["evidence"]), set(out["early"]), set(out["roots"]), out["started"])
    return Report(ran=ran, outside=outside, **value)


def _evidence(value: dict[str, Any]) -> Evidence:
    return Evidence(
        blocks={(path, name) for path, name in value["blocks"]},
        loaded=set(value["loaded"]),
        reads={path: {(a, b) for a, b in stack} for path, stack in value["reads"].items()},
        imports={(importer, name) for importer, name in value["imports"]},
        problems=set(value["problems"]),
    )
