"""How a run, check or suite ended, in one word."""

from __future__ import annotations

import enum


class Verdict(enum.StrEnum):
    """How a run, check or suite ended. Empty or missing evidence is never PASS."""

    PASS = "PASS"  # noqa: S105 - not a password
    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"
    ERROR = "ERROR"
    SKIP = "SKIP"
