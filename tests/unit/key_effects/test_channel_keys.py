"""Keys of the losses beside the policy's: each, through the config, leads to other weights or to another end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError, InvariantError, TaskError
from surefoot.learner.samples import to_samples

Build = Callable[..., Any]
PAIRS = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(20, 40)]


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[..., str]:
    """`write_pairs(rows, name)`: a file of pairs, with a name that is not a plain word."""

    def write(rows: list[Any], name: str = "my pärs.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return name

    return write


def learned(parts: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights after one step on the same twelve tasks, and the step's metrics."""
    samples = to_samples(parts.runtime.collect(list(parts.train[:12]), 1), scale="group")
    assert any(s.advantage > 0 for s in samples), "somebody has to succeed"
    metrics = dict(parts.learner.learn(samples).metrics)
    return {name: p.detach().clone() for name, p in parts.learner.net.named_parameters()}, metrics


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.config_key("alpha_sdpo", "sdpo_mixing")
def test_self_distillation_changes_the_step_and_weight_zero_changes_not_one_bit(assembled: Build) -> None:
    (plain, _), (off, before) = learned(assembled()), learned(assembled(alpha_sdpo=0.0, sdpo_mixing=0.5))
    assert distance(plain, off) == 0.0
    assert not any(name.startswith(("sdpo/", "replay/")) for name in before)
    reverse, metrics = learned(assembled(alpha_sdpo=1.0))
    forward, _ = learned(assembled(alpha_sdpo=1.0, sdpo_mixing=0.0))
    assert min(distance(plain, reverse), distance(plain, forward), distance(reverse, forward)) > 1e-5
    assert metrics["sdpo/loss"] > 1e-3
    assert 0 < metrics["sdpo/live_fraction"] < 1


@pytest.mark.config_key("beta_replay", "replay_pairs")
def test_replay_changes_the_step_by_the_pairs_of_the_file(assembled: Build, write_pairs: Any) -> None:
    other = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in PAIRS]
    plain, _ = learned(assembled())
    first, metrics = learned(assembled(beta_replay=1.0, replay_pairs=write_pairs(PAIRS)))
    second, _ = learned(assembled(beta_replay=1.0, replay_pairs=write_pairs(other, "other.jsonl")))
    assert min(distance(plain, first), distance(plain, second), distance(first, second)) > 1e-5
    assert metrics["replay/loss"] == pytest.approx(0.6931, abs=1e-3), "the reference is the policy at the start"


@pytest.mark.config_key("replay_pairs")
def test_recorded_answers_end_like_the_policy_s_own_and_keep_their_source(assembled: Build, write_pairs: Any) -> None:
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "5", "source": "me"}]
    rows += [{"prompt": [{"role": "user", "content": "2+3="}], "chosen": "5", "rejected": "", "source": "you"}]
    rows += [{"prompt": "2+4=", "chosen": "6", "rejected": "7", "source": None}]
    parts = assembled(beta_replay=1.0, replay_pairs=write_pairs(rows))
    (channel,) = parts.learner.channels.members
    assert channel.dropped == {"too_short": 1, "no_source": 1}
    (pair,) = channel.pairs
    assert pair.source == "me"
    assert pair.prompt_ids == parts.codec.encode_prompt([{"role": "user", "content": "2+2="}])
    assert (parts.codec.decode(pair.chosen_ids), pair.chosen_ids[-1] in parts.codec.stop_ids) == ("4", True)


@pytest.mark.config_key("dead_channel_steps")
@pytest.mark.parametrize("limit", [2, 3])
def test_a_channel_that_stays_dead_ends_the_run_with_a_verdict_that_names_its_key(
    ran: Any, rewards: Any, tmp_path: Path, limit: int
) -> None:
    rewards("def f(completions, **_):\n    return [0.0 for _ in completions]\n")
    keys: dict[str, Any] = dict(reward_funcs=["r.py:f"], max_steps=5, heldout_fraction=0.0, output_dir="dead")
    with pytest.raises(InvariantError, match=r"alpha_sdpo = 0\.5"):
        ran(**keys, alpha_sdpo=0.5, dead_channel_steps=limit)
    verdict = json.loads((tmp_path / "dead" / "verdict.json").read_text())
    assert (verdict["status"], verdict["executed_steps"]) == ("FAIL", limit - 1)
    assert "alpha_sdpo" in verdict["reasons"][0]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"alpha_sdpo": -0.1}, "alpha_sdpo = -0.1: must not be negative"),
        ({"beta_replay": -0.1}, "beta_replay = -0.1: must not be negative"),
        ({"beta_replay": 0.1}, "beta_replay = 0.1 with replay_pairs = None"),
        ({"replay_pairs": "p.jsonl"}, "beta_replay = 0.0 with replay_pairs = 'p.jsonl'"),
        ({"sdpo_mixing": 1.5}, "sdpo_mixing = 1.5: must lie between"),
        ({"dead_channel_steps": 0}, "dead_channel_steps = 0: must be above 0"),
        ({"alpha_sdpo": float("nan")}, "alpha_sdpo"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(configure: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(**keys)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (None, "replay_pairs = 'pairs.jsonl' is not a file"),
        ([], "has no tasks"),
        ([{"prompt": "1+1=", "chosen": "2"}], "has no text 'rejected'"),
        ([{"prompt": "1+1=", "chosen": "2", "rejected": 3}], "has no text 'rejected'"),
        ([{"prompt": "1+1=", "chosen": "2<|end|>", "rejected": "3"}], "holds an end token"),
        ([{"chosen": "2", "rejected": "3"}], "has no prompt"),
    ],
)
def test_a_file_that_holds_no_pairs_is_refused_before_the_run(
    assembled: Build, write_pairs: Any, rows: list[Any] | None, words: str
) -> None:
    if rows is not None:
        write_pairs(rows, "pairs.jsonl")
    with pytest.raises(TaskError) as caught:
        assembled(beta_replay=0.1, replay_pairs="pairs.jsonl")
    assert words in str(caught.value)


def test_a_file_of_pairs_that_teach_nothing_is_refused(assembled: Build, write_pairs: Any) -> None:
    name = write_pairs([{"prompt": "1+1=", "chosen": "2", "rejected": "2"}])
    with pytest.raises(ConfigError, match=r"no pair of replay_pairs is left .*identical"):
        assembled(beta_replay=0.1, replay_pairs=name)


def test_drawing_pairs_and_teaching_leaves_the_training_stream_alone(assembled: Build, write_pairs: Any) -> None:
    parts = assembled(alpha_sdpo=1.0, beta_replay=1.0, replay_pairs=write_pairs(PAIRS))
    before = torch.get_rng_state()
    learned(parts)
    assert torch.equal(before, torch.get_rng_state())
