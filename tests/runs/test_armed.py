"""Armed by default, through the real command: the plan says it, the verdict says it, and a collapse is stopped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from command import Ran, surefoot

REWARDS = """
def starts_with_nine(completions, **columns):
    return [float(text.startswith("9")) for text in completions]

def never(completions, **columns):
    return [0.0 for _ in completions]
"""
CONFIG = """
model = "pebble"
tasks = "builtin:sums"
reward_funcs = ["rewards.py:starts_with_nine"]
max_steps = 40
tasks_per_step = 16
max_completion_length = 4
learning_rate = 1e-3
eval_tasks = 60
threads = 1
"""
"""No eval_steps, no [guard]: what everybody gets."""


def project(folder: Path) -> Path:
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "nines.toml").write_text(CONFIG)
    return folder


def guard_words(ran: Ran) -> list[str]:
    """Every line that says armed, in order."""
    return [line.strip() for line in ran.out.splitlines() if "armed" in line]


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return surefoot("train", "nines.toml", cwd=project(tmp_path_factory.mktemp("nines by default")))


@pytest.mark.config_key("eval_steps")
@pytest.mark.every_day
def test_a_collapse_is_stopped_with_79_by_the_defaults_alone(collapsed: Ran) -> None:
    assert collapsed.code == 79, collapsed.out + collapsed.err
    verdict = collapsed.verdict
    assert verdict["executed_steps"] < 40
    assert verdict["guard"]["fired"] is True
    assert [m["step"] for m in collapsed.metrics if "eval_n" in m] == list(range(0, verdict["executed_steps"] + 1, 5))
    assert "held out  60 tasks x 1 answer every 5 steps (auto: 9.5 % of the sampled tokens)" in collapsed.out


def test_a_config_of_two_keys_is_armed(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text('model = "pebble"\ntasks = "builtin:sums"\n')
    ran = surefoot("train", "two.toml", "--dry-run", cwd=tmp_path, run="")
    assert ran.code == 0, ran.err
    assert "guard     strict: a run that hurts the model stops with exit code 79" in ran.out
    [said] = guard_words(ran)
    assert said.startswith("armed: stops ")
    assert "(auto: " in ran.out, "evaluations are spread over the run without a key"


def test_plan_and_verdict_say_armed_once_each(collapsed: Ran) -> None:
    plan, end = guard_words(collapsed)
    assert plan.startswith("armed: stops ")
    assert "from 0.25 (assumed) to 0" in plan
    assert "(expected false alarms)" in plan
    first = collapsed.metrics[0]["eval_accuracy"]
    assert end.startswith("guard  ")
    assert f"from {first:.3g} to 0" in end
    facts = collapsed.verdict["guard"]
    assert facts["armed"] is True
    assert facts["why_not_armed"] is None
    assert (facts["first_heldout"], facts["first_heldout_measured"]) == (first, True)
    assert (facts["planned_evaluations"], facts["answers"]) == (9, 60)
    assert facts["simulated_falls_stopped"] >= 0.8
    assert facts["expected_false_alarms"] <= 0.01


def test_a_short_run_says_not_armed_once_in_plan_and_verdict_and_warns_of_nothing(tmp_path: Path) -> None:
    ran = surefoot("train", "nines.toml", "max_steps=2", cwd=project(tmp_path))
    assert ran.code in (0, 1), ran.err  # what the verdict is, is not the point
    plan, end = guard_words(ran)
    wanted = "not armed: 2 evaluations are planned, and it says nothing before number 4; would do: "
    assert plan.startswith("guard     strict, but " + wanted)
    assert wanted in end
    assert "max_steps = " in plan
    assert "never fire" not in ran.out
    assert "warning: the guard" not in ran.out
    facts = ran.verdict["guard"]
    assert facts["armed"] is False
    assert facts["why_not_armed"] in plan
    assert any(word.startswith("max_steps = ") for word in facts["would_do"])


@pytest.mark.config_key("guard.require")
def test_require_refuses_before_anything_is_there(tmp_path: Path) -> None:
    ran = surefoot("train", "nines.toml", "max_steps=2", "guard.require=true", cwd=project(tmp_path))
    assert ran.code == 2
    assert "ConfigError: guard.require = true, and the guard is not armed: 2 evaluations are planned" in ran.err
    assert "would do: " in ran.err
    assert "max_steps = " in ran.err
    assert not ran.run.exists()
    dry = surefoot("train", "nines.toml", "max_steps=2", "guard.require=true", "--dry-run", cwd=tmp_path)
    assert dry.code == 2


def test_require_refuses_when_the_first_value_leaves_nothing_to_fall(tmp_path: Path) -> None:
    """The plan could only assume; the evaluation before step 1 knows, and nothing is trained."""
    ran = surefoot("train", "nines.toml", "guard.require=true", "eval_metric=rewards.py:never", cwd=project(tmp_path))
    assert ran.code == 2, ran.out + ran.err
    assert "held-out begins at 0, so there is nothing that could fall to 0" in ran.err
    assert ran.verdict["executed_steps"] == 0
    assert ran.verdict["status"] == "ERROR"


def test_a_folder_that_cannot_calibrate_is_refused_and_leaves_nothing_behind(tmp_path: Path, collapsed: Ran) -> None:
    words = ["guard.max_proxy_real_gap=2.0", f"guard.calibrate_from={collapsed.run}"]
    ran = surefoot("train", "nines.toml", *words, cwd=project(tmp_path))
    assert ran.code == 3
    assert "cannot calibrate a guard: its guard fired" in ran.err
    assert not ran.run.exists()


def healthy_run(folder: Path) -> Path:
    """What a run leaves that rises for 30 evaluations, the reward a little ahead of held-out."""
    rows: list[dict[str, float]] = []
    for t in range(30):
        rows += [{"step": t, "reward": 0.3 + 0.012 * t}] if t else []
        rows.append({"step": t, "eval_n": 200, "eval_reward": 0.3, "eval_accuracy": 0.3 + 0.01 * t})
    folder.mkdir()
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "verdict.json").write_text(json.dumps({"status": "PASS", "guard": {"fired": False}}))
    return folder


@pytest.mark.config_key("guard.calibrate_from")
def test_a_calibrated_run_goes_on_with_its_limits_when_the_healthy_run_is_gone(tmp_path: Path) -> None:
    good, folder = healthy_run(tmp_path / "good"), project(tmp_path)
    words = ["max_steps=2", "guard.max_proxy_real_gap=5.0", "guard.calibrate_from=good"]
    killed = surefoot("train", "nines.toml", *words, cwd=folder, env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@1"})
    assert killed.code == -9, killed.err
    (line,) = [line.strip() for line in killed.out.splitlines() if "calibrated by" in line]
    assert line.startswith("calibrated by good: max_proxy_real_gap 5 -> 0.0")
    shutil.rmtree(good)
    again = replace(surefoot("train", "--resume", "run", cwd=folder, run=""), run=killed.run)
    assert "cannot calibrate" not in again.err, again.err
    assert line in again.out
    assert f"-> {again.verdict['guard']['calibrated']['max_proxy_real_gap']:.4g}" in line
