"""Keys that shape the update: each, through the config, leads to other weights.

The baseline of every case is the same run without the key. Three updates on the same rollouts: ratios
leave 1, some far enough to be clipped and some not, moments fill up, schedules move on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import NumericsError
from surefoot.learner.grpo import GRPOLearner
from surefoot.records import TrainSample
from surefoot.run.model import learner_settings

REWARDS = [[1, 0, 0, 1], [0, 1, 0.5, 0], [0, 0, 1, 1], [1, 0, 1, 0.2], [0, 1, 1, 0], [1, 0, 0, 0]]
UPDATES = 3
VISIBLE = 1e-5
"""Smallest difference of a weight that counts; rounding stays below 1e-7 here."""
SLOPPY = dict(parity_tolerance=1e9)
"""For samples whose log-probabilities are planted: parity has its own test."""

Learned = Callable[..., dict[str, Tensor]]
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # key under test, what both sides share, the change
    ("learning_rate", {}, {"learning_rate": 1e-3}),
    ("lr_scheduler_type", {}, {"lr_scheduler_type": "linear"}),
    ("lr_scheduler_type", {"lr_scheduler_type": "linear"}, {"lr_scheduler_type": "cosine"}),
    ("max_steps", {"lr_scheduler_type": "linear"}, {"max_steps": 30}),
    ("warmup_steps", {}, {"warmup_steps": 2}),
    ("weight_decay", {}, {"weight_decay": 0.1}),
    ("adam_beta1", {}, {"adam_beta1": 0.5}),
    ("adam_beta2", {}, {"adam_beta2": 0.5}),
    ("adam_epsilon", {}, {"adam_epsilon": 1e-2}),
    ("max_grad_norm", {}, {"max_grad_norm": 1e-8}),
    ("max_grad_norm", {"max_grad_norm": 1e-8}, {"max_grad_norm": 0.0}),
    ("loss_type", {}, {"loss_type": "grpo"}),
    ("loss_type", {"loss_type": "grpo"}, {"loss_type": "bnpo"}),  # bnpo = dapo by design: see docs/maths.md
    ("loss_type", {"scale_rewards": "none", "loss_type": "grpo"}, {"loss_type": "dr_grpo"}),
    ("loss_type", {"epsilon_high": 1.0}, {"loss_type": "cispo"}),
    ("loss_type", {"loss_type": "grpo"}, {"loss_type": "gspo"}),
    ("importance_sampling_level", {}, {"importance_sampling_level": "sequence"}),
    ("epsilon", {"epsilon_high": 0.2}, {"epsilon": 0.01}),
    ("epsilon_high", {}, {"epsilon_high": 0.01}),
    ("delta", {"epsilon_high": 0.01}, {"delta": 1.02}),
    ("beta", {}, {"beta": 0.5}),
    ("kl_estimator", {"beta": 0.5}, {"kl_estimator": "k1"}),
    ("kl_estimator", {"beta": 0.5}, {"kl_estimator": "k2"}),
    ("reference_sync_steps", {"beta": 0.5}, {"reference_sync_steps": 2}),
    ("temperature", SLOPPY, {"temperature": 0.7}),
    ("mask_truncated_completions", {}, {"mask_truncated_completions": True}),
    ("importance_sampling_correction", SLOPPY, {"importance_sampling_correction": True}),
    (
        "importance_sampling_mode",
        SLOPPY | {"importance_sampling_correction": True},
        {"importance_sampling_mode": "token_mask"},
    ),
    (
        "importance_sampling_mode",
        SLOPPY | {"importance_sampling_correction": True, "importance_sampling_mode": "sequence_truncate"},
        {"importance_sampling_mode": "sequence_mask"},
    ),
    (
        "importance_sampling_clip_max",
        SLOPPY | {"importance_sampling_correction": True},
        {"importance_sampling_clip_max": 1.5},
    ),
]


@pytest.fixture(scope="module")
def samples(net: Any, sampled_groups: Any) -> list[TrainSample]:
    drawn: list[TrainSample] = sampled_groups(net, REWARDS)
    assert {s.finish_reason for s in drawn} == {"stop", "length"}, "both endings are needed to tell the keys apart"
    return drawn


@pytest.fixture
def learned(net: Any, samples: list[TrainSample], configure: Any) -> Learned:
    """`learned(**keys)`: the weights after three updates under such a config."""

    def weights(**keys: Any) -> dict[str, Tensor]:
        learner = make_learner(net, configure, **keys)
        given = strayed(samples) if "parity_tolerance" in keys else samples
        for iteration in range(UPDATES):
            assert learner.learn(given, iteration=iteration).applied
        return {name: p.detach().clone() for name, p in learner.net.named_parameters()}

    return weights


def make_learner(net: Any, configure: Any, **keys: Any) -> GRPOLearner:
    usual = {"learning_rate": 2e-3, "max_steps": UPDATES, "max_completion_length": 9}
    return GRPOLearner(copy.deepcopy(net), learner_settings(configure(**(usual | keys)).config, pad_token_id=0))


def strayed(samples: list[TrainSample]) -> list[TrainSample]:
    """Samples of an engine that disagrees: every other token was far less likely to it, by a factor of 7.4."""
    return [replace(s, logprobs=tuple(p - 2.0 * (i % 2) for i, p in enumerate(s.logprobs))) for s in samples]


def distance(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.mark.config_key(
    "learning_rate", "lr_scheduler_type", "max_steps", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "max_grad_norm", "loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta",
    "beta", "kl_estimator", "reference_sync_steps", "temperature", "mask_truncated_completions",
    "importance_sampling_correction", "importance_sampling_mode", "importance_sampling_clip_max",
)  # fmt: skip
@pytest.mark.parametrize(("key", "shared", "change"), CASES, ids=[f"{k}={c[k]}" for k, _, c in CASES])
def test_the_key_leads_to_other_weights(
    key: str, shared: dict[str, Any], change: dict[str, Any], learned: Learned
) -> None:
    assert list(change) == [key], "one key at a time"
    assert distance(learned(**shared), learned(**shared | change)) > VISIBLE


@pytest.mark.config_key("loss_type", "importance_sampling_level")
def test_gspo_is_the_pair_it_stands_for_and_auto_is_token_for_all_others(learned: Learned) -> None:
    pair = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    assert distance(learned(loss_type="gspo"), learned(**pair)) == 0.0
    assert distance(learned(), learned(importance_sampling_level="token")) == 0.0
    assert distance(learned(**pair), learned(**pair | {"loss_type": "dapo"})) > VISIBLE, "dapo weighs rows by length"


def test_without_a_change_the_weights_are_the_same(learned: Learned) -> None:
    assert distance(learned(), learned()) == 0.0


@pytest.mark.config_key("max_completion_length")
def test_dr_grpo_divides_by_the_configured_length(net: Any, samples: list[TrainSample], configure: Any) -> None:
    """Adam hides a constant factor, so the gradient itself is asked."""
    dr = {"loss_type": "dr_grpo", "scale_rewards": "none", "max_grad_norm": 0.0}
    short, long = (
        make_learner(net, configure, **dr, max_completion_length=n).learn(samples).metrics["grad_norm"] for n in (9, 18)
    )
    assert short > 0
    assert short == pytest.approx(2 * long, rel=1e-4)


@pytest.mark.config_key("microbatch_size")
@pytest.mark.parametrize(("size", "pieces"), [(0, [24]), (12, [12, 12]), (2, [2] * 12), (24, [24])])
def test_the_microbatch_size_is_the_number_of_rows_per_forward(
    size: int, pieces: list[int], net: Any, samples: list[TrainSample], configure: Any
) -> None:
    learner = make_learner(net, configure, microbatch_size=size, tasks_per_step=6)
    seen: list[int] = []
    pack = learner._pack
    learner._pack = lambda piece: (seen.append(len(piece)), pack(piece))[1]  # type: ignore[func-returns-value,method-assign]
    learner.learn(samples)
    assert seen == pieces


@pytest.mark.config_key("parity_tolerance")
def test_the_parity_tolerance_decides_whether_step_1_is_believed(
    net: Any, samples: list[TrainSample], configure: Any
) -> None:
    off_by_a_hundredth = [replace(s, logprobs=tuple(p - 0.01 for p in s.logprobs)) for s in samples]
    with pytest.raises(NumericsError):
        make_learner(net, configure).learn(off_by_a_hundredth)
    assert make_learner(net, configure, parity_tolerance=0.1).learn(off_by_a_hundredth).applied


@pytest.mark.config_key("dtype")
def test_bfloat16_is_allowed_its_own_rounding(net: Any, samples: list[TrainSample], configure: Any) -> None:
    off_by_a_hundredth = [replace(s, logprobs=tuple(p - 0.01 for p in s.logprobs)) for s in samples]
    assert make_learner(net, configure, dtype="bfloat16").learn(off_by_a_hundredth).applied
    assert torch.get_default_dtype() == torch.float32
