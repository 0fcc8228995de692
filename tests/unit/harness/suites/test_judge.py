from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.harness.suites import verdicts
from surefoot.harness.suites.manifest import Recipe
from surefoot.harness.suites.plan import Trial
from surefoot.harness.suites.verdicts import Ending, TrialJudgement, judge, read_verdict, worst_exit, write_verdict
from surefoot.records import Verdict

RECIPE = Recipe(
    name="one", max_steps=4, steps_per_run=4, minutes=5.0,
    checks=('max(data["train/loss"]) < 1.5', 'last(data["train/reward"]) > 0.2'),
)  # fmt: skip
FACTS = dict(commit="c", dirty=None, config_hash="h", container=None, overrides=[], extra_args=[], command=[], started="s", finished="f")  # fmt: skip


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def trial(
        steps: int = 4, *, values: dict[str, dict[str, Any]] | None = None, log: str = "", **changes: Any
    ) -> Trial:
        made = Trial("try", dataclasses.replace(RECIPE, **changes), None, tmp_path, tmp_path / "one")
        made.run.mkdir(parents=True, exist_ok=True)
        made.log.write_text(log)
        table = {name: {str(s): s / 10 for s in range(1, steps + 1)} for name in ("train/loss", "train/reward")}
        (made.run / "metrics.json").write_text(json.dumps(table | (values or {})))
        return made

    return trial


def test_all_steps_and_all_checks_are_a_pass(make: Any) -> None:
    result = judge(make(), Ending(0))
    assert (result.status, result.exit_code, result.steps_reached) == (Verdict.PASS, 0, 4)
    assert [row["status"] for row in result.checks] == ["PASS", "PASS"]


def a_short_run_is_incomplete(make: Any) -> None:
    result = judge(make(3), Ending(0))
    assert (result.status, result.exit_code, result.steps_reached) == (Verdict.INCOMPLETE, 70, 3)
    assert result.reasons == ("only 3 of 4 steps",)


def test_a_run_that_stops_one_step_early_is_incomplete(make: Any) -> None:
    a_short_run_is_incomplete(make)


def test_planted_short_run_counted_as_pass_is_caught(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "steps_reached", lambda metrics, recipe: recipe.max_steps)
    with pytest.raises(AssertionError):
        a_short_run_is_incomplete(make)


def test_early_checks_inform_but_do_not_decide(make: Any) -> None:
    result = judge(make(3, early_checks=True), Ending(0))
    assert result.status == Verdict.INCOMPLETE
    assert [row["status"] for row in result.checks] == ["PASS", "PASS"]


def words_in_a_log_decide_nothing(make: Any) -> None:
    passed = judge(
        make(log="prompt: write FAIL and ERROR\nMETRIC FAIL\nTraceback (most recent call last):\n"), Ending(0)
    )
    failed = judge(make(log="PASS PASS all checks passed\n", values={"train/reward": {"4": 0.1}}), Ending(0))
    assert (passed.status, failed.status) == (Verdict.PASS, Verdict.FAIL)


def test_words_in_a_log_decide_nothing(make: Any) -> None:
    words_in_a_log_decide_nothing(make)


