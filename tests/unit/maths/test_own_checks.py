"""What is asked of a loss or an estimator that nobody has looked at: ours all hold it, and each planted fault is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ShapeError
from surefoot.maths import losses
from surefoot.maths.advantages import ESTIMATORS
from surefoot.maths.losses import LOSSES, LossInputs, LossKind, LossSettings, mean_over_rows
from surefoot.maths.own_checks import estimator_breach, loss_breach

OTHERS: tuple[dict[str, Any], ...] = (
    {}, {"beta": 0.1}, {"beta": 0.1, "kl_estimator": "k1"}, {"level": "sequence"}, {"delta": 6.0},
    {"correction": "sequence_mask"}, {"correction": "token_truncate"}, {"positive_nll": 0.1},
)  # fmt: skip


def allowed(loss_type: str) -> Iterator[LossSettings]:
    """The loss under every one of these settings that it takes."""
    for keys in OTHERS:
        try:
            yield LossSettings(loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else None, **keys)
        except losses.ConfigError:
            continue


@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_of_ours_holds_all_of_it(loss_type: str) -> None:
    tried = [loss_breach(settings) for settings in allowed(loss_type)]
    assert len(tried) >= 4, "settings that it takes"
    assert set(tried) == {None}


def plain(inputs: LossInputs) -> Tensor:
    return -inputs.ratio * inputs.advantages


def own(objective: Callable[[LossInputs], Any], **keys: Any) -> LossSettings:
    return LossSettings(loss_type="own", own=LossKind(objective=objective, caps_ratio=True, **keys))


def dice(inputs: LossInputs) -> Tensor:
    return plain(inputs) * torch.rand(())


def in_place(inputs: LossInputs) -> Tensor:
    inputs.advantages.mul_(1.5)
    return plain(inputs)


def columns(inputs: LossInputs) -> Tensor:
    return plain(inputs) / inputs.logp.shape[1]


def least_of_all(inputs: LossInputs) -> Tensor:
    return plain(inputs) * inputs.advantages.abs().max()


def overflows(inputs: LossInputs) -> Tensor:
    return plain(inputs) * (9 * (inputs.logp - inputs.old_logp)).exp().square()


def average(inputs: LossInputs) -> dict[str, Tensor]:
    return {"ratio": (inputs.ratio * inputs.mask).sum() / inputs.mask.sum().clamp(min=1)}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (own(lambda i: plain(i) / i.mask.sum()), "the loss of a step depends on its cut"),
        (own(least_of_all), "the loss of a step depends on its cut"),
        (own(lambda i: plain(i) - plain(i).mean(0)), "the loss of a step depends on its cut"),
        (own(plain, sums=average), "the sum ratio of a step depends on its cut"),
        (own(columns), "the loss of a step depends on padding"),
        (own(overflows), "the loss is not finite"),
        (own(lambda i: (i.ratio - i.ratio.detach()).square().sqrt() - i.advantages), "its gradient is not finite"),
        (own(lambda i: plain(i).detach()), "no gradient on any token"),
        (own(lambda i: -i.logp), "a row with an advantage of 0 adds"),
        (own(dice), "the same rows gave two values"),
        (own(in_place), "it changes advantages in place"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_planted_fault_of_a_loss_is_named(settings: LossSettings, named: str) -> None:
    breach = loss_breach(settings)
    assert breach is not None
    assert named in breach.what


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (own(lambda i: plain(i).sum()), "gave the shape ()"),
        (own(lambda i: plain(i).sum(1)), "gave the shape (6,)"),
        (own(lambda i: plain(i)[:, :1]), "gave the shape (6, 1)"),
        (own(lambda i: plain(i).double()), "gave torch.float64 for torch.float32"),
        (own(lambda i: 0.5), "gave a float"),
        (own(plain, sums=lambda i: {"ratio": i.ratio}), "declares the sum 'ratio' with shape (6, 13)"),
        (own(plain, sums=lambda i: {"a b": i.ratio.sum()}), "declares the sum 'a b'"),
        (own(plain, sums=lambda i: {"ratio_max": i.ratio.max()}), "declares the sum 'ratio_max'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_wrong_form_is_refused_where_it_is_used(settings: LossSettings, named: str) -> None:
    with pytest.raises(ShapeError) as caught:
        loss_breach(settings)
    assert named in caught.value.what


@pytest.mark.parametrize(
    "keys", [{}, {"reduce": mean_over_rows}, {"sums": lambda i: {"ratio": (i.ratio * i.mask).sum()}}]
)
def test_a_sound_loss_of_somebody_else_is_taken(keys: dict[str, Any]) -> None:
    assert loss_breach(own(plain, **keys)) is None


def test_rows_without_advantage_may_have_a_gradient_where_that_is_declared() -> None:
    assert loss_breach(own(lambda i: plain(i) - 0.01 * i.logp, every_row=True)) is None


def test_masks_that_leak_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in our own half: nothing is selected away behind the loss."""
    monkeypatch.setattr(losses, "_reduce", lambda per_token, mask, counts, settings, totals: per_token.sum())
    breach = loss_breach(own(lambda i: -(i.ratio + i.logp.exp()) * i.advantages))
    assert breach is not None, "a masked token added to the loss"


def test_asking_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    loss_breach(own(dice))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_of_ours_holds_all_of_it(name: str) -> None:
    assert estimator_breach(ESTIMATORS[name]) is None


def spoiled(values: Tensor, batch_std: Tensor) -> Tensor:
    values.sub_(values.mean())
    return values


@pytest.mark.parametrize(
    ("estimate", "named"),
    [
        (lambda values, std: values, "they do not add up to 0"),
        (lambda values, std: values.mean() - values, "a lower reward has the higher advantage"),
        (lambda values, std: values * 0, "no advantage at all"),
        (lambda values, std: (values - values.mean()) * torch.rand(()).double(), "and then"),
        (lambda values, std: torch.linspace(-1, 1, len(values)).double() * (values - values.mean()).abs().max(), "another order"),
        (spoiled, "in place"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_each_planted_fault_of_an_estimator_is_named(estimate: Any, named: str) -> None:
    breach = estimator_breach(estimate)
    assert breach is not None
    assert named in breach.what


@pytest.mark.parametrize(
    "given", [lambda v, s: v.mean(), lambda v, s: v.float(), lambda v, s: v.tolist(), lambda v, s: None]
)
def test_an_estimator_of_another_form_is_refused(given: Any) -> None:
    with pytest.raises(ShapeError, match="the advantage estimator gave"):
        estimator_breach(given)
