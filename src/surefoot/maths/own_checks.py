"""What holds for every loss type and advantage estimator of ours, asked of one that nobody has looked at yet.

Owns       made-up rows that expose: very unequal lengths, holes, a row without a token, advantages of both signs and 0.
Promises   the first thing that does not hold is named, in the order of the functions below; asking leaves the global
           random numbers as they were. The same questions are asked of every entry of ours by a test.
Never      knows where the code came from, or says that a loss is a good one.

Axes: B rows, T completion positions; G siblings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from surefoot.maths.advantages import Estimator, compute_advantages
from surefoot.maths.losses import LossInputs, LossSettings, LossTerms, StepTotals, policy_loss

LENGTHS = (5, 1, 8, 0, 3, 13)
HOLE = (5, slice(4, 6))
"""In the longest row a tool speaks."""
ADVANTAGES = (1.2, -0.7, 0.4, 1.0, 0.0, -1.5)
IDLE = 4
"""The row with an advantage of 0."""
CUTS: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1, 2), (3, 4, 5)), tuple((row,) for row in range(6)))
GARBAGE = (math.nan, 1e30)
FAR = 10.0
"""Nats by which the policy has moved on some tokens: far, and not unheard of."""


class Breach(NamedTuple):
    """What does not hold, why that matters, and what to do."""

    what: str
    why: str
    fix: str


@dataclass(frozen=True)
class Rows:
    """(B, T) log-probabilities and masks; (B,) advantages."""

    logp: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    advantages: Tensor
    mask: Tensor

    @classmethod
    def made_up(cls, dtype: torch.dtype) -> Rows:
        """The same every time."""
        dice = torch.Generator().manual_seed(17)
        shape = (len(LENGTHS), max(LENGTHS))
        old = -3 * torch.rand(shape, generator=dice, dtype=torch.float64) - FAR - 0.5
        gaps = [0.4 * torch.randn(shape, generator=dice, dtype=torch.float64) for _ in range(3)]
        gaps[0][2, 1], gaps[0][5, 7], gaps[0][5, 9] = FAR, -FAR, FAR
        mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
        mask[HOLE] = False
        logp, old, ref, sampler = (value.to(dtype) for value in (old + gaps[0], old, old + gaps[1], old + gaps[2]))
        return cls(logp, old, ref, sampler, torch.tensor(ADVANTAGES, dtype=dtype), mask)

    def take(self, rows: Sequence[int], width: int) -> Rows:
        """Some of the rows, cut or padded to a width."""
        index = torch.tensor(rows)
        most = self.logp.shape[1]

        def cut(values: Tensor, fill: float) -> Tensor:
            more = max(0, width - most)
            return torch.nn.functional.pad(values[index][:, :width], (0, more), value=fill)

        logp, old, ref, sampler = (cut(values, 0.0) for values in (self.logp, self.old, self.ref, self.sampler))
        return Rows(logp, old, ref, sampler, self.advantages[index], cut(self.mask.to(torch.uint8), 0).bool())

    def with_garbage(self, value: float) -> Rows:
        """The same with this wherever nothing counts."""
        hidden = ~self.mask
        parts = (self.logp, self.old, self.ref, self.sampler)
        logp, old, ref, sampler = (values.masked_fill(hidden, value) for values in parts)
        return Rows(logp, old, ref, sampler, self.advantages, self.mask)

    @property
    def totals(self) -> StepTotals:
        """Of the whole step."""
        return StepTotals(int(self.mask.any(1).sum()), int(self.mask.sum()), 16)


class LossShare(NamedTuple):
    """What some rows add to a step."""

    loss: Tensor
    gradient: Tensor
    """(B, T)."""
    sums: Mapping[str, Tensor]


def loss_breach(settings: LossSettings) -> Breach | None:
    """The first thing that holds for every loss of ours and not for this one; None when all of it does.

    Whatever the loss itself raises is raised.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        single, rows = Rows.made_up(torch.float32), Rows.made_up(torch.float64)
        breach = _finite(settings, single)
        for check in (_leaves_inputs, _repeats, _moves, _idle_row, _cut, _padding):
            breach = breach or check(settings, rows)
        return breach


def _share(settings: LossSettings, rows: Rows, totals: StepTotals) -> LossShare:
    logp = rows.logp.clone().requires_grad_()
    terms: LossTerms = policy_loss(
        logp, rows.old, rows.advantages, rows.mask, settings=settings, totals=totals,
        ref_logp=rows.ref if settings.beta > 0 else None,
        sampler_logp=None if settings.correction is None else rows.sampler,
    )  # fmt: skip
    if not terms.loss.requires_grad:
        return LossShare(terms.loss.detach(), torch.zeros_like(logp), terms.sums)
    torch.autograd.backward(terms.loss)
    return LossShare(terms.loss.detach(), torch.zeros_like(logp) if logp.grad is None else logp.grad, terms.sums)


