"""What keeps a step from the weights: numbers that are not finite, a sampler that disagrees, a dead penalty."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from learner_kit import SampleGroups, make, parameters, same
from torch import Tensor

from surefoot.errors import InvariantError, NumericsError, StateError
from surefoot.learner.checkpoint import capture
from surefoot.learner.grpo import DEAD_KL_STEPS, GRPOLearner, nonfinite_error
from surefoot.maths.losses import LossSettings
from surefoot.maths.packing import make_batch
from surefoot.protocols import StepReport
from surefoot.records import TrainSample

REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0.5, 0], [0, 0, 0, 0]]
"""Two groups that teach, two that cannot."""

# -- what is not finite ---------------------------------------------------------------------------


def refused(learner: GRPOLearner, samples: Sequence[TrainSample]) -> StepReport:
    before, version = parameters(learner), learner.version
    report = learner.learn(samples)
    assert same(before, parameters(learner)), "a parameter moved"
    assert (report.applied, report.version, learner.version) == (False, version, version)
    assert all(map(math.isfinite, report.metrics.values()))
    return report


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(
    value: float, make_net: Any, sampled_groups: SampleGroups
) -> None:
    """The loss is fine; one entry of one gradient is not."""
    net = make_net()
    learner = make(net)
    samples = sampled_groups(net, REWARDS)

    def spoil(grad: Tensor) -> Tensor:
        spoiled = grad.clone()
        spoiled.view(-1)[3] = value
        return spoiled

    hook = learner.net.model.layers[1].mlp.up_proj.weight.register_hook(spoil)
    refused(learner, samples)
    hook.remove()
    assert learner.learn(samples).applied, "nothing of the refused step is left in gradients or moments"
    clean = make(net)
    clean.learn(samples)
    assert same(parameters(clean), parameters(learner))


def test_weights_that_are_not_finite_are_never_stepped_on(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner = make(net)
    with torch.no_grad():
        learner.net.model.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    before = parameters(learner)
    assert not learner.learn(samples).applied
    after = parameters(learner)
    assert all(torch.equal(before[n].nan_to_num(7.0), after[n].nan_to_num(7.0)) for n in before)
    assert learner.version == 0


def test_an_update_that_overflows_by_itself_is_the_end_and_cannot_be_saved(
    make_net: Any, sampled_groups: SampleGroups
) -> None:
    """Gradient and moments are finite; the rate alone is beyond every float32."""
    net = make_net()
    learner = make(net, learning_rate=1e39)
    with pytest.raises(NumericsError, match="made weights that are not finite, from a finite gradient"):
        learner.learn(sampled_groups(net, REWARDS))
    with pytest.raises(StateError, match="interrupted inside the optimiser's step at version 0"):
        capture(learner)


@pytest.mark.parametrize("field", ["reward", "advantage"])
def test_a_reward_or_advantage_that_is_not_a_number_cannot_reach_the_learner(
    field: str, make_net: Any, sampled_groups: SampleGroups
) -> None:
    sample = sampled_groups(make_net(), [[1, 0]])[0]
    with pytest.raises(ValueError, match="non-finite weight"):
        dataclasses.replace(sample, **{field: float("nan")})  # type: ignore[arg-type]


def test_too_many_refused_steps_name_the_tasks(make_net: Any, sampled_groups: SampleGroups) -> None:
    error = nonfinite_error(sampled_groups(make_net(), [[1, 0], [0, 1]]), 3)
    assert error.what.startswith("3 steps in a row")
    assert "t0, t1" in error.what
    assert error.exit_code == 78


# -- sampler against learner --------------------------------------------------------------------------


def off_by(samples: Sequence[TrainSample], gap: float) -> list[TrainSample]:
    """One token of one sample claims another probability."""
    first = samples[0]
    return [dataclasses.replace(first, logprobs=(*first.logprobs[:-1], first.logprobs[-1] - gap)), *samples[1:]]


@pytest.mark.config_key("parity_tolerance")
def test_sampler_and_learner_that_disagree_stop_the_run(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = off_by(sampled_groups(net, [[1, 0]]), 2e-3)
    learner = make(net)
    before = parameters(learner)
    with pytest.raises(NumericsError, match=r"disagree by 0\.002"):
        learner.learn(samples)
    assert same(before, parameters(learner))
    assert learner.version == 0
    assert make(net, parity_tolerance=3e-3).learn(samples).applied


def test_a_first_step_without_signal_still_compares_sampler_and_learner(
    make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    with pytest.raises(NumericsError, match="disagree by"):
        make(net).learn(off_by(sampled_groups(net, [[1, 1]]), 0.5))


def test_after_step_one_the_limit_is_ten_times_wider_and_no_more(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net)
    learner.learn(sampled_groups(net, [[1, 0]]))
    fresh = sampled_groups(learner.net, [[1, 0]], version=1)
    with pytest.raises(NumericsError, match="version 1"):
        learner.learn(off_by(fresh, 2e-3))
    assert learner.learn(off_by(fresh, 5e-4)).applied


def test_a_shifted_mask_is_refused_before_any_gradient(
    make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(*args: Any, **kwargs: Any) -> Any:
        batch, stats = make_batch(*args, **kwargs)
        return dataclasses.replace(batch, mask=batch.mask.roll(1, dims=1)), stats

    net = make_net()
    samples = sampled_groups(net, REWARDS)
    assert len({len(s.completion_ids) for s in samples}) > 1
    monkeypatch.setattr("surefoot.learner.grpo.make_batch", shifted)
    learner = make(net)
    before = parameters(learner)
    with pytest.raises(InvariantError, match="trained tokens must be the sampled tokens"):
        learner.learn(samples)
    assert same(before, parameters(learner))


def test_checked_tokens_count_what_was_compared(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner = make(net)
    learner.learn(samples)
    assert learner.checked_tokens == sum(s.trained_tokens for s in samples if s.advantage != 0)


# -- the reference --------------------------------------------------------------------------------------


def run_steps(
    learner: GRPOLearner, sampled_groups: SampleGroups, steps: int, rewards: Any = None
) -> list[dict[str, float]]:
    return [
        dict(learner.learn(sampled_groups(learner.net, rewards or [[1, 0, 0, 1]], version=learner.version)).metrics)
        for _ in range(steps)
    ]


@pytest.mark.config_key("beta")
def test_the_reference_is_a_frozen_copy_of_the_first_weights(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net, LossSettings(beta=0.1))
    metrics = run_steps(learner, sampled_groups, 3)
    assert metrics[0]["kl"] == 0.0
    assert metrics[1]["kl"] > 1e-6
    assert learner.reference is not None
    assert same(dict(net.named_parameters()), dict(learner.reference.named_parameters()))
    assert not any(p.requires_grad for p in learner.reference.parameters())
    assert make(net).reference is None, "without a penalty there is no second model in memory"


@pytest.mark.config_key("reference_sync_steps")
def test_the_reference_is_refreshed_on_its_cadence_and_only_then(make_net: Any, sampled_groups: SampleGroups) -> None:
    learner = make(make_net(), LossSettings(beta=0.1), reference_sync_steps=2)
    metrics = run_steps(learner, sampled_groups, 5)
    assert [m["kl"] == 0.0 for m in metrics] == [True, False, True, False, True]


def test_a_penalty_that_is_always_zero_is_refused(make_net: Any, sampled_groups: SampleGroups) -> None:
    learner = make(make_net(), LossSettings(beta=0.1), reference_sync_steps=1)
    run_steps(learner, sampled_groups, DEAD_KL_STEPS)
    with pytest.raises(InvariantError, match="KL was exactly 0"):
        run_steps(learner, sampled_groups, 1)


def test_a_policy_that_had_nothing_to_learn_yet_is_no_dead_penalty(make_net: Any, sampled_groups: SampleGroups) -> None:
    """Equal rewards at first: the weights did not move, so a KL of 0 is the truth and no reason to stop."""
    learner = make(make_net(), LossSettings(beta=0.1))
    metrics = run_steps(learner, sampled_groups, DEAD_KL_STEPS + 2, rewards=[[0, 0, 0, 0]])
    assert all(m["kl"] == 0.0 for m in metrics)
