"""Silent failure 46: loss and reward curves look alive while some or all weights never move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.config import Config
from surefoot.learner.grpo import GRPOLearner
from surefoot.loop_state import step_one_warnings


def census_after(prepare: Callable[[GRPOLearner], None] = lambda learner: None, **changes: Any) -> GRPOLearner:
    learner = make_learner(tiny_net(), **changes)
    samples = sampled(learner.net)
    prepare(learner)
    learner.learn(samples)
    return learner


def check(learner: GRPOLearner) -> None:
    """Every trainable tensor got a gradient and moved, and step 1 has nothing to warn about."""
    assert learner.parameter_updates is not None
    assert learner.parameter_updates.still == ()
    assert (
        learner.parameter_updates.with_gradient
        == learner.parameter_updates.moved
        == learner.parameter_updates.total
        > 10
    )
    config = Config(model="pebble", tasks="builtin:sums")
    assert list(step_one_warnings({}, learner.parameter_updates, config)) == []


def test_after_step_1_every_parameter_has_moved() -> None:
    check(census_after())


def freeze_head(learner: GRPOLearner) -> None:
    """Cut one layer off from the loss, as a fused kernel that reads another tensor would."""
    learner.net.model.layers[0].mlp.down_proj.weight.register_hook(torch.zeros_like)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: census_after(learning_rate=0.0), "no parameter changed"),
        (lambda: census_after(freeze_head), "model.layers.0.mlp.down_proj.weight"),
    ],
    ids=["learning rate 0", "a layer cut off from the loss"],
)
def test_planted_standstill_is_seen_and_said(make: Callable[[], GRPOLearner], said: str) -> None:
    learner = make()
    with pytest.raises(AssertionError):
        check(learner)
    warnings = list(step_one_warnings({}, learner.parameter_updates, Config(model="pebble", tasks="builtin:sums")))
    assert any(said in what for what, _ in warnings)
