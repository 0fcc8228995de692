"""Silent failure 04: equal rewards whose mean is off by one rounding, divided by an almost-zero deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from silent_kit import make_group, prepare

from surefoot.errors import InvariantError
from surefoot.learner import samples as samples_module

VALUES = [0.1, 1 / 3, 0.7, 1e3, 1e-30, -0.3]  # most are not exact in binary, so sums round
SIZES = [3, 5, 6, 7, 8]


def naive(rewards: Sequence[float], group_ids: Sequence[str], **_: Any) -> torch.Tensor:
    """The planted bug: textbook formula in float32, with the textbook's tiny constant."""
    values = torch.tensor(rewards, dtype=torch.float32)
    return ((values - values.mean()) / (values.std(unbiased=False) + 1e-9)).double()


@pytest.mark.parametrize("value", VALUES)
def test_a_constant_group_is_exactly_zero(value: float) -> None:
    for size in SIZES:
        assert {s.advantage for s in prepare([make_group([value] * size)])} == {0.0}


def test_no_advantage_exceeds_what_one_success_among_failures_can_earn() -> None:
    samples = prepare([make_group([1.0 + 1e-12, 1.0, 1.0, 1.0])])
    assert max(abs(s.advantage) for s in samples) <= 3**0.5


def test_planted_naive_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = [size for size in SIZES if naive([0.1] * size, []).abs().max() > 1e-3]
    assert noisy, "the planted formula must go wrong somewhere, or this test shows nothing"
    monkeypatch.setattr(samples_module, "compute_advantages", naive)
    with pytest.raises(InvariantError, match="equal rewards"):
        prepare([make_group([0.1] * noisy[0])])
