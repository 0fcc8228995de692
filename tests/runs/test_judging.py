"""How answers are judged, through the real command: data sets one by one, loops, what rewards are told and how long they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import Ran, python, surefoot

REWARDS = """
import time
from surefoot.rewards.verifiers.multi import MultiVerifier

def score(completions, answer, dataset, **columns):
    return [0.0 if name == "hard" else float(text.strip() == gold)
            for text, gold, name in zip(completions, answer, dataset)]

def told(prompts, completions, completion_ids, trainer_state):
    "What it was told, as one number."
    state = 1000 * trainer_state.global_step + 100 * trainer_state.max_steps
    return [state + 10 * len(ids) + int(text[:1] in "02468") for ids, text in zip(completion_ids, completions)]

def by_keyword(completions, **kwargs):
    return [float(kwargs["trainer_state"].global_step + sum(ids)) for ids in kwargs["completion_ids"]]

def slow(problem, answer):
    time.sleep(0.02)
    return float(answer == str(problem["answer"]))

checked = MultiVerifier(verifiers={"slow": slow}, isolate=False).as_reward

def digits(completions, **columns):
    return [float(text[:1] in "012") for text in completions]

def curious(completions, trainer_state, **columns):
    return [trainer_state.epoch for _ in completions]

def logs(completions, log_metric, **columns):
    return [0.0 for _ in completions]
"""
CONFIG = """
model = "pebble"
tasks = "mine.jsonl"
reward_funcs = ["rewards.py:score"]
tasks_per_step = 4
num_generations = 4
max_completion_length = 6
max_steps = 2
learning_rate = 1e-4
heldout_fraction = 0.0
guard.mode = "off"
eval_metric = "none"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    rows = [
        {
            "prompt": f"{a}+{b}=", "answer": str(a + b), "dataset": "hard" if (a + b) % 3 == 0 else "easy/sums",
            "verifier_type": "slow",
        }
        for a in range(10, 18) for b in range(10, 18)
    ]  # fmt: skip
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "my.toml").write_text(CONFIG)
    return tmp_path


def train(project: Path, *words: str, **how: Any) -> Ran:
    return surefoot("train", "my.toml", *words, cwd=project, **how)


def rollouts(ran: Ran, step: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ran.run / f"rollouts/step_{step}.jsonl").read_text().splitlines()]


# -- data sets ------------------------------------------------------------------------------------------


@pytest.mark.config_key("preflight_tasks")
def test_a_data_set_that_earns_the_same_throughout_is_refused_by_name(project: Path) -> None:
    refused = train(project)
    assert refused.code == 4, refused.out + refused.err
    for words in (
        "data set 'hard': all 64 baseline completions on", "got reward 0, while others earned", "one of them: '",
        "why: equal rewards give no gradient", 'fix: look at the completion above and at what judges this data set; '
        'preflight_allow = ["hard"] trains anyway',
    ):  # fmt: skip
        assert words in refused.err
    assert not refused.run.exists(), "a start that is refused leaves nothing behind"
    forgotten = train(project, "max_steps=1", planted="forget_datasets")
    assert forgotten.code in (0, 1), "planted: without the look at each, the mean over both hides the bad one"


