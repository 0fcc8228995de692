"""A deadline counts down to 0 on the monotonic clock, and is over exactly when nothing is left."""

from __future__ import annotations

import time

import pytest

from surefoot.system.signals import Deadline


def test_it_counts_down_stops_at_zero_and_is_over_when_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    deadline = Deadline(5.0)
    seen = []
    for clock[0] in (100.0, 104.5, 105.0, 300.0):
        seen.append((deadline.left, deadline.expired))
    assert seen == [(5.0, False), (0.5, False), (0.0, True), (0.0, True)]
    assert (deadline.seconds, deadline.ends) == (5.0, 105.0)


@pytest.mark.parametrize("seconds", [0, -3])
def test_no_time_is_over_at_once(seconds: float) -> None:
    deadline = Deadline(seconds)
    assert deadline.expired
    assert deadline.left == 0.0


def test_planted_wall_clock_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: the wall clock is set forward by a day, and no deadline is shorter for it."""
    deadline, now = Deadline(60.0), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86_400)
    assert not deadline.expired
    assert deadline.left > 30