def _finite(settings: LossSettings, rows: Rows) -> Breach | None:
    share = _share(settings, rows, rows.totals)
    numbers = {
        "the loss": share.loss,
        "its gradient": share.gradient,
        **{f"the sum {n}": s for n, s in share.sums.items()},
    }
    for name, value in numbers.items():
        if not bool(torch.isfinite(value).all()):
            return Breach(
                f"{name} is not finite where the policy has moved by up to {FAR:g} nats",
                "such tokens occur, and one of them would refuse the whole step",
                "bound what can overflow (a clamp before an exponential), and what is divided by",
            )
    return None


def _repeats(settings: LossSettings, rows: Rows) -> Breach | None:
    one, two = (_share(settings, rows, rows.totals) for _ in range(2))
    if bool((one.loss == two.loss).all()) and bool((one.gradient == two.gradient).all()):
        return None
    return Breach(
        "the same rows gave two values", "a run could not be repeated or resumed bit for bit",
        "leave random numbers out, and anything that is kept between two calls",
    )  # fmt: skip


def _leaves_inputs(settings: LossSettings, rows: Rows) -> Breach | None:
    changed: list[str] = []

    def watched(call: Callable[[LossInputs], object]) -> Callable[[LossInputs], object]:
        def called(inputs: LossInputs) -> object:
            before = [part.detach().clone() for part in inputs[:5]]
            given = call(inputs)
            after = zip(inputs._fields, before, inputs[:5], strict=False)
            changed.extend(name for name, old, new in after if not torch.equal(old, new.detach()))
            return given

        return called

    kind = settings.kind
    spied = replace(kind, objective=watched(kind.objective), sums=watched(kind.sums))  # type: ignore[arg-type]
    _share(replace(settings, own=spied), rows, rows.totals)
    if not changed:
        return None
    return Breach(
        f"it changes {changed[0]} in place", "what comes behind it (corrections, sums) reads the same tensor",
        "write to a new tensor: x.clamp(...), not x.clamp_(...)",
    )  # fmt: skip


def _moves(settings: LossSettings, rows: Rows) -> Breach | None:
    """The gradient reaches trained tokens, and no others."""
    gradient = _share(settings, rows, rows.totals).gradient
    if bool((gradient[~rows.mask] != 0).any()):
        return Breach(
            "tokens that are masked get a gradient", "what a tool said, and padding, would be trained",
            "use only what it is given, where the mask is True",
        )  # fmt: skip
    if bool((gradient == 0).all()):
        return Breach(
            "it has no gradient on any token", "nothing would be learned, and every number would look well",
            "let the result depend on ratio or logp without detach()",
        )  # fmt: skip
    return None


def _idle_row(settings: LossSettings, rows: Rows) -> Breach | None:
    """The learner does not score rows that move nothing: it has to be true that they move nothing."""
    if settings.kind.every_row or settings.beta > 0:
        return None
    share = _share(settings, rows.take([IDLE], LENGTHS[IDLE]), rows.totals)
    if float(share.loss) == 0 and bool((share.gradient == 0).all()):
        return None
    return Breach(
        f"a row with an advantage of 0 adds {float(share.loss):.3g} to the loss",
        "such rows are not scored, because they move nothing: a part of this loss would be left out in silence",
        "multiply by the advantage, or declare it: LossKind(objective=..., every_row=True)",
    )


def _cut(settings: LossSettings, rows: Rows) -> Breach | None:
    """Value, gradient and declared sums of a step do not depend on the cut into microbatches."""
    whole = _share(settings, rows, rows.totals)
    for pieces in CUTS:
        shares = [_share(settings, rows.take(piece, rows.logp.shape[1]), rows.totals) for piece in pieces]
        found = LossShare(
            torch.stack([share.loss for share in shares]).sum(), torch.cat([share.gradient for share in shares]),
            {name: torch.stack([share.sums[name] for share in shares]).sum() for name in whole.sums},
        )  # fmt: skip
        for name, one, other in _compared(whole, found):
            if not _close(one, other):
                return Breach(
                    f"{name} of a step depends on its cut into microbatches: {_seen(one, other)} in parts",
                    "memory would decide what is learned",
                    "compute each token from its own row: no mean, maximum or norm over rows or over the batch; "
                    "sums are added, never averaged",
                )
    return None


