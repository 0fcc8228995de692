"""bfloat16 computes, float32 is trained: gradients go up, rounded weights come down, and nothing is lost on either way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from surefoot.errors import ConfigError, InvariantError, NumericsError
from surefoot.learner import grpo, precision
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.model import load_policy
from surefoot.learner.optimizer import make_optimizer
from surefoot.learner.precision import MasterWeights, make_master_weights, split_precision
from surefoot.maths.losses import LossSettings
from surefoot.records import TrainSample

pytestmark = pytest.mark.usefixtures("one_thread", "bfloat16_products")

REWARDS = [[1, 0, 0, 1], [0, 1, 0.5, 0], [1, 0, 1, 1]]
Sample = Callable[..., list[TrainSample]]


def settings(**changes: Any) -> LearnerSettings:
    numbers: dict[str, Any] = {
        "loss": LossSettings(), "learning_rate": 1e-6, "max_steps": 10, "max_completion_length": 9, "temperature": 1.0,
        "pad_token_id": 0, "parity_tolerance": 1.0, "weight_decay": 0.1,
    }  # fmt: skip
    return LearnerSettings(**(numbers | changes))


def make(net: Any, **changes: Any) -> GRPOLearner:
    """A learner that computes in bfloat16, with the float32 numbers of `net` as masters."""
    coarse = copy.deepcopy(net)
    masters = split_precision(coarse, torch.bfloat16)
    return GRPOLearner(coarse, settings(**changes), None, masters)


def stamped(samples: list[TrainSample], version: int) -> list[TrainSample]:
    from dataclasses import replace

    return [replace(s, trainer_version=version) for s in samples]


def assert_rounded(learner: GRPOLearner) -> None:
    """What computes is what is trained, rounded to nearest."""
    assert learner.masters is not None
    for name, parameter in learner.net.named_parameters():
        master = learner.trained()[name]
        assert (parameter.dtype, master.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(parameter, master.to(torch.bfloat16)), name


# -- where they come from -----------------------------------------------------------------------


def test_masters_are_the_files_own_numbers_and_only_parameters_are_rounded(model_folder: Path, make_net: Any) -> None:
    coarse, fine = (load_policy(str(model_folder), base=Path(), device="cpu", dtype=d) for d in ("bfloat16", "float32"))
    stored = load_file(model_folder / "model.safetensors")
    assert fine.masters is None
    assert coarse.masters is not None
    assert coarse.masters.keys() == dict(coarse.model.named_parameters()).keys() == stored.keys()
    assert all(torch.equal(coarse.masters[name], value) for name, value in stored.items())
    lost = sum(int((value.bfloat16().float() != value).sum()) for value in stored.values())
    assert lost > 1000, "a file whose numbers all fit into bfloat16 would show nothing"
    assert_rounded(GRPOLearner(coarse.model, settings(), None, coarse.masters))
    assert coarse.spec == fine.spec
    assert torch.equal(coarse.model.model.rotary_emb.inv_freq, fine.model.model.rotary_emb.inv_freq)


def test_tied_weights_have_one_master_and_stay_tied(make_net: Any) -> None:
    learner = make(make_net("llama"))
    assert "lm_head.weight" not in learner.trained()
    assert learner.net.lm_head.weight is learner.net.model.embed_tokens.weight


def test_float32_has_no_masters_and_trains_its_own_parameters(make_net: Any) -> None:
    learner = GRPOLearner(make_net(), settings())
    assert learner.masters is None
    assert split_precision(learner.net, torch.float32) is None
    assert all(one is two for one, two in zip(learner.trained().values(), learner.net.parameters(), strict=True))


def test_without_given_masters_they_begin_as_the_network_is(make_net: Any) -> None:
    learner = GRPOLearner(make_net().to(torch.bfloat16), settings())
    assert_rounded(learner)


@pytest.mark.parametrize("harm", ["missing", "shape", "other"])
def test_masters_of_another_network_are_refused(harm: str, make_net: Any) -> None:
    net = make_net()
    masters = split_precision(net, torch.bfloat16)
    assert masters is not None
    name = next(iter(masters))
    if harm == "missing":
        del masters[name]
    else:
        masters[name] = masters[name][1:] if harm == "shape" else masters[name] + 1
    with pytest.raises(InvariantError, match=name):
        GRPOLearner(net, settings(), None, masters)


# -- a step -------------------------------------------------------------------------------------


def test_the_optimiser_steps_masters_with_the_float32_gradient(make_net: Any, sampled_groups: Sample) -> None:
    """Against AdamW by hand, over the masters; three steps, weight decay, clipping."""
    net = make_net()
    learner = make(net, max_grad_norm=0.5, learning_rate=1e-3)
    samples = sampled_groups(net, REWARDS)
    by_hand = {name: value.detach().clone() for name, value in learner.trained().items()}
    theirs = make_optimizer(
        by_hand.values(), learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.999), epsilon=1e-8
    )  # fmt: skip
    for version in range(3):
        assert learner.learn(stamped(samples, version)).applied
        for name, value in by_hand.items():
            value.grad = learner.trained()[name].grad
            assert value.grad is not None
            assert value.grad.dtype == torch.float32
        norm = torch.nn.utils.get_total_norm([v.grad for v in by_hand.values() if v.grad is not None])
        assert float(norm) == pytest.approx(0.5, rel=1e-3), "clipped, all of them together"
        theirs.step()
        assert all(torch.equal(value, learner.trained()[name]) for name, value in by_hand.items())
        assert_rounded(learner)
    moments = [value for kept in learner.optimiser.state.values() for value in kept.values()]
    assert {value.dtype for value in moments} == {torch.float32}
    assert {p.dim() >= 2 for p in learner.optimiser.param_groups[0]["params"]} == {True}
    assert {p.dim() >= 2 for p in learner.optimiser.param_groups[1]["params"]} == {False}


def gradients(learner: GRPOLearner, samples: list[TrainSample]) -> dict[str, Tensor]:
    learner._gradient(samples, samples, 0)
    assert all(p.grad is None for p in learner.net.parameters()), "on its way up nothing stays behind"
    return {n: p.grad.clone() for n, p in learner.trained().items() if p.grad is not None}


def test_microbatches_are_added_up_in_float32(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    whole = make(net, microbatch_size=4)
    found = gradients(whole, samples)
    totals = whole._totals(samples)
    parts: list[dict[str, Tensor]] = []
    for at in range(0, len(samples), 4):
        alone = make(net)
        alone._backward(samples[at : at + 4], totals, 0)
        parts.append({n: p.grad for n, p in alone.trained().items() if p.grad is not None})
    assert len(parts) == 3
    coarse = 0
    for name, value in found.items():
        assert torch.equal(value, parts[0][name] + parts[1][name] + parts[2][name]), name
        coarse += int((value.bfloat16().float() != value).sum())
    assert coarse > 1000, "sums that fit into bfloat16 would show nothing"


def test_the_cut_matters_no_more_than_the_rounding_of_one_gradient(make_net: Any, sampled_groups: Sample) -> None:
    """The promise in bfloat16: the cut changes what each microbatch rounds, and nothing else."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    one, many = (gradients(make(net, microbatch_size=size), samples) for size in (0, 4))
    for name, value in one.items():
        gap = float((many[name] - value).norm() / value.norm())
        assert gap < 0.02, name


