"""The verdict on a finished run: PASS needs evidence that something was learned, and a model that got no worse.

In full: every planned step ran, every invariant held, rewards differed,
parameter entries changed, the guard was silent, held-out tasks are not answered worse than before training by more
than noise, and the target, where there is one, was reached.

Read next: `verdict.py`, what more than noise is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import InvariantError
from surefoot.protocols import count_text
from surefoot.records import Verdict

if TYPE_CHECKING:
    from surefoot.guards.arming import Arming
    from surefoot.guards.collapse import HeldOutGuard


# -- Whether a model answers the same tasks better or worse than before, by more than noise -------
# Owns       the comparison of two evaluations of the same tasks, task by task.
# Promises   a model that did not change is called worse in fewer than 1 of 100 runs, however few tasks there are (at
# most 0.7 %, computed exactly for 1 to 70 tasks whose two answers are independent draws, and less for
# more); equal answers are never a change; a task that was graded only once is left out and not counted.
# Never      decides what that means for a run: `verdict.py` does.
#
# The tasks are the same before and after, so the differences per task are compared with 0; how hard the tasks are
# cancels
# out. Two tasks are added, one that went from worst to best and one that went back, as `noise.proportion_se` adds a
# right
# and a wrong answer: without them four answers of four that got worse would have no noise at all. For 0 and 1 this is
# the interval of Bonett and Price for paired proportions.


MARGIN_SE = 2.6
"""Standard errors that a change has to exceed to be more than noise, on one side."""

Scores = Sequence[float | None]
"""One number per held-out task, always in the same order; None where nobody could grade it."""


@dataclass(frozen=True)
class Change:
    """The same tasks, before training and after."""

    before: float
    after: float
    noise: float
    """What a change has to exceed."""
    tasks: int
    counted: bool
    """Whether each task was either right or wrong, so that a mean of few is shown as a count."""

    @property
    def worse(self) -> bool:
        """Lower than before by more than noise."""
        return self.before - self.after > self.noise

    @property
    def better(self) -> bool:
        """Higher than before by more than noise."""
        return self.after - self.before > self.noise

    @property
    def text(self) -> str:
        """`0.14 -> 0.00`, or `5 of 9 -> 2 of 9`."""
        return " -> ".join(self._shown(value) for value in (self.before, self.after))

    @property
    def margin(self) -> str:
        """`±0.077 at 150 tasks`."""
        return f"±{self.noise:.2g} at {self.tasks} task{'s' * (self.tasks != 1)}"

    def _shown(self, value: float) -> str:
        right = {"eval_right": round(value * self.tasks), "eval_n": self.tasks} if self.counted else {}
        return count_text(right) or f"{value:.4g}"


def compare(before: Scores, after: Scores) -> Change | None:
    """What became of the tasks that were graded both times; None when there is no such task.

    Example:
        >>> found = compare([1.0] * 21 + [0.0] * 129, [0.0] * 150)
        >>> found.worse, found.text, found.margin
        (True, '0.14 -> 0', '±0.078 at 150 tasks')
        >>> compare([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]).worse  # 3 of 4 -> 1 of 4
        False
    """
    if before and after and len(before) != len(after):
        raise InvariantError(
            f"{len(before)} held-out tasks were answered before training and {len(after)} after it",
            "tasks are compared one by one, so they have to be the same",
            "evaluate the same tasks every time; this is a bug in surefoot",
        )
    pairs = [(b, a) for b, a in zip(before, after, strict=False) if b is not None and a is not None]
    if not pairs:
        return None
    n, seen = len(pairs), {score for pair in pairs for score in pair}
    width = 1.0 if seen <= {0.0, 1.0} else max(seen) - min(seen)
    total = math.fsum(a - b for b, a in pairs) / (n + 2)
    squares = (math.fsum((a - b) ** 2 for b, a in pairs) + 2 * width * width) / (n + 2)
    se = math.sqrt(max(squares - total * total, 0.0) / (n + 2))
    return Change(
        before=math.fsum(b for b, _ in pairs) / n, after=math.fsum(a for _, a in pairs) / n,
        noise=MARGIN_SE * se * (n + 2) / n, tasks=n, counted=seen <= {0.0, 1.0},
    )  # fmt: skip


# -- The verdict on a finished run: PASS needs evidence that something was learned, and a model that got no worse


@dataclass(frozen=True)
class RunJudgement:
    """A verdict and the sentences that carry it."""

    status: Verdict
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class LearningEvidence:
    """What a run can show for having learned something; PASS needs it, whatever else went well."""

    learning_rate: float
    groups: int
    """That were looked at, over the whole run."""
    differing: int
    """Of them, those whose rewards were not all equal: only these have a gradient."""
    changed_entries: int
    """Parameter entries that steps changed, added up."""
    metric: str
    """The held-out number by which the run is judged."""
    change: Change | None
    """That number before training and at the end; None when it was not measured twice."""
    measured: bool
    """Whether held-out tasks were answered at least once."""
    channels: tuple[str, ...] = ()
    """Keys of what trains beside the rewards, and needs no rewards that differ."""

    def missing(self) -> str:
        """Why nothing can have been learned, the most specific cause first; empty when something was."""
        if self.learning_rate == 0.0:
            return "nothing was learned: learning_rate = 0"
        if self.differing == 0 and not self.channels:
            return f"nothing was learned: all rewards were equal, in none of {self.groups} groups did they differ"
        if self.changed_entries == 0:
            return "nothing was learned: no parameter entry ever changed"
        return ""

    def heldout(self) -> str:
        """What held-out tasks say of the model, beside what they said before training."""
        if self.change is None:
            once = "not measured before training, nothing to compare with (see eval_on_start)"
            return f"held-out: {once if self.measured else 'not measured'}"
        numbers, margin = f"{self.metric} {self.change.text}", self.change.margin
        if self.change.worse:
            return f"worse than the model you started with: {numbers}, noise {margin}"
        if self.change.better:
            return f"better than the model you started with: {numbers}, noise {margin}"
        return f"no measurable change ({margin}): {numbers}"


def judge_run(
    *,
    planned: int,
    executed: int,
    target: tuple[str, float] | None,
    metrics: Mapping[str, float],
    evidence: LearningEvidence,
    refused: int = 0,
    samples: int | None = None,
    collapse: str = "",
    unaccounted: int = 0,
    no_target: str = "no target was set",
) -> RunJudgement:
    """Judge by the numbers that were seen; a missing or non-finite one is never a pass.

    Args:
        metrics: the last evaluation's and the last step's, by name.
        evidence: that something was learned, and what became of the model.
        refused: steps whose update was not finite and therefore not applied.
        samples: how many were trained on over the whole run; None when nobody counted.
        collapse: why the guard fired; empty while it has not. It outweighs everything else.
        unaccounted: planned items of the ledger that are neither pending, trained nor dropped.
        no_target: what is said of the target where there is none to judge by.
    """
    if collapse:
        return RunJudgement(
            Verdict.FAIL, (f"the guard stopped the run after {executed} of {planned} steps: {collapse}",)
        )
    if executed < planned:
        return RunJudgement(Verdict.INCOMPLETE, (f"{executed} of {planned} planned steps ran",))
    if unaccounted:
        return RunJudgement(Verdict.FAIL, (f"the ledger does not add up: {unaccounted} items are unaccounted for",))
    ran = [f"all {planned} planned steps ran", "every invariant held"]
    if refused:
        ran.append(f"{refused} updates were not finite and not applied")
    if lacking := _nothing_trained(planned, refused, samples) or evidence.missing():
        return RunJudgement(Verdict.FAIL, (lacking, *ran, evidence.heldout()))
    reached, said = (True, no_target) if target is None else _target(target, metrics)
    if evidence.change is not None and evidence.change.worse:
        return RunJudgement(Verdict.FAIL, (evidence.heldout(), *ran, said))
    if evidence.channels and not evidence.differing:
        ran.append(f"all rewards were equal: only {' and '.join(evidence.channels)} trained")
    return RunJudgement(Verdict.PASS if reached else Verdict.FAIL, (*ran, evidence.heldout(), said))


def _nothing_trained(planned: int, refused: int, samples: int | None) -> str:
    """Why no step can have trained anything; empty when one may have."""
    if planned and refused >= planned:
        return f"nothing was learned: none of {planned} updates was finite"
    return "nothing was learned: no rollout ever got a verdict" if samples == 0 else ""


def _target(target: tuple[str, float], metrics: Mapping[str, float]) -> tuple[bool, str]:
    """Whether it was reached, and a sentence about it."""
    name, wanted = target
    value = metrics.get(name)
    if value is None:
        known = ", ".join(sorted(metrics)) or "none"
        return False, f"target metric {name} was never measured (known: {known})"
    shown = (count_text(metrics) if name == "eval_accuracy" else None) or f"{value:.4g}"
    if not math.isfinite(value) or value < wanted:
        return False, f"{name} is {shown}, below the target {wanted:g}"
    return True, f"{name} is {shown}, target {wanted:g}"


def best_facts(
    best: tuple[int, float] | None, metric: str, *, at_start: float | None, kept: object, measured: bool = True
) -> dict[str, Any] | None:
    """The best evaluation, for verdict.json: step 0 and no checkpoint where no later one was better than the first.

    Args:
        best: step and value of the best one after step 0 that was better than the one before training.
        at_start: the same number before the first step; None when nobody looked.
        kept: whether its weights were saved; their place is relative to the run folder, which may be moved.
        measured: whether there was an evaluation after step 0; without one nothing is the best.
    """
    if best is None:
        if at_start is None or not measured:
            return None
        best, kept = (0, at_start), False
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
    if best is not None and best["step"] == 0:
        where = f"no step was better than the model it began with, {model}; "
    elif best is not None and best["checkpoint"]:
        where = f"the best weights are in {root / best['checkpoint']}; "
    return f"{where}read the rollouts with the highest reward in {root / 'rollouts'}, and repair the reward"


def guard_facts(
    guard: HeldOutGuard | None, mode: str, metric: str, arming: Arming | None = None,
    calibrated: Mapping[str, float] | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """What the guard last thought and whether it was armed, for verdict.json; None when there was no guard.

    Args:
        arming: the judgement by the first held-out value.
        calibrated: limits that a healthy run tightened.
    """
    if guard is None:
        return None
    facts: dict[str, Any] = {"mode": mode, "metric": metric} | ({} if arming is None else arming.facts())
    facts |= {"calibrated": dict(calibrated)} if calibrated else {}
    status = guard.last_status
    if status is None:
        return facts | {"evaluations": 0, "fired": False}
    return facts | {
        "evaluations": status.folds, "fired": status.fire, "rule": status.rule or None, "reason": status.reason or None,
        "step": status.fired_step, "unfed_rules": list(status.unfed),
    }  # fmt: skip
