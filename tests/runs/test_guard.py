"""A run that is hurting the model, through the real command: stopped, judged, and its best weights kept.

The reward pays for answers that begin with a 9, whatever the sum. The policy learns it within a few steps, and
held-out accuracy, which knows the right answers, falls to nothing.
"""

from __future__ import annotations

from pathlib import Path

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


def test_the_stopped_and_the_best_weights_are_there_and_named(strict: Ran) -> None:
    verdict = strict.verdict
    evaluations = [m for m in strict.metrics if "eval_accuracy" in m]
    after = [m for m in evaluations if m["step"] > 0]
    best = max(after, key=lambda m: m["eval_accuracy"])
    assert verdict["best"] == {
        "step": best["step"], "metric": "eval_accuracy", "value": best["eval_accuracy"],
        "checkpoint": f"checkpoints/step_{best['step']}", "before_training": evaluations[0]["eval_accuracy"],
    }  # fmt: skip
    kept = {path.name for path in (strict.run / "checkpoints").iterdir()}
    assert kept == {f"step_{best['step']}", f"step_{verdict['executed_steps']}"}
    assert all((strict.run / "checkpoints" / name / "manifest.json").is_file() for name in kept)
    assert "best  " in strict.out


def test_the_best_weights_can_be_evaluated_by_that_name(strict: Ran) -> None:
    again = surefoot("eval", "run", "--checkpoint", "best", cwd=strict.run.parent)
    assert again.code == 0, again.err
    reported = dict(line.split() for line in again.out.splitlines() if line.startswith("eval_"))
    assert float(reported["eval_accuracy"]) == strict.verdict["best"]["value"]


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
    assert off.code == 0, off.err
    assert off.verdict["executed_steps"] == 14
    assert off.verdict["guard"] is None
    assert numbers(off)[: len(numbers(strict))] == numbers(strict), "looking on changed what was looked at"
    for step in range(1, strict.verdict["executed_steps"] + 1):
        name = f"rollouts/step_{step}.jsonl"
        assert (off.run / name).read_bytes() == (strict.run / name).read_bytes()


def numbers(ran: Ran) -> list[dict[str, float]]:
    """Every logged number but the guard's own and those that a clock made."""
    clocks = ("killswitch/", "timing/", "step_time", "tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in ran.metrics]


def test_planted_missing_call_site_lets_the_run_pass(tmp_path: Path) -> None:
    """Teeth: without the call the run goes to its end and passes, so the first test above would be red."""
    ran = surefoot("train", "hack.toml", "max_steps=6", cwd=project(tmp_path), planted="forget_the_guard")
    assert ran.code == 0, ran.err
    assert ran.verdict["guard"]["evaluations"] == 0
