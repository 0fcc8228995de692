"""Bands from stored runs: the right width, the stated false-alarm rate, and a reason for every loosening."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness import baseline
from surefoot.harness.baseline import (
    Baselines,
    add_run,
    baseline_names,
    load_baseline,
    loosen,
    prediction_band,
    t_quantile,
    t_tail,
)
from surefoot.harness.checks import CheckRow, run_checks
from surefoot.harness.series import Metrics, Series
from surefoot.records import Verdict

KNOWN_T = {  # printed tables of Student's distribution: (tail, degrees of freedom) -> t
    (0.05, 1): 6.313752, (0.025, 1): 12.706205, (0.005, 1): 63.656741, (0.025, 2): 4.302653, (0.005, 2): 9.924843,
    (0.05, 5): 2.015048, (0.025, 5): 2.570582, (0.005, 5): 4.032143, (0.025, 10): 2.228139, (0.005, 10): 3.169273,
    (0.0005, 10): 4.586894, (0.05, 30): 1.697261, (0.025, 30): 2.042272, (0.005, 30): 2.749996, (0.025, 120): 1.979930,
    (0.005, 120): 2.617421, (0.25, 3): 0.764892, (0.4, 7): 0.263167,
}  # fmt: skip


@pytest.mark.parametrize(("tail", "freedom"), KNOWN_T)
def test_t_agrees_with_printed_tables(tail: float, freedom: int) -> None:
    assert t_quantile(tail, freedom) == pytest.approx(KNOWN_T[tail, freedom], abs=2e-6)


def test_t_and_its_tail_are_inverse_also_far_out() -> None:
    for freedom in (1, 2, 3, 10, 1000):
        for tail in (0.4999, 0.1, 1e-3, 1e-9):
            assert t_tail(t_quantile(tail, freedom), freedom) == pytest.approx(tail, rel=1e-9)
    assert t_quantile(0.5, 4) == pytest.approx(0, abs=1e-9)
    assert t_quantile(0.975, 10) == pytest.approx(-2.228139, abs=1e-6)


def false_alarms(alpha: float, side: str, runs: int, trials: int = 4000) -> float:
    stream = random.Random(20240607)
    alarms = 0
    for _ in range(trials):
        values = [stream.gauss(0.5, 0.1) for _ in range(runs + 1)]
        alarms += not prediction_band(values[:-1], alpha, side).holds(values[-1])
    return alarms / trials


@pytest.mark.parametrize(
    ("alpha", "side", "runs"), [(0.05, "both", 3), (0.05, "low", 5), (0.05, "high", 8), (0.2, "both", 4)]
)
def test_the_false_alarm_rate_is_the_stated_one(alpha: float, side: str, runs: int) -> None:
    """4,000 trials: three standard errors are 0.010 at 0.05 and 0.019 at 0.2."""
    assert false_alarms(alpha, side, runs) == pytest.approx(alpha, abs=3 * (alpha * (1 - alpha) / 4000) ** 0.5)


def test_planted_band_without_the_small_sample_width_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: the normal 1.96 instead of t, as hand-made bands do, alarms three times too often with three runs."""
    monkeypatch.setattr(baseline, "t_quantile", lambda tail, freedom: statistics.NormalDist().inv_cdf(1 - tail))
    assert false_alarms(0.05, "both", 3) > 0.12


def test_a_band_needs_three_runs_and_finite_numbers() -> None:
    for values in ([], [1.0], [1.0, 2.0], [1.0, 2.0, float("nan")]):
        with pytest.raises(ConfigError):
            prediction_band(values)
    assert prediction_band([1.0, 1.0, 1.0]).holds(1.0)
    assert not prediction_band([1.0, 1.0, 1.0]).holds(1.001)


def run_metrics(seed: int, middle: float = 0.5) -> Metrics:
    stream = random.Random(seed)
    points = {step: stream.gauss(middle, 0.05) for step in range(1, 21)}
    return Metrics({"reward": Series("reward", points), "kl": Series("kl", {1: 0.1 + seed / 1000})})


def stored(folder: Path, count: int, name: str = "main") -> Baselines:
    for seed in range(count):
        add_run(folder / f"run-{seed}", run_metrics(seed), folder=folder, name=name)
    return Baselines(folder)


def judged(metrics: Metrics, expression: str, baselines: Baselines | None) -> CheckRow:
    return run_checks(metrics, [expression], baselines).rows[0]


def test_a_run_like_the_others_passes_and_a_bad_one_fails_and_both_say_the_band(tmp_path: Path) -> None:
    baselines = stored(tmp_path, 5)
    good = judged(run_metrics(99), 'within_baseline("train/reward")', baselines)
    bad = judged(run_metrics(99, middle=0.2), 'within_baseline("train/reward")', baselines)
    assert (good.status, bad.status) == (Verdict.PASS, Verdict.FAIL)
    assert good.value == pytest.approx(statistics.fmean(run_metrics(99)["reward"].values()))
    for row in (good, bad):
        assert "5 runs, false alarm rate 0.01" in row.message
        assert "train/reward is recorded as reward" in row.message


