"""Bad rewards through the real command: the run goes on without them, or stops with a name; nobody is scored 0."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from command import Ran, surefoot

REWARDS = '''
import os, random, signal

def f(completions, crime, **_):
    """What the task's own column says."""
    if crime[0] == "exits":
        os._exit(0)
    if crime[0] == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if crime[0] == "hoards":
        kept = bytearray(b"x") * (512 * 2**20)
        while kept:
            pass
    if crime[0] == "hangs":
        signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
        while True:
            pass
    if crime[0] == "interrupts":
        raise KeyboardInterrupt
    if crime[0] == "shouts":
        for _ in range(50):
            print("x" * 1_000_000)
    return [1.0 + len(text) + index for index, text in enumerate(completions)]

def by_chance(completions, **_):
    return [random.random() for _ in completions]

def constant(completions, **_):
    return [0.5 for _ in completions]
'''
CRIMES = {"exits": "died", "kills": "died", "hoards": "died", "hangs": "timeout", "interrupts": "raised"}
TINY = dict(
    tasks="t.jsonl", tasks_per_step=8, num_generations=2, max_completion_length=4, reward_workers=2, threads=1,
    max_steps=1, preflight_tasks=0, heldout_fraction=0, eval_metric="none", eval_steps=0, reward_timeout_s=3, reward_memory_mb=256,
)  # fmt: skip


def train(folder: Path, **keys: Any) -> Ran:
    crimes = [*CRIMES, "shouts", "none", "none"]
    rows = [{"id": f"{i}-{crime}", "prompt": f"1{i}+11=", "crime": crime} for i, crime in enumerate(crimes)]
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.py").write_text(REWARDS)
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in (TINY | keys).items()]
    return surefoot("train", *words, cwd=folder)


@pytest.mark.config_key("reward_memory_mb")
def test_a_run_survives_rewards_that_die_hang_hoard_and_shout(tmp_path: Path) -> None:
    ran = train(tmp_path, reward_funcs=["r.py:f"], max_reward_failures=1.0)
    assert ran.code == 0, ran.err
    (step,) = ran.metrics
    counted = {name: count for name, count in step.items() if name.startswith("failures/") and count}
    assert counted == {"failures/f:died": 6.0, "failures/f:timeout": 2.0, "failures/f:raised": 2.0}
    rollouts = [json.loads(line) for line in (ran.run / "rollouts/step_1.jsonl").read_text().splitlines()]
    for rollout in rollouts:
        expected = CRIMES.get(rollout["task"].partition("-")[2])
        assert rollout["failure"] == (None if expected is None else f"f:{expected}")
        assert (rollout["reward"] is None) == (expected is not None), "no verdict is not a reward of 0"
    log = ran.run / "logs" / "rewards.log"
    assert log.stat().st_size < 1_100_000
    assert log.read_text().endswith("[more output was discarded]\n")
    assert "xxxx" not in ran.out + ran.err


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_a_run_that_allows_no_failures_stops_with_4_and_tells_the_story_of_each_kind(tmp_path: Path) -> None:
    ran = train(tmp_path, reward_funcs=["r.py:f"])
    assert ran.code == 4, ran.err
    assert "10 of 16 rollouts in step 1 got no verdict (f:died, f:raised, f:timeout)" in ran.err
    assert "KeyboardInterrupt" in ran.err
    assert "no answer within 3 s" in ran.err
    assert ran.verdict["status"] == "ERROR"


@pytest.mark.config_key("audit_rewards")
def test_the_audit_refuses_a_reward_that_changes_its_mind_with_4(tmp_path: Path) -> None:
    ran = train(tmp_path, reward_funcs=["r.py:by_chance"], preflight_tasks=4, audit_rewards=True)
    assert ran.code == 4, ran.err
    assert "RewardError: reward function by_chance gave 0." in ran.err
    assert "audit_rewards = false trains anyway" in ran.err
    assert not ran.run.exists()


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_equal_rewards_give_no_gradient_and_no_nan(tmp_path: Path) -> None:
    ran = train(tmp_path, reward_funcs=["r.py:constant"])
    (step,) = ran.metrics
    assert all(math.isfinite(value) for value in step.values() if isinstance(value, float)), step
    assert step["reward"] == 0.5
    assert step.get("grad_norm", 0.0) == 0.0
