"""One learner over several ranks: weights, gradients and optimiser in shards (FSDP2), samples dealt out by tokens.

    rank 0      the learner that the loop sees; what it is asked, the others do too, call by call
    rank k      a learner of the same model; it has 1 / N of every tensor and of the optimiser's memory

Every rank is handed every sample of a step, so every rank knows the step's denominators, the share of each other rank
and how many microbatches the busiest one has. A rank with fewer runs one that counts for nothing in place of each that
it lacks: each layer gathers its weights from all ranks, and a rank that is missing there would be waited for.

Owns       `fully_shard` and every collective of the learner; who scores which sample.
Promises   gradients are added over ranks, never averaged: losses are divided by the whole step's counts already; each
           sample is scored by exactly one rank, and that is checked; whatever is decided (not finite, clipped, moved)
           is decided from numbers of all ranks in the order of ranks, so that no two ranks decide differently.
Never      pickles: what ranks tell each other is numbers, or JSON.

Read next: `grpo.py`, which learns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from surefoot.errors import InvariantError
from surefoot.learner.forward import SHARDED_ENTRY
from surefoot.learner.tensor_file import whole
from surefoot.maths.packing import BatchStats
from surefoot.maths.stats import Sums, merge
from surefoot.records import TrainSample

Named = dict[str, Tensor]
Cut = Callable[[list[TrainSample]], Iterable[list[TrainSample]]]
"""Samples into microbatches."""
Pieces = list[tuple[list[TrainSample], bool]]
"""Microbatches in order, each with whether it counts."""


class OneRank:
    """A learner that is one process on one device: nothing is cut, and nobody is asked."""

    index = 0
    size = 1

    def shard(self, net: Any, computes: torch.dtype | None = None) -> None:
        """Cut a network's tensors, in place; before an optimiser is made for them.

        Args:
            computes: what each tensor is rounded to when it is gathered; None leaves it as it is.
        """

    def own(self, net: Any) -> Named:
        """The parameters that this rank steps, by name."""
        return dict(net.named_parameters())

    def take_gradients(self, net: Any) -> None:
        """After the last backward pass of a step: gradients go to what is stepped."""

    def pieces(self, samples: list[TrainSample], cut: Cut, together: int = 1) -> Pieces:
        """The microbatches of this rank.

        Args:
            together: rows that belong together, such as the two of a pair; they come to one rank.
        """
        return [(piece, True) for piece in cut(samples)]

    def merged(self, sums: Sums) -> Sums:
        """Statistics of all ranks."""
        return sums

    def exchange(self, told: Any) -> list[Any]:
        """What each rank tells, in the order of ranks; as JSON brings it."""
        return [told]

    def share_old(self, old: dict[tuple[str, int], Tensor], samples: Sequence[TrainSample]) -> None:
        """Complete the log-probabilities of the first pass with those of the other ranks, in place."""

    def every(self, agrees: bool) -> bool:
        """Whether it holds on all ranks."""
        return agrees

    def any_each(self, found: Sequence[bool]) -> list[bool]:
        """For each of several questions, whether it holds on any rank."""
        return list(found)

    def total_each(self, counts: Sequence[int]) -> list[int]:
        """Each count, added over ranks."""
        return list(counts)

    def sum_each(self, values: Sequence[float]) -> list[float]:
        """Each number, added over ranks."""
        return list(values)

    def clip(self, parameters: Iterable[Tensor], limit: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `limit`; returns what it was."""
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def norm(self, gradients: Iterable[Tensor]) -> float:
        """Of all these tensors of all ranks, as if they were one."""
        return float(get_total_norm(list(gradients)))

    def as_whole(self, part: Tensor, like: Tensor) -> Tensor:
        """A name for the whole of which this rank has a part: what checkpoints write."""
        return part

    def rows(self, length: int) -> slice:
        """Which rows of a whole tensor this rank has."""
        return slice(0, length)

    def here(self, tensor: Tensor) -> Tensor:
        """What of a network's tensor this rank holds, in its very memory."""
        return tensor

    def put(self, target: Tensor, value: Tensor) -> None:
        """Put the numbers of this rank's rows into the memory of this tensor, or of its shard."""
        target.copy_(value)


