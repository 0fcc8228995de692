"""The verdict on a finished run: PASS needs every planned step, every invariant, a silent guard and the target."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.records import Verdict

if TYPE_CHECKING:
    from surefoot.guards.collapse import HeldOutGuard


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
    collapse: str = "",
    unaccounted: int = 0,
) -> Judgement:
    """Judge by the numbers that were seen; a missing or non-finite one is never a pass.

    Args:
        metrics: the last evaluation's and the last step's, by name.
        refused: steps whose update was not finite and therefore not applied.
        samples: how many were trained on over the whole run; None when nobody counted.
        moved: parameter tensors that changed in the first step with a gradient; None when nobody counted.
        collapse: why the guard fired; empty while it has not. It outweighs everything else.
        unaccounted: planned items of the ledger that are neither pending, trained nor dropped.
    """
    if collapse:
        return Judgement(Verdict.FAIL, (f"the guard stopped the run after {executed} of {planned} steps: {collapse}",))
    if executed < planned:
        return Judgement(Verdict.INCOMPLETE, (f"{executed} of {planned} planned steps ran",))
    if unaccounted:
        return Judgement(Verdict.FAIL, (f"the ledger does not add up: {unaccounted} items are unaccounted for",))
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


def best_facts(
    best: tuple[int, float] | None, metric: str, *, at_start: float | None, kept: object
) -> dict[str, Any] | None:
    """The best evaluation after step 0, for verdict.json; None when there was none.

    Args:
        best: step and value.
        at_start: the same number before the first step: a best that lies below it is no success.
        kept: whether its weights were saved; their place is relative to the run folder, which may be moved.
    """
    if best is None:
        return None
    step, value = best
    return {
        "step": step, "metric": metric, "value": value, "checkpoint": f"checkpoints/step_{step}" if kept else None,
        "before_training": at_start,
    }  # fmt: skip


def way_out(best: Mapping[str, Any] | None, model: str, root: Path) -> str:
    """What to do after a collapse: which weights to take, and where to look.

    Args:
        best: from `best_facts`.
        model: what the run began with.
        root: the run folder.
    """
    where = ""
    if best is not None and best["before_training"] is not None and best["before_training"] > best["value"]:
        where = f"no step was as good as the model it began with, {model}; "
    elif best is not None and best["checkpoint"]:
        where = f"the best weights are in {root / best['checkpoint']}; "
    return f"{where}read the rollouts with the highest reward in {root / 'rollouts'}, and repair the reward"


def guard_facts(guard: HeldOutGuard | None, mode: str, metric: str) -> dict[str, Any] | None:
    """What the guard last thought, for verdict.json; None when there was no guard."""
    if guard is None:
        return None
    facts: dict[str, Any] = {"mode": mode, "metric": metric}
    status = guard.last_status
    if status is None:
        return facts | {"evaluations": 0, "fired": False}
    return facts | {
        "evaluations": status.folds, "fired": status.fire, "rule": status.rule or None, "reason": status.reason or None,
        "step": status.fired_step, "unfed_rules": list(status.unfed),
    }  # fmt: skip
