"""When a run counts as finished: its verdict is whole, of its own length, and nobody left a lock behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.load import load_config
from surefoot.records import Verdict
from surefoot.run.outcome import LOCK, Outcome, final_verdict
from surefoot.storage.run_folder import RunFolder

CONFIG = load_config(None, ["model=pebble", "tasks=builtin:sums", "max_steps=3"]).config
WHOLE: dict[str, Any] = {
    "exit_code": 0, "status": "PASS", "planned_steps": 3, "executed_steps": 3, "reasons": ["it learned"],
    "metrics": {"reward": 1.0}, "seconds": 2.5, "best": {"step": 2, "checkpoint": "checkpoints/step_2"},
    "guard": {"fired": False},
}  # fmt: skip


def judged(folder: Path, verdict: dict[str, Any]) -> dict[str, Any] | None:
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return final_verdict(RunFolder(folder), CONFIG)


@pytest.mark.parametrize(
    "other",
    [
        {}, {"best": None}, {"best": {"step": 2, "checkpoint": None}}, {"guard": None}, {"exit_code": 1, "status": "FAIL"},
        {"exit_code": 79, "status": "FAIL", "executed_steps": 2, "guard": {"fired": True, "step": 2, "reason": "fell"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_whole_verdict_of_its_own_length_is_final(tmp_path: Path, other: dict[str, Any]) -> None:
    assert judged(tmp_path, WHOLE | other) == WHOLE | other


@pytest.mark.parametrize(
    "damage",
    [
        {"exit_code": "0"}, {"exit_code": True}, {"exit_code": 74}, {"status": "FINE"}, {"planned_steps": 3.0},
        {"executed_steps": None}, {"executed_steps": 2}, {"planned_steps": 4, "executed_steps": 4},
        {"reasons": "it learned"}, {"reasons": [1]}, {"metrics": [1.0]}, {"metrics": {"reward": "high"}},
        {"metrics": {"reward": True}}, {"metrics": {"reward": 1e301}}, {"seconds": None},
        {"best": "checkpoints/step_2"}, {"best": {"step": 2, "checkpoint": 2}}, {"best": {"step": 2}},
        {"best": {"checkpoint": None}}, {"guard": "quiet"}, {"guard": {"fired": True, "step": 2}},
        {"exit_code": 79, "status": "FAIL"},
    ],
    ids=str,
)  # fmt: skip
def test_a_verdict_that_no_run_wrote_so_is_not_final(tmp_path: Path, damage: dict[str, Any]) -> None:
    assert judged(tmp_path, WHOLE | damage) is None


def test_a_lock_that_somebody_left_means_that_it_did_not_end_in_order(tmp_path: Path) -> None:
    assert judged(tmp_path, WHOLE) is not None
    (tmp_path / LOCK).touch()
    assert judged(tmp_path, WHOLE) is None


def test_an_outcome_says_its_first_reason_and_names_the_newest_weights(tmp_path: Path) -> None:
    outcome = Outcome(Verdict.FAIL, ("it fell", "it was slow"), tmp_path, 1, {})
    assert "'it fell'" in repr(outcome)
    assert "''" in repr(Outcome(Verdict.PASS, (), tmp_path, 0, {}))
    assert outcome.checkpoint is None
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert outcome.checkpoint == tmp_path / "checkpoints" / "step_10"
