"""Held-out tasks during a run: answered with the published weights, folded by the guard, the best step remembered.

Promises   the guard is told of every evaluation, once; a run that hurts the model ends: strict at once, soft with the
           step; an evaluation set whose metric judged nothing is an error, never a pass.
Never      touches a training random stream, or changes weights.

Read next: `guards/collapse.py`, which decides; `run/evaluate.py`, the same questions asked of a finished run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from surefoot.config.rules import HELDOUT
from surefoot.errors import RewardError
from surefoot.loop_state import Metrics, Run
from surefoot.protocols import EvalResult, Runtime
from surefoot.records import Task
from surefoot.rewards.grading import EvalSet
from surefoot.storage.files import failpoint


def evaluate(run: Run) -> None:
    """Answer the held-out tasks and every evaluation set, tell the guard, remember the best."""
    if not run.heldout and not run.eval_sets:
        return
    failpoint("loop.before_evaluate")
    started = time.perf_counter()
    with run.hooks.phase("evaluate"):
        results = answer(run.runtime, run.heldout, run.eval_sets, run.step)
    if run.config.save_rollouts:
        run.hooks.save_answers(run.step, results)
    run.last_eval = eval_metrics(results) | {"timing/eval": time.perf_counter() - started}
    run.last_eval_step, run.scores = run.step, eval_scores(results, run.heldout_metric)
    run.clock.eval_seconds += run.last_eval["timing/eval"]
    run.last_eval |= update_guard(run)
    run.hooks.evaluated(run.step, run.last_eval)
    remember_best(run)
    failpoint("loop.after_evaluate")


def answer(runtime: Runtime, heldout: Sequence[Task], eval_sets: Sequence[EvalSet], step: int) -> dict[str, EvalResult]:
    """Held-out tasks and every evaluation set, by name, in the order in which they are logged."""
    results = {HELDOUT: runtime.evaluate(heldout, step)} if heldout else {}
    for each in eval_sets:
        results[each.name] = runtime.evaluate(each.tasks, step, each.name)
        if each.judges.metric is not None and results[each.name].accuracy is None:
            raise no_metric(each)
    return results


def eval_metrics(results: Mapping[str, EvalResult]) -> Metrics:
    """As they are logged: each set under its own name."""
    found: Metrics = {}
    for name, result in results.items():
        found |= result.metrics(None if name == HELDOUT else name)
    return found


def eval_scores(results: Mapping[str, EvalResult], metric: str) -> list[float | None]:
    """The watched metric, task by task; empty when it was not measured."""
    for name, result in results.items():
        scores = result.named_scores(None if name == HELDOUT else name)
        if metric in scores:
            return list(scores[metric])
    return []


def no_metric(each: EvalSet) -> RewardError:
    """An evaluation set has a metric, and it judged none of its answers."""
    return RewardError(
        f"eval_sets.{each.name}: its metric gave no verdict on any of the answers to {len(each.tasks)} tasks",
        "a metric that fails, or abstains every time, measures nothing",
        f'repair it (logs/rewards.log has what it printed), or set eval_sets.{each.name}.metric = "none"',
    )


def update_guard(run: Run) -> Metrics:
    """Tell the guard of this evaluation; its state as metrics, and the share of the run that evaluations took."""
    if run.guard is None:
        return {}
    updates = run.guard_inputs.for_evaluation(run.step, run.last_eval, run.heldout_metric)
    for step, numbers in updates:
        run.guard.update(step, **numbers)
    if not updates or run.guard.last_status is None:
        if run.step > 0:
            run.hooks.warn(
                f"step {run.step}: no reward since the last evaluation", "the guard skips it; see failures/*"
            )
        return {}
    share = run.clock.eval_seconds / max(run.clock.seconds, 1e-9)
    return run.guard.last_status.as_metrics() | {"killswitch/eval_share": share}


def remember_best(run: Run) -> None:
    """Remember the best evaluation; one that is no better than what the run began with is none."""
    value = run.last_eval.get(run.heldout_metric)
    if run.step == 0:
        run.at_start, run.scores_at_start = value, run.scores
        return
    bar = run.at_start if run.best is None else run.best[1]
    if value is not None and (bar is None or value > bar):
        run.best = (run.step, value)


def guard_fired(run: Run) -> bool:
    """Whether the guard has called for the end."""
    return run.guard is not None and run.guard.should_halt()


def stop_if_guard_fired(run: Run) -> None:
    """Where the guard has fired the weights are saved, and a strict one ends the run here."""
    if run.guard is None or not guard_fired(run):
        return
    run.hooks.save(run.step)
    if run.config.guard.mode == "strict":
        assert run.guard.last_status is not None, "a guard that fired has a status"
        raise run.guard.last_status.as_error()
