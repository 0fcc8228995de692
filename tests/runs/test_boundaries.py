"""Rules with a boundary, on both sides of it, through the real command: what just fits runs, one more is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

CONTEXT = 512
"""Tokens of the built-in model."""
TINY = (
    "tasks=mine.jsonl tasks_per_step=2 num_generations=2 max_completion_length=4 max_steps=1 eval_steps=0 "
    "heldout_fraction=0 preflight_tasks=0 reward_workers=1 device=cpu learning_rate=1e-4 eval_metric=none "
    'target_metric=none target_value=none guard.mode=off reward_funcs=["r.py:score"]'
).split()


def plan(cwd: Path, **keys: Any) -> Ran:
    """`surefoot train --dry-run` with these keys."""
    return surefoot("train", "--dry-run", *(f"{key}={json.dumps(value)}" for key, value in keys.items()), cwd=cwd)


# -- sampling ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize(("sync", "passes", "needed"), [(3, 1, 2), (6, 2, 4)])
def test_a_sync_every_so_many_steps_needs_its_staleness_to_the_version(
    tmp_path: Path, sync: int, passes: int, needed: int
) -> None:
    keys = dict(weight_sync_steps=sync, num_iterations=passes, max_steps=12, eval_steps=0)
    keys |= dict(importance_sampling_correction=True)
    enough = plan(tmp_path, max_staleness=needed, **keys)
    assert enough.code == 0, enough.err
    assert f"samples at most {needed} versions old, weights synced after every {sync} steps" in enough.out
    refused = plan(tmp_path, max_staleness=needed - 1, **keys)
    assert refused.code == 2, refused.out
    assert f"weight_sync_steps = {sync} with max_staleness = {needed - 1}" in refused.err
    assert f"set max_staleness = {needed} or more" in refused.err


def test_a_sync_between_two_passes_is_refused(tmp_path: Path) -> None:
    keys = dict(importance_sampling_correction=True, max_staleness=9, max_steps=12, eval_steps=0)
    refused = plan(tmp_path, weight_sync_steps=3, num_iterations=2, **keys)
    assert refused.code == 2
    assert "weight_sync_steps = 3 is not a multiple of num_iterations = 2" in refused.err


def test_old_samples_need_their_correction(tmp_path: Path) -> None:
    refused = plan(tmp_path, max_staleness=1)
    assert refused.code == 2, refused.out
    assert "max_staleness = 1 with importance_sampling_correction = false" in refused.err
    assert plan(tmp_path, max_staleness=1, importance_sampling_correction=True).code == 0
    assert plan(tmp_path, max_staleness=0).code == 0, "and only those"


# -- the model's context --------------------------------------------------------------------------


def train(cwd: Path, length: int, *words: str, run: str = "run") -> Ran:
    """One step over two tasks, one of them with a prompt of so many characters."""
    rows = [{"id": "short", "prompt": "1+1="}, {"id": "long", "prompt": "1" * length}]
    (cwd / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cwd / "r.py").write_text(
        "def score(completions, **_):\n    return [float(i) for i, _ in enumerate(completions)]\n"
    )
    return surefoot("train", *TINY, *words, cwd=cwd, run=run)


def test_a_prompt_must_leave_room_for_one_token(tmp_path: Path) -> None:
    far = train(tmp_path, CONTEXT + 50)
    assert far.code == 4, far.err
    asked = re.search(rf"context of {CONTEXT} tokens, first long with (\d+)", far.err)
    assert asked, far.err
    around = int(asked[1]) - (CONTEXT + 50)
    # what the chat template adds
    full = train(tmp_path, CONTEXT - around)
    assert full.code == 4, "a prompt that fills the context leaves no room for an answer"
    assert f"first long with {CONTEXT}" in full.err
    assert not full.run.exists()
    fits = train(tmp_path, CONTEXT - around - 1)
    assert fits.code in (0, 1), fits.out + fits.err
    kept = [json.loads(line) for line in (fits.run / "rollouts/step_1.jsonl").read_text().splitlines()]
    lengths = [len(row["completion_ids"]) for row in kept if row["task"] == "long"]
    assert lengths == [1, 1], "it was asked, and answered in what room there was"


def test_a_streamed_prompt_may_be_one_token_shorter_than_the_context(tmp_path: Path) -> None:
    limits = {limit: ["stream_tasks=true", f"max_prompt_length={limit}"] for limit in (CONTEXT, CONTEXT - 1)}
    full = train(tmp_path, 9, *limits[CONTEXT])
    assert full.code == 2, full.out + full.err
    assert f"max_prompt_length = {CONTEXT} with stream_tasks = true, the context is {CONTEXT} tokens" in full.err
    assert train(tmp_path, 9, *limits[CONTEXT - 1]).code in (0, 1)
