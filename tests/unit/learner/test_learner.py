"""One optimiser step: the right gradient, whatever the cut, against the right anchor, counted once."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from learner_kit import SampleGroups, counted_rows, make, parameters, same
from torch import Tensor

from surefoot.errors import InvariantError
from surefoot.learner.grpo import GRPOLearner
from surefoot.maths.losses import LossSettings
from surefoot.records import TrainSample

REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0.5, 0], [0, 0, 0, 0]]
"""Two groups that teach, two that cannot."""
LOSSES = [
    LossSettings(loss_type="grpo"), LossSettings(loss_type="bnpo"), LossSettings(loss_type="dr_grpo"),
    LossSettings(loss_type="dapo"), LossSettings(loss_type="cispo", epsilon_high=5.0),
    LossSettings(loss_type="dapo", level="sequence"), LossSettings(loss_type="dapo", beta=0.1),
    LossSettings(loss_type="grpo", correction="token_truncate"),
]  # fmt: skip
IDS = [
    f"{s.loss_type}{'-seq' * (s.level == 'sequence')}{'-kl' * (s.beta > 0)}{'-is' * bool(s.correction)}" for s in LOSSES
]


def gradient(learner: GRPOLearner, samples: Sequence[TrainSample], iteration: int = 0) -> dict[str, Tensor]:
    """What the optimiser was handed: unclipped gradients, seen at the moment of its step."""
    seen: dict[str, Tensor] = {}
    real = learner.optimiser.step

    def step(*args: Any) -> Any:
        seen.update({n: p.grad.clone() for n, p in learner.net.named_parameters() if p.grad is not None})
        return real(*args)

    learner.optimiser.step = step  # type: ignore[method-assign,assignment]
    assert learner.learn(samples, iteration=iteration).applied
    return seen


def close(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert max(float(g.abs().max()) for g in first.values()) > 1e-4, "a gradient of zero compares nothing"
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], atol=2e-6, rtol=1e-4, msg=name)


# -- the gradient ---------------------------------------------------------------------------


@pytest.mark.config_key("microbatch_size")
@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_the_gradient_does_not_depend_on_the_cut(
    loss: LossSettings, make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    whole = gradient(make(net, loss, max_grad_norm=0.0), samples)
    for size in (1, 3, 4):
        close(whole, gradient(make(net, loss, max_grad_norm=0.0, microbatch_size=size), samples))


@pytest.mark.parametrize("loss", LOSSES, ids=IDS)
def test_metrics_do_not_depend_on_the_cut(loss: LossSettings, make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    one, many = (make(net, loss, microbatch_size=size).learn(samples).metrics for size in (0, 3))
    assert one.keys() == many.keys()
    assert {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in one.items()} == many


@pytest.mark.parametrize("loss", [s for s in LOSSES if s.beta == 0], ids=[i for i in IDS if "kl" not in i])
def test_groups_that_cannot_move_anything_cost_no_forward_and_still_count(
    loss: LossSettings, make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    lean, full = make(net, loss, max_grad_norm=0.0), make(net, loss, max_grad_norm=0.0)
    monkeypatch.setattr(full, "_moves", lambda sample: True)
    rows = counted_rows(lean)
    close(gradient(full, samples), gradient(lean, samples))
    assert sum(rows) == sum(s.advantage != 0 for s in samples) == 8


@pytest.mark.config_key("loss_type")
def test_loss_types_give_different_gradients(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    norms = {loss.loss_type: make(net, loss).learn(samples).metrics["grad_norm"] for loss in LOSSES[:4]}
    assert len({round(norms[name], 6) for name in ("grpo", "dr_grpo", "dapo")}) == 3


def test_a_step_raises_the_probability_of_what_was_better(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, [[1, 0, 0, 1]])
    learner = make(net, learning_rate=1e-3)
    learner.learn(samples)
    old = {key: value.sum() for key, value in learner._old.items()}
    from surefoot.learner.forward import score_batch
    from surefoot.maths.packing import make_batch

    batch, _ = make_batch(samples, pad_token_id=0)
    new = score_batch(learner.net, batch, temperature=1.0, with_entropy=False).logprobs.sum(1).detach()
    gain = sum(s.advantage * float(new[i] - old[s.group, s.index]) for i, s in enumerate(samples))
    assert gain > 0.01


@pytest.mark.config_key("max_grad_norm")
def test_clipping_scales_the_gradient_and_reports_the_norm_before_it(
    make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    free, clipped = make(net, max_grad_norm=0.0), make(net, max_grad_norm=1e-3)
    raw, scaled = gradient(free, samples), gradient(clipped, samples)
    norm = math.sqrt(sum(float(g.square().sum()) for g in raw.values()))
    assert math.sqrt(sum(float(g.square().sum()) for g in scaled.values())) == pytest.approx(1e-3, rel=1e-3)
    assert make(net, max_grad_norm=1e-3).learn(samples).metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


# -- ratios and iterations --------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_first_ratio_is_exactly_one(temperature: float, make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS, temperature=temperature)
    metrics = make(net, temperature=temperature, microbatch_size=3).learn(samples).metrics
    assert metrics["probs_ratio"] == 1.0
    assert metrics["abs_log_ratio"] == 0.0
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.config_key("num_iterations")
def test_later_iterations_compare_with_the_policy_of_the_first(make_net: Any, sampled_groups: SampleGroups) -> None:
    """Iteration 1 by hand: ratios against what the learner itself scored in iteration 0."""
    net = make_net()
    samples = sampled_groups(net, [[1, 0, 0, 1]])
    learner = make(net, microbatch_size=2)
    learner.learn(samples, iteration=0)
    old = {key: value.clone() for key, value in learner._old.items()}
    assert len(old) == 4
    before = parameters(learner)
    second = learner.learn(samples, iteration=1).metrics
    assert second["abs_log_ratio"] > 1e-3
    assert all(torch.equal(learner._old[key], value) for key, value in old.items()), "the anchor moved"
    assert learner.version == 2
    expected = _mean_abs_log_ratio(net, before, samples, old)
    assert second["abs_log_ratio"] == pytest.approx(expected, rel=1e-4)
    assert not any(name.startswith("sampling/") for name in second), "mismatch is measured on the weights that sampled"


def _mean_abs_log_ratio(
    net: Any, weights: dict[str, Tensor], samples: list[TrainSample], old: dict[Any, Tensor]
) -> float:
    other = copy.deepcopy(net)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights[name])
    total, count = 0.0, 0
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids, *s.completion_ids]])
        with torch.no_grad():
            logp = torch.log_softmax(other(ids).logits[0, len(s.prompt_ids) - 1 : -1], -1)
        new = logp.gather(1, torch.tensor(s.completion_ids)[:, None]).squeeze(1)
        total += float((new - old[s.group, s.index]).abs().sum())
        count += len(s.completion_ids)
    return total / count


def test_the_next_step_forgets_the_old_anchor(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net)
    learner.learn(sampled_groups(net, [[1, 0]]))
    fresh = sampled_groups(learner.net, [[1, 0]], version=1)
    assert learner.learn(fresh).metrics["abs_log_ratio"] == 0.0
    assert set(learner._old) == {(s.group, s.index) for s in fresh}


# -- versions -----------------------------------------------------------------------------------


def test_every_applied_step_counts_one_version(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net)
    assert learner.version == 0
    for version in range(3):
        report = learner.learn(sampled_groups(learner.net, [[1, 0]], version=version))
        assert (report.version, report.applied, learner.version) == (version + 1, True, version + 1)


def test_a_step_without_signal_is_a_step_that_changes_nothing(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net, weight_decay=0.1)
    before = parameters(learner)
    report = learner.learn(sampled_groups(net, [[1, 1], [0, 0]]))
    assert (report.version, report.applied) == (1, True)
    assert same(before, parameters(learner))
    assert report.metrics["sampling/sampling_logp_difference/max"] < 1e-4, "step 1 compares sampler and learner anyway"


@pytest.mark.parametrize("version", [0, 2])
def test_samples_of_another_version_are_refused_before_any_forward(
    version: int, make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    learner = make(net)
    learner.learn(sampled_groups(net, [[1, 0]]))
    rows, before = counted_rows(learner), parameters(learner)
    with pytest.raises(InvariantError, match=rf"version {version}.*learner is at 1"):
        learner.learn(sampled_groups(learner.net, [[1, 0]], version=version))
    assert rows == []
    assert same(before, parameters(learner))


def test_weights_are_the_live_parameters_by_hugging_face_name(make_net: Any) -> None:
    for architecture in ("llama", "untied"):
        learner = make(make_net(architecture))
        weights = learner.weights()
        assert set(weights) == set(dict(learner.net.named_parameters()))
        assert ("lm_head.weight" in weights) == (architecture == "untied")
        assert weights["model.norm.weight"] is learner.net.model.norm.weight


# -- truncation, census, schedule --------------------------------------------------------------------


@pytest.mark.config_key("mask_truncated_completions")
def test_masked_truncated_completions_carry_no_loss_and_no_weight(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    samples = sampled_groups(net, [[1, 0, 0, 1], [0, 1, 0.5, 0]])
    ended = [s for s in samples if s.finish_reason != "length"]
    assert 0 < len(ended) < len(samples), "the test needs both kinds"
    masked = gradient(make(net, mask_truncated=True, max_grad_norm=0.0), samples)
    close(masked, gradient(make(net, max_grad_norm=0.0), ended))


def test_the_census_says_which_tensors_moved(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net)
    learner.net.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    total = len(list(net.parameters()))
    learner.learn(sampled_groups(net, REWARDS))
    assert learner.parameter_updates is not None
    assert (
        learner.parameter_updates.total,
        learner.parameter_updates.with_gradient,
        learner.parameter_updates.moved,
    ) == (total, total, total)
    still = make(net, learning_rate=0.0)
    still.learn(sampled_groups(net, REWARDS))
    assert still.parameter_updates is not None
    assert (still.parameter_updates.with_gradient, still.parameter_updates.moved) == (total, 0)
    assert len(still.parameter_updates.still) == total


@pytest.mark.config_key("learning_rate")
def test_the_rate_in_the_report_is_the_one_that_was_used(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net, lr_scheduler_type="linear", max_steps=4)
    for version, rate in enumerate((1e-2, 7.5e-3, 5e-3, 2.5e-3)):
        metrics = learner.learn(sampled_groups(learner.net, [[1, 0]], version=version)).metrics
        assert metrics["learning_rate"] == pytest.approx(rate)
        assert {group["lr"] for group in learner.optimiser.param_groups} == {metrics["learning_rate"]}


@pytest.mark.config_key("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")
@pytest.mark.parametrize(
    "change", [{"weight_decay": 0.5}, {"betas": (0.5, 0.999)}, {"betas": (0.9, 0.5)}, {"adam_epsilon": 1e-2}], ids=str
)
def test_each_number_of_the_optimiser_changes_the_weights(
    change: dict[str, Any], make_net: Any, sampled_groups: SampleGroups
) -> None:
    net = make_net()
    results = []
    for settings in ({}, change):
        learner = make(net, **settings)
        for iteration in range(2):
            learner.learn(sampled_groups(net, REWARDS), iteration=iteration)
        results.append(parameters(learner))
    assert not same(*results)


def test_weight_decay_leaves_norms_and_biases_alone(make_net: Any) -> None:
    learner = make(make_net("qwen2"), weight_decay=0.5)
    decayed = {id(p) for group in learner.optimiser.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    assert decayed == {id(p) for n, p in learner.net.named_parameters() if not n.endswith(("norm.weight", "bias"))}


# -- weights that overflow, and what the statistics are of ---------------------------------------------


def strayed(samples: Sequence[TrainSample], by: float) -> list[TrainSample]:
    """The first sample of every group, reported by an engine that thought each of its tokens less likely."""
    return [dataclasses.replace(s, logprobs=tuple(p - by for p in s.logprobs)) if s.index == 0 else s for s in samples]


@pytest.mark.parametrize("mode", ["sequence_truncate", "sequence_mask"])
def test_a_sequence_weight_that_overflows_does_not_refuse_a_correct_step(
    mode: Any, make_net: Any, sampled_groups: SampleGroups
) -> None:
    """A summed log-difference of 100 and more is infinite in float32; clip and mask know what to do with that row."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    loss = LossSettings(correction=mode)
    learner, tame = (make(net, loss, max_grad_norm=0.0, parity_tolerance=1e9) for _ in range(2))
    seen = gradient(learner, strayed(samples, 100.0))
    close(seen, gradient(tame, strayed(samples, 10.0)))  # large enough to be bounded, small enough to be a number
    metrics = make(net, loss, parity_tolerance=1e9).learn(strayed(samples, 100.0)).metrics
    assert metrics["correction/overflow"] == 2.0, "one row of each of the two groups that teach"
    assert 1.0 < metrics["correction/raw_mean"] <= math.exp(20.0)
    assert metrics["correction/log_mean"] > 25.0
    assert all(math.isfinite(value) for value in metrics.values())
    if mode == "sequence_mask":
        assert 0.0 < metrics["correction/rejected_share"] < 1.0