# -- what goes wrong on the way -------------------------------------------------------------------


def test_what_an_interrupted_backward_left_is_thrown_away(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory runs out while a gradient is on its way to its master: the step is done again, not added on top."""
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    expected, learner = make(net), make(net)
    expected.splits = 1
    expected.learn(samples)
    real, calls = learner._backward, []

    def once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            first = next(learner.net.parameters())
            first.grad = torch.ones_like(first)
            raise MemoryError("planted")
        return real(*args)

    monkeypatch.setattr(learner, "_backward", once)
    report = learner.learn(samples)
    assert report.applied
    assert learner.splits == 1
    assert all(torch.equal(value, learner.trained()[n]) for n, value in expected.trained().items())


def test_two_learners_of_one_network_are_refused_and_one_after_another_are_not(
    make_net: Any, sampled_groups: Sample
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    net.to(torch.bfloat16)
    first = GRPOLearner(net, settings())
    second = GRPOLearner(net, settings())
    with pytest.raises(InvariantError, match="two learners share one network"):
        second.learn(samples)
    del first
    second.forget_gradients()
    assert second.learn(samples).applied


def test_a_broken_master_is_named(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    learner, samples = make(net), sampled_groups(net, REWARDS)
    assert learner.learn(samples).applied
    name = "model.norm.weight"
    learner.optimiser.state[learner.trained()[name]]["exp_avg"][3] = math.nan
    report = learner.learn(stamped(samples, 1))
    assert not report.applied
    assert report.suspects == (f"optimiser state of {name}, exp_avg: 1 of 32 numbers are not finite",)
    learner.trained()[name].data[5] = math.inf
    report = learner.learn(stamped(samples, 1))
    assert report.suspects[0] == f"float32 master of {name}: 1 of 32 numbers are not finite"


def test_an_update_that_overflows_is_never_published(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    learner, samples = make(net, learning_rate=1e39), sampled_groups(net, REWARDS)
    with pytest.raises(NumericsError, match="not finite"):
        learner.learn(samples)


def test_a_reference_is_refreshed_from_what_computes(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    learner = make(net, loss=LossSettings(beta=0.1), learning_rate=1e-2, reference_sync_steps=1)
    learner.learn(sampled_groups(net, REWARDS))
    mine, theirs = learner.net.named_parameters(), learner.reference.named_parameters()
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))


# -- evidence -----------------------------------------------------------------------------------


def shares(learner: GRPOLearner, samples: list[TrainSample], name: str) -> list[float]:
    return [learner.learn(stamped(samples, version)).metrics[f"updates/{name}_share"] for version in range(4)]


def test_as_many_master_entries_change_as_in_float32_and_few_of_the_engines_copy(
    make_net: Any, sampled_groups: Sample
) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    fine = shares(GRPOLearner(copy.deepcopy(net), settings()), samples, "changed")
    assert shares(make(net), samples, "changed") == pytest.approx(fine, abs=0.01)
    assert shares(GRPOLearner(copy.deepcopy(net), settings()), samples, "published") == fine
    published = shares(make(net), samples, "published")
    assert min(published) > 0
    assert max(published) < 0.1
    assert min(fine) > 0.9


def test_weights_that_are_published_are_the_rounded_ones(make_net: Any) -> None:
    learner = make(make_net())
    assert {value.dtype for value in learner.weights().values()} == {torch.bfloat16}
    assert all(value is dict(learner.net.named_parameters())[name] for name, value in learner.weights().items())


def test_the_first_steps_of_a_long_warm_up_are_measured_and_not_judged(make_net: Any, sampled_groups: Sample) -> None:
    net = make_net()
    samples = sampled_groups(net, REWARDS)
    slow = make(net, warmup_steps=10**6, max_steps=2 * 10**6)
    report = slow.learn(samples)
    assert report.metrics["learning_rate"] == pytest.approx(1e-12)
    assert report.metrics["updates/changed_share"] < 0.5, "float32 itself rounds it away, and the log says so"
    for judged in ({"learning_rate": 1e-12}, {"warmup_steps": 10**6, "max_steps": 1}):
        with pytest.raises(NumericsError, match="its highest is 1e-12"):
            make(net, **judged).learn(samples)


# -- teeth --------------------------------------------------------------------------------------


def test_planted_optimiser_over_the_coarse_weights_stops_at_its_first_step(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "make_master_weights", lambda net, given: None)
    net = make_net()
    with pytest.raises(NumericsError, match=r"moved \d+ of them .*\n.*bfloat16.*\n.*learning_rate.*dtype"):
        make(net).learn(sampled_groups(net, REWARDS))


def test_planted_masters_that_never_come_down_are_seen(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MasterWeights, "by_tensor", lambda self: {})
    net = make_net()
    learner = make(net, learning_rate=1e-2)
    learner.learn(sampled_groups(net, REWARDS))
    with pytest.raises(AssertionError):
        assert_rounded(learner)


def test_planted_sum_in_bfloat16_is_seen(
    make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of microbatches that are added up where they are made, and lifted once."""
    from surefoot.learner import precision as masters

    def lift_rounded(name: str, master: Tensor) -> Callable[[Tensor], None]:
        def lift(parameter: Tensor) -> None:
            so_far = torch.zeros_like(parameter) if master.grad is None else master.grad.bfloat16()
            assert parameter.grad is not None
            master.grad, parameter.grad = (so_far + parameter.grad).float(), None

        return lift

    monkeypatch.setattr(masters, "_lift", lift_rounded)
    with pytest.raises(AssertionError):
        test_microbatches_are_added_up_in_float32(make_net, sampled_groups)


def test_planted_leftover_is_seen(make_net: Any, sampled_groups: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        GRPOLearner, "forget_gradients", lambda self: self.optimiser.zero_grad(set_to_none=True)
    )  # the network's own are left
    with pytest.raises(AssertionError), monkeypatch.context() as patch:
        test_what_an_interrupted_backward_left_is_thrown_away(make_net, sampled_groups, patch)


def test_masters_only_where_something_is_coarse(make_net: Any) -> None:
    assert make_master_weights(make_net()) is None
    assert make_master_weights(make_net().to(torch.bfloat16)) is not None


@pytest.mark.parametrize(
    ("device", "code", "said"),
    [("cuda", 0, "has no such products"), ("cpu", -4, "signal 4"), ("cpu", 1, "comes out wrong"), ("cpu", None, "")],
)
def test_a_device_without_products_in_bfloat16_is_refused(
    device: str, code: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(precision.Child, "wait", lambda self, limit: code)
    require = precision.require_precision.__wrapped__
    require(device, "float32")
    if not said:
        return require(device, "bfloat16")
    with pytest.raises(ConfigError, match=said):
        require(device, "bfloat16")
    return None
