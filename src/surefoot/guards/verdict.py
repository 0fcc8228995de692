"""The verdict on a finished run: PASS needs every planned step, every invariant and the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.records import Verdict


@dataclass(frozen=True)
class Judgement:
    """A verdict and the sentences that carry it."""

    status: Verdict
    reasons: tuple[str, ...]


def judge_run(
    *,
    planned: int,
    executed: int,
    target: tuple[str, float] | None,
    metrics: Mapping[str, float],
    refused: int = 0,
    samples: int | None = None,
    moved: int | None = None,
) -> Judgement:
    """Judge by the numbers that were seen; a missing or non-finite one is never a pass.

    Args:
        metrics: the last evaluation's and the last step's, by name.
        refused: steps whose update was not finite and therefore not applied.
        samples: how many were trained on over the whole run; None when nobody counted.
        moved: parameter tensors that changed in the first step with a gradient; None when nobody counted.
    """
    if executed < planned:
        return Judgement(Verdict.INCOMPLETE, (f"{executed} of {planned} planned steps ran",))
    reasons = [f"all {planned} planned steps ran", "every invariant held"]
    if planned and refused >= planned:
        return Judgement(Verdict.FAIL, (f"none of {planned} updates was finite: nothing was trained",))
    if samples == 0:
        return Judgement(Verdict.FAIL, (*reasons, "no rollout ever got a verdict: nothing was trained on"))
    if moved == 0:
        reasons.append("no parameter ever changed")
    if refused:
        reasons.append(f"{refused} updates were not finite and not applied")
    if target is None:
        return Judgement(Verdict.PASS, (*reasons, "no target was set"))
    name, wanted = target
    value = metrics.get(name)
    if value is None:
        known = ", ".join(sorted(metrics)) or "none"
        return Judgement(Verdict.FAIL, (*reasons, f"target metric {name} was never measured (known: {known})"))
    if not math.isfinite(value) or value < wanted:
        return Judgement(Verdict.FAIL, (*reasons, f"{name} is {value:.4g}, below the target {wanted:g}"))
    return Judgement(Verdict.PASS, (*reasons, f"{name} is {value:.4g}, target {wanted:g}"))
