"""The statistics behind "no length bias": a test that cannot tell two sources apart would prove nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest
from benchmark_scripts import benchmark

kit: Any = benchmark("stream_kit")


@pytest.mark.parametrize(
    ("one", "two", "p"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 1.0),
        (list(range(100)), [x + 0.5 for x in range(100)], 1.0),
        (list(range(100)), [x + 20 for x in range(100)], 0.0314),
        (list(range(100)), [x + 60 for x in range(100)], 1.15e-16),
    ],
)
def test_the_p_value_is_the_tabulated_one(one: list[float], two: list[float], p: float) -> None:
    """By hand: the largest gap of 0.2 or 0.6 between two samples of 100, in the series of Kolmogorov."""
    assert kit.ks_p_value(one, two) == pytest.approx(p, rel=0.02, abs=1e-18)


def test_samples_of_one_source_are_seldom_told_apart_and_a_cut_tail_always_is() -> None:
    source = kit.tail(4000, seed=1)
    dice = random.Random(2)
    fair = [kit.ks_p_value(dice.sample(source, 1500), source) for _ in range(20)]
    assert sum(p < 0.05 for p in fair) <= 2
    assert kit.ks_p_value([s for s in source if s < 5.0][:3000], source) < 1e-3


def test_five_percent_of_the_lengths_are_eight_times_as_long() -> None:
    lengths = kit.tail(20_000, seed=3)
    long = [s for s in lengths if s > 4.0]
    assert 0.04 < len(long) / len(lengths) < 0.06
    assert sum(long) / len(long) == pytest.approx(8.0, rel=0.02)
