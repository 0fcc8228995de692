"""Silent failure 27: the reference is refreshed with the policy, so that the KL is always 0 and the penalty is dead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from silent_kit import TASKS, flat, make_engine, make_learner, make_runtime, prepare, tiny_net

from surefoot.config.load import load_config
from surefoot.errors import ConfigError, InvariantError
from surefoot.learner.grpo import GRPOLearner


def train(learner: GRPOLearner, steps: int) -> list[float]:
    """On-policy steps with fresh samples; returns the KL of each."""
    kls = []
    for step in range(1, steps + 1):
        groups = make_runtime(make_engine(learner.net, learner.version)).collect(TASKS, step)
        kls.append(learner.learn(prepare(groups)).metrics["kl"])
    return kls


def test_the_reference_stays_where_it_was_and_the_kl_comes_alive() -> None:
    learner = make_learner(tiny_net(), loss={"beta": 0.1})
    start = flat(learner.reference)
    kls = train(learner, 7)
    assert kls[0] == 0.0
    assert all(kl > 0 for kl in kls[1:])
    assert flat(learner.reference).equal(start)


def test_a_declared_refresh_happens_when_it_was_declared_and_is_no_alarm() -> None:
    learner = make_learner(tiny_net(), loss={"beta": 0.1}, reference_sync_steps=3)
    kls = train(learner, 7)
    assert [i for i, kl in enumerate(kls) if kl == 0.0] == [0, 3, 6]


def config(tmp_path: Path, *lines: str) -> Any:
    path = tmp_path / "run.toml"
    path.write_text("\n".join(['model = "pebble"', 'tasks = "builtin:sums"', *lines]))
    return load_config(path).config


def test_leaving_the_cadence_out_means_a_fixed_reference(tmp_path: Path) -> None:
    assert config(tmp_path, "beta = 0.1").reference_sync_steps == "never"


def test_planted_refresh_every_step_is_refused_by_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"beta = 0.1 with reference_sync_steps = 1"):
        config(tmp_path, "beta = 0.1", "reference_sync_steps = 1")


@pytest.mark.parametrize("bug", ["the same object", "copied after every step"])
def test_planted_reference_that_follows_the_policy_is_refused_while_running(bug: str) -> None:
    every = 1 if bug == "copied after every step" else None
    learner = make_learner(tiny_net(), loss={"beta": 0.1}, reference_sync_steps=every)
    if bug == "the same object":
        learner.reference = learner.net
    with pytest.raises(InvariantError, match="the KL was exactly 0"):
        train(learner, 8)
