"""A learner that is lost before step 1: the run ends with that cause, and not with one that follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import surefoot
from kill_runs import Bench, Case
from ray_kit import TINY, place

CASE = Case("lost early", {"preflight_tasks": 2})


@pytest.mark.parametrize(
    ("when", "fix"), [("start", "resume the run, or whatever fits"), ("baseline", "start the run again")]
)
def test_a_learner_that_is_lost_before_step_1_is_the_cause_that_is_told(bench: Bench, when: str, fix: str) -> None:
    folder = bench.folder(CASE)
    ended = bench.train(folder, before=[("learner_lost", when)])
    assert ended.code == 77, ended.said
    assert f"the learner is gone ({when})" in ended.said
    assert f"fix: {fix}" in ended.said
    assert "is not a run folder" not in ended.said
    assert not (folder / "run").exists(), "a start that is refused leaves no folder behind"


def test_a_learner_that_is_lost_in_a_resume_is_asked_for_again_and_the_folder_stays(bench: Bench) -> None:
    folder = bench.killed(CASE, "loop.after_learn=kill@1").fresh()
    ended = bench.resume(folder, before=[("learner_lost", "start")])
    assert ended.code == 77, ended.said
    assert "5 such losses are left" in ended.said
    assert "1 such losses are left" in ended.said
    bench.check(CASE, folder, bench.resume(folder))


@pytest.mark.ray
@pytest.mark.slow
def test_a_learner_that_is_not_ready_in_time_ends_the_run_by_that_name(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [*TINY, *place(tmp_path), "runtime.kind=ray", "max_steps=2", "runtime.start_timeout_s=0.01"]
    ran = surefoot("train", *words, cwd=tmp_path)
    assert ran.code == 77, ran.out + ran.err
    assert (
        "LearnerStartError: the learner did not start: it was not ready within runtime.start_timeout_s = 0.01 s"
        in ran.err
    )
    assert "fix: raise runtime.start_timeout_s if that takes longer here" in ran.err
    assert "is not a run folder" not in ran.err
    assert not ran.run.exists(), "a start that is refused leaves no folder behind"
