"""What the maths promise, through the real command: overflow, GSPO by name, tokens in place, items that add up."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import surefoot

SMALL = [
    "max_steps=2", "tasks_per_step=4", "num_tasks=60", "eval_tasks=4", "preflight_tasks=0", "guard.mode=off",
    "eval_on_start=false", "target_metric=none", "target_value=none", "max_completion_length=6", "save_rollouts=false",
]  # fmt: skip
"""Two short steps of the built-in run."""
NOT_GSPO = "importance_sampling_level = sequence with loss_type = dapo weighs rows by length"


@pytest.mark.config_key("importance_sampling_level", "importance_sampling_mode")
def test_an_infinite_sequence_weight_does_not_refuse_the_step(tmp_path: Path) -> None:
    ran = surefoot(
        "train", *SMALL, "importance_sampling_correction=true", "importance_sampling_mode=sequence_mask",
        "loss_type=gspo", "parity_tolerance=1000000", cwd=tmp_path, planted="strange_sampler",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    steps = [m for m in ran.metrics if "loss" in m]
    assert [m["steps_refused"] for m in steps] == [0.0, 0.0]
    assert sum(m["correction/overflow"] for m in steps) > 0
    assert all(m["correction/raw_mean"] < 1e9 for m in steps)
    assert max(m["correction/rejected_share"] for m in steps) > 0
    assert all(0 < m["scored_share"] <= 1 for m in steps)
    assert ran.verdict["ledger"]["trained"] == 8


@pytest.mark.config_key("loss_type", "importance_sampling_level")
def test_one_ratio_per_row_is_called_gspo_only_where_it_is(tmp_path: Path) -> None:
    """By its name it is GSPO, and silent; with the default loss_type rows weigh by length, and that is said twice."""
    gspo = surefoot("train", *SMALL, "loss_type=gspo", cwd=tmp_path, run="gspo")
    assert gspo.code == 0, gspo.err
    assert "loss      GSPO: one ratio per row" in gspo.out
    assert "weighs rows by length" not in gspo.out + gspo.err
    by_length = surefoot("train", *SMALL, "importance_sampling_level=sequence", cwd=tmp_path, run="by_length")
    assert by_length.code == 0, by_length.err
    assert NOT_GSPO in by_length.out + by_length.err
    assert 'GSPO is loss_type = "gspo"' in by_length.out
    pair = surefoot(
        "train", *SMALL, "importance_sampling_level=sequence", "loss_type=grpo", cwd=tmp_path, run="pair"
    )  # fmt: skip
    assert "weighs rows by length" not in pair.out + pair.err
    one, two = ([m["loss"] for m in ran.metrics if "loss" in m] for ran in (gspo, pair))
    assert one == two, "the name stands for the pair, bit by bit"
    again = surefoot("train", "--resume", "gspo", cwd=tmp_path, run="")
    assert again.code == 0, again.err


def test_a_dry_run_says_what_one_ratio_per_row_is(tmp_path: Path) -> None:
    words = ["train", "--dry-run", "importance_sampling_level=sequence"]
    dry = surefoot(*words, cwd=tmp_path)
    assert dry.code == 0, dry.err
    assert 'loss      dapo, one ratio per row: rows weigh by length; GSPO is loss_type = "gspo"' in dry.out
    assert "loss      GSPO" in surefoot(*words, "loss_type=grpo", cwd=tmp_path).out


def test_planted_prompt_length_stops_the_run_before_a_token_is_scored(tmp_path: Path) -> None:
    ran = surefoot("train", *SMALL, cwd=tmp_path, planted="longer_prompts")
    assert ran.code == 1, ran.out
    assert "InvariantError" in ran.err
    assert "is not at place" in ran.err


def test_planted_batches_that_are_a_task_short_fail_the_verdict(tmp_path: Path) -> None:
    """Every step ran and every item is accounted for; only the count of both together tells."""
    ran = surefoot("train", *SMALL, cwd=tmp_path, planted="short_batches")
    assert ran.code == 1, ran.err
    assert ran.verdict["status"] == "FAIL"
    assert ran.verdict["reasons"][0] == (
        "the ledger counts 7 trained items, 2 steps of 4 tasks make 8 less 0 dropped"
    )  # fmt: skip
