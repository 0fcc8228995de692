"""A frozen base in four bits: NF4 through bitsandbytes, for an adapter to be trained beside (QLoRA).

    file       float32 or bfloat16     its digest is the model's, whatever the weights are held in
    held       packed, scales          one of 16 levels per weight and a float32 scale per 64: 0.5625 bytes of a weight
    computed   level * scale           made anew for each product, in the precision that the model computes in

What comes back is the base from then on: learner, reference and engines compute with it, and none with the file's.

Owns       the layers that hold their weights so; the only place that knows bitsandbytes.
Promises   `weight` of such a layer is the matrix that it computes with, for whoever reads it: nobody meets the packed
           bytes under that name. Packing is done on the CPU, so every device holds the same bytes. When a model is
           packed, each weight that comes back is as near to its file as NF4 gets, and on another device the same.
Never      packs embeddings, the output layer or a module that is trained whole, or imports bitsandbytes unasked.

Read next: `lora.py`, what is trained beside it and what engines get.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name

from surefoot.errors import ConfigError, InvariantError, ModelError
from surefoot.learner.footprint import PACKED_WIDTH
from surefoot.maths.checksums import checksums
from surefoot.system.files import sha256_of_sized

NF4, NONE = "nf4", "none"
BLOCK = 64
"""Weights that share a scale."""
BYTES_PER_WEIGHT = PACKED_WIDTH  # BLOCK of them share a scale
DEVICES = ("cpu", "cuda")
"""Where it was tried."""
_SLACK = 1 + 1e-5
"""Of the distance between two levels: for what float32 rounds."""
_SMALLEST = 1e-37
"""A last block of nothing but zeros, filled in part, gets about so small a scale."""


def require_bitsandbytes(device: str) -> None:
    """Raise unless four bits can be had here: nobody who asked for them gets anything else without a word."""
    if device not in DEVICES:
        raise ConfigError(
            f"quantization = {NF4} on device {device} was never tried", "other bits may come back there than were kept",
            f"use one of {', '.join(DEVICES)}, or leave quantization out",
        )  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"quantization = {NF4} needs the package bitsandbytes",
            "without it the base would be held in full, and take up to seven times the memory",
            "pip install 'surefoot[quantization]', or leave quantization out",
        )
    try:
        _levels()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise ConfigError(
            f"quantization = {NF4}: bitsandbytes does not work here: {' '.join(str(error).split())[:200]}",
            "the base would be held in full, or not at all", "python -m bitsandbytes says more; or leave it out",
        ) from error  # fmt: skip


class QuantisedLinear(torch.nn.Linear):
    """A linear layer that is never trained and holds its weight in four bits.

    Args:
        linear: the layer; its bias goes on being used.
        dtype: of `weight`.
    """

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: torch.nn.Linear, dtype: torch.dtype) -> None:
        torch.nn.Module.__init__(self)  # not Linear's: that would take the memory of a whole weight
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        packed, scales = _pack(linear.weight.detach())
        self.register_buffer("packed", packed, persistent=False)  # what is saved is the adapter beside it
        self.register_buffer("scales", scales, persistent=False)
        self.bias = linear.bias

    @property
    def entries(self) -> int:
        """Numbers of the weight."""
        return self.in_features * self.out_features

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """(out, in) what it computes with; in memory of its own, made anew at each look."""
        flat = _unpack(self.packed, self.scales)[: self.entries]
        return flat.view(self.out_features, self.in_features).to(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        """As any linear layer."""
        return _Product.apply(input, self)  # type: ignore[no-any-return, no-untyped-call]


class _Product(torch.autograd.Function):
    """input @ weight.T + bias. The weight is made again for the way back: kept, it would be there in full after all."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.weight, layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.weight, None


@dataclass(frozen=True)
class QuantisedBase:
    """What became of a model whose linear layers are held in four bits."""

    names: tuple[str, ...]
    """Every weight of the model as engines get it, in the model's order."""
    layers: Mapping[str, QuantisedLinear]
    """By the names of the layers."""
    file_sha256: str
    """`weights_sha256` of the model before."""

    @property
    def held(self) -> dict[str, Tensor]:
        """What is in memory, by name."""
        both = ((name, each) for name, each in self.layers.items())
        return {f"{name}.{part}": getattr(each, part) for name, each in both for part in ("packed", "scales")}

    @property
    def sha256(self) -> str:
        """One digest of what is held, the same on every device."""
        return weights_sha256(self.held)

    def move(self, device: str) -> None:
        """To where the model computes; raises unless the first layer comes back there as it did on the CPU."""
        name, layer = next(iter(self.layers.items()))
        before = layer.weight
        for each in self.layers.values():
            each.to(device)
        if not torch.equal(layer.weight.cpu(), before.cpu()):
            raise InvariantError(
                f"{name} comes back from four bits on {layer.packed.device} as another matrix than on the CPU",
                "a checkpoint would be of another model on every device",
                "report this with the versions of bitsandbytes and torch; or leave quantization out",
            )


