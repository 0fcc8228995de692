"""Which task comes next, through the real command: from a file on the disk, by level, by success; killed and resumed it is the same run."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from command import Ran, surefoot
from ray_kit import numbers

TINY = (
    "tasks_per_step=4 num_generations=4 max_steps=8 eval_steps=8 eval_tasks=8 preflight_tasks=0 "
    "reward_workers=1 threads=1 device=cpu guard.mode=off learning_rate=1e-3 target_metric=none target_value=none "
    'reward_funcs=["r.py:score"]'
).split()
SUMS = "tasks=sums.jsonl"
WAYS = {
    "streamed": [SUMS, "stream_tasks=true", "max_prompt_length=16"],
    "streamed-levels": [
        SUMS,
        "stream_tasks=true",
        "max_prompt_length=16",
        "curriculum.kind=levels",
        "curriculum.steps=6",
    ],
    "levels": [SUMS, "curriculum.kind=levels", "curriculum.start=[1.0,0.0,0.0]", "curriculum.end=[0.0,0.0,1.0]"],
    "success": ["tasks=few.jsonl", "curriculum.kind=success"],
}
REWARD = """
def score(completions, answer, **_):
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(said, wanted)) / max(len(said), len(wanted), 1) for said, wanted in pairs]
"""
"""The share of right digits: siblings differ at every level, so that every step moves the weights."""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    dice, rows = random.Random(0), []
    for level, low in (("easy", 2), ("medium", 20), ("hard", 60)):
        sums = [(a, b) for a in range(low, low + 12) for b in range(low, low + 12)]
        for a, b in dice.sample(sums, 60):
            rows.append({"id": f"{level}-{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b), "complexity": level})
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::9]))
    (tmp_path / "r.py").write_text(REWARD)


def visited(run: Path, step: int) -> list[str]:
    rows = [json.loads(line) for line in (run / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
    return list(dict.fromkeys(row["task"] for row in rows))


@pytest.mark.parametrize("way", WAYS)
def test_killed_and_resumed_it_visits_the_same_tasks_and_ends_the_same(tmp_path: Path, way: str) -> None:
    words = ["train", *TINY, *WAYS[way], "save_steps=2"]
    whole = surefoot(*words, cwd=tmp_path, run="whole")
    assert whole.code == 0, whole.out + whole.err
    killed = surefoot(*words, cwd=tmp_path, run="killed", env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@6"})
    assert killed.code == -signal.SIGKILL, killed.out + killed.err
    resumed = surefoot("train", "--resume", "killed", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.out + resumed.err
    again = Ran(0, "", "", tmp_path / "killed")
    assert numbers(whole.metrics) == numbers(again.metrics)
    batches = [visited(whole.run, step) for step in range(1, 9)]
    assert batches == [visited(again.run, step) for step in range(1, 9)]
    assert all(len(set(batch)) == 4 for batch in batches)
    assert sum(line.get("grad_norm", 0.0) > 0 for line in whole.metrics) >= 6, (
        "weights that never move are equal anyway"
    )
    check_order(way, batches, whole)


@pytest.mark.ray
@pytest.mark.nightly
@pytest.mark.parametrize("way", ["streamed-levels", "success"])
def test_on_ray_it_visits_the_same_tasks_and_is_the_same_run(tmp_path: Path, way: str) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    words = ["train", *TINY, *WAYS[way]]
    local = surefoot(*words, cwd=tmp_path, run="local")
    there = surefoot(*words, "runtime.kind=ray", cwd=tmp_path, run="ray")
    assert there.code == 0, there.out + there.err
    assert "Traceback" not in there.err
    assert numbers(local.metrics) == numbers(there.metrics)
    assert [visited(local.run, step) for step in range(1, 9)] == [visited(there.run, step) for step in range(1, 9)]


def check_order(way: str, batches: list[list[str]], ran: Ran) -> None:
    """What this way of choosing promises beside being repeatable."""
    if way == "streamed":
        assert len({task for batch in batches for task in batch}) == 32, "every task once before any comes again"
    if way == "levels":
        assert all(task.startswith("easy") for task in batches[0])
        assert sum(task.startswith("hard") for batch in batches[5:] for task in batch) >= 5
    if way.endswith("levels"):
        steps = [line for line in ran.metrics if "curriculum/share/easy" in line]
        assert [line["curriculum/share/hard"] for line in steps] == [
            sum(task.startswith("hard") for task in batch) / 4 for batch in batches
        ]
    if way == "success":
        told = [line for line in ran.metrics if "curriculum/new_frequency" in line]
        assert told[0]["curriculum/new_frequency"] == 1.0
        rates = [line["curriculum/success_rate"] for line in told if "curriculum/success_rate" in line]
        assert rates, "tasks came again, and what was seen of them was remembered"
        assert all(0 < rate < 1 for rate in rates), rates


def test_a_level_that_nobody_named_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    words = [*TINY, SUMS, "curriculum.kind=levels", 'curriculum.levels=["easy","hard"]', "curriculum.start=[1.0,0.0]"]
    for command in (["train"], ["train", "--dry-run"]):
        ran = surefoot(*command, *words, "curriculum.end=[0.0,1.0]", cwd=tmp_path)
        assert ran.code == 4, ran.out + ran.err
        assert "of 'medium'" in ran.err


def test_a_dry_run_of_a_streamed_file_leaves_nothing_behind(tmp_path: Path) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    ran = surefoot("train", "--dry-run", *TINY, *WAYS["streamed-levels"], cwd=tmp_path)
    assert ran.code == 0, ran.out + ran.err
    assert "sums.jsonl: 161 to train on, 19 held out" in ran.out
    assert sorted(path.name for path in tmp_path.iterdir()) == before
