"""At which steps the guard folds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surefoot.trl_bridge.trainer import fold_every


@pytest.mark.parametrize(
    ("given", "most", "steps"),
    [(1, None, 1), (10, None, 10), (10.0, None, 10), (1.0, 50, 1), (0.1, 35, 4), (0.001, 5, 1), (0.5, 3, 2)],
)
def test_whole_numbers_count_steps_and_shares_are_rounded_up(given: float, most: Any, steps: int) -> None:
    assert fold_every(given, most) == steps


@pytest.mark.parametrize("given", [0, -1, -0.5, 2.5, math.nan, math.inf, None, "10", True, [10]], ids=repr)
def test_everything_else_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ValueError, match="logging_steps"):
        fold_every(given, 100)


@pytest.mark.parametrize("most", [None, 0, -1, math.nan, "many"], ids=repr)
def test_a_share_of_an_unknown_length_is_refused(most: Any) -> None:
    with pytest.raises(ValueError, match="unknown number of steps"):
        fold_every(0.1, most)