@pytest.mark.config_key("preflight_allow")
def test_a_data_set_may_be_allowed_by_name_and_has_numbers_of_its_own(project: Path) -> None:
    ran = train(project, 'preflight_allow=["hard"]', "tasks_per_step=12")
    assert ran.code in (0, 1), ran.err
    for step, row in enumerate((m for m in ran.metrics if "reward" in m), 1):
        rows = rollouts(ran, step)
        of = {name: [r for r in rows if (int(r["prompt"][:2]) + int(r["prompt"][3:5])) % 3 == rest]
              for name, rest in (("hard", 0),)}  # fmt: skip
        of["easy_sums"] = [r for r in rows if r not in of["hard"]]
        assert all(of.values()), "both data sets are in every step"
        for word, mine in of.items():
            assert row[f"datasets/{word}/reward"] == pytest.approx(sum(r["reward"] for r in mine) / len(mine))
            lengths = [len(r["completion_ids"]) for r in mine]
            assert row[f"datasets/{word}/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
            assert 0 <= row[f"datasets/{word}/clipped_ratio"] <= 1
        assert (row["datasets/hard/reward"], row["datasets/hard/frac_reward_zero_std"]) == (0, 1)
        assert row["datasets/hard/trained_rows"] == 0 < row["datasets/easy_sums/trained_rows"]
        whole = [len(r["prompt_ids"]) + len(r["completion_ids"]) for r in of["easy_sums"]]
        assert min(whole) <= row["sequences/mean_length"] <= row["sequences/max_length"] <= max(whole)
    typo = train(project, 'preflight_allow=["hart"]', run="typo")
    assert (typo.code, "a data set 'hart' that no training task belongs to" in typo.err) == (2, True)
    assert "there is 'hard'" in typo.err


# -- what a reward is told, and how long it takes --------------------------------------------------------


@pytest.mark.config_key("reward_funcs")
def test_a_reward_that_asks_is_told_tokens_and_progress_and_its_time_is_kept(project: Path) -> None:
    functions = ["told", "by_keyword", "checked"]
    named = json.dumps([f"rewards.py:{name}" for name in functions])
    ran = train(project, f"reward_funcs={named}", "max_steps=3", "max_staleness=0", "probe_reward_tasks=0")
    assert ran.code in (0, 1), ran.err
    for step in (1, 2, 3):
        for row in rollouts(ran, step):
            ids, parts = row["completion_ids"], row["reward_parts"]
            even = int(row["text"][:1] in "02468")
            assert parts["told"] == 1000 * (step - 1) + 300 + 10 * len(ids) + even
            assert parts["by_keyword"] == step - 1 + sum(ids)
            assert row["version"] == step - 1
            assert set(row["grading_seconds"]) == {"told", "by_keyword", "as_reward"}
            assert row["grading_seconds"]["as_reward"] >= 4 * 0.02, "four siblings, 20 ms each"
            assert row["seconds"] > 0
    for row in (m for m in ran.metrics if "reward" in m):
        assert 4 * 0.02 <= row["timing/reward/as_reward/mean"] <= row["timing/reward/as_reward/max"]
        assert 0 < row["timing/reward/told/mean"] <= row["timing/reward/told/max"]


def test_the_same_from_python_with_a_closure(project: Path) -> None:
    (project / "go.py").write_text(
        "import surefoot\n"
        "rows = [{'prompt': f'{a}+{b}=', 'answer': str(a + b)} for a in range(10, 16) for b in range(10, 16)]\n"
        "def score(completions, completion_ids, trainer_state, **_):\n"
        "    return [len(ids) + 0.5 * trainer_state.max_steps + (text[:1] in '12') for ids, text in zip(completion_ids, completions)]\n"
        "keys = dict(model='pebble', tasks=rows, max_steps=1, tasks_per_step=2, num_generations=4, heldout_fraction=0.0,\n"
        "            max_completion_length=6, output_dir='run', threads=1)\n"
        "surefoot.train(reward_funcs=[score], **keys)\n"
        "import torch\n"
        "try:\n"
        "    surefoot.train(reward_funcs=[torch.nn.Linear(1, 1)], **keys)\n"
        "except surefoot.errors.RewardError as error:\n"
        "    print(error)\n"
    )
    ran = python(project / "go.py", cwd=project)
    assert ran.code == 0, ran.err
    for row in rollouts(ran):
        assert row["reward"] == len(row["completion_ids"]) + 0.5 + (row["text"][:1] in "12")
    assert "reward_funcs holds a Linear, which is a model" in ran.out


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("trl-lib/reward-model", ["looks like the name of a model", "docs/rewards.md", "file.py:function"]),
        ("rewards.py:logs", ["reward function logs needs log_metric", "weight 0 in reward_weights"]),
        ("rewards.py:curious", ["trainer_state has no 'epoch' here", "global_step and max_steps"]),
    ],
)
def test_what_trl_has_and_we_do_not_is_refused_with_what_to_do(project: Path, spec: str, words: list[str]) -> None:
    refused = train(project, f'reward_funcs=["{spec}"]')
    assert refused.code == 4, refused.out + refused.err
    assert [each for each in words if each not in refused.err] == []


# -- loops ------------------------------------------------------------------------------------------------


def loops(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "Let me check" in row["text"]]


@pytest.mark.config_key("repetition", "repetition_cost")
def test_a_loop_costs_its_rollout_or_makes_it_invalid_without_tools_too(project: Path) -> None:
    keys = ['reward_funcs=["rewards.py:digits"]', "max_steps=1", "tasks_per_step=8", "partial_groups=train"]
    told = {}
    for word in ("penalise", "invalid", "off"):
        ran = train(project, *keys, f"repetition={word}", "repetition_cost=0.25", run=word, planted="speak_in_circles")
        assert ran.code in (0, 1), ran.err
        told[word] = (rollouts(ran), next(m for m in ran.metrics if "loss" in m))
        assert loops(told[word][0])
    for row in told["penalise"][0]:
        cost = 0.25 if row in loops(told["penalise"][0]) else 0.0
        assert row["reward"] == row["reward_parts"]["digits"] - cost
        assert row["reward_parts"].get("repetition-cost", 0.0) == -cost
    assert {r["failure"] for r in loops(told["invalid"][0])} == {"repetition"}
    assert {r["reward"] for r in loops(told["invalid"][0])} == {None}
    assert all(r["reward"] == r["reward_parts"]["digits"] for r in told["off"][0])
    share = len(loops(told["penalise"][0])) / 32
    assert told["penalise"][1]["completions/looping_share"] == share
    assert told["invalid"][1]["completions/looping_share"] == share
    assert told["invalid"][1]["failures/repetition"] == 32 * share
    assert "completions/looping_share" not in told["off"][1]


def test_planted_grading_that_looks_for_no_loops_pays_them(project: Path) -> None:
    """Teeth: the test above is red then."""
    keys = ['reward_funcs=["rewards.py:digits"]', "max_steps=1"]
    ran = train(project, *keys, planted="forget_loops")
    assert loops(rollouts(ran))
    assert all(row["reward"] == row["reward_parts"]["digits"] for row in rollouts(ran))
