"""Silent failure 25: the KL penalty is measured the wrong way round, and still grows when the policy moves."""

from __future__ import annotations

import math

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net
from torch import Tensor

from surefoot.maths import losses
from surefoot.maths.losses import estimate_kl

POLICY, REFERENCE = (0.9, 0.1), (0.3, 0.7)  # far apart: the two directions differ by 0.4 nats


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def expected(estimator: str) -> float:
    """The estimate's mean over tokens drawn from the policy, and its gradient's: no sampling noise."""
    policy, reference = (torch.tensor(d, dtype=torch.float64) for d in (POLICY, REFERENCE))
    return float((policy * losses.estimate_kl(reference.log() - policy.log(), estimator)).sum())  # type: ignore[arg-type]


def check(estimator: str) -> None:
    assert expected(estimator) == pytest.approx(kl(POLICY, REFERENCE), abs=1e-12)


def test_the_two_directions_are_far_apart() -> None:
    assert abs(kl(POLICY, REFERENCE) - kl(REFERENCE, POLICY)) > 0.2


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_policy_samples_is_the_kl_from_policy_to_reference(estimator: str) -> None:
    check(estimator)


def test_a_token_that_became_likelier_than_in_the_reference_is_pushed_down() -> None:
    logp = torch.tensor([math.log(0.9)], requires_grad=True)
    (gradient,) = torch.autograd.grad(estimate_kl(math.log(0.3) - logp, "k3").sum(), logp)
    assert float(gradient) == pytest.approx(1 - 0.3 / 0.9)


def drift(beta: float) -> float:
    """How far eight steps on one set of samples carry the policy from where it began."""
    net = tiny_net()
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    learner = make_learner(net, loss={"beta": beta}, learning_rate=3e-3)
    samples = sampled(net)
    for iteration in range(8):
        metrics = learner.learn(samples, iteration=iteration).metrics
    assert not torch.equal(start, torch.cat([p.detach().flatten() for p in net.parameters()]))
    return float(metrics["kl"])


def test_a_larger_beta_keeps_the_policy_nearer() -> None:
    assert 0 < drift(3.0) < 0.7 * drift(0.01)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_planted_reversed_direction_is_seen(monkeypatch: pytest.MonkeyPatch, estimator: str) -> None:
    def reversed_kl(gap: Tensor, kind: str) -> Tensor:
        return estimate_kl(-gap, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(losses, "estimate_kl", reversed_kl)
    with pytest.raises(AssertionError):
        check(estimator)