def test_planted_infinite_statistic_would_refuse_the_step(
    make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teeth: with the bound of the statistic away, the learner refuses what it has the right gradient of."""
    from surefoot.maths import losses

    net = make_net()
    samples = strayed(sampled_groups(net, REWARDS), 100.0)
    monkeypatch.setattr(losses, "LARGEST_LOG", math.inf)
    report = make(net, LossSettings(correction="sequence_mask"), parity_tolerance=1e9).learn(samples)
    assert not report.applied
    assert any("correction/raw_mean" in suspect for suspect in report.suspects)


def test_scored_share_says_what_the_entropy_is_of(make_net: Any, sampled_groups: SampleGroups) -> None:
    """Two groups of four cannot move anything and are not scored; with a KL penalty every row is."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    tokens = [s.trained_tokens for s in samples]
    moved = sum(n for n, s in zip(tokens, samples, strict=True) if s.advantage != 0)
    metrics = make(net, microbatch_size=3).learn(samples).metrics
    assert metrics["scored_share"] == pytest.approx(moved / sum(tokens))
    assert metrics["scored_share"] < 1.0
    assert metrics["trained_tokens"] == moved
    assert "scored_entropy" in metrics
    assert "entropy" not in metrics, "the name of a mean over all tokens, which nobody knows here"
    whole = make(net, LossSettings(beta=0.1)).learn(samples).metrics
    assert whole["scored_share"] == 1.0
    assert whole["entropy"] == whole["scored_entropy"]


def test_a_step_that_scored_nothing_says_so_and_has_no_entropy(make_net: Any, sampled_groups: SampleGroups) -> None:
    net = make_net()
    learner = make(net)
    learner.learn(sampled_groups(net, [[1, 0]]))
    metrics = learner.learn(sampled_groups(learner.net, [[1, 1], [0, 0]], version=1)).metrics
    assert metrics["scored_share"] == 0.0
    assert not {"entropy", "scored_entropy", "clip_ratio/region_mean"} & metrics.keys()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clip_ratios_are_of_all_rows_whether_or_not_they_were_scored(
    level: Any, make_net: Any, sampled_groups: SampleGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same second pass with every row scored: the same shares."""
    net = make_net()
    samples, loss = sampled_groups(net, REWARDS), LossSettings(level=level, epsilon=1e-3)
    lean, full = make(net, loss), make(net, loss)
    monkeypatch.setattr(full, "_moves", lambda sample: True)
    for learner in (lean, full):
        learner.learn(samples)
    one, two = (learner.learn(samples, iteration=1).metrics for learner in (lean, full))
    shares = [name for name in two if name.startswith("clip_ratio/")]
    assert max(two[name] for name in shares) > 0.1
    assert {name: one[name] for name in shares} == pytest.approx({name: two[name] for name in shares}, abs=1e-6)
    assert two["scored_share"] == 1.0 > one["scored_share"]
