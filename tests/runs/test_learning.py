"""The built-in run learns, and nothing that should not learn passes the same check.

Every run goes through the real command. The null controls differ from the first test in one thing
each; a check that one of them passes would be a check that a no-op trainer passes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import SHORT, Ran, ledger, surefoot


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return surefoot("train", *SHORT, cwd=tmp_path_factory.mktemp("learned"), fresh=True)


@pytest.mark.config_key("target_metric", "target_value", "eval_steps", "eval_tasks", "max_steps")
@pytest.mark.every_day
def test_the_built_in_run_reaches_its_target(learned: Ran) -> None:
    assert learned.code == 0, learned.err
    assert learned.verdict["status"] == "PASS"
    first, last = (m["eval_accuracy"] for m in learned.metrics if "eval_accuracy" in m)
    assert 0.1 <= first <= 0.4, "the warm start solves 10 to 40 % of held-out tasks"
    assert last >= 0.65
    assert learned.verdict["executed_steps"] == learned.verdict["planned_steps"] == 60


def test_sampler_and_learner_agree_on_every_token_of_step_1(learned: Ran) -> None:
    step_1 = next(m for m in learned.metrics if m["step"] == 1 and "reward" in m)
    assert 0 < step_1["sampling/sampling_logp_difference/max"] < 1e-4, "measured, not assumed, and never rounded to 0"
    assert step_1["probs_ratio"] == 1.0, "learner against learner, the first ratio is exactly 1"
    assert step_1["census/moved"] == step_1["census/parameters"] > 0


def test_every_sync_was_proved_and_every_task_is_accounted_for(learned: Ran) -> None:
    rows = [m for m in learned.metrics if "reward" in m]
    assert all(row["sync/replicas"] == 1.0 and 0 <= row["sync/probe_gap"] < 1e-4 for row in rows)
    assert max(row["sync/probe_move"] for row in rows) > 1e-3, "the canary could tell new weights from old ones"
    account = ledger(learned)
    assert account["trained"] == 32 * 60
    assert account["dropped"] == {}
    assert account["planned"] == account["pending"] + account["trained"], "nothing is left in anybody's hands"


def test_evaluating_the_run_again_gives_the_same_accuracy(learned: Ran) -> None:
    again = surefoot("eval", "run", cwd=learned.run.parent)
    assert again.code == 0, again.err
    reported = dict(line.split() for line in again.out.splitlines() if line.startswith("eval_"))
    last = [m for m in learned.metrics if "eval_accuracy" in m][-1]
    assert float(reported["eval_accuracy"]) == last["eval_accuracy"]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("planted", "extra"),
    [
        pytest.param(None, ["learning_rate=0"], id="learning_rate_0"),
        pytest.param("shuffle_rewards", [], id="rewards_shuffled_across_tasks"),
        pytest.param("flip_advantages_after_checks", [], id="advantage_sign_flipped", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.config_key("learning_rate")
def test_a_null_control_does_not_reach_the_target(tmp_path: Path, planted: str | None, extra: list[str]) -> None:
    ran = surefoot("train", *SHORT, *extra, cwd=tmp_path, planted=planted)
    assert ran.code == 1, ran.err
    assert ran.verdict["status"] == "FAIL"
    assert ran.verdict["executed_steps"] == 60, "it must fail by what it measured, not by stopping early"
    assert [m for m in ran.metrics if "eval_accuracy" in m][-1]["eval_accuracy"] < 0.45


@pytest.mark.parametrize("planted", ["mask_shift_left", "mask_shift_right"])
def test_a_mask_that_is_off_by_one_is_refused_at_step_1(tmp_path: Path, planted: str) -> None:
    ran = surefoot("train", "max_steps=3", "num_tasks=1000", cwd=tmp_path, planted=planted)
    assert ran.code == 1, ran.err
    assert "InvariantError" in ran.err
    assert "the policy sampled" in ran.err
    assert not any("reward" in m for m in ran.metrics), "no step was taken"


def test_weights_that_never_reach_the_sampler_are_noticed_within_a_step(tmp_path: Path) -> None:
    ran = surefoot("train", "max_steps=5", "num_tasks=1000", cwd=tmp_path, planted="skip_publish")
    assert ran.code in (1, 78), ran.err
    assert ran.verdict["executed_steps"] <= 1
