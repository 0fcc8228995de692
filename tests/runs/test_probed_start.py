"""A run is not started with a reward that pays for nothing; and the reward of several facts, from a config, with its world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, python, surefoot

from surefoot.rewards.functions import WEIGHTS, components

GRADERS = """
calls = 0

def around(completions, answer, **columns):
    return [float(text.strip() in gold) for text, gold in zip(completions, answer)]

def some(completions, answer, **columns):
    return [1.0 if text.strip() == gold else 0.3 for text, gold in zip(completions, answer)]

def anywhere(completions, answer, **columns):
    return [float(gold in text) for text, gold in zip(completions, answer)]

def counts(completions, answer, **columns):
    "Right, and what is left of a point by how often this process was asked: it would remember a probe."
    global calls
    calls += 1
    return [float(text.strip() == gold) + (len(text) % 3) / (100 + calls) for text, gold in zip(completions, answer)]
"""
TINY = (
    "num_tasks=200 tasks_per_step=2 num_generations=4 max_completion_length=4 max_steps=2 eval_tasks=8 eval_steps=2 "
    "preflight_tasks=0 reward_workers=1 threads=1 device=cpu guard.mode=off learning_rate=1e-3"
).split()


def train(folder: Path, grader: str, *words: str, **more: Any) -> Ran:
    (folder / "r.py").write_text(GRADERS)
    return surefoot("train", *TINY, f'reward_funcs=["r.py:{grader}"]', *words, cwd=folder, **more)


def rollouts(run: Path) -> list[dict[str, Any]]:
    kept = sorted((run / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for path in kept for line in path.read_text().splitlines()]


# -- refused, and the way through -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("grader", "says"),
    [("around", "doing nothing pays"), ("some", "an empty answer earns 0.3"), ("anywhere", "guessing pays")],
)
def test_a_reward_that_pays_for_nothing_is_refused_before_a_folder_is_made(
    tmp_path: Path, grader: str, says: str
) -> None:
    ran = train(tmp_path, grader)
    assert ran.code == 4, ran.out + ran.err
    assert ran.err.startswith(f"RewardError: the reward {grader} cannot be trained with: "), ran.err
    assert says in ran.err
    assert "probe_reward_tasks = 0 trains anyway" in ran.err
    assert "model " not in ran.out, "nothing was loaded or planned"
    assert not ran.run.exists()


@pytest.mark.config_key("probe_reward_tasks")
def test_one_key_turns_the_probe_off_and_a_start_that_forgot_it_is_noticed(tmp_path: Path) -> None:
    through = train(tmp_path, "around", "probe_reward_tasks=0")
    assert (through.code, through.verdict["executed_steps"]) in ((0, 2), (1, 2)), through.err
    forgotten = train(tmp_path, "around", run="forgotten", planted="forget_the_probe")
    assert forgotten.code != 4, "the wire from the start to the probe is what refuses"
    assert forgotten.verdict["executed_steps"] == 2
    negative = train(tmp_path, "around", "probe_reward_tasks=-1", run="negative")
    assert (negative.code, "probe_reward_tasks = -1: must not be negative" in negative.err) == (2, True)


def test_from_python_it_is_refused_with_the_same_error(tmp_path: Path) -> None:
    script = tmp_path / "train_me.py"
    script.write_text(
        "import surefoot\n"
        "from surefoot.errors import RewardError\n"
        "def around(completions, answer, **_):\n"
        "    return [float(text in gold) for text, gold in zip(completions, answer)]\n"
        "rows = [{'prompt': f'{a}+{b}=', 'answer': str(a + b)} for a in range(10, 20) for b in range(10, 20)]\n"
        "try:\n"
        "    surefoot.train(model='pebble', tasks=rows, reward_funcs=[around], max_steps=1, output_dir='run')\n"
        "except RewardError as error:\n"
        "    print(error.exit_code, error.what)\n"
    )
    ran = python(script, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("4 the reward around cannot be trained with: an empty answer earns 1"), ran.out
    assert not (tmp_path / "run").exists()


def test_no_grader_remembers_the_probe_and_the_run_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    asked, alone = (
        train(tmp_path, "counts", run="asked"),
        train(tmp_path, "counts", "probe_reward_tasks=0", run="alone"),
    )
    assert asked.code == alone.code == 0, asked.err + alone.err
    assert [row["reward"] for row in rollouts(asked.run)] == [row["reward"] for row in rollouts(alone.run)]
    weights = [(each.run / "checkpoints/step_2/model.safetensors").read_bytes() for each in (asked, alone)]
    assert weights[0] == weights[1]


def test_a_grader_that_hangs_is_asked_once_and_left_to_the_preflight(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "import pathlib, time\n"
        "def hangs(completions, **_):\n"
        "    with pathlib.Path('calls').open('a') as calls:\n"
        "        print(len(completions), file=calls)\n"
        "    time.sleep(600)\n"
    )
    words = [word for word in TINY if not word.startswith("preflight_tasks")]
    ran = surefoot(
        "train", *words, 'reward_funcs=["r.py:hangs"]', "reward_timeout_s=0.2", "preflight_tasks=1", cwd=tmp_path
    )
    assert ran.code == 4, ran.out + ran.err
    assert "reward    not probed: hangs:timeout" in ran.out
    assert "4 of 4 rollouts in the preflight got no verdict (hangs:timeout)" in ran.err
    assert (tmp_path / "calls").read_text().split() == ["1", "4", "1", "1", "1", "1"]


# -- the reward of several facts ------------------------------------------------------------------

CONFIG = str(ROOT / "configs" / "tools_components.toml")
FEW = (
    "num_tasks=400 tasks_per_step=4 num_generations=4 max_steps=2 eval_steps=2 eval_tasks=8 preflight_tasks=0 "
    "reward_workers=1 threads=1 device=cpu guard.mode=off learning_rate=1e-3"
).split()


def paid(row: dict[str, Any], gold: str, weights: dict[str, float]) -> float:
    """What a rollout in a file earns by these weights, from its own turns."""
    talk = [
        message
        for turn in row["turns"]
        for message in (
            {"role": "assistant", "content": turn["text"]},
            *({"role": "tool", "name": call["name"], "outcome": call["outcome"]} for call in turn["calls"]),
        )
    ]
    said = [message["content"] for message in talk if message["role"] == "assistant"]
    parts = components(talk, solved=float(said[-1].strip() == gold), environment_reward=row["own_reward"])
    return sum(weight * parts[name] for name, weight in weights.items())


@pytest.mark.mcp
@pytest.mark.config_key("component_weights")
def test_the_shipped_config_pays_by_its_weights_and_for_next_to_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    from surefoot.data.sources import errands_tasks

    golds = {task.id: task.columns["answer"] for task in errands_tasks(400, 0)}
    own = {"completion": 0.6, "reasoning": 0.1, "efficiency": 0.2, "recovery": 0.05, "response": 0.05}
    for words, weights in (([], own), (["component_weights={}"], dict(WEIGHTS))):
        ran = surefoot("train", CONFIG, *FEW, *words, cwd=tmp_path, run=f"run_{len(words)}")
        assert ran.code == 0, ran.out + ran.err
        rows = rollouts(ran.run)
        assert len(rows) == 32
        assert [row["reward"] for row in rows] == pytest.approx(
            [paid(row, golds[row["task"]], weights) for row in rows]
        )
        assert len({round(row["reward"], 6) for row in rows}) > 1
        assert all(row["reward"] <= 0.05 or row["reward"] >= 0.5 for row in rows), "solved, or next to nothing"
        assert {name for row in rows for name in row["reward_parts"]} == {"components"}


def test_the_state_is_the_world_s_own_reward_and_counts_once(tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "class World:\n"
        "    def reset(self, answer, **row):\n"
        "        self.answer = answer\n"
        "    def press(self) -> str:\n"
        '        """Press the button."""\n'
        "        return 'pressed'\n"
        "    def get_reward(self) -> float:\n"
        "        return int(self.answer[-1]) / 10\n"
    )
    words = ["model=pebble_tools", "tools.environment=world.py:World", "tools.in_prompt=false", "max_turns=2"]
    words += ['reward_funcs=["builtin:components"]', "probe_reward_tasks=0", "tools.max_result_tokens=16"]
    for weights in ({"state": 1.0}, {"completion": 1.0}):
        table = "{" + ", ".join(f"{name} = {weight}" for name, weight in weights.items()) + "}"
        ran = surefoot("train", *TINY, *words, f"component_weights={table}", cwd=tmp_path, run=next(iter(weights)))
        assert ran.verdict["executed_steps"] == 2, ran.out + ran.err
        rows = [row for row in rollouts(ran.run) if row["failure"] is None]
        assert rows
        for row in rows:
            own = int(str(sum(map(int, row["prompt"].rstrip("=").split("+"))))[-1]) / 10
            assert row["own_reward"] == row["reward_parts"]["environment"] == own
            expected = own if "state" in weights else row["reward_parts"]["components"] + own
            assert row["reward"] == pytest.approx(expected), "a world that no part weighs is added, as ever"


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["component_weights={completion=0.5}"], 2, 'without "builtin:components" in reward_funcs'),
        (['reward_funcs=["builtin:components"]', "component_weights={completion=0.9,state=0.2}"], 2, "sum, 1.1"),
        (['reward_funcs=["builtin:components"]', "component_weights={charm=0.5}"], 2, "must be a table of numbers for"),
        (['reward_funcs=["builtin:component"]'], 4, "did you mean builtin:components?"),
    ],
)
def test_weights_and_names_that_make_no_sense_are_refused(
    tmp_path: Path, words: list[str], code: int, says: str
) -> None:
    ran = surefoot("train", *TINY, *words, cwd=tmp_path)
    assert ran.code == code, ran.out + ran.err
    assert says in ran.err, ran.err