def test_sides_stats_ranges_and_alpha_change_the_answer(tmp_path: Path) -> None:
    baselines = stored(tmp_path, 6)
    better = run_metrics(99, middle=0.9)
    assert judged(better, 'within_baseline("reward")', baselines).status is Verdict.FAIL
    assert judged(better, 'within_baseline("reward", side="low")', baselines).status is Verdict.PASS
    assert judged(better, 'within_baseline("reward", side="high")', baselines).status is Verdict.FAIL
    for stat in ("mean", "median", "last", "min", "max"):
        assert stat in judged(better, f'within_baseline("reward", stat="{stat}")', baselines).message
    tail = judged(better, 'within_baseline("reward", -5, alpha=0.2)', baselines)
    assert tail.value == pytest.approx(statistics.fmean(list(better["reward"].values())[-5:]))
    assert "false alarm rate 0.2" in tail.message


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_than_three_runs_are_not_enough(tmp_path: Path, count: int) -> None:
    row = judged(run_metrics(99), 'within_baseline("reward")', stored(tmp_path, count))
    assert row.status is Verdict.FAIL
    assert "not enough runs" in row.message


def test_without_any_baseline_it_fails_and_says_how_to_get_one() -> None:
    row = judged(run_metrics(1), 'within_baseline("reward")', None)
    assert (row.status, row.value) == (Verdict.FAIL, None)
    assert "surefoot baseline add RUN" in row.message


def test_stored_runs_that_lack_the_points_do_not_count(tmp_path: Path) -> None:
    baselines = stored(tmp_path, 3)
    row = judged(run_metrics(99), 'within_baseline("kl", 1, 3)', baselines)
    assert row.status is Verdict.FAIL
    other = Metrics({"new": Series("new", {1: 1.0})})
    assert "0 of at least 3" in judged(other, 'within_baseline("new")', baselines).message


def test_nan_in_the_run_fails_and_nan_in_a_stored_run_is_left_out_with_its_reason(tmp_path: Path) -> None:
    baselines = stored(tmp_path, 3)
    broken = Metrics({"reward": Series("reward", {1: 0.5, 2: float("nan")}), "kl": Series("kl", {1: 0.1})})
    assert "NaN at step 2" in judged(broken, 'within_baseline("reward")', baselines).message
    run = add_run(tmp_path / "broken", broken, folder=tmp_path)
    assert run.left_out == {"reward": "NaN at step 2"}
    with pytest.raises(StateError, match="no metric of finite numbers"):
        add_run(tmp_path / "x", Metrics({"a": Series("a", {1: float("nan")})}), folder=tmp_path)


def test_the_same_run_is_never_stored_twice(tmp_path: Path) -> None:
    stored(tmp_path, 1)
    with pytest.raises(StateError, match="already in the baseline main, as run-0"):
        add_run(tmp_path / "copy", run_metrics(0), folder=tmp_path)
    assert len(load_baseline(tmp_path, "main").runs) == 1


def test_a_loosened_band_needs_a_reason_and_shows_it(tmp_path: Path) -> None:
    baselines = stored(tmp_path, 5)
    far = run_metrics(99, middle=0.62)
    before = judged(far, 'within_baseline("reward")', baselines)
    for reason in ("", "  "):
        with pytest.raises(ConfigError, match="recorded reason"):
            loosen(tmp_path, "main", "reward", 2.0, reason)
    for factor in (0.5, float("nan"), float("inf"), 1000.0):
        with pytest.raises(ConfigError, match="factor"):
            loosen(tmp_path, "main", "reward", factor, "why not")
    with pytest.raises(ConfigError, match="holds 'rewrad'"):
        loosen(tmp_path, "main", "rewrad", 2.0, "typo")
    loosen(tmp_path, "main", "reward", 3.0, "new tokenizer, accepted by hand")
    after = judged(far, 'within_baseline("reward")', baselines)
    assert (before.status, after.status) == (Verdict.FAIL, Verdict.PASS)
    for name in ("reward", "train/reward"):  # one band, whatever it is called
        told = judged(far, f'within_baseline("{name}")', baselines).message
        assert "loosened 3 times: new tokenizer, accepted by hand" in told


def test_the_file_holds_no_path_of_this_machine_and_survives_a_round_trip(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("seed = 1\n")
    (tmp_path / "run" / "environment.json").write_text(json.dumps({"git": {"commit": "abc123"}}))
    run = add_run(tmp_path / "run", run_metrics(3), folder=tmp_path / "base")
    text = (tmp_path / "base" / "main.json").read_text()
    assert str(tmp_path) not in text
    (back,) = load_baseline(tmp_path / "base", "main").runs
    assert (back.source, back.commit, back.config_hash, back.digest) == ("run", "abc123", run.config_hash, run.digest)
    assert dict(back.metrics["reward"]) == dict(run_metrics(3)["reward"])


def test_several_baselines_have_to_be_named(tmp_path: Path) -> None:
    stored(tmp_path, 3, "one")
    stored(tmp_path, 3, "two")
    assert baseline_names(tmp_path) == ["one", "two"]
    with pytest.raises(ConfigError, match="2 baselines: one, two"):
        judged(run_metrics(9), 'within_baseline("reward")', Baselines(tmp_path))
    assert judged(run_metrics(9), 'within_baseline("reward", baseline="two")', Baselines(tmp_path)).value
    assert judged(run_metrics(9), 'within_baseline("reward")', Baselines(tmp_path, "one")).value
    missing = judged(run_metrics(9), 'within_baseline("reward", baseline="three")', Baselines(tmp_path))
    assert "no baseline three is stored" in missing.message


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "x" * 200, "a b", "ü"])
def test_a_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="baseline name"):
        add_run(tmp_path / "run", run_metrics(1), folder=tmp_path, name=name)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"version": 2, "runs": [], "loosened": []}', '{"version": 1, "runs": 3, "loosened": []}'],
)
def test_a_damaged_baseline_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "main.json").write_text(content)
    with pytest.raises(StateError):
        load_baseline(tmp_path, "main")
    with pytest.raises(StateError, match="no baseline other"):
        load_baseline(tmp_path, "other")
