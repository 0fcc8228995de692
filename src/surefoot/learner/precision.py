"""Float32 masters: what is trained, beside the coarser copy that computes.

bfloat16 keeps 8 bits of a number. At a learning rate of 1e-6 more than nine updates in ten are smaller than half of the
last of them, and a weight that is kept in bfloat16 rounds them away, step after step. So the network computes in
bfloat16, and the optimiser steps float32 masters of the same parameters.

    backward   a parameter's gradient is added to its master's in float32 and then freed, before the next microbatch
    step       the optimiser moves the master; the network's parameter becomes the master, rounded to nearest

Owns       the masters, and the two ways between them and the network's parameters.
Promises   a network parameter always is its master, rounded: engines, checkpoints and scores see one policy; gradients
           of microbatches are added up in float32; a parameter that shares its memory with another has one master.
Never      exists for parameters that are float32 already: those are trained themselves, bit for bit as without this.

Read next: `updates.py`, the step; `model.py`, where masters get the model file's own precision.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import InvariantError

Named = dict[str, Tensor]


class MasterWeights:
    """A float32 master for every parameter of a network that is coarser than float32.

    Args:
        given: the same parameters by name in float32, as the model's file has them; they become the masters, in the
            memory they are in. Without them the masters begin as the network's parameters are.
    """

    def __init__(self, net: Any, given: Mapping[str, Tensor] | None = None) -> None:
        self.copies: Named = {name: p for name, p in net.named_parameters() if is_low_precision(p)}
        """What computes, by name."""
        self.tensors: Named = {name: _master(name, p, given) for name, p in self.copies.items()}
        """What is trained, by name."""
        handles = [
            copy.register_post_accumulate_grad_hook(_lift(name, self.tensors[name]))
            for name, copy in self.copies.items()
        ]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def by_tensor(self) -> dict[Tensor, Tensor]:
        """Master -> what computes."""
        return {self.tensors[name]: copy for name, copy in self.copies.items()}


def is_low_precision(tensor: Tensor) -> bool:
    """Whether a parameter of this kind rounds small updates away."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize


def make_master_weights(net: Any, given: Mapping[str, Tensor] | None = None) -> MasterWeights | None:
    """Masters where the network is coarser than float32; None where its own parameters are trained."""
    return MasterWeights(net, given) if any(map(is_low_precision, net.parameters())) else None


def split_precision(net: Any, dtype: torch.dtype) -> Named | None:
    """Round a float32 network's parameters to `dtype`, in place; returns the float32 ones, None if nothing changed.

    Buffers stay as they are: the frequencies of rotary positions, rounded, would turn late tokens to wrong angles.
    """
    if dtype == torch.float32:
        return None
    kept: Named = {}
    for name, parameter in net.named_parameters():
        kept[name] = parameter.data
        parameter.data = parameter.data.to(dtype)
    net.config.dtype = dtype
    return kept


def _master(name: str, parameter: Tensor, given: Mapping[str, Tensor] | None) -> Tensor:
    value = parameter.detach().float() if given is None else given.get(name)
    if value is None or value.shape != parameter.shape or value.dtype != torch.float32:
        raise InvariantError(
            f"{name} has no float32 master of its shape {tuple(parameter.shape)}",
            "it would be trained in another precision than the rest",
            "hand over the masters that `load_policy` made with the model",
        )
    value = value.detach()
    if not torch.equal(value.to(parameter.dtype), parameter.detach()):
        raise InvariantError(
            f"{name} is not its master, rounded",
            "what computes and what is trained would be two models",
            "hand over the masters that `load_policy` made with the model",
        )
    return value.requires_grad_(True)


def _lift(name: str, master: Tensor) -> Callable[[Tensor], None]:
    """Called by autograd when a backward pass has finished with this parameter."""

    def lift(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise InvariantError(
                f"the gradient of {name} was taken before its master came for it",
                "two learners share one network, and one of them would learn nothing",
                "give each learner a network of its own",
            )
        if master.grad is None:
            master.grad = gradient.detach().float()
        else:
            master.grad.add_(gradient.detach())

    return lift
