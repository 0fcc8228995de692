"""Optimisers and their memory: made before they are stepped on, looked at before they are trusted.

Promises   after `allocate_moments` a step needs no further memory of any size (`adamw_8bit`: some copies of one
           slice), so memory cannot run out half-way through the weights; one number that is not finite, anywhere in
           a list of tensors, is found and named.
Never      steps.

Read next: `grpo.py`, the only one who steps; `low_bit.py`, moments in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from surefoot.learner.tensor_file import Spec

DUE = 0.01
"""An entry is due when Adam's update of it is at least this share of the learning rate."""


Added = Callable[[Sequence[float]], list[float]]


class Moments(Protocol):
    """What an optimiser remembers of a parameter, and what it asks of each of its entries."""

    def zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the optimiser itself would make at its first step; empty where it remembers nothing."""

    def specs(self, parameter: Tensor) -> dict[str, Spec]:
        """The same as a checkpoint holds it."""

    def look(self, optimiser: torch.optim.Optimizer) -> None:
        """Before a step, with all gradients there: what `asked` has to know of whole tensors."""

    def asked(
        self, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any], steps: float,
        views: list[Tensor], flat: Tensor, spare: tuple[list[Tensor], Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """(n,) the size of each entry's update, where 1 is due; in `flat`, whose views these are, or in `spare`."""


class AdamMoments:
    """Two moments, each as large as the parameter."""

    def zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """See `Moments`."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def specs(self, parameter: Tensor) -> dict[str, Spec]:
        """See `Moments`."""
        own = Spec.of(parameter)
        return {"step": Spec("F32", ()), "exp_avg": own, "exp_avg_sq": own}

    def look(self, optimiser: torch.optim.Optimizer) -> None:
        """Nothing: an entry's own moments say all."""

    def asked(
        self, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any], steps: float,
        views: list[Tensor], flat: Tensor, spare: tuple[list[Tensor], Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """See `Moments`."""
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        if spare is not None:  # a few launches for all tensors
            firsts, flat_firsts = spare
            torch._foreach_copy_(views, squares)
            torch._foreach_copy_(firsts, averages)
            return flat_firsts.div_(due_bound(flat.sqrt_(), group, steps)).abs_()
        for square, bound in zip(squares, views, strict=True):
            torch.sqrt(square, out=bound)
        due_bound(flat, group, steps)
        for average, bound in zip(averages, views, strict=True):
            torch.div(average, bound, out=bound)
        return flat.abs_()


def due_bound(root: Tensor, group: Mapping[str, Any], steps: float) -> Tensor:
    """What Adam's first moment has to reach to be due, from the root of the second; in place."""
    beta1, beta2 = group["betas"]
    return root.div_(math.sqrt(1 - beta2**steps)).add_(group["eps"]).mul_(DUE * (1 - beta1**steps))


class NoMoments:
    """Plain gradient descent. An entry is due when its gradient is no smaller than DUE of the tensor's usual one.

    Args:
        added: each of these numbers over all ranks, where a tensor here is a part of one.
    """

    def __init__(self, added: Added = list) -> None:
        self._added = added
        self._usual: dict[Tensor, float] = {}

    def zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """See `Moments`."""
        return {}

    def specs(self, parameter: Tensor) -> dict[str, Spec]:
        """See `Moments`."""
        return {}

    def look(self, optimiser: torch.optim.Optimizer) -> None:
        """The root of each tensor's mean square, over its parts on all ranks."""
        found = [(p, p.grad) for group in optimiser.param_groups for p in group["params"] if p.grad is not None]
        norms = torch.stack([gradient.norm() for _, gradient in found]).tolist() if found else []
        told = self._added([*(norm * norm for norm in norms), *(float(p.numel()) for p, _ in found)])
        squares, entries = told[: len(found)], told[len(found) :]
        self._usual = {
            p: math.sqrt(square / max(1.0, count))
            for (p, _), square, count in zip(found, squares, entries, strict=True)
        }

    def asked(
        self, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any], steps: float,
        views: list[Tensor], flat: Tensor, spare: tuple[list[Tensor], Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """See `Moments`."""
        for parameter, view in zip(params, views, strict=True):
            assert parameter.grad is not None, "a piece holds what has a gradient"
            torch.div(parameter.grad, DUE * self._usual[parameter], out=view)  # 0 / 0, without any gradient, is not due
        return flat.abs_()


class SGD(torch.optim.SGD):
    """torch's, without momentum: it remembers nothing."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, added: Added = list) -> None:
        super().__init__(groups, lr=lr, fused=True)
        self.remembers: Moments = NoMoments(added)


ADAM: Moments = AdamMoments()


def moments_of(optimiser: torch.optim.Optimizer) -> Moments:
    """How this optimiser remembers; AdamW's way where it does not say."""
    return getattr(optimiser, "remembers", ADAM)


def make_optimizer(
    trained: Iterable[Tensor], *, learning_rate: float, weight_decay: float, betas: tuple[float, float], epsilon: float,
    kind: str = "adamw", added: Added = list,
) -> torch.optim.Optimizer:  # fmt: skip
    """An optimiser over these parameters, a model's own or their masters; only matrices decay.

    Args:
        kind: see the config key `optim`.
        added: numbers of this rank -> the same of all ranks, each added up.
    """
    parameters = list(trained)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if kind == "sgd":
        return SGD(groups, lr=learning_rate, added=added)
    if kind == "adamw_8bit":
        from surefoot.learner.low_bit import AdamW8bit  # the only way to torchao

        return AdamW8bit(groups, learning_rate=learning_rate, betas=betas, epsilon=epsilon)
    assert kind == "adamw", f"the config takes no optimiser {kind!r}"
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=True)


def allocate_moments(optimiser: torch.optim.Optimizer) -> None:
    """Zeros for every parameter that has a gradient and no memory yet: what it would make itself, all or nothing."""
    remembers = moments_of(optimiser)
    parameters = (p for group in optimiser.param_groups for p in group["params"])
    made = {p: remembers.zeros(p) for p in parameters if p.grad is not None and not optimiser.state.get(p)}
    optimiser.state.update({p: kept for p, kept in made.items() if kept})


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number is finite, read once and without a copy."""
    values = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    if math.isfinite(float(get_total_norm(values))):
        return True
    # Squares of large finite numbers overflow too; the largest absolute value does not, but takes longer to find.
    return math.isfinite(float(get_total_norm(values, norm_type=math.inf)))


def moments(optimiser: torch.optim.Optimizer) -> list[Tensor]:
    """Everything an optimiser remembers."""
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
    parameters: Mapping[str, Tensor], optimiser: torch.optim.Optimizer, masters: Mapping[str, Tensor] | None = None
) -> Iterable[tuple[str, Tensor]]:
    """Weights, their masters, then the optimiser's memory, each under a name that a person can look up."""
    parameters = dict(parameters)
    masters = dict(masters or {})
    yield from ((f"weights of {name}", value) for name, value in parameters.items())
    yield from ((f"float32 master of {name}", value) for name, value in masters.items())
    for name, parameter in (parameters | masters).items():
        for key, value in optimiser.state.get(parameter, {}).items():
            yield f"optimiser state of {name}, {key}", value
