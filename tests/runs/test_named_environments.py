"""`tools.environment` may name a kind of environment of ours instead of a file: trained with, and refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import surefoot

TINY = (
    "model=pebble_tools num_tasks=60 tasks_per_step=2 num_generations=4 max_completion_length=12 max_steps=1 eval_tasks=4 "
    "eval_steps=0 preflight_tasks=0 probe_reward_tasks=0 reward_workers=1 threads=1 device=cpu guard.mode=off max_turns=2 "
    "tools.in_prompt=false tools.max_result_tokens=8"
).split()


def test_a_run_plays_an_environment_of_gymnasium(tmp_path: Path) -> None:
    ran = surefoot("train", *TINY, "tools.environment=gymnasium:CliffWalking-v1", cwd=tmp_path, run="run")
    rows = [
        json.loads(line)
        for path in sorted((ran.run / "rollouts").glob("step_*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    graded = [row for row in rows if row["failure"] is None]
    assert graded, ran.out + ran.err
    assert {row["reward_parts"]["environment"] for row in graded} == {row["own_reward"] for row in graded}
    assert {row["own_reward"] for row in graded} <= {0.0, -1.0, -2.0}, "-1 for each step that was taken"
    kept = (ran.run / "config.toml").read_text(encoding="utf-8")
    assert 'environment = "gymnasium:CliffWalking-v1"' in kept, "a name is no path"


@pytest.mark.parametrize(
    ("value", "code", "says"),
    [
        (
            "gymnasiun:CliffWalking-v1",
            2,
            "it is file.py:Class, or a kind of ours: gymnasium:FrozenLake-v1, reasoning_gym",
        ),
        ("gymnasium", 2, "it needs a name behind the colon, such as gymnasium:FrozenLake-v1"),
        ("reasoning_gym:leg_counting", 2, "write reasoning_gym alone"),
        ("gymnasium:NoSuchLake-v1", 4, "Gymnasium does not make 'NoSuchLake-v1'"),
        ("reasoning_gym", 4, "reasoning_gym"),
    ],
)
def test_what_names_no_environment_is_refused_and_leaves_nothing(
    tmp_path: Path, value: str, code: int, says: str
) -> None:
    ran = surefoot("train", *TINY, f"tools.environment={value}", cwd=tmp_path, run="run")
    assert ran.code == code, ran.out + ran.err
    assert says in ran.err, ran.err
    assert not (tmp_path / "run").exists()


def test_without_the_package_it_says_what_to_install(tmp_path: Path) -> None:
    """A package of that name which cannot be imported stands for one that is not there."""
    (tmp_path / "gymnasium.py").write_text("raise ImportError('no module named gymnasium')\n")
    ran = surefoot(
        "train", *TINY, "tools.environment=gymnasium:CliffWalking-v1", cwd=tmp_path, run="run", fresh=True,
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.code == 4, ran.out + ran.err
    assert 'pip install "surefoot[gymnasium]"' in ran.err
