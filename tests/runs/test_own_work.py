"""A user's own tasks and rewards, from a file and from Python; and README's first example, word for word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import ROOT, Ran, python, surefoot
from doc_blocks import run_blocks
from warm_command import shared

REWARDS = """
def score(prompts, completions, answer, **columns):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]

def sometimes(completions, **columns):
    return [None for _ in completions]
"""
CONFIG = """
model = "pebble"
tasks = "mine.jsonl"
reward_funcs = ["my_rewards.py:score"]
tasks_per_step = 4
num_generations = 8
max_completion_length = 6
max_steps = 2
learning_rate = 1e-4
eval_tasks = 20
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    rows = [
        {"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10, 20) for b in range(10, 20)
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    (tmp_path / "my.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.config_key("model", "tasks", "reward_funcs")
def test_a_config_file_with_own_tasks_and_rewards_trains(project: Path) -> None:
    ran = surefoot("train", str(project / "my.toml"), "--max-steps", "3", cwd=project, fresh=True)
    assert ran.code == 0, ran.err
    steps = [m for m in ran.metrics if "reward" in m]
    assert len(steps) == 3
    assert all("rewards/score/mean" in m for m in steps)
    assert (ran.run / "checkpoints/step_3/model.safetensors").exists()
    lines = [json.loads(line) for line in (ran.run / "rollouts/step_1.jsonl").read_text().splitlines()]
    assert len(lines) == 32
    assert {"text", "completion_ids", "logprobs", "reward_parts", "version"} <= set(lines[0])


def test_a_function_that_always_abstains_stops_the_run_with_4(project: Path) -> None:
    ran = surefoot("train", str(project / "my.toml"), 'reward_funcs=["my_rewards.py:sometimes"]', cwd=project)
    assert ran.code == 4
    assert "abstained" in ran.err
    assert not ran.run.exists(), "a start that is refused leaves nothing behind"


def test_the_same_from_python_with_a_closure(project: Path) -> None:
    script = project / "train_me.py"
    script.write_text(
        "import surefoot\n"
        "bonus = 0.5\n"
        "def score(completions, answer, **_):\n"
        "    return [bonus * (text == gold) for text, gold in zip(completions, answer)]\n"
        "rows = [{'prompt': f'{a}+{b}=', 'answer': str(a + b)} for a in range(10, 20) for b in range(10, 20)]\n"
        "outcome = surefoot.train(model='pebble', tasks=rows, reward_funcs=[score], max_steps=2,\n"
        "                         max_completion_length=6, eval_tasks=10, output_dir='run')\n"
        "print('verdict', outcome.verdict, outcome.metrics['eval_accuracy'])\n"
    )
    ran = python(script, cwd=project)
    assert ran.code == 0, ran.err
    assert "verdict PASS" in ran.out


def test_a_folder_that_holds_a_run_is_refused(project: Path) -> None:
    assert surefoot("train", str(project / "my.toml"), cwd=project).code == 0
    before = (project / "run/metrics.jsonl").read_bytes()
    again = surefoot("train", str(project / "my.toml"), cwd=project)
    assert again.code == 3
    assert (project / "run/metrics.jsonl").read_bytes() == before


# -- what README shows first --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every block of README was executed, in order; tests/repo/test_docs.py leaves that page to us."""
    folder = tmp_path_factory.mktemp("a reader")
    said = run_blocks("README.md", (ROOT / "README.md").read_text(encoding="utf-8"), folder, shared())
    assert said == "", said
    return folder


@pytest.mark.slow  # two short trainings that really learn
def test_the_first_example_learns_and_passes_for_that_reason(readme: Path) -> None:
    verdict = Ran(0, "", "", readme / "first").verdict
    assert verdict["status"] == "PASS"
    (said,) = [reason for reason in verdict["reasons"] if reason.startswith("better than the model you started with: ")]
    heldout = verdict["evidence"]["heldout"]
    assert heldout["after"] - heldout["before"] > heldout["noise"]
    assert heldout["tasks"] >= 60
    assert f"noise ±{heldout['noise']:.2g} at {heldout['tasks']} tasks" in said
    again = surefoot("eval", "first", "--checkpoint", "best", cwd=readme)
    assert again.code == 0, again.err
    reported = dict(line.split() for line in again.out.splitlines() if line.startswith("eval_"))
    assert float(reported["eval_accuracy"]) == verdict["best"]["value"] > verdict["best"]["before_training"]


@pytest.mark.slow
def test_the_example_in_python_learns_and_passes_too(readme: Path) -> None:
    (run,) = (readme / "runs").iterdir()
    verdict = Ran(0, "", "", run).verdict
    assert verdict["status"] == "PASS"
    assert any(reason.startswith("better than the model you started with: ") for reason in verdict["reasons"])
