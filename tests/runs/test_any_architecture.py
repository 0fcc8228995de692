"""An architecture that our own decoder does not know, through the command and with no key that says so."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from command import Ran, surefoot
from families import save_family
from safetensors.torch import load_file

import surefoot as api
from surefoot.records import Verdict

CONFIG = """model = "m"
tasks = "builtin:sums"
reward_funcs = ["r.py:digits"]
num_tasks = 300
tasks_per_step = 2
max_completion_length = 6
max_steps = 4
learning_rate = 1e-3
save_steps = 2
eval_tasks = 8
preflight_tasks = 0
device = "cpu"
threads = 1

[guard]
mode = "off"
"""
REWARD = '''"""How many characters are digits."""


def digits(completions, **columns):
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]
'''


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "r.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path


def train(
    home: Path, *words: str, planted: str | None = None, run: str = "run", family: str = "gemma2",
    env: dict[str, str] | None = None,
) -> Ran:  # fmt: skip
    if not (home / "m").exists():
        save_family(family, home / "m")
    return surefoot("train", "run.toml", *words, cwd=home, planted=planted, run=run, env=env)


def gaps(ran: Ran) -> list[float]:
    return [m["sampling/sampling_logp_difference/max"] for m in ran.metrics if "reward" in m]


@pytest.mark.config_key("engine.kind")
@pytest.mark.every_day
def test_it_trains_says_how_and_is_evaluated(home: Path) -> None:
    ran = train(home)
    assert "all 4 planned steps ran" in ran.out + ran.err, ran.err
    assert len(gaps(ran)) == 4
    assert max(gaps(ran)) < 1e-4
    assert min(m["updates/changed_share"] for m in ran.metrics if "reward" in m) > 0.5
    told = json.loads((ran.run / "environment.json").read_text())["architecture"]
    assert "architecture 'gemma2'" in told
    assert "rows padded" in told
    assert told in ran.out + ran.err
    looked = surefoot("eval", "run", cwd=home)
    assert looked.code == 0, looked.err
    last = [m for m in ran.metrics if "eval_reward" in m][-1]
    found = dict(line.split() for line in looked.out.splitlines() if line.startswith("eval_"))
    assert float(found["eval_reward"]) == pytest.approx(last["eval_reward"], abs=1e-4)


@pytest.mark.turns(4)
@pytest.mark.parametrize("family", ["gemma2", "qwen3_5", "qwen3_moe", "gpt2"])
def test_killed_it_goes_on_to_the_last_bit(home: Path, family: str) -> None:
    whole = train(home, family=family)
    killed = train(home, run="killed", env={"SUREFOOT_FAILPOINTS": "loop.after_learn=kill@3"})
    assert killed.code == -signal.SIGKILL, killed.err
    again = surefoot("train", "--resume", "killed", cwd=home, run="")
    assert "all 4 planned steps ran" in again.out + again.err, again.err
    name = "checkpoints/step_4/model.safetensors"
    first, second = load_file(whole.run / name), load_file(killed.run / name)
    assert all(first[key].equal(second[key]) for key in first), "a resumed run is another one"


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("planted", "code", "said"),
    [
        ("leaking_rows", 4, "other probabilities in a batch than alone"),
        ("leaking_rows_unproved", 78, "the engine does not serve version 0"),
        ("head_without_scaling", 78, "sampler and learner disagree"),
        ("engine.kind=embedded", 4, "does not compute architecture 'gemma2'"),
    ],
)
def test_a_plant_ends_the_run(home: Path, planted: str, code: int, said: str) -> None:
    is_key = "=" in planted
    ran = train(home, *([planted] if is_key else []), planted=None if is_key else planted)
    assert ran.code == code, ran.err
    assert said in ran.err
    assert not list(ran.run.glob("checkpoints/step_*"))


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_run_on_ray_is_the_run_in_one_process(home: Path, family: str) -> None:
    """Recurrent state, and experts with buffers that no optimiser steps, across processes."""
    here = train(home, family=family)
    there = train(home, "runtime.kind=ray", "runtime.engines=1", "runtime.workers=1", run="ray", family=family)
    for ran in (here, there):
        assert "all 4 planned steps ran" in ran.out + ran.err, ran.err
    name = "checkpoints/step_4/model.safetensors"
    first, second = load_file(here.run / name), load_file(there.run / name)
    assert all(first[key].equal(second[key]) for key in first)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "words",
    [
        ["beta=0.1"],
        ["lora.rank=4"],
        ["max_staleness=1", "importance_sampling_correction=true"],
        ["engine.kind=transformers"],
    ],
    ids=str,
)
def test_with_a_reference_with_an_adapter_ahead_and_by_name(home: Path, words: list[str]) -> None:
    ran = train(home, *words)
    assert "all 4 planned steps ran" in ran.out + ran.err, ran.err
    assert gaps(ran)[0] < 1e-4


@pytest.mark.nightly
def test_the_engine_computes_plain_models_too(home: Path) -> None:
    """`engine.kind = "transformers"` on the built-in model: it learns the same from the same dice."""
    words = ["model=pebble", "max_steps=3"]
    ours, theirs = (train(home, *words, f"engine.kind={kind}", run=kind) for kind in ("embedded", "transformers"))
    for ran in (ours, theirs):
        assert "all 3 planned steps ran" in ran.out + ran.err, ran.err
    first, other = (next(m["reward"] for m in ran.metrics if "reward" in m) for ran in (ours, theirs))
    assert first == other, "the same dice on the same model draw other tokens"


@pytest.mark.nightly
def test_from_python_it_is_the_same(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    save_family("granite", home / "m")
    words = dict(
        num_tasks=300, tasks_per_step=2, max_completion_length=6, max_steps=2, learning_rate=1e-3, eval_tasks=8
    )
    quiet = dict(preflight_tasks=0, guard={"mode": "off"}, threads=1, device="cpu")
    outcome = api.train(
        model="m", tasks="builtin:sums", reward_funcs=["r.py:digits"], output_dir="run", **words, **quiet
    )
    assert outcome.verdict in (Verdict.PASS, Verdict.FAIL)
    assert outcome.checkpoint is not None
