"""Silent failure 26: the choice of KL estimator falls through to one of them, so that the option does nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.maths.losses import estimate_kl

GAP = torch.tensor([0.5, -0.7, 0.0, 2.0], dtype=torch.float64)
BY_HAND = {"k1": -GAP, "k2": GAP * GAP / 2, "k3": GAP.exp() - GAP - 1}


def check(estimate: Callable[[Tensor, str], Tensor]) -> None:
    values = {kind: estimate(GAP, kind) for kind in BY_HAND}
    for kind, value in values.items():
        torch.testing.assert_close(value, BY_HAND[kind])
    assert len({tuple(value.tolist()) for value in values.values()}) == 3


def falls_through(gap: Tensor, kind: str) -> Tensor:
    """The planted bug: `if`, `if`, `else` where `elif` was meant."""
    if kind == "k1":
        value = -gap
    if kind == "k2":
        value = gap.square() / 2
    else:
        value = gap.exp() - gap - 1
    return value


def test_three_settings_give_three_values_and_each_is_the_one_it_names() -> None:
    check(estimate_kl)  # type: ignore[arg-type]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="k4"):
        estimate_kl(GAP, "k4")  # type: ignore[arg-type]


def test_planted_fall_through_is_seen() -> None:
    with pytest.raises(AssertionError):
        check(falls_through)
