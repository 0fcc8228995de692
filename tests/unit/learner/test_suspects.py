"""Who broke a step that was not finite: the guilty by name, nobody else, and nothing left behind by the search."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.learner import grpo
from surefoot.learner.checkpoint import capture, restore
from surefoot.learner.grpo import GRPOLearner, LearnerSettings, nonfinite_error
from surefoot.learner.nonfinite import name_of, nonfinite_sources, not_finite
from surefoot.maths.losses import LossSettings
from surefoot.records import TrainSample

REWARDS = [[1, 0, 0, 1], [1, 1, 1, 1], [0, 1, 0.5, 0]]
NAN, INF = float("nan"), float("inf")
Sample = Callable[..., list[TrainSample]]


def make(net: Any, **changes: Any) -> GRPOLearner:
    settings = LearnerSettings(
        loss=LossSettings(), learning_rate=1e-2, max_steps=10, max_completion_length=9, temperature=1.0, pad_token_id=0
    )
    return GRPOLearner(copy.deepcopy(net), dataclasses.replace(settings, **changes))


def bits(learner: GRPOLearner) -> dict[str, Tensor]:
    """Weights, moments and old logprobs."""
    state = capture(learner).clone()
    flat = {f"weights/{name}": value for name, value in state.weights.items()}
    flat |= {f"{key}/{name}": value for name, kept in state.moments.items() for key, value in kept.items()}
    return flat | {f"old/{key}": value for key, value in state.old.items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def break_scores(
    monkeypatch: pytest.MonkeyPatch, guilty: list[TrainSample], value: float, *, gradient: bool = False
) -> None:
    """From now on the forward pass gives one logprob of these samples this value, or its backward pass does."""
    real = grpo.score_batch
    said = {tuple(s.completion_ids) for s in guilty}

    def score(net: Any, batch: Any, **how: Any) -> Any:
        scores = real(net, batch, **how)
        rows = [
            i
            for i, (ids, mask) in enumerate(zip(batch.completion_ids.tolist(), batch.mask.tolist(), strict=True))
            if tuple(t for t, on in zip(ids, mask, strict=True) if on) in said
        ]
        spoil = torch.zeros_like(batch.mask)
        spoil[rows, 0] = True
        if not gradient:
            return scores._replace(logprobs=scores.logprobs.masked_fill(spoil, value))
        if rows and scores.logprobs.requires_grad:
            scores.logprobs.register_hook(lambda grad: grad.masked_fill(spoil, value))
        return scores

    monkeypatch.setattr(grpo, "score_batch", score)


# -- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("gradient", [False, True], ids=["loss", "gradient"])
def test_a_refused_step_names_its_one_guilty_sample(
    value: float, gradient: bool, make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner, guilty = make(net), samples[9]
    before = bits(learner)
    break_scores(monkeypatch, [guilty], value, gradient=gradient)
    report = learner.learn(samples)
    assert not report.applied
    assert [text.partition(": ")[0] for text in report.suspects] == [name_of(guilty)]
    assert name_of(guilty) == "task=t2/group=train/0/2/rollout=1"
    assert ("gradient norm is" in report.suspects[0]) == gradient
    assert equal({k: v for k, v in bits(learner).items() if not k.startswith("old")}, before)
    assert all(p.grad is None for p in learner.net.parameters())


def test_several_guilty_samples_are_all_named(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    break_scores(monkeypatch, [samples[0], samples[10]], NAN)
    report = make(net).learn(samples)
    assert [text.partition(": ")[0] for text in report.suspects] == [name_of(samples[0]), name_of(samples[10])]


def test_the_search_leaves_no_trace(make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused pass, then a good one: as if the refused one had never been looked into."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner, other = make(net), make(net)
    with monkeypatch.context() as patch:
        break_scores(patch, [samples[0]], NAN, gradient=True)
        learner.learn(samples)
        patch.setattr(other, "_nonfinite_sources", lambda *everything: ())
        other.learn(samples)
    assert learner.checked_tokens == other.checked_tokens
    assert equal(bits(learner), bits(other)), "old logprobs included: those of the step's own cut"
    assert learner.learn(samples, iteration=1).applied
    assert other.learn(samples, iteration=1).applied
    assert equal(bits(learner), bits(other))


def test_an_applied_step_looks_at_nobody(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "nonfinite_sources", None)
    report = make(make_net()).learn(sampled_groups(make_net(), REWARDS))
    assert (report.applied, report.suspects, report.notes) == (True, (), ())


def test_when_only_the_sum_overflows_no_sample_is_blamed(make_net: Any, sampled_groups: Sample) -> None:
    """Every microbatch's gradient is finite; the second one added to the first is not."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner = make(net, microbatch_size=6)
    parameter = learner.net.model.norm.weight

    def overflow(p: Tensor) -> None:
        assert p.grad is not None
        pieces.append(1)
        p.grad.fill_(INF if len(pieces) == 2 else 1.0)

    pieces: list[int] = []
    hook = parameter.register_post_accumulate_grad_hook(overflow)
    report = learner.learn(samples)
    hook.remove()
    assert not report.applied
    assert report.suspects == ("no single sample: grad_norm is inf, yet each of 8 samples is finite by itself",)


