"""AdamW whose two moments are kept in 8 bits: two bytes of an entry instead of eight.

A moment is kept in blocks of 256 entries: a code of 8 bits for each of them, and one float32 scale for the block. Codes
and their table are torchao's (`torchao.optim`), the arithmetic is its too, entry by entry in float32; the state lies in
plain tensors, so that a checkpoint holds it as it is. Tensors below 4,096 entries, or not made of whole blocks, keep
float32 moments, as there.

Owns       the only way to torchao.
Promises   the same numbers as torchao's `AdamW8bit`, on every device that torch has; the second run of a step is the
           first, to the last bit, on a CPU; what a step needs beside the state is some float32 copies of one slice,
           whatever the size of a tensor.
Never      compiles anything.

Read next: `optimizer.py`, the other ones.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import ConfigError
from surefoot.learner.optimizer import ADAM, due_bound
from surefoot.learner.tensor_file import Spec

BLOCK = 256
SMALLEST = 4096
"""Smaller tensors are not worth it: their moments stay float32."""
SLICE = 4 << 20
"""Entries that are stepped at a time, in whole blocks."""
CODES, SCALES = "codes", "scales"
FIRST, SECOND = "exp_avg", "exp_avg_sq"


def require_torchao() -> None:
    """Raise unless torchao is installed: without it the moments would be four times as large."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(
            'optim = "adamw_8bit" needs the package torchao', "its 8-bit code is what the moments are kept in",
            "pip install 'surefoot[torchao]', or set optim = \"adamw\"",
        )  # fmt: skip


def is_coded(parameter: Tensor) -> bool:
    """Whether its moments are kept in 8 bits."""
    return parameter.numel() >= SMALLEST and parameter.numel() % BLOCK == 0


class LowBitMoments:
    """Two moments in blocks of 8-bit codes, each block with its scale; see `optimizer.Moments`."""

    def zeros(self, parameter: Tensor) -> dict[str, Tensor]:
        """See `optimizer.Moments`."""
        if not is_coded(parameter):
            return ADAM.zeros(parameter)
        device, entries = parameter.device, parameter.numel()
        made = {"step": torch.zeros((), dtype=torch.float32, device=device)}
        for name in (FIRST, SECOND):
            made[f"{name}_{CODES}"] = torch.zeros(entries, dtype=torch.uint8, device=device)
            made[f"{name}_{SCALES}"] = torch.zeros(entries // BLOCK, dtype=torch.float32, device=device)
        return made

    def specs(self, parameter: Tensor) -> dict[str, Spec]:
        """See `optimizer.Moments`."""
        if not is_coded(parameter):
            return ADAM.specs(parameter)
        codes, scales = Spec("U8", (parameter.numel(),)), Spec("F32", (parameter.numel() // BLOCK,))
        return {"step": Spec("F32", ())} | {
            f"{name}_{kind}": spec for name in (FIRST, SECOND) for kind, spec in ((CODES, codes), (SCALES, scales))
        }

    def look(self, optimiser: torch.optim.Optimizer) -> None:
        """Nothing: an entry's own moments say all."""

    def asked(
        self, params: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], group: Mapping[str, Any], steps: float,
        views: list[Tensor], flat: Tensor, spare: tuple[list[Tensor], Tensor] | None,
    ) -> Tensor:  # fmt: skip
        """See `optimizer.Moments`."""
        for parameter, state, view in zip(params, states, views, strict=True):
            for part in _slices(parameter):
                bound = due_bound(_moment(state, SECOND, part).sqrt_(), group, steps)
                torch.div(_moment(state, FIRST, part), bound, out=view.view(-1)[part])
        return flat.abs_()


class AdamW8bit(torch.optim.Optimizer):
    """AdamW over groups of parameters, its moments in 8 bits."""

    remembers = LowBitMoments()

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, learning_rate: float, betas: tuple[float, float], epsilon: float
    ) -> None:
        require_torchao()
        super().__init__([dict(each) for each in groups], {"lr": learning_rate, "betas": betas, "eps": epsilon})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Every parameter that has a gradient, slice by slice."""
        assert closure is None, "the gradient is there when it is stepped"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.remembers.zeros(parameter))
                state["step"] += 1
                for part in _slices(parameter):
                    _step(parameter.detach().view(-1)[part], parameter.grad.view(-1)[part], state, part, group)


def _slices(parameter: Tensor) -> Iterator[slice]:
    entries = parameter.numel()
    yield from (slice(start, min(start + SLICE, entries)) for start in range(0, entries, SLICE))


def _step(
    weights: Tensor, gradient: Tensor, state: Mapping[str, Tensor], part: slice, group: Mapping[str, Any]
) -> None:
    """One slice: torchao's formulas, with the moments before they are coded again."""
    (beta1, beta2), rate, step = group["betas"], group["lr"], state["step"]
    first = _moment(state, FIRST, part).lerp_(gradient, 1 - beta1)
    second = _moment(state, SECOND, part).lerp_(gradient.square(), 1 - beta2)
    _keep(state, FIRST, part, first)
    _keep(state, SECOND, part, second)
    if group["weight_decay"]:
        weights.sub_(weights * (rate * group["weight_decay"]))
    divisor = second.sqrt_().div_((1 - beta2**step).sqrt_()).add_(group["eps"])
    weights.sub_(first.div_(1 - beta1**step).mul_(rate).div_(divisor))


def _moment(state: Mapping[str, Tensor], name: str, part: slice) -> Tensor:
    """(n,) a moment of these entries in float32, in memory of its own."""
    if name in state:
        return state[name].view(-1)[part].clone()
    codes, scales = state[f"{name}_{CODES}"][part], state[f"{name}_{SCALES}"][_blocks(part)]
    table = _table(name == FIRST, codes.device)
    return table[codes.int()].view(-1, BLOCK).mul_(scales[:, None]).view(-1)


def _keep(state: Mapping[str, Tensor], name: str, part: slice, value: Tensor) -> None:
    if name in state:
        state[name].view(-1)[part] = value
        return
    scaled, scales = _torchao().scale_tensor(value, BLOCK)
    state[f"{name}_{CODES}"][part] = _torchao().quantize_8bit_with_qmap(scaled, _table(name == FIRST, value.device))
    state[f"{name}_{SCALES}"][_blocks(part)] = scales


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, part.stop // BLOCK)


@cache
def _table(signed: bool, device: torch.device) -> Tensor:
    """(256,) what each code stands for; the second moment has no sign."""
    return torch.tensor(_torchao().create_dynamic_map(signed=signed), dtype=torch.float32, device=device)


@cache
def _torchao() -> Any:
    from torchao.optim import quant_utils

    return quant_utils
