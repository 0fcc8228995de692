"""Silent failure 35: the learning rate is 0 at the first update, or long before the last."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import TASKS as THREE
from silent_kit import flat, make_engine, make_learner, make_runtime, prepare, tiny_net

from surefoot.errors import InvariantError
from surefoot.learner import grpo
from surefoot.learner.schedule import learning_rate_at

STEPS, PEAK = 6, 1e-3


def rates(kind: str, warmup: int) -> list[float]:
    """What the learner itself used, step by step; every step must also have moved the weights."""
    learner = make_learner(tiny_net(), learning_rate=PEAK, max_steps=STEPS, lr_scheduler_type=kind, warmup_steps=warmup)
    used = []
    for step in range(1, STEPS + 1):
        before = flat(learner.net)
        groups = make_runtime(make_engine(learner.net, learner.version)).collect(THREE, step)
        report = learner.learn(prepare(groups))
        used.append(report.metrics["learning_rate"])
        assert used[-1] == learner.optimiser.param_groups[0]["lr"]
        assert not torch.equal(before, flat(learner.net)), f"step {step} moved nothing"
    return used


def check(kind: str, warmup: int) -> None:
    used = rates(kind, warmup)
    assert max(used) == pytest.approx(PEAK)
    assert all(rate > 0 for rate in used)
    if kind != "constant":
        assert used[-1] < 0.5 * PEAK, "the decay reaches its end with the run"


@pytest.mark.parametrize(("kind", "warmup"), [("constant", 0), ("constant", 3), ("linear", 2), ("cosine", 0)])
def test_every_planned_step_has_a_rate_above_zero_and_the_decay_ends_with_the_run(kind: str, warmup: int) -> None:
    check(kind, warmup)


def test_the_whole_curve_is_known_before_the_run() -> None:
    curve = [
        learning_rate_at(s, peak=PEAK, kind="linear", warmup_steps=2, max_steps=STEPS) for s in range(1, STEPS + 1)
    ]
    assert curve == pytest.approx(rates("linear", 2))


@pytest.mark.parametrize(
    "bug",
    [
        lambda step, **keys: learning_rate_at(step * 4, **keys),  # stepped once per process, or per rollout
        lambda step, **keys: learning_rate_at(step, **keys) - keys["peak"] / 2 * (step == 1),  # warm-up starts at 0
    ],
    ids=["stepped too often", "first update at rate 0"],
)
def test_planted_schedule_is_seen(monkeypatch: pytest.MonkeyPatch, bug: Any) -> None:
    monkeypatch.setattr(grpo, "learning_rate_at", bug)
    with pytest.raises((AssertionError, InvariantError)):  # the schedule refuses what is behind its end
        check("linear", 2)
