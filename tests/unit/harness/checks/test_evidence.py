"""Missing, empty, non-finite or bare evidence is never a PASS. Each claim has a planted checker that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.harness import checks
from surefoot.harness.checks import evaluate, functions, run_checks
from surefoot.harness.checks.functions import Points, Range
from surefoot.harness.checks.functions import select as real_select
from surefoot.harness.series import Metrics, Series, is_number
from surefoot.records import Verdict

NAN, INF = float("nan"), float("inf")
NEED_NUMBERS = [
    "min(X)", "max(X)", "mean(X)", "median(X)", "percentile(X, 50)", "last(X, 5)", "slope(X)", "mean(X, -5)",
    "mean(X, ignore_top_p=0.5)", "mean(X, exclude_outliers=1)", "min({k: v for k, v in X.items() if v < 9})",
    "max([X[s] for s in range(1, 6)])", "X[BAD]", "max({**X})",
]  # fmt: skip


def rows(points: Any, *expressions: str, name: str = "x", single: bool = False) -> list[checks.CheckRow]:
    metrics = Metrics({name: Series(name, points, single=single)})
    return list(run_checks(metrics, [text.replace("X", f'data["{name}"]') for text in expressions]).rows)


def claim_nan_fails(bad: object, where: int) -> None:
    points: dict[int, Any] = dict.fromkeys(range(1, 6), 0.5)
    points[where] = bad
    for helper in NEED_NUMBERS:
        for comparison in ("< 100", "> -100", "!= 100"):
            (row,) = rows(points, f"{helper} {comparison}".replace("BAD", str(where)))
            assert row.status is Verdict.FAIL, f"{helper} {comparison} passed with {bad!r} at step {where}"
            assert f"at step {where}" in row.message, row.message


@pytest.mark.parametrize("where", [1, 3, 5])
@pytest.mark.parametrize("bad", [NAN, INF, -INF, "0.5", "NaN", None, True, 10**400], ids=str)
def test_nan_first_middle_or_last_fails_every_helper(bad: object, where: int) -> None:
    claim_nan_fails(bad, where)


def test_planted_checker_that_passes_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: leave out what is not a number, as a tolerant mean would."""

    def tolerant(points: Points) -> list[float]:
        return [float(value) for _, value in points.items if is_number(value)] or [0.0]

    monkeypatch.setattr(functions, "usable", tolerant)
    monkeypatch.setattr(evaluate, "usable", tolerant)
    with pytest.raises(AssertionError, match="passed with nan"):
        claim_nan_fails(NAN, 3)


def claim_empty_fails() -> None:
    asked = [
        "min(X)",
        "max(X)",
        "mean(X)",
        "median(X)",
        "percentile(X, 50)",
        "ratio_above(X, 1)",
        "last(X)",
        "slope(X)",
    ]
    for helper in asked:
        for comparison in ("< 100", ">= 0"):
            (row,) = rows({}, f"{helper} {comparison}")
            assert row.status is Verdict.FAIL, f"{helper} {comparison} passed on an empty series"
            assert "no recorded points" in row.message
    (row,) = rows({}, "finite(X)")
    assert row.status is Verdict.FAIL


def test_an_empty_series_fails_every_helper() -> None:
    claim_empty_fails()


def test_planted_checker_that_passes_an_empty_series_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: answer 0.0 for nothing, as a ratio of an empty list easily does."""

    def kind(points: Points, wanted: Range) -> Points:
        return real_select(points, wanted) if points.items else Points(points.name, [(1, 0.0)])

    monkeypatch.setattr(evaluate, "select", kind)
    with pytest.raises(AssertionError, match="passed on an empty series"):
        claim_empty_fails()


BARE = ["mean(X)", "X['1']", "X", "1", "steps(X)", "'a'", "data", "len(X)", "-X['1']"]


def claim_bare_fails() -> None:
    for expression in BARE:
        (row,) = rows({1: 0.5}, expression)
        assert row.status is Verdict.FAIL, f"{expression} passed without a comparison"
        assert "not a comparison" in row.message


def test_a_bare_value_fails_and_shows_its_value() -> None:
    claim_bare_fails()
    assert rows({1: 0.5}, "mean(X)")[0].value == 0.5


def test_planted_checker_that_passes_a_bare_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: take whatever is true in Python for a PASS."""
    monkeypatch.setattr(checks.Check, "_verdict", lambda self, answer, evaluator: (bool(answer), ""))
    with pytest.raises(AssertionError, match="passed without a comparison"):
        claim_bare_fails()


@pytest.mark.parametrize("expression", ["1 < 2", "True", "not False", "0.1 + 0.2 != 0.3", "count(range(3)) == 3"])
def test_a_check_that_reads_no_metric_proves_nothing(expression: str) -> None:
    (row,) = rows({1: 0.5}, expression)
    assert row.status is Verdict.FAIL
    assert "reads no metric" in row.message


