"""Float32 masters: what is trained, beside the coarser copy that computes.

bfloat16 keeps 8 bits of a number. At a learning rate of 1e-6 more than nine updates in ten are smaller than half of the
last of them, and a weight that is kept in bfloat16 rounds them away, step after step. So the network computes in
bfloat16, and the optimiser steps float32 masters of the same parameters.

    backward   a parameter's gradient is added to its master's in float32 and then freed, before the next microbatch
    step       the optimiser moves the master; the network's parameter becomes the master, rounded to nearest

Owns       the masters, and the two ways between them and the network's parameters.
Over several ranks the masters are what is cut, and a layer's gathered copy is what computes (`MasterShards`).

Promises   a network parameter always is its master, rounded: engines, checkpoints and scores see one policy; gradients
           of microbatches are added up in float32; a parameter that shares its memory with another has one master.
Never      exists for parameters that are float32 already: those are trained themselves, bit for bit as without this.

A device that has no products in bfloat16 is refused before a model is read: some processors say that they have them and
kill whoever tries.

Read next: `updates.py`, the step; `model.py`, where masters get the model file's own precision.
"""

from __future__ import annotations

import faulthandler
import os
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from surefoot.errors import ConfigError, InvariantError
from surefoot.system.process import Child

Named = dict[str, Tensor]
PATIENCE_S = 20.0
"""How long a product of two small matrices may take on a busy machine."""


@cache
def require_precision(device: str, dtype: str) -> None:
    """Raise unless the device multiplies in this precision."""
    why = None
    if dtype == "bfloat16" and device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        why = "it has no such products, and would compute each in another way"
    elif dtype == "bfloat16" and device == "cpu":
        why = _why_no_products()
    if why is not None:
        raise ConfigError(
            f"dtype = {dtype} on device {device}: {why}", "the run would die in its first product, or be hours slower",
            'set dtype = "float32", or use another device',
        )  # fmt: skip


def _why_no_products() -> str | None:
    """A product in bfloat16, in a process that may die of it."""
    with Child.fork(_multiply) as child:
        code = child.wait(PATIENCE_S)
    if code is None or code == 0:  # one that hangs has met a lock that was held when it was forked: that says nothing
        return None
    return f"a product ends its process (signal {-code})" if code < 0 else "a product of ones comes out wrong"


def _multiply() -> NoReturn:
    faulthandler.disable()  # whoever waits says how it ended
    torch.set_num_threads(1)  # the threads of the process that was copied are not here
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    os._exit(0 if float((ones @ ones).sum()) == 64**3 else 1)


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

    rounds: torch.dtype | None = None
    """What engines get is rounded to this; None where what computes is kept, rounded."""

    @property
    def beside(self) -> Named:
        """What is stepped in place of the network's own parameters, by name."""
        return self.tensors

    def by_tensor(self) -> dict[Tensor, Tensor]:
        """Master -> what computes."""
        return {self.tensors[name]: copy for name, copy in self.copies.items()}

    def rounded(self, tensors: Named) -> Named:
        """The network's tensors as it computes with them: they are."""
        return tensors


class MasterShards:
    """Masters that are the network's own parameters, in shards over ranks; each layer is rounded as it is gathered.

    There is no rounded copy between two passes. What engines and checkpoints get is rounded for them.

    Args:
        net: already cut.
        dtype: what it computes in.
    """

    def __init__(self, net: Any, dtype: torch.dtype) -> None:
        self.rounds: torch.dtype = dtype
        self.tensors: Named = dict(net.named_parameters())
        """What is trained, by name; in shards."""
        self.beside: Named = {}

    def by_tensor(self) -> dict[Tensor, Tensor]:
        """Nothing that computes is kept."""
        return {}

    def rounded(self, tensors: Named) -> Named:
        """The network's tensors as it computes with them; what is trained is in memory of its own."""
        return {name: value.to(self.rounds) if name in self.tensors else value for name, value in tensors.items()}


def put_masters(net: Any, given: Mapping[str, Tensor] | None = None) -> torch.dtype | None:
    """Give a network its float32 masters for parameters, before it is cut; returns what it is to compute in.

    None, and nothing changed, where it has no parameters coarser than float32.
    """
    own: Named = dict(net.named_parameters())
    kinds: set[torch.dtype] = {p.dtype for p in own.values()}
    if not any(map(is_low_precision, own.values())):
        return None
    if len(kinds) > 1:
        raise InvariantError(
            f"the network computes in {', '.join(sorted(map(str, kinds)))} at once",
            "rounded as they are gathered, all of its layers would compute in one of them",
            "report this with the model's config.json; set runtime.learner_ranks = 1",
        )
    for name, parameter in own.items():
        parameter.data = _master(name, parameter, given).detach()
    return kinds.pop()


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
