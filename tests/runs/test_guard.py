"""A run that is hurting the model, through the real command: stopped, judged, and no weights called better.

The reward pays for answers that begin with a 9, whatever the sum. The policy learns it within a few steps, and
held-out accuracy, which knows the right answers, falls to nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

REWARDS = """
def starts_with_nine(completions, **columns):
    return [float(text.startswith("9")) for text in completions]
"""
CONFIG = """
model = "pebble"
tasks = "builtin:sums"
num_tasks = 1000
reward_funcs = ["rewards.py:starts_with_nine"]
tasks_per_step = 8
num_generations = 8
max_completion_length = 6
learning_rate = 1e-3
max_steps = 14
threads = 1
eval_steps = 1
eval_tasks = 60

[guard]
min_evals = 3
decline_patience = 2
ema_alpha = 0.5
margin_se = 2.0
"""


def project(folder: Path) -> Path:
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "hack.toml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return surefoot("train", "hack.toml", cwd=project(tmp_path_factory.mktemp("a gamed reward")))


def test_a_gamed_reward_ends_the_run_with_79_and_verdict_fail(strict: Ran) -> None:
    assert strict.code == 79, strict.err
    assert strict.err.startswith("CollapseStopError: step ")
    verdict = strict.verdict
    assert verdict["status"] == "FAIL"
    assert verdict["executed_steps"] < verdict["planned_steps"]
    assert verdict["guard"]["fired"] is True
    assert verdict["guard"]["rule"] == "decline"
    assert verdict["guard"]["step"] == verdict["executed_steps"]
    assert verdict["guard"]["reason"] in verdict["reasons"][0]
    assert "held-out" in verdict["guard"]["reason"]


def test_the_curves_and_the_reason_are_on_the_screen(strict: Ran) -> None:
    lines = [line.strip() for line in strict.out.splitlines()]
    (reward,) = [line for line in lines if line.startswith("reward ") and "to" in line and "▁" in line]
    (heldout,) = [line for line in lines if line.startswith("held-out ") and "to" in line and "▁" in line]
    assert reward.index("▁") < reward.index("█"), "the reward rose"
    assert heldout.index("█") < heldout.index("▁"), "held-out fell"
    assert any(strict.verdict["guard"]["reason"] in line for line in lines)
    assert any(line.startswith("guard ") and "strict" in line for line in lines), "the plan said so before"


def test_the_stopped_weights_are_there_and_what_is_best_is_named(strict: Ran) -> None:
    """No step was better than the start, so no checkpoint is the best and none was kept as such."""
    verdict = strict.verdict
    first, *after = [m["eval_accuracy"] for m in strict.metrics if "eval_accuracy" in m]
    assert max(after) < first
    assert verdict["best"] == {
        "step": 0, "metric": "eval_accuracy", "value": first, "checkpoint": None, "before_training": first,
    }  # fmt: skip
    assert [path.name for path in (strict.run / "checkpoints").iterdir()] == [f"step_{verdict['executed_steps']}"]
    assert (strict.run / "checkpoints" / f"step_{verdict['executed_steps']}" / "manifest.json").is_file()
    assert "best               the model it began with: eval_accuracy " in strict.out
    assert "no step was better than the model it began with, pebble" in strict.err


def test_weights_that_are_worse_than_the_start_cannot_be_evaluated_as_the_best(strict: Ran) -> None:
    again = surefoot("eval", "run", "--checkpoint", "best", cwd=strict.run.parent)
    assert again.code == 3
    assert again.err.startswith("StateError: no step of ")
    assert "fix: use the model it began with" in again.err


def test_every_fold_is_in_the_log_and_only_the_last_one_fired(strict: Ran) -> None:
    fires = [m["killswitch/fire"] for m in strict.metrics if "killswitch/fire" in m]
    assert len(fires) == len([m for m in strict.metrics if "eval_n" in m and m["step"] > 0])
    assert fires == [0.0] * (len(fires) - 1) + [1.0]
    assert all(0 < m["killswitch/eval_share"] < 1 for m in strict.metrics if "killswitch/fire" in m)


@pytest.mark.config_key("guard.mode")
def test_soft_ends_the_same_run_at_the_same_step_with_1(strict: Ran, tmp_path: Path) -> None:
    soft = surefoot("train", "hack.toml", "guard.mode=soft", cwd=project(tmp_path))
    assert soft.code == 1, soft.err
    assert soft.err == ""
    assert soft.verdict["status"] == "FAIL"
    for fact in ("executed_steps", "best", "reasons"):
        assert soft.verdict[fact] == strict.verdict[fact], fact
    assert soft.verdict["guard"] == strict.verdict["guard"] | {"mode": "soft"}
    assert "CollapseStopError" not in soft.out


@pytest.mark.config_key("guard.mode")
def test_off_trains_to_the_end_and_was_equal_until_the_stop(strict: Ran, tmp_path: Path) -> None:
    off = surefoot("train", "hack.toml", "guard.mode=off", cwd=project(tmp_path))
    assert off.code == 1, off.err
    assert off.verdict["executed_steps"] == 14
    assert off.verdict["reasons"][0].startswith("worse than the model you started with: eval_accuracy ")
    assert off.verdict["guard"] is None
    assert numbers(off)[: len(numbers(strict))] == numbers(strict), "looking on changed what was looked at"
    for step in range(1, strict.verdict["executed_steps"] + 1):
        assert rollouts(off, step) == rollouts(strict, step)


def rollouts(ran: Ran, step: int) -> list[dict[str, Any]]:
    """Every rollout of a step, without what a clock made."""
    rows = [json.loads(line) for line in (ran.run / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


def numbers(ran: Ran) -> list[dict[str, float]]:
    """Every logged number but the guard's own and those that a clock made."""
    clocks = ("killswitch/", "timing/", "step_time", "tokens_per_second", "memory/peak")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in ran.metrics]


def test_planted_missing_call_site_lets_the_run_go_to_its_end(tmp_path: Path) -> None:
    """Teeth: without the call only the verdict tells, after the last step, so the first test above would be red."""
    ran = surefoot("train", "hack.toml", "max_steps=6", cwd=project(tmp_path), planted="forget_the_guard")
    assert ran.code == 1, ran.err
    assert ran.verdict["executed_steps"] == 6
    assert ran.verdict["guard"]["evaluations"] == 0
    assert ran.verdict["reasons"][0].startswith("worse than the model you started with")
