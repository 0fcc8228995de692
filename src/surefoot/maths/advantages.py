"""From rewards to advantages: compare siblings, and nobody else.

Owns       who is whose sibling (by id), and the registry of ways to weigh what they differ by, `ESTIMATORS`.
Promises   ids decide the groups, in any order; a constant group is exactly zero at any float
           value; a non-finite reward is refused, never averaged.
Never      knows the configured group size unless it is told, and never fills in a reward.

Axes: B samples, G siblings of one group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from surefoot.errors import ConfigError, PartialGroupError, ShapeError

Estimator = Callable[[Tensor, Tensor], Tensor]
"""`estimate(rewards, batch_std)`: (G,) rewards of siblings that differ, () std of the batch -> (G,) advantages."""
Partial = Literal["train", "drop", "refuse"]

STD_FLOOR = 1e-6
"""Rewards that differ by less than this differ by rounding: the std is never taken below it."""


def compute_advantages(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[Hashable],
    *,
    scale: str | Estimator = "group",
    expected_size: int | None = None,
    partial: Partial = "train",
) -> Tensor:
    """How much better each sample did than its siblings.

    Args:
        rewards: (B,) one finite number per sample.
        group_ids: (B,) equal ids are siblings; any hashables, or an integer tensor.
        scale: `group` divides by the group's population std, `batch` by that of all rewards,
            `rank` replaces rewards by their mean rank spread over [-1, 1], `none` only centres; or an estimator that is
            in no table.
        expected_size: siblings a whole group has; None means that every group counts as whole. No run gives it:
            `learner.samples.drop_ungraded` decides on partial groups before.
        partial: a group of another size is trained on as it is, dropped (advantage exactly 0),
            or refused with `PartialGroupError`.

    Returns:
        (B,) float64 on the CPU. With `scale="group"` no entry exceeds sqrt(G - 1).

    Example:
        >>> compute_advantages([1.0, 0.0, 5.0, 5.0], ["a", "a", "b", "b"]).tolist()
        [1.0, -1.0, 0.0, 0.0]
    """
    if isinstance(scale, str):
        _require_choice("scale", scale, tuple(ESTIMATORS))
        scale = ESTIMATORS[scale]
    _require_choice("partial", partial, ("train", "drop", "refuse"))
    values = _as_rewards(rewards)
    groups = _members(group_ids, len(values))
    kept = _apply_policy(groups, expected_size, partial)
    advantages = torch.zeros_like(values)
    if not kept:
        return advantages
    batch_std = _population_std(values[[row for rows in kept.values() for row in rows]])
    for rows in kept.values():
        advantages[rows] = _within_group(values[rows], scale, batch_std)
    if not torch.isfinite(advantages).all():
        raise ShapeError(
            f"rewards between {values.min():g} and {values.max():g} overflow float64 when averaged",
            "an infinite advantage reaches every parameter",
            "scale the rewards to a sane range",
        )
    return advantages


def zero_variance(
    rewards: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[Hashable],
    *,
    best: float | None = None,
    worst: float | None = None,
) -> dict[str, int]:
    """Counts of groups that teach nothing, since all siblings earned the same. No run calls this.

    `best` and `worst` default to the largest and smallest reward seen. When every reward is
    equal and neither is given, nobody can say which it was: those two keys are left out.
    A group of one counts as zero variance.

    Example:
        >>> zero_variance([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [1, 1, 2, 2, 3, 3, 4])
        {'groups': 4, 'all_equal': 3, 'all_correct': 2, 'all_wrong': 1}
    """
    values = _as_rewards(rewards)
    groups = _members(group_ids, len(values))
    constants = [float(values[rows[0]]) for rows in groups.values() if _is_constant(values[rows])]
    counts = {"groups": len(groups), "all_equal": len(constants)}
    tellable = len(values) > 0 and float(values.min()) != float(values.max())
    top = float(values.max()) if best is None and tellable else best
    bottom = float(values.min()) if worst is None and tellable else worst
    if top is not None:
        counts["all_correct"] = sum(value == top for value in constants)
    if bottom is not None:
        counts["all_wrong"] = sum(value == bottom for value in constants)
    return counts


def _within_group(values: Tensor, estimate: Estimator, batch_std: Tensor) -> Tensor:
    """(G,) advantages of one group."""
    if _is_constant(values):  # the mean of equal floats need not equal them: 0.1 * 3 / 3 != 0.1
        return torch.zeros_like(values)
    given: object = estimate(values, batch_std)
    if not isinstance(given, Tensor) or given.shape != values.shape or given.dtype != values.dtype:
        form = f"{given.dtype} of {tuple(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
        raise ShapeError(
            f"the advantage estimator gave {form} for {len(values)} rewards in {values.dtype}",
            "broadcasting would give one sibling's advantage to others",
            "return one number per reward, as a tensor in the type of the rewards",
        )
    return given


def _by_group_std(values: Tensor, batch_std: Tensor) -> Tensor:
    bound = math.sqrt(len(values) - 1)  # a theorem; the clamp removes rounding only
    return ((values - values.mean()) / _population_std(values).clamp(min=STD_FLOOR)).clamp(-bound, bound)


def _by_batch_std(values: Tensor, batch_std: Tensor) -> Tensor:
    return (values - values.mean()) / batch_std.clamp(min=STD_FLOOR)


def _centred_ranks(values: Tensor, batch_std: Tensor) -> Tensor:
    """(G,) mean rank (ties share one), moved and scaled to [-1, 1]."""
    below = (values.unsqueeze(0) < values.unsqueeze(1)).sum(1)
    above = (values.unsqueeze(0) > values.unsqueeze(1)).sum(1)
    return (below - above).to(values.dtype) / (len(values) - 1)


def _centred(values: Tensor, batch_std: Tensor) -> Tensor:
    return values - values.mean()


ESTIMATORS: dict[str, Estimator] = {
    "group": _by_group_std, "batch": _by_batch_std, "rank": _centred_ranks, "none": _centred,
}  # fmt: skip
"""Advantage estimator -> its formula; asked only where the rewards of a group differ."""


def _population_std(values: Tensor) -> Tensor:
    """() std with 1/n, computed on values scaled to 1 so that squares do not overflow."""
    centred = values - values.mean()
    largest = centred.abs().max()
    if largest == 0:
        return largest
    return largest * (centred / largest).square().mean().sqrt()


def _is_constant(values: Tensor) -> bool:
    return bool((values == values[0]).all())


def _as_rewards(rewards: Tensor | Sequence[float]) -> Tensor:
    try:
        values = torch.as_tensor(rewards, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"rewards are not numbers: {error}",
            "a sample nobody could grade has no reward, and None is not 0",
            "leave samples without a verdict out, with a reason",
        ) from error
    if values.dim() != 1:
        raise ShapeError(
            f"rewards have shape {tuple(values.shape)}, expected (B,)",
            "a second axis would be averaged over strangers",
            "pass one number per sample",
        )
    bad = (~torch.isfinite(values)).nonzero().flatten().tolist()
    if bad:
        raise ShapeError(
            f"reward {values[bad[0]].item()} at row {bad[0]} ({len(bad)} non-finite of {len(values)})",
            "one NaN makes every advantage of its group NaN, or quietly zero",
            "leave samples without a verdict out, with a reason",
        )
    return values


def _members(group_ids: Tensor | Sequence[Hashable], count: int) -> dict[Hashable, list[int]]:
    """Row numbers by group id, in order of first appearance."""
    if isinstance(group_ids, Tensor):
        if group_ids.dim() != 1 or group_ids.is_floating_point() or group_ids.is_complex():
            raise ShapeError(
                f"group_ids is a {group_ids.dtype} tensor of shape {tuple(group_ids.shape)}",
                "ids are compared for equality; rounded or nested ones merge or split groups",
                "pass an integer tensor of shape (B,), or hashables",
            )
        group_ids = group_ids.tolist()
    if len(group_ids) != count:
        raise ShapeError(
            f"{count} rewards but {len(group_ids)} group ids",
            "a shifted list compares strangers",
            "pass one id per reward",
        )
    groups: dict[Hashable, list[int]] = {}
    for row, group in enumerate(group_ids):
        groups.setdefault(group, []).append(row)
    return groups


def _apply_policy(
    groups: Mapping[Hashable, list[int]], expected_size: int | None, partial: Partial
) -> dict[Hashable, list[int]]:
    if expected_size is not None and expected_size < 1:
        raise ConfigError(f"expected_size = {expected_size}", "a group has members", "pass num_generations, or None")
    odd = {g: len(rows) for g, rows in groups.items() if expected_size is not None and len(rows) != expected_size}
    if not odd or partial == "train":
        return dict(groups)
    if partial == "refuse":
        group, size = next(iter(odd.items()))
        raise PartialGroupError(
            f"group {group} has {size} of {expected_size} rollouts ({len(odd)} such groups of {len(groups)})",
            "an advantage over survivors rewards whatever did not fail",
            'find out why siblings are missing, or set partial_groups = "drop" or "train"',
        )
    return {g: rows for g, rows in groups.items() if g not in odd}


def _require_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} = {value!r}", f"it must be one of {', '.join(allowed)}", f"correct the spelling of {name}"
        )