def _padding(settings: LossSettings, rows: Rows) -> Breach | None:
    """What stands where nothing counts, and how much of it there is, changes nothing."""
    whole, width = _share(settings, rows, rows.totals), rows.logp.shape[1]
    everyone = range(len(LENGTHS))
    others = {f"{value:g} in masked positions": rows.with_garbage(value) for value in GARBAGE}
    others["seven more columns of padding"] = rows.take(everyone, width + 7)
    for name, padded in others.items():
        share = _share(settings, padded, rows.totals)
        found = share._replace(gradient=share.gradient[:, :width])
        for what, one, other in _compared(whole, found):
            if not _close(one, other):
                return Breach(
                    f"{what} of a step depends on padding: {_seen(one, other)} with {name}",
                    "a row's loss would depend on its neighbours' lengths",
                    "count tokens with inputs.mask, never with a shape or a mean over columns",
                )
    return None


def _compared(one: LossShare, other: LossShare) -> Iterator[tuple[str, Tensor, Tensor]]:
    yield "the loss", one.loss, other.loss
    yield "the gradient", one.gradient, other.gradient
    yield from ((f"the sum {name.rpartition('/')[2]}", one.sums[name], other.sums[name]) for name in one.sums)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool(torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-11))


def _seen(one: Tensor, other: Tensor) -> str:
    far = (one.double() - other.double()).abs().argmax()
    return f"{float(one.flatten()[far]):.6g} whole, {float(other.flatten()[far]):.6g}"


# -- Advantage estimators -------------------------------------------------------------------------


REWARDS = (
    (0.0, 1.0), (1.0, 0.0, 1.0), (0.1, 0.7, 0.7, -0.3), (0.0, 0.0, 0.0, 1.0, 0.5, 0.25, 1.0, 0.0),
    (1e6, 1e6 + 1, 1e6 - 3), (1e-9, 0.0, 2e-9), (-5.0, -4.0, -9.0, -5.0, -1.0),
)  # fmt: skip
"""Groups whose rewards differ: small and large ones, ties, tiny and huge numbers."""


def estimator_breach(estimate: Estimator) -> Breach | None:
    """The first thing that holds for every advantage estimator of ours and not for this one; None when all does.

    A wrong form is a `ShapeError`; whatever it raises itself is raised.
    """
    with torch.random.fork_rng(devices=[]):
        return next((breach for rewards in REWARDS if (breach := _of_group(estimate, rewards)) is not None), None)


def _of_group(estimate: Estimator, rewards: Sequence[float]) -> Breach | None:
    def asked(values: Sequence[float]) -> list[float]:
        rest = [0.25, 0.75]  # of another group: it has a part in the batch's std, and no other
        return compute_advantages([*values, *rest], [0] * len(values) + [1, 1], scale=handed)[: len(values)].tolist()

    def handed(values: Tensor, batch_std: Tensor) -> Tensor:
        before = values.clone()
        given = estimate(values, batch_std)
        intact.append(torch.equal(before, values))
        return given

    intact: list[bool] = []
    first, again = asked(rewards), asked(rewards)
    turned = asked(rewards[::-1])[::-1]
    shown = f"rewards {list(rewards)} got {[round(a, 6) for a in first]}"
    scale = max(map(abs, first))
    ranked = sorted(zip(rewards, first, strict=True))
    findings = {
        f"{shown}: not finite": not all(map(math.isfinite, first)),
        f"{shown}, and then {again}": first != again,
        f"it changes the rewards {list(rewards)} in place": not all(intact),
        f"{shown}: no advantage at all": scale == 0,
        f"{shown}, and in another order other ones": any(
            abs(a - b) > 1e-6 * scale for a, b in zip(first, turned, strict=True)
        ),
        f"{shown}: they do not add up to 0": abs(math.fsum(first)) > 1e-6 * scale * len(first),
        f"{shown}: equal rewards are told apart": len(set(zip(rewards, first, strict=True))) > len(set(rewards)),
        f"{shown}: a lower reward has the higher advantage": any(
            low[1] > high[1] + 1e-6 * scale for low, high in itertools.pairwise(ranked)
        ),
    }
    broken = next((what for what, is_broken in findings.items() if is_broken), None)
    if broken is None:
        return None
    return Breach(
        broken, "siblings are compared by their rewards alone; the run refuses any other advantage at its first step",
        "centre what you return, and let it rise with the reward",
    )  # fmt: skip