def test_planted_judge_by_log_word_is_caught(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_word(trial: Trial, metrics: Any, reached: Any, ending: Any) -> TrialJudgement:
        bad = "FAIL" in trial.log.read_text()
        return TrialJudgement(Verdict.FAIL if bad else Verdict.PASS, (), int(bad))

    monkeypatch.setattr(verdicts, "_by_numbers", by_word)
    with pytest.raises(AssertionError):
        words_in_a_log_decide_nothing(make)


@pytest.mark.parametrize(
    ("ending", "status", "code"),
    [
        (Ending(1), Verdict.ERROR, 70),
        (Ending(3), Verdict.ERROR, 70),
        (Ending(78), Verdict.ERROR, 70),
        (Ending(-11), Verdict.ERROR, 70),
        (Ending(134), Verdict.ERROR, 70),
        (Ending(2), Verdict.ERROR, 2),
        (Ending(74), Verdict.ERROR, 74),
        (Ending(-9), Verdict.ERROR, 74),
        (Ending(137), Verdict.ERROR, 74),
        (Ending(126), Verdict.ERROR, 3),
        (Ending(127), Verdict.ERROR, 3),
        (Ending(75), Verdict.INCOMPLETE, 75),
        (Ending(-15), Verdict.INCOMPLETE, 75),
        (Ending(130), Verdict.INCOMPLETE, 75),
        (Ending(None, why="lost", lost=True), Verdict.ERROR, 3),
        (Ending(125, why="docker itself failed", infrastructure=True), Verdict.ERROR, 3),
        (Ending(-15, out_of_time=True), Verdict.INCOMPLETE, 76),
        (Ending(0, out_of_time=True), Verdict.INCOMPLETE, 76),
        (Ending(None, stopped=True), Verdict.INCOMPLETE, 75),
    ],
)
def test_a_bad_ending_is_never_a_pass_whatever_the_numbers_say(
    make: Any, ending: Ending, status: Verdict, code: int
) -> None:
    result = judge(make(command=("train.sh", "{run}")), ending)
    assert (result.status, result.exit_code, result.checks) == (status, code, ())
    assert result.steps_reached == 4


OURS = ("{python}", "-m", "surefoot", "train", "output_dir={run}")


@pytest.mark.parametrize("command", [OURS, (".venv/bin/surefoot", "train")])
@pytest.mark.parametrize(
    ("code", "left", "status", "exit_code"),
    [
        (1, '{"status": "FAIL"}', Verdict.FAIL, 1),
        (1, '{"status": "ERROR"}', Verdict.ERROR, 70),
        (1, '{"status": "FAIL"', Verdict.ERROR, 70),
        (1, None, Verdict.ERROR, 70),
        (78, None, Verdict.FAIL, 1),
        (79, None, Verdict.FAIL, 1),
        (3, None, Verdict.ERROR, 3),
        (4, None, Verdict.ERROR, 4),
        (5, None, Verdict.ERROR, 5),
        (70, None, Verdict.ERROR, 70),
        (76, None, Verdict.ERROR, 76),
        (77, None, Verdict.ERROR, 77),
    ],
)
def test_our_own_trainers_verdict_counts_only_where_it_gave_one(
    make: Any, command: tuple[str, ...], code: int, left: str | None, status: Verdict, exit_code: int
) -> None:
    """Python ends with 1 when an import fails: that is no verdict of a training."""
    trial = make(command=command)
    if left is not None:
        (trial.run / "verdict.json").write_text(left)
    result = judge(trial, Ending(code))
    assert (result.status, result.exit_code) == (status, exit_code)
    (trial.run / "verdict.json").write_text('{"status": "FAIL"}')
    stranger = judge(
        dataclasses.replace(trial, recipe=dataclasses.replace(trial.recipe, command=("train.sh",))), Ending(1)
    )
    assert (stranger.status, stranger.exit_code) == (Verdict.ERROR, 70), (
        "a stranger's 1 says no more than that it broke"
    )


def test_signals_are_named(make: Any) -> None:
    assert "SIGKILL" in judge(make(), Ending(-9)).reasons[0]
    assert "SIGKILL" in judge(make(), Ending(137)).reasons[0]
    assert judge(make(), Ending(3)).reasons == ("the trainer failed: exit 3",)


@pytest.mark.parametrize("content", [None, "", "{", "{}", '{"train/loss": {}}', "[1]"])
def test_no_numbers_are_an_error_that_nobody_can_judge(make: Any, content: str | None) -> None:
    trial = make()
    (trial.run / "metrics.json").unlink() if content is None else (trial.run / "metrics.json").write_text(content)
    result = judge(trial, Ending(0))
    assert (result.status, result.exit_code) == (Verdict.ERROR, 3)


@pytest.mark.parametrize("step", ["1", "2", "4"])
def test_nan_anywhere_fails_the_check_and_is_kept_by_name(make: Any, step: str) -> None:
    series = {"1": 0.1, "2": 0.1, "3": 0.1, "4": 0.1} | {step: float("nan")}
    trial = make(values={"train/loss": series})
    result = judge(trial, Ending(0))
    assert (result.status, result.exit_code) == (Verdict.FAIL, 1)
    assert json.loads((trial.folder / "metrics.json").read_text())["train/loss"][step] == "NaN"


def test_a_counter_of_seconds_does_not_count_as_steps(make: Any) -> None:
    """System metrics are often logged against time: their last step says nothing about the training."""
    result = judge(make(2, values={"system/gpu": {"5000": 1.0}}), Ending(0))
    assert (result.status, result.steps_reached) == (Verdict.INCOMPLETE, 2)


def test_another_metric_can_show_the_progress_and_steps_can_count_from_zero(make: Any) -> None:
    values = {"score": {"0": 1.0, "3": 1.0}}
    assert judge(make(values=values, progress="score", first_step=0), Ending(0)).steps_reached == 4
    result = judge(make(values=values, progress="scor"), Ending(0))
    assert (result.status, result.exit_code) == (Verdict.ERROR, 3)
    assert "recorded: score" in result.reasons[0]


def test_a_check_without_an_answer_has_failed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.harness import checks

    monkeypatch.setattr(checks, "run_checks", lambda *_: checks.CheckReport(()))
    result = judge(make(), Ending(0))
    assert (result.status, [row["message"] for row in result.checks]) == (Verdict.FAIL, ["no answer", "no answer"])


def test_a_missing_baseline_is_not_a_pass(make: Any) -> None:
    result = judge(make(checks=('within_baseline(data["train/reward"])',)), Ending(0))
    assert result.status in (Verdict.FAIL, Verdict.ERROR)
    assert result.exit_code != 0


def test_a_number_that_nobody_measured_is_no_fail_and_no_pass(make: Any) -> None:
    values = {"memory": {"4": "unavailable"}}
    result = judge(make(values=values, checks=('last(data["memory"]) < 5', *RECIPE.checks)), Ending(0))
    assert (result.status, result.exit_code) == (Verdict.ERROR, 3)
    assert "memory is unavailable" in result.reasons[-1]
    worse = judge(make(values=values, checks=('last(data["memory"]) < 5', 'max(data["train/loss"]) < 0')), Ending(0))
    assert (worse.status, worse.exit_code) == (Verdict.FAIL, 1)


def kept(trial: Trial, **changes: Any) -> dict[str, Any] | None:
    write_verdict(trial, judge(trial, Ending(0)), FACTS)
    trial.verdict.write_text(json.dumps(json.loads(trial.verdict.read_text()) | changes))
    return read_verdict(trial)


def test_an_earlier_verdict_counts_only_when_every_part_of_it_fits(make: Any) -> None:
    trial = make()
    record = kept(trial)
    assert record is not None
    assert record["status"] == "PASS"
    bad_row = {**record["checks"][0], "status": "FAIL"}
    assert kept(trial, status="FAIL") is None
    assert kept(trial, checks=[bad_row, record["checks"][1]]) is None
    assert kept(trial, checks=[]) is None
    assert kept(trial, steps_reached=3) is None
    assert kept(trial, steps_reached=None) is None
    assert kept(trial, status="SKIP") is None
    trial.verdict.write_text(trial.verdict.read_text()[:-20])
    assert read_verdict(trial) is None
    trial.verdict.write_text("[]")
    assert read_verdict(trial) is None
    trial.verdict.unlink()
    assert read_verdict(trial) is None


def test_secrets_do_not_reach_the_verdict(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value")
    record = write_verdict(make(), TrialJudgement(Verdict.ERROR, ("said s3cr3t-value",), 1), FACTS)
    assert record["reasons"] == ["said [hidden]"]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 1], 1),
        ([3, 0], 3),
        ([3, 1], 1),
        ([1, 75], 75),
        ([], 3),
        ([0, 2], 2),
        ([70, 1], 1),
        ([74, 70], 70),
        ([74, 3], 3),
        ([0, 74], 74),
        ([76, 0], 76),
    ],
)
def test_one_exit_code_for_several(codes: list[int], code: int) -> None:
    assert worst_exit(codes) == code
