"""AdamW and its memory: made before it is stepped on, looked at before it is trusted.

Promises   after `allocate_moments` a step needs no further memory of any size, so memory cannot run out half-way
           through the weights; one number that is not finite, anywhere in a list of tensors, is found and named.
Never      steps.

Read next: `grpo.py`, the only one who steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm


def make_optimizer(
    trained: Iterable[Tensor], *, learning_rate: float, weight_decay: float, betas: tuple[float, float], epsilon: float
) -> torch.optim.AdamW:
    """AdamW over these parameters, a model's own or their masters; only matrices decay."""
    parameters = list(trained)
    decayed = [p for p in parameters if p.dim() >= 2]
    plain = [p for p in parameters if p.dim() < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
        lr=learning_rate, betas=betas, eps=epsilon, fused=True,
    )  # fmt: skip


def allocate_moments(optimiser: torch.optim.Optimizer) -> None:
    """Zeros for every parameter that has a gradient and no memory yet: what AdamW itself would make, all or nothing."""
    parameters = (p for group in optimiser.param_groups for p in group["params"])
    made = {p: _zeros(p) for p in parameters if p.grad is not None and not optimiser.state.get(p)}
    optimiser.state.update(made)


def _zeros(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite, read once and without a copy."""
    values = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    if math.isfinite(float(get_total_norm(values))):
        return True
    # Squares of large finite numbers overflow too; the largest absolute value does not, but takes longer to find.
    return math.isfinite(float(get_total_norm(values, norm_type=math.inf)))


def moments(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    """Everything AdamW remembers."""
    return [value for kept in optimiser.state.values() for value in kept.values()]


def name_not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """`weights of model.norm.weight: 3 of 32 numbers are not finite`, for each tensor that holds one."""
    found = []
    for name, value in named:
        bad = int((~value.detach().isfinite()).sum())
        if bad:
            found.append(f"{name}: {bad} of {value.numel()} numbers are not finite")
    return found


def named_state(
    net: Any, optimiser: torch.optim.Optimizer, masters: Mapping[str, Tensor] | None = None
) -> Iterable[tuple[str, Tensor]]:
    """Weights, their masters, then AdamW's memory, each under a name that a person can look up."""
    parameters: dict[str, Tensor] = dict(net.named_parameters())
    masters = dict(masters or {})
    yield from ((f"weights of {name}", value) for name, value in parameters.items())
    yield from ((f"float32 master of {name}", value) for name, value in masters.items())
    for name, parameter in (parameters | masters).items():
        for key, value in optimiser.state.get(parameter, {}).items():
            yield f"optimiser state of {name}, {key}", value
