"""The census counts what got a gradient and what moved, by name."""

from __future__ import annotations

from typing import Any

import torch

from surefoot.learner.updates import watch_updates


def layers() -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3), "c": torch.nn.Linear(3, 3)})


def test_moved_still_frozen_and_gradients_are_counted_apart() -> None:
    net = layers()
    net["c"].requires_grad_(False)
    net["a"].weight.grad = torch.ones(3, 3)
    net["a"].bias.grad = torch.zeros(3)
    with watch_updates(dict(net.named_parameters()), wanted=True) as found, torch.no_grad():
        net["a"].weight.add_(1e-6)
        net["b"].bias[1] += 1e-7
        net["c"].weight.add_(1.0)
    (updates,) = found
    assert (updates.total, updates.with_gradient, updates.moved) == (4, 1, 2)
    assert updates.still == ("a.bias", "b.weight")
    assert updates.metrics() == {"census/parameters": 4.0, "census/with_gradient": 1.0, "census/moved": 2.0}


def test_a_census_that_nobody_wants_counts_nothing() -> None:
    with watch_updates(dict(layers().named_parameters()), wanted=False) as found:
        pass
    assert found == []
