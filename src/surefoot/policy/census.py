"""Which parameters got a gradient, and which really moved: counted once, after the first step.

An adapter that is bypassed, a frozen head, a learning rate of zero: the loss curve looks alive
in all three. The census does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Census:
    """Counts over parameter tensors, with the names of those left out."""

    total: int
    with_gradient: int
    moved: int
    still: tuple[str, ...]
    """Trainable tensors that did not change."""

    def metrics(self) -> dict[str, float]:
        """For the log line of the first step."""
        return {
            "census/parameters": float(self.total),
            "census/with_gradient": float(self.with_gradient),
            "census/moved": float(self.moved),
        }


@dataclass
class _Counter:
    before: dict[str, tuple[float, float]] = field(default_factory=dict)
    counted: Census | None = None

    def result(self) -> Census | None:
        return self.counted


@contextmanager
def take_census(trained: Mapping[str, Tensor], *, wanted: bool) -> Iterator[_Counter]:
    """Count around an optimiser step over these parameters; free when not wanted."""
    counter = _Counter()
    if not wanted:
        yield counter
        return
    named = [(n, p) for n, p in trained.items() if p.requires_grad]
    before = {name: _fingerprint(p) for name, p in named}
    gradients = sum(1 for _, p in named if p.grad is not None and bool((p.grad != 0).any()))
    yield counter
    still = tuple(name for name, p in named if _fingerprint(p) == before[name])
    counter.counted = Census(len(named), gradients, len(named) - len(still), still)


def _fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    """Two sums that change when almost any entry does; cheaper than a copy of the model."""
    data = tensor.detach()
    return float(data.sum(dtype=torch.float32 if data.device.type == "mps" else torch.float64)), float(data.norm())