def test_counting_and_asking_for_finiteness_is_allowed_on_nan() -> None:
    points = {1: 0.5, 2: NAN}
    count, length, steps, finite, not_finite = rows(
        points, "count(X) == 2", "len(X) == 2", "steps(X) == set(range(1, 3))", "finite(X)", "not finite(X)"
    )
    assert [row.status for row in (count, length, steps)] == [Verdict.PASS] * 3
    assert (finite.status, finite.value, finite.message) == (Verdict.FAIL, False, "x is NaN at step 2")
    assert not_finite.status is Verdict.PASS


def test_a_nan_counts_against_ratio_above_whichever_way_it_is_asked() -> None:
    points = {1: 2.0, 2: NAN, 3: 0.0, 4: 0.0}
    below, above, all_nan = (
        rows(points, "ratio_above(X, 1) < 0.5")[0],
        rows(points, "ratio_above(X, 1) > 0.3")[0],
        rows({1: NAN, 2: NAN}, "ratio_above(X, 1) < 0.99")[0],
    )
    assert (below.status, below.value) == (Verdict.FAIL, 0.5)  # the NaN counts as above
    assert above.status is Verdict.FAIL  # without the NaN only a quarter is above
    assert "NaN at step 2" in above.message
    assert (all_nan.status, all_nan.value) == (Verdict.FAIL, 1.0)
    for hidden in ("1 - ratio_above(X, 1) < 0.9", "abs(ratio_above(X, 1)) < 0.9", "0.3 < ratio_above(X, 1)"):
        assert rows(points, hidden)[0].status is Verdict.FAIL, hidden
    for bad in ("0.5", None, INF, -INF):
        assert rows({1: 0.0, 2: bad}, "ratio_above(X, 1) < 0.99")[0].status is Verdict.FAIL


def test_a_missing_metric_names_the_nearest_and_a_missing_step_the_nearest_steps() -> None:
    metrics = Metrics({"train/loss": Series("train/loss", {8: 1.0, 10: 1.0, 40: 1.0})})
    name, step, number = run_checks(
        metrics, ['max(data["train/los"]) < 2', 'data["train/loss"]["9"] < 2', 'data["train/loss"][9] < 2']
    ).rows
    assert "key not found" in name.message
    assert "nearest: train/loss" in name.message
    assert "nearest: 8, 10, 40" in step.message
    assert [row.status for row in (name, step, number)] == [Verdict.FAIL] * 3


def test_a_missing_metric_fails_even_inside_not() -> None:
    for expression in ('not max(data["no"]) > 1', 'not finite(data["no"])', 'max(data["no"]) > 1 or True'):
        assert rows({1: 0.5}, expression)[0].status is Verdict.FAIL


def test_and_and_or_stop_early_so_a_guard_in_front_works() -> None:
    assert rows({1: 0.5}, '"no" not in data or max(data["no"]) < 3')[0].status is Verdict.PASS
    guarded = rows({1: 0.5}, '"no" in data and max(data["no"]) < 3')[0]
    assert (guarded.status, guarded.message) == (Verdict.FAIL, "'no' is not recorded")


def test_a_series_is_not_one_number() -> None:
    (row,) = rows({1: 0.5}, "X < 1")
    assert row.status is Verdict.FAIL
    assert "is a series" in row.message


def test_one_number_without_steps_can_be_compared() -> None:
    assert rows({0: 0.5}, "X < 1", single=True)[0].status is Verdict.PASS
    assert rows({0: NAN}, "X < 1", single=True)[0].message == "x is NaN"
    assert rows({0: 0.5}, "X['0'] < 1", single=True)[0].status is Verdict.FAIL


@pytest.mark.parametrize(
    "expression", ["1 / (X[1] - X[1]) > 0", "X[1] % 0 < 1", "X[1] // 0 < 1", "X[1] * 1e300 * 1e300 > 0"]
)
def test_division_by_zero_and_overflow_fail(expression: str) -> None:
    assert rows({1: 0.5}, expression)[0].status is Verdict.FAIL


def test_joining_series_cannot_hide_one_value_behind_another() -> None:
    metrics = Metrics(
        {"a": Series("a", {1: 3.0, 2: 0.0}), "b": Series("b", {1: 0.0}), "c": Series("c", {2: 0.0, 3: 1.0})}
    )
    hidden, fine, loop = run_checks(
        metrics,
        [
            'max({**data["a"], **data["b"]}) == 3',
            'len({**data["a"], **data["c"]}) == 3',
            'max({1: v for k, v in data["a"].items()}) == 0',
        ],
    ).rows
    assert (hidden.status, hidden.message) == (Verdict.FAIL, "step 1 has two values, 3.0 and 0.0 (b)")
    assert fine.status is Verdict.PASS
    assert loop.status is Verdict.FAIL


def test_a_loop_cannot_drop_a_nan_by_its_condition() -> None:
    (row,) = rows({1: 0.5, 2: NAN}, "max({k: v for k, v in X.items() if v > 0}) < 1")
    assert (row.status, row.message) == (Verdict.FAIL, "x is NaN at step 2")