def quantise(net: Any, spared: Sequence[str], dtype: torch.dtype) -> QuantisedBase:
    """Replace the linear layers of a network, one after the other; the new ones are on the CPU until `move`.

    Args:
        spared: ends of the names of modules that stay as they are, with all below them.
        dtype: what the model is going to compute in.
    """
    weights = dict(net.named_parameters())
    names, digest = tuple(weights), weights_sha256(weights)
    layers: dict[str, QuantisedLinear] = {}
    for name in chosen(net, spared):
        parent, _, child = name.rpartition(".")
        linear = net.get_submodule(name)
        layers[name] = QuantisedLinear(linear, dtype)
        _check(name, linear.weight.detach().float().cpu(), layers[name])
        setattr(net.get_submodule(parent), child, layers[name])
        del weights[f"{name}.weight"], linear  # its memory is free before the next one is packed
    return QuantisedBase(names, layers, digest)


def chosen(net: Any, spared: Sequence[str] = ()) -> list[str]:
    """The names of the layers that are packed: every linear one but the output layer and what is trained whole."""
    head = net.get_output_embeddings()
    linear = [name for name, module in net.named_modules() if type(module) is torch.nn.Linear and module is not head]
    return [name for name in linear if not _is_below(name, spared)]


def _is_below(name: str, spared: Sequence[str]) -> bool:
    parts = name.split(".")
    above = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return any(each.endswith(end) for each in above for end in spared)


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """One digest of all weights, the same on every device."""
    return sha256_of_sized(f"{name} {number}".encode() for name, number in checksums(weights).items())


@torch.no_grad()
def _check(name: str, given: Tensor, layer: QuantisedLinear) -> None:
    """Raise unless every weight came back as one of the two levels that it lies between."""
    if not bool(layer.scales.isfinite().all()):
        raise ModelError(
            f"{name} of the model holds a number that is not finite", "its block would come back as nothing else",
            "use another copy of the model",
        )  # fmt: skip
    widest = float(_levels().diff().max())
    scales = layer.scales.repeat_interleave(BLOCK)[: given.numel()].view(given.shape)
    largest = F.pad(given.flatten(), (0, -given.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
    gap = (_unpack(layer.packed, layer.scales)[: given.numel()].view(given.shape) - given).abs()
    if bool((gap > widest / 2 * _SLACK * scales).any() | ((layer.scales - largest).abs() > _SMALLEST).any()):
        raise InvariantError(
            f"{name} does not come back from four bits: a weight is {float(gap.max()):.3g} away from what it was",
            "the model would be another one than NF4 makes of its file",
            "report this with the version of bitsandbytes; or leave quantization out",
        )


# -- bitsandbytes: the only place that knows it ------------------------------------------------------


@contextmanager
def absent(name: str) -> Iterator[None]:
    """Inside this an import of the package fails, as where it is not installed."""
    modules: dict[str, Any] = sys.modules
    before = {name: modules[name]} if name in modules else {}
    modules[name] = None
    try:
        yield
    finally:
        del modules[name]
        modules.update(before)


@cache
def _package() -> Any:
    """bitsandbytes' functions. Where the package `kernels` is installed it fetches programs from a hub: not here.

    transformers imports that package too, so it is hidden from this import even where it is there already.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of those programs, which nobody needs
    with absent("kernels"):
        from bitsandbytes import functional

    return functional


@cache
def _levels() -> Tensor:
    """(16,) from -1 to 1."""
    levels: Tensor = _package().get_4bit_type(NF4, device="cpu")
    return levels


@torch.no_grad()
def _pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Two levels to a byte, and the scales; the last byte and the last block may be filled in part."""
    packed, state = _package().quantize_4bit(
        weight.float().cpu().contiguous(), blocksize=BLOCK, compress_statistics=False, quant_type=NF4
    )
    return packed.flatten(), state.absmax


@torch.no_grad()
def _unpack(packed: Tensor, scales: Tensor) -> Tensor:
    """(2 * bytes,) in float32; flat, since bitsandbytes compiles a program for rows of an odd length."""
    package, shape = _package(), torch.Size((2 * packed.numel(),))
    state = package.QuantState(scales, shape, _levels(), BLOCK, NF4, torch.float32)
    values: Tensor = package.dequantize_4bit(packed.unsqueeze(1), state)
    return values.flatten()