def test_broken_weights_are_named_and_no_sample_is_blamed_for_them(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    learner = make(net)
    with torch.no_grad():
        learner.net.model.layers[0].mlp.up_proj.weight[0, 0] = NAN
    report = learner.learn(samples)
    assert not report.applied
    assert report.suspects == ("weights of model.layers.0.mlp.up_proj.weight: 1 of 1536 numbers are not finite",)


@pytest.mark.parametrize("key", ["step", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_broken_moment_refuses_the_step_and_is_named(
    key: str, value: float, make_net: Any, sampled_groups: Sample
) -> None:
    """The gradient is fine; AdamW alone would write the NaN into the weight, or never move it again."""
    net = make_net()
    learner = make(net)
    learner.learn(sampled_groups(net, REWARDS))
    parameter = learner.net.model.norm.weight
    learner.optimiser.state[parameter][key].view(-1)[0] = value
    before = {name: p.detach().clone() for name, p in learner.net.named_parameters()}
    report = learner.learn(sampled_groups(learner.net, REWARDS, version=1))
    assert not report.applied
    size = parameter.numel() if key != "step" else 1
    assert report.suspects == (f"optimiser state of model.norm.weight, {key}: 1 of {size} numbers are not finite",)
    assert equal(before, dict(learner.net.named_parameters()))


def test_a_first_step_without_signal_is_refused_too_when_a_score_is_not_finite(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    samples = sampled_groups(net, [[1, 1], [0, 0]])
    break_scores(monkeypatch, [samples[1]], NAN)
    report = make(net).learn(samples)
    assert not report.applied
    assert [text.partition(": ")[0] for text in report.suspects] == [name_of(samples[1])]


def test_a_state_after_a_refused_first_pass_can_be_saved_and_restored(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old logprobs were not finite: they are kept as missing, and the second pass is refused in both lives."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    first, second = make(net), make(make_net(seed=5))
    with monkeypatch.context() as patch:
        break_scores(patch, [samples[0]], NAN)
        assert not first.learn(samples).applied
    restore(second, capture(first).clone())
    reports = [learner.learn(samples, iteration=1) for learner in (first, second)]
    assert [r.applied for r in reports] == [False, False]
    assert reports[0].suspects == reports[1].suspects == (f"{name_of(samples[0])}: loss is nan",)


def test_memory_that_runs_out_in_the_search_does_not_hide_the_refusal(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    samples = sampled_groups(net, [[1, 0]])

    def examine(sample: TrainSample) -> dict[str, float]:
        raise MemoryError

    found = nonfinite_sources(samples, examine, net=net, optimiser=make(net).optimiser, seen=("loss is nan",))
    assert found == tuple(f"{name_of(s)}: nobody could look, memory ran out" for s in samples)

    def broken(sample: TrainSample) -> dict[str, float]:
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        nonfinite_sources(samples, broken, net=net, optimiser=make(net).optimiser, seen=())


def test_planted_search_that_blames_the_whole_batch_is_seen(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "nonfinite_sources", lambda samples, *a, **k: tuple(name_of(s) for s in samples))
    with pytest.raises(AssertionError):
        test_a_refused_step_names_its_one_guilty_sample(NAN, False, make_net, sampled_groups, monkeypatch)


# -- words ----------------------------------------------------------------------------------------


def test_numbers_that_are_not_finite_are_told_with_the_loss_first() -> None:
    assert not_finite({"a": 1.0, "grad_norm": INF, "loss": NAN}) == ("loss is nan", "grad_norm is inf")
    assert not_finite({"a": -1e308, "loss": 0.0}) == ()
    assert not_finite({}) == ()


def test_the_error_names_the_suspects_and_counts_the_rest() -> None:
    error = nonfinite_error([], 3, [f"task=t{i}/group=g/rollout=0: loss is nan" for i in range(11)])
    assert error.what.startswith("3 steps in a row")
    assert "task=t7/group=g/rollout=0: loss is nan; and 3 more" in error.what
    assert "t8" not in error.what
    assert error.exit_code == 78
