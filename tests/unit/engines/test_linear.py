"""The packed product is the plain product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.engines.decoder import FixedRowsLinear


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "fallback"])
def test_the_product_equals_the_plain_one(
    biased: bool, packs: bool, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(37, 24, generator=generator), torch.randn(16, 24, generator=generator)
    bias = torch.randn(37, generator=generator) if biased else None
    layer = FixedRowsLinear(weight, bias, 16)
    assert (layer.packed is None) == (not packs) or not torch.backends.mkl.is_available()
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "fallback"])
def test_later_changes_of_the_weight_are_not_seen(
    packs: bool, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packs:
        monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    weight, x = torch.ones(8, 4), torch.ones(16, 4)
    layer = FixedRowsLinear(weight, None, 16)
    weight.zero_()
    assert torch.equal(layer(x), torch.full((16, 8), 4.0))


def test_bfloat16_takes_the_plain_layout(one_thread: None) -> None:
    weight: Any = torch.randn(8, 4).bfloat16()
    x: Any = torch.randn(16, 4).bfloat16()
    layer = FixedRowsLinear(weight, None, 16)
    assert layer.packed is None
    torch.testing.assert_close(layer(x).float(), torch.nn.functional.linear(x, weight).float(), atol=1e-2, rtol=1e-2)