class RankGroup(OneRank):
    """One rank of several, in the default process group.

    Args:
        device: of this rank's tensors; collectives of numbers go over the CPU whatever it is.
    """

    def __init__(self, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.index, self.size = dist.get_rank(), dist.get_world_size()
        self.mesh = init_device_mesh(device.type, (self.size,))
        self._own: dict[int, Named] = {}

    # -- shards -----------------------------------------------------------------

    def shard(self, net: Any, computes: torch.dtype | None = None) -> None:
        """Cut every layer and the rest, each gathered for its own forward and backward pass and then freed."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        # Gradients are added over ranks, and over microbatches, in the precision of the shards.
        added = None if computes is None else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=computes, reduce_dtype=added, cast_forward_inputs=False)
        for layer in net.get_decoder().layers:
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
        # The root too: left whole after a forward pass without a backward one, it would be served stale after a step.
        fully_shard(net, mesh=self.mesh, reshard_after_forward=True, mp_policy=policy)
        for module in _sharded(net):
            module.set_gradient_divide_factor(1.0)  # a sum: losses are divided by the counts of the whole step
            module.set_force_sum_reduction_for_comms(True)
        setattr(net, SHARDED_ENTRY, partial(_do, net))
        register_fsdp_forward_method(net, SHARDED_ENTRY)
        self._own[id(net)] = {
            name: _local(p).detach().requires_grad_(p.requires_grad) for name, p in net.named_parameters()
        }

    def own(self, net: Any) -> Named:
        """This rank's part of every parameter, as plain tensors in the very memory of the shards."""
        return self._own[id(net)]

    def take_gradients(self, net: Any) -> None:
        """Hand the gradients of the shards to the plain tensors that are stepped."""
        own = self.own(net)
        for name, parameter in net.named_parameters():
            if _local(parameter).data_ptr() != own[name].data_ptr():
                raise InvariantError(
                    f"the shard of {name} on rank {self.index} lies elsewhere than what its optimiser steps",
                    "the step would change a tensor that nothing computes with",
                    "report this with the model's config.json; set runtime.learner_ranks = 1",
                )
            own[name].grad = None if parameter.grad is None else _local(parameter.grad)

    def as_whole(self, part: Tensor, like: Tensor) -> Tensor:
        """A `DTensor` of this part; nothing is moved until somebody asks for its numbers."""
        from torch.distributed.tensor import DTensor

        if part.dim() == 0 or not isinstance(like, DTensor):
            return part
        return DTensor.from_local(
            part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def rows(self, length: int) -> slice:
        """Those that `fully_shard` gives it."""
        each = -(-length // self.size)
        return slice(min(self.index * each, length), min((self.index + 1) * each, length))

    def here(self, tensor: Tensor) -> Tensor:
        """Its shard; of a tensor that is not cut, the tensor."""
        from torch.distributed.tensor import DTensor

        return _local(tensor) if isinstance(tensor, DTensor) else tensor

    def put(self, target: Tensor, value: Tensor) -> None:
        """What is read of a checkpoint are these rows alone."""
        _local(target).copy_(value)

    # -- who scores what --------------------------------------------------------

    def pieces(self, samples: list[TrainSample], cut: Cut, together: int = 1) -> Pieces:
        """Its own microbatches, and as many that count for nothing as the busiest rank has more."""
        shares = [list(cut(share)) for share in deal(samples, self.size, together)]
        mine, most = shares[self.index], max(map(len, shares))
        return [(piece, True) for piece in mine] + [(samples[:together], False)] * (most - len(mine))

    def share_old(self, old: dict[tuple[str, int], Tensor], samples: Sequence[TrainSample]) -> None:
        """Added up: each row is there on one rank, and 0 on the others."""
        if not samples:
            return
        keys = [(s.group, s.index) for s in samples]
        lengths = [len(s.completion_ids) for s in samples]
        known = next(iter(old.values()), torch.zeros(0))
        dtype = torch.float64 if self._most(float(known.dtype == torch.float64)) else torch.float32
        rows = [
            old[key].to("cpu", dtype) if key in old else torch.zeros(length, dtype=dtype)
            for key, length in zip(keys, lengths, strict=True)
        ]
        flat = torch.cat(rows)
        dist.all_reduce(flat)
        device = self.mesh.device_type
        old.clear()
        old.update(zip(keys, (row.to(device, copy=True) for row in flat.split(lengths)), strict=True))

    # -- numbers of all ranks ---------------------------------------------------

    def exchange(self, told: Any) -> list[Any]:
        """Two collectives: how long each text is, and the texts."""
        text = json.dumps(told).encode()
        sizes = [int(row[0]) for row in self._rows([float(len(text))]).tolist()]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(found, padded)
        return [json.loads(bytes(each[:size].numpy())) for each, size in zip(found, sizes, strict=True)]

    def merged(self, sums: Sums) -> Sums:
        """Added in the order of ranks, whole numbers as such and others in float64."""
        return merge(as_sums(told) for told in self.exchange(plain_sums(sums)))

    def every(self, agrees: bool) -> bool:
        """Whether all say so."""
        return bool(self._rows([float(agrees)]).min() == 1.0)

    def any_each(self, found: Sequence[bool]) -> list[bool]:
        """Question by question."""
        return [bool(row) for row in self._rows([float(each) for each in found]).amax(0).tolist()]

    def total_each(self, counts: Sequence[int]) -> list[int]:
        """Whole numbers below 2**53 stay exact in float64."""
        return [int(row) for row in self._rows([float(count) for count in counts]).sum(0).tolist()]

    def sum_each(self, values: Sequence[float]) -> list[float]:
        """In float64, in the order of ranks."""
        return [float(row) for row in self._rows(list(values)).sum(0).tolist()]

    def _most(self, value: float) -> float:
        return float(self._rows([value]).max())

    def clip(self, parameters: Iterable[Tensor], limit: float) -> float:
        """By the norm over all ranks: each scales by the same number."""
        stepped = [p for p in parameters if p.grad is not None]
        norm = self.norm([p.grad for p in stepped if p.grad is not None])
        clip_grads_with_norm_(stepped, limit, torch.tensor(norm))
        return norm

    def norm(self, gradients: Iterable[Tensor]) -> float:
        """The root of the sum of squares, those of each rank added in the order of ranks."""
        own = float(get_total_norm([g for g in gradients if g.numel()]))
        return math.sqrt(sum(value * value for value in self._rows([own])[:, 0].tolist()))

    def _rows(self, values: list[float]) -> Tensor:
        """(ranks, n) the numbers of each rank."""
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own)
        return torch.stack(found)


def deal(samples: Sequence[TrainSample], ranks: int, together: int = 1) -> list[list[TrainSample]]:
    """Consecutive shares of about equally many tokens, one per rank, in order; a share may be empty.

    Siblings stay together where they can: a prompt is computed once for those of one microbatch.

    Args:
        together: so many rows are never parted.
    """
    shares: list[list[TrainSample]] = [[] for _ in range(ranks)]
    units = [samples[i : i + together] for i in range(0, len(samples), together)]
    costs = [sum(len(s.prompt_ids) + len(s.completion_ids) for s in unit) for unit in units]
    total, before = sum(costs), 0
    for unit, cost in zip(units, costs, strict=True):
        shares[min(ranks - 1, (2 * before + cost) * ranks // (2 * total))] += unit
        before += cost
    return shares


def check_dealt(scored: Sequence[Sequence[Any]], samples: Sequence[TrainSample]) -> None:
    """Every sample was scored once, by one rank.

    Args:
        scored: per rank, group and index of each sample that it scored.
    """
    found = [tuple(key) for each in scored for key in each]
    if sorted(found) == sorted((s.group, s.index) for s in samples):
        return
    counts = ", ".join(f"rank {rank}: {len(each)}" for rank, each in enumerate(scored))
    raise InvariantError(
        f"{len(samples)} samples were to be scored, each by one rank; {counts}",
        "the gradient would be that of other samples than the step's, with the step's denominators",
        "nothing of this step was applied; report it with the run folder, and set runtime.learner_ranks = 1",
    )


def gather_into(copies: Named, parts: Mapping[str, Tensor], *, keep: bool, rounded: torch.dtype | None = None) -> None:
    """Whole tensors into memory that is there from the second time on; one at a time, so never two copies of all.

    Args:
        keep: on the rank that wants them; the others take part.
        rounded: what they are rounded to, before they are sent.
    """
    for name, part in parts.items():
        found = whole(part.detach().to(part.dtype if rounded is None else rounded))
        if keep and name in copies:
            copies[name].copy_(found)
        elif keep:
            copies[name] = found
        del found  # before the next one is gathered


def plain_sums(sums: Sums) -> dict[str, float | int]:
    """As JSON holds them."""
    return {name: int(v) if not v.is_floating_point() else float(v) for name, v in sums.items()}


def as_sums(told: Mapping[str, float | int]) -> dict[str, Tensor]:
    """Back to tensors: whole numbers stay whole."""
    return {
        name: torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
        for name, value in told.items()
    }


def plain_stats(packed: Sequence[BatchStats]) -> list[dict[str, Any]]:
    """What packing saw, as JSON holds it."""
    return [asdict(each) for each in packed]


def as_stats(told: Sequence[Mapping[str, Any]]) -> list[BatchStats]:
    """And back."""
    return [BatchStats(**each) for each in told]


def _do(net: Any, work: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """What runs behind the door of a sharded network: see `forward.inside`."""
    return work(net, *args, **words)


def _sharded(net: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [module for module in net.modules() if isinstance(module, FSDPModule)]


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local()
    return local
