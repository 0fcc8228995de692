"""A small learner, its parameters, and the rows of its microbatches."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.learner.auxiliary_losses import AuxiliaryLosses
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.lora import Adapter, LoraSettings
from surefoot.learner.precision import split_precision
from surefoot.learner.sharding import OneRank
from surefoot.maths.losses import LossSettings
from surefoot.records import TrainSample

SampleGroups = Callable[..., list[TrainSample]]
"""What the fixture `sampled_groups` is."""


def make(
    net: Any, loss: LossSettings | None = None, *, ranks: OneRank | None = None, lora: LoraSettings | None = None,
    dtype: torch.dtype = torch.float32, channels: Callable[[Any], AuxiliaryLosses] | None = None, **changes: Any,
) -> GRPOLearner:  # fmt: skip
    """A learner of a copy of this net, with an adapter where that is asked for; of a part of it, on several ranks.

    Args:
        channels: the losses beside the policy's, of the net as it is whole.
    """
    settings = LearnerSettings(
        loss=loss or LossSettings(), learning_rate=1e-2, max_steps=10, max_completion_length=9, temperature=1.0,
        pad_token_id=0,
    )  # fmt: skip
    net = copy.deepcopy(net)
    masters = split_precision(net, dtype)
    beside = None if channels is None else channels(net)
    adapter = None if lora is None else Adapter(net, lora, masters)
    numbers = dataclasses.replace(settings, **changes)
    return GRPOLearner(net, numbers, beside, masters=masters, adapter=adapter, ranks=ranks)


def parameters(learner: GRPOLearner) -> dict[str, Tensor]:
    """Its parameters as they are now."""
    return {name: p.detach().clone() for name, p in learner.net.named_parameters()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def counted_rows(learner: GRPOLearner) -> list[int]:
    """Rows of every microbatch from now on; each costs a forward."""
    rows: list[int] = []
    real = learner._pack

    def pack(piece: Sequence[TrainSample]) -> Any:
        rows.append(len(piece))
        return real(piece)

    learner._pack = pack  # type: ignore[method-assign]
    return rows
