"""One row of bars for the console, the trend table and the guard."""

from __future__ import annotations

from surefoot.system.text import sparkline


def test_it_spans_its_own_range_and_shows_the_last_values() -> None:
    assert sparkline([0, 1, 2, 3], 24) == "▁▃▆█"
    assert sparkline([9, 0, 1], 2) == "▁█"
    assert len(sparkline(list(range(100)), 24)) == 24


def test_gaps_equal_values_nothing_and_extremes_are_drawn() -> None:
    assert sparkline([0.0, None, 7.0], 60) == "▁?█"
    assert sparkline([5, 5], 60) == "▁▁"
    assert sparkline([], 60) == ""
    assert sparkline([None, None], 60) == "??"
    assert sparkline([-1e308, 1e308], 60) == "▁█"
    assert sparkline([0.0, 5e-324], 60) == "▁▁", "half of the smallest number is none"
