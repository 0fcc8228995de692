"""Which sample broke a step that was not finite: asked only then, so it costs nothing otherwise.

Promises   every sample is looked at by itself, as the step itself would have; the guilty are named with the number
           that gives them away; weights or an optimiser that are broken themselves are named instead; when nobody
           is guilty alone, that is said in so many words.
Never      leaves a gradient behind, touches the optimiser, or blames the whole batch because one of it is bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import NumericsError
from surefoot.learner.memory import is_out_of_memory
from surefoot.learner.optimizer import name_not_finite, named_state
from surefoot.records import TrainSample

SHOWN = 8
"""Names in an error; the dump in the run folder holds them all."""


def not_finite(metrics: Mapping[str, float]) -> tuple[str, ...]:
    """`loss is nan`, for every metric that is not a finite number; the loss first."""
    bad = [name for name, value in metrics.items() if not math.isfinite(value)]
    return tuple(f"{name} is {metrics[name]}" for name in sorted(bad, key=lambda name: (name != "loss", name)))


def nonfinite_sources(
    samples: Sequence[TrainSample], examine: Callable[[TrainSample], Mapping[str, float]], *, net: Any,
    optimiser: torch.optim.Optimizer, seen: Sequence[str], masters: Mapping[str, Tensor] | None = None,
    parameters: Mapping[str, Tensor] | None = None, everywhere: Callable[[list[str]], list[str]] = list,
) -> tuple[str, ...]:  # fmt: skip
    """Who is to blame for a refused step.

    Args:
        samples: those that took part in it.
        examine: one sample -> its own numbers, `loss` and `gradient norm` among them; leaves nothing behind.
        seen: what was not finite about the step as a whole, for the case that no part of it is to blame.
        masters: what the optimiser steps instead of the network's parameters of these names.
        parameters: those that are looked at, where they are not the network's own: its parts on this rank.
        everywhere: what was found here -> what was found on all ranks.

    Returns:
        Texts such as `task=sums/1+1/group=train/3/0/rollout=2: loss is nan`; never empty.
    """
    named = dict(net.named_parameters()) if parameters is None else parameters
    if broken := everywhere(name_not_finite(named_state(named, optimiser, masters))):
        return tuple(broken)  # with broken weights every sample looks guilty, and none is
    if guilty := [f"{name_of(sample)}: {fault}" for sample in samples if (fault := _fault(sample, examine))]:
        return tuple(guilty)
    return (f"no single sample: {', '.join(seen)}, yet each of {len(samples)} samples is finite by itself",)


def _fault(sample: TrainSample, examine: Callable[[TrainSample], Mapping[str, float]]) -> str:
    """What is wrong with one sample; empty when nothing is."""
    try:
        found = not_finite(examine(sample))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return "nobody could look, memory ran out"
    return found[0] if found else ""


def name_of(sample: TrainSample) -> str:
    """As its rollout writes itself."""
    return f"task={sample.item_id}/group={sample.group}/rollout={sample.index}"


def nonfinite_error(samples: Sequence[TrainSample], in_a_row: int, suspects: Sequence[str] = ()) -> NumericsError:
    """What to raise when too many steps in a row were refused; `suspects` are those of the last one."""
    told = list(suspects) or [f"tasks {', '.join(sorted({s.item_id for s in samples})[:SHOWN])}"]
    more = f"; and {len(told) - SHOWN} more" if len(told) > SHOWN else ""
    return NumericsError(
        f"{in_a_row} steps in a row had a non-finite loss or gradient; the last on {'; '.join(told[:SHOWN])}{more}",
        "no such step was applied; the weights are those of the last finite one",
        "lower learning_rate, or look at the dumped batch in the run folder",
    )
