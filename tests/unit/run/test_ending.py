"""What the ledger counts as trained, against what so many steps train on."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.config import Config
from surefoot.guards.verdict import RunJudgement
from surefoot.records import Verdict
from surefoot.run.outcome import count_trained
from surefoot.storage.ledger import Balance

PASSED = RunJudgement(Verdict.PASS, ("all 6 planned steps ran",))
AHEAD = {"max_staleness": 1, "importance_sampling_correction": True}


def judged(trained: int, dropped: dict[str, int] | None = None, **keys: Any) -> RunJudgement:
    """Six steps of eight tasks, in the usual case 48 items."""
    config = Config(**({"model": "pebble", "tasks": "builtin:sums", "tasks_per_step": 8, "max_steps": 6} | keys))
    dropped = dropped or {}
    planned = trained + sum(dropped.values())
    return count_trained(PASSED, config, 6, Balance(planned, 0, 0, 0, trained, dropped))


@pytest.mark.parametrize(
    ("trained", "dropped", "keys"),
    [
        (48, {}, {}),
        (45, {"timeout": 2, "nonfinite_step": 1}, {}),
        (24, {}, {"num_iterations": 2}),
        (48, {"equal_rewards": 17, "surplus": 7}, {"dynamic_sampling_batches": 4}),
        (40, {"equal_rewards": 17, "nonfinite_step": 8}, {"dynamic_sampling_batches": 4}),
        (48, {"timeout": 3}, AHEAD),
        (46, {"timeout": 3}, AHEAD),
    ],
    ids=str,
)
def test_a_count_that_adds_up_changes_nothing(trained: int, dropped: dict[str, int], keys: dict[str, Any]) -> None:
    assert judged(trained, dropped, **keys) is PASSED


@pytest.mark.parametrize(
    ("trained", "dropped", "keys"),
    [
        (47, {}, {}),
        (49, {}, {}),
        (48, {"timeout": 1}, {}),
        (48, {}, {"num_iterations": 2}),
        (47, {"equal_rewards": 17}, {"dynamic_sampling_batches": 4}),
        (44, {"timeout": 3}, AHEAD),
        (49, {"timeout": 3}, AHEAD),
    ],
    ids=str,
)
def test_any_other_count_is_a_fail_that_names_both_numbers(
    trained: int, dropped: dict[str, int], keys: dict[str, Any]
) -> None:
    found = judged(trained, dropped, **keys)
    assert found.status is Verdict.FAIL
    assert f"the ledger counts {trained} trained items, 6 steps of 8 tasks make" in found.reasons[0]
    assert found.reasons[1:] == PASSED.reasons
