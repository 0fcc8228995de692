"""Ranges count recorded points: dense, resumed, sparse or zero-based, nothing is lost and nothing is made up."""

from __future__ import annotations

import pytest

from surefoot.harness.checks import run_checks
from surefoot.harness.checks.functions import Points
from surefoot.harness.series import Metrics, Series
from surefoot.records import Verdict

DENSE = {step: float(step) for step in range(1, 11)}
RESUMED = {step: float(step) for step in range(101, 106)}
SPARSE = {step: float(step) for step in range(10, 60, 10)}
ZERO_BASED = {step: float(step) for step in range(5)}
SINGLE = {7: 7.0}


def judged(points: dict[int, float], call: str) -> tuple[float | None, str]:
    (row,) = run_checks(Metrics({"x": Series("x", points)}), [call.replace("X", 'data["x"]') + " > -1"]).rows
    assert (row.status is Verdict.PASS) == (row.value is not None)
    return row.value, row.message  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("points", "call", "wanted"),
    [
        (DENSE, "mean(X)", 5.5),
        (DENSE, "mean(X, 2)", 6.0),  # without the first
        (DENSE, "mean(X, 3, 5)", 3.5),  # the end is left out: 3 and 4
        (DENSE, "mean(X, -6, -1)", 7.0),  # 5 to 9: the last one is left out
        (DENSE, "mean(X, -2)", 9.5),
        (DENSE, "mean(X, 1, 0)", 5.5),  # end 0 is through the last
        (DENSE, "mean(X, 0)", 5.5),
        (DENSE, "mean(X, 10)", 10.0),
        (RESUMED, "mean(X)", 103.0),
        (RESUMED, "mean(X, 2)", 103.5),
        (RESUMED, "mean(X, -2)", 104.5),
        (RESUMED, "mean(X, from_step=104)", 104.5),
        (SPARSE, "mean(X, -2)", 45.0),  # two points, not the two last steps
        (SPARSE, "mean(X, 2, 4)", 25.0),
        (SPARSE, "mean(X, from_step=20, to_step=30)", 25.0),
        (ZERO_BASED, "mean(X)", 2.0),  # step 0 is a step
        (ZERO_BASED, "mean(X, 1)", 2.0),
        (ZERO_BASED, "mean(X, 1, 2)", 0.0),  # and can be asked for
        (ZERO_BASED, "mean(X, -5, -4)", 0.0),
        (ZERO_BASED, "min(X)", 0.0),
        (SINGLE, "mean(X)", 7.0),
        (SINGLE, "mean(X, -1)", 7.0),
        (SINGLE, "median(X, 1, 0)", 7.0),
    ],
)
def test_a_range_means_these_points(points: dict[int, float], call: str, wanted: float) -> None:
    assert judged(points, call)[0] == wanted


@pytest.mark.parametrize(
    ("points", "call", "word"),
    [
        (DENSE, "mean(X, 11)", "empty range"),
        (DENSE, "mean(X, 5, 5)", "empty range"),
        (DENSE, "mean(X, 5, 3)", "empty range"),
        (DENSE, "mean(X, -2, -5)", "empty range"),
        (DENSE, "mean(X, -20, -15)", "empty range"),
        (DENSE, "mean(X, 40, 50)", "empty range"),
        (SPARSE, "mean(X, 20)", "empty range"),  # the twentieth point, not step 20
        (SPARSE, "mean(X, from_step=31, to_step=39)", "empty range"),
        (RESUMED, "mean(X, 101)", "empty range"),
        (SINGLE, "mean(X, 2)", "empty range"),
        (SINGLE, "mean(X, -6, -1)", "empty range"),
        (DENSE, "mean(X, -11)", "reaches outside"),
        (DENSE, "mean(X, 1, 12)", "reaches outside"),
        (SINGLE, "last(X, 2)", "only 1 points are recorded"),
        (SINGLE, "slope(X)", "needs two points"),
        (DENSE, "mean(X, exclude_outliers=10)", "leaves nothing"),
    ],
)
def test_a_range_without_its_points_fails(points: dict[int, float], call: str, word: str) -> None:
    value, message = judged(points, call)
    assert value is None
    assert word in message, message


def test_every_point_of_every_series_can_be_reached_from_both_ends() -> None:
    for points in (DENSE, RESUMED, SPARSE, ZERO_BASED, SINGLE):
        total = len(points)
        for place, step in enumerate(sorted(points)):
            for start, end in ((place + 1, place + 2), (place - total, place + 1 - total)):
                assert judged(points, f"mean(X, {start}, {end})")[0] == points[step]


def claim_step_0_counts() -> None:
    for call in ("min(X)", "mean(X, 1, 2)", "percentile(X, 0)", "min(X, 0)"):
        assert judged(ZERO_BASED, call)[0] == 0.0, f"{call} lost step 0"


def test_step_0_counts() -> None:
    claim_step_0_counts()


def test_planted_checker_that_drops_step_0_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: start at step 1, as a checker with 1-based steps does."""
    without = classmethod(lambda cls, series: Points(series.name, [item for item in series.points() if item[0] >= 1]))
    monkeypatch.setattr(Points, "of", without)
    with pytest.raises(AssertionError, match="lost step 0"):
        claim_step_0_counts()


def test_the_row_says_which_steps_a_range_means_where_positions_are_not_steps() -> None:
    assert judged(SPARSE, "mean(X, -2)")[1] == "the range (-2, 0) of x means steps 40 to 50, 2 recorded"
    assert judged(DENSE, "mean(X, -2)")[1] == ""
