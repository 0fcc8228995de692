"""How many entries of the parameters a step changed: the only evidence that something was learned.

A tensor "moved" when one of its entries did. In bfloat16 that says next to nothing: at a learning rate of 1e-6 more
than nine entries of ten are too coarse to take the update in, and every tensor still moves. So entries are counted.

    entries    of the trained parameters
    changed    are another number now
    due        Adam asks for at least `DUE` learning rates: the entry has to move
    taken      due, and changed; the others' updates were rounded away
    published  entries of the copy that engines get (the masters, rounded) that are another number now

Only Adam's part of the update makes an entry due. Weight decay is in proportion to the weight, so precision decides
about it for all entries at once, and at usual rates (1e-6 x 0.01) float32 itself rounds it away. And an update of less
than a hundredth of the learning rate is Adam holding still: its epsilon against gradients of next to nothing, such as
those of words that never come up, or the fading of a step long past. No dtype would take those in either.

Promises   the step is the optimiser's own, to the last bit; the memory that counting and rounding need is taken before
           the first weight is touched, so that running out of it cannot tear a step.

Read next: `grpo.py`, which steps; `precision.py`, what is rounded; `guards/verdict.py`, which asks whether anything
was ever changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import InvariantError, NumericsError
from surefoot.learner.optimizer import moments_of
from surefoot.protocols import ParameterUpdates

PIECE_ENTRIES = 16 << 20
"""Parameters are stepped in pieces of about so many entries: a piece is copied, stepped and compared."""
GPU_PIECE_ENTRIES = 64 << 20
"""On a GPU, where every call is a launch."""
AT_ONCE = frozenset({"cuda"})
"""Kinds of device on which all tensors of a piece are stepped and compared at once."""


@dataclass(frozen=True)
class StepUpdates:
    """What one optimiser step did, in entries of the trained parameters."""

    entries: int
    changed: int
    published: int = 0
    due: int = 0
    taken: int = 0

    @property
    def changed_share(self) -> float:
        """Of the trained entries, the share that is another number now."""
        return self.changed / self.entries if self.entries else 0.0

    @property
    def published_share(self) -> float:
        """Of the entries that engines get, the share that is another number now."""
        return self.published / self.entries if self.entries else 0.0

    @property
    def swallowed(self) -> bool:
        """Whether most of what had to move did not."""
        return 2 * self.taken < self.due


def check_rate(optimiser: torch.optim.Optimizer, rate: float, version: int) -> None:
    """The optimiser steps at the rate of the schedule, every group of it, before the step and after it."""
    own = [float(group["lr"]) for group in optimiser.param_groups]
    if any(found != rate for found in own):
        raise InvariantError(
            f"the step from version {version} is scheduled at learning rate {rate:g}, the optimiser has {own}",
            "the log would tell of another run than the one that was trained",
            "nothing but the schedule may set the optimiser's rate; resume from the last checkpoint",
        )


def check_taken_in(
    updates: StepUpdates, rate: float, highest: float, version: int, dtypes: Iterable[torch.dtype]
) -> None:
    """Refuse a step whose updates were mostly too small for the numbers they were added to.

    Only at half of the run's highest rate and above: the first steps of a warm-up and the last of a decay are meant to
    do next to nothing, and a cosine over 1,000 steps ends at a millionth of its peak.

    Args:
        highest: of all rates in the run's schedule.
        dtypes: of what the optimiser stepped.
    """
    if rate < highest / 2 or not updates.swallowed:
        return
    kept_in = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
    raise NumericsError(
        f"the step from version {version}, at learning rate {rate:g}, had to move {updates.due} parameter entries and "
        f"moved {updates.taken} of them ({updates.taken / updates.due:.1%})",
        f"the updates of the others are smaller than half of the last digit of their weights, in {kept_in}: the run "
        "would look alive and learn next to nothing",
        f"raise learning_rate (its highest is {highest:g}); with dtype = float32 and with dtype = bfloat16 what is "
        "trained is float32, and a learner of your own has to do the same",
    )


class Piece(NamedTuple):
    """Parameters of one optimiser group and one kind, stepped as often as each other."""

    group: int
    params: list[Tensor]
    steps: float
    """How often they were stepped before."""
    entries: int
    """Of all of them."""

    @property
    def device(self) -> torch.device:
        """Where they all are."""
        return self.params[0].device


class CountedStep:
    """One step of an optimiser: making it takes the memory, `take` steps and counts.

    Args:
        copies: by trained parameter, the coarser one that computes; each becomes its master, rounded.
        rounds: what engines get every parameter rounded to, where nobody keeps such a copy.
    """

    def __init__(
        self, optimiser: torch.optim.Optimizer, copies: Mapping[Tensor, Tensor] | None = None,
        rounds: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.optimiser, self.copies, self.rounds = optimiser, copies or {}, rounds
        self.pieces = list(_pieces(optimiser))
        kinds = [(p.dtype, piece) for piece in self.pieces for p in piece.params[:1]]
        copied = [(piece, {self.copies[p].dtype for p in piece.params if p in self.copies}) for piece in self.pieces]
        kinds += [(dtype, piece) for piece, dtypes in copied for dtype in dtypes]
        kinds += [(torch.bool, piece) for piece in self.pieces]
        kinds += [(rounds, piece) for piece in self.pieces if rounds is not None]
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for dtype, device in {(dtype, piece.device) for dtype, piece in kinds}:
            size = max(piece.entries for kind, piece in kinds if (kind, piece.device) == (dtype, device))
            rows = 2 if dtype in (torch.bool, rounds) or device.type in AT_ONCE else 1
            self._buffers[dtype, device] = torch.empty(rows, size, dtype=dtype, device=device)
        self._counts: dict[str, list[Tensor]] = {"changed": [], "published": [], "due": [], "taken": []}

    def take(self) -> StepUpdates:
        """Step every parameter that has a gradient, once."""
        moments_of(self.optimiser).look(self.optimiser)
        groups = self.optimiser.param_groups
        whole = [group["params"] for group in groups]
        try:
            for piece in self.pieces:
                for group in groups:
                    group["params"] = []
                groups[piece.group]["params"] = piece.params
                (self._step_at_once if piece.device.type in AT_ONCE else self._step)(piece)
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        found = {name: sum(int(count) for count in counts) for name, counts in self._counts.items()}
        return StepUpdates(sum(map(_entries, whole)), **found)

    def _step_at_once(self, piece: Piece) -> None:
        """As `_step`, the same numbers, with a few launches for all tensors instead of several for each."""
        params, group = [p.detach() for p in piece.params], self.optimiser.param_groups[piece.group]
        kept, flat = self._views(piece, params[0].dtype)
        now, new = self._views(piece, params[0].dtype, 1)
        torch._foreach_copy_(kept, params)
        self.optimiser.step()
        if self.rounds is not None:
            self._count_rounded(piece, self.rounds, params, kept)
        torch._foreach_copy_(now, params)
        changed, due = self._buffers[torch.bool, piece.device][:, : piece.entries]
        torch.ne(flat, new, out=changed)
        self._counts["changed"].append(_count(changed))
        if group["lr"] > 0:
            asked = self._asked(piece, group, kept, flat, (now, new))
            torch.ge(asked, 1.0, out=due)  # 0 / 0, without epsilon and gradient, is not due
            self._counts["due"].append(_count(due))
            self._counts["taken"].append(_count(due.logical_and_(changed)))
        if self.rounds is None:
            self._counts["published"].append(self._round_down_at_once(piece, params, changed))

    def _round_down_at_once(self, piece: Piece, params: list[Tensor], changed: Tensor) -> Tensor:
        copies = [self.copies[p].detach() for p in piece.params if p in self.copies]
        if len(copies) < len(params) or len({copy.dtype for copy in copies}) > 1:  # some are trained themselves
            return self._round_down(piece, *self._views(piece, torch.bool))
        rounded, flat = self._views(piece, copies[0].dtype)
        before, old = self._views(piece, copies[0].dtype, 1)
        torch._foreach_copy_(rounded, params)
        torch._foreach_copy_(before, copies)
        torch._foreach_copy_(copies, rounded)
        return _count(torch.ne(flat, old, out=changed))

    def _step(self, piece: Piece) -> None:
        params, group = piece.params, self.optimiser.param_groups[piece.group]
        kept, flat = self._views(piece, params[0].dtype)
        is_new, all_new = self._views(piece, torch.bool)
        for p, old in zip(params, kept, strict=True):
            old.copy_(p.detach())
        self.optimiser.step()
        if self.rounds is not None:
            self._count_rounded(piece, self.rounds, [p.detach() for p in params], kept)
        for p, old, new in zip(params, kept, is_new, strict=True):
            torch.ne(p.detach(), old, out=new)
        self._counts["changed"].append(_count(all_new))
        if group["lr"] > 0:
            is_due = self._buffers[torch.bool, piece.device][1, : piece.entries]
            torch.ge(self._asked(piece, group, kept, flat), 1.0, out=is_due)  # 0 / 0 is not due
            self._counts["due"].append(_count(is_due))
            self._counts["taken"].append(_count(is_due.logical_and_(all_new)))
        if self.rounds is None:
            self._counts["published"].append(self._round_down(piece, is_new, all_new))

    def _count_rounded(self, piece: Piece, dtype: torch.dtype, params: list[Tensor], kept: list[Tensor]) -> None:
        """In how many entries the parameters, rounded, are another number than before; nobody keeps them rounded."""
        before, old = self._views(piece, dtype)
        now, new = self._views(piece, dtype, 1)
        torch._foreach_copy_(before, kept)
        torch._foreach_copy_(now, params)
        differs = self._buffers[torch.bool, piece.device][0, : piece.entries]
        self._counts["published"].append(_count(torch.ne(old, new, out=differs)))

    def _asked(
        self, piece: Piece, group: Mapping[str, Any], kept: list[Tensor], flat: Tensor,
        spare: tuple[list[Tensor], Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """(n,) for every entry, how large its update is, 1 being due; overwrites what was kept, and `spare`."""
        states = [self.optimiser.state.get(p, {}) for p in piece.params]
        return moments_of(self.optimiser).asked(piece.params, states, group, piece.steps + 1, kept, flat, spare)

    def _round_down(self, piece: Piece, is_new: list[Tensor], all_new: Tensor) -> Tensor:
        """The copies become their masters, rounded; returns how many entries that changed."""
        if not any(p in self.copies for p in piece.params):
            return _count(all_new)  # what is trained is what engines get
        spare = {k: self._views(piece, k)[0] for k in {self.copies[p].dtype for p in piece.params if p in self.copies}}
        for at, (p, new) in enumerate(zip(piece.params, is_new, strict=True)):
            if p in self.copies:
                copy = self.copies[p].detach()
                rounded = spare[copy.dtype][at].copy_(p.detach())
                torch.ne(copy, rounded, out=new)
                copy.copy_(rounded)
        return _count(all_new)

    def _views(self, piece: Piece, dtype: torch.dtype, row: int = 0) -> tuple[list[Tensor], Tensor]:
        """For each parameter a tensor of its shape, in memory that is there already, and all of them as one row."""
        flat = self._buffers[dtype, piece.device][row, : piece.entries]
        parts = flat.split([p.numel() for p in piece.params])
        return [part.view(p.shape) for part, p in zip(parts, piece.params, strict=True)], flat


def _pieces(optimiser: torch.optim.Optimizer) -> Iterator[Piece]:
    """All parameters with a gradient, in their order, cut where a piece is full or the next one is of another kind."""
    for index, group in enumerate(optimiser.param_groups):
        piece: list[Tensor] = []
        entries = 0
        kind: tuple[float, torch.dtype, torch.device] | None = None
        params = [p for p in group["params"] if p.grad is not None]
        for p, steps in zip(params, _steps(optimiser, params), strict=True):
            own = (steps, p.dtype, p.device)
            most = GPU_PIECE_ENTRIES if p.device.type in AT_ONCE else PIECE_ENTRIES
            if piece and kind is not None and (own != kind or entries + p.numel() > most):
                yield Piece(index, piece, kind[0], entries)
                piece, entries = [], 0
            piece, kind, entries = [*piece, p], own, entries + p.numel()
        if piece and kind is not None:
            yield Piece(index, piece, kind[0], entries)


def _steps(optimiser: torch.optim.Optimizer, params: list[Tensor]) -> list[float]:
    """How often each was stepped, read from the device at once."""
    counts = [optimiser.state[p]["step"] if optimiser.state.get(p) else torch.zeros(()) for p in params]
    return torch.stack([count.to(counts[0].device) for count in counts]).tolist() if counts else []


def _count(mask: Tensor) -> Tensor:
    """How many are true, without memory of any size: a sum is ten times slower on a CPU, the other copies on a GPU."""
    return torch.count_nonzero(mask) if mask.device.type == "cpu" else mask.sum()


def _entries(params: list[Tensor]) -> int:
    return sum(p.numel() for p in params)


# -- Which parameters got a gradient, and which really moved: counted once, after the first step --


@contextmanager
def watch_updates(
    trained: Mapping[str, Tensor], *, wanted: bool, anywhere: Callable[[Sequence[bool]], list[bool]] = list
) -> Iterator[list[ParameterUpdates]]:
    """Which trainable tensors got a gradient and which changed, measured around one optimiser step.

    The list that is given holds one entry when the block has ended; none, and at no cost, when it is not wanted.

    Args:
        anywhere: for each tensor, whether it holds of any part of it: other ranks may have others.
    """
    found: list[ParameterUpdates] = []
    if not wanted:
        yield found
        return
    named = [(n, p) for n, p in trained.items() if p.requires_grad]
    before = {name: _fingerprint(p) for name, p in named}
    gradients = sum(anywhere([p.grad is not None and bool((p.grad != 0).any()) for _, p in named]))
    yield found
    moved = anywhere([_fingerprint(p) != before[name] for name, p in named])
    still = tuple(name for (name, _), has_moved in zip(named, moved, strict=True) if not has_moved)
    found.append(ParameterUpdates(len(named), gradients, len(named) - len(still), still))


def _fingerprint(tensor: torch.Tensor) -> tuple[float, float]:
    """Two sums that change when almost any entry does; cheaper than a copy of the model."""
    data = tensor.detach()
    return float(data.sum(dtype=torch.float32 if data.device.type == "mps" else torch.float64)), float(data.norm())
