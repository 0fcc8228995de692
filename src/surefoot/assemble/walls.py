"""What keeps model-written code in, on this host and in this run: for the plan, the run's records and the report."""

from __future__ import annotations

import sys
from typing import Any


def sandbox_facts() -> dict[str, Any] | None:
    """Which walls stand here; None while nothing in this process has anything to do with a sandbox.

    Asking builds a sandbox, so a run that never uses one is not made to.
    """
    if "surefoot.envs.sandbox" not in sys.modules:
        return None
    from surefoot.envs.sandbox import available

    report = available()
    return {"usable": report.usable, "missing": list(report.missing), "weaker": list(report.weaker)}


def weaker_words() -> str | None:
    """What is absent behind the other walls, in one line; None where nothing is."""
    facts = sandbox_facts()
    return "; ".join(facts["weaker"]) if facts and facts["weaker"] else None
