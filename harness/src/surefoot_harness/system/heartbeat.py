"""Where this process is, and when it last got ahead: one word and one moment, for the watchdog.

Whoever does a long piece of work beats after every part of it. A beat costs less than a microsecond, takes no lock and
never fails; a wait that does not end is a wait without beats, and `run.watchdog` ends it.
"""

from __future__ import annotations

import time
from typing import NamedTuple


class Heartbeat(NamedTuple):
    """What was last said: the stage, in words that complete "stuck while ...", and when, on the monotonic clock."""

    stage: str
    moment: float


OUTSIDE = "in the caller's own code, between two steps"
"""A stage that is no stall, however long it lasts: the run waits for whoever steps it."""

_last = Heartbeat("starting", time.monotonic())


def tick(stage: str) -> None:
    """Something was done; `stage` says what is being done next."""
    global _last
    _last = Heartbeat(stage, time.monotonic())


def last_heartbeat() -> Heartbeat:
    """The newest beat of this process."""
    return _last
