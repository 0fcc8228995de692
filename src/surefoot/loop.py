"""GRPO on one screen. Read this first.

    collect -> sort out -> weigh -> pack -> learn -> publish -> log -> judge

What is left out, and where it went: who generates and where (`runtime`), what counts as right
(`envs`), the loss (`maths.losses`), how a step is cut and applied (`policy.learner`), what must
hold (`guards`). What this loop adds is the order, that every planned step is accounted for, and that
a run which hurts the model ends: the guard hears of every evaluation, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from surefoot.config import Config
from surefoot.guards import invariants
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.diversity import DiversityGuard
from surefoot.loop_notes import Between, step_one_warnings
from surefoot.policy.learner import GRPOLearner, nonfinite_error
from surefoot.policy.samples import sort_out, weigh
from surefoot.protocols import Codec, Runtime
from surefoot.records import Group, Task, TrainSample
from surefoot.tracking.summary import group_metrics

Metrics = dict[str, float]


class StopRequested(Exception):  # noqa: N818 - not an error: somebody asked
    """Asked to stop; raised between two steps, so nothing is half done."""


@dataclass
class Hooks:
    """Where the loop's facts go: files, screens, tests."""

    log: Callable[[int, Metrics], None]
    evaluated: Callable[[int, Metrics], None]
    warn: Callable[[str, str], None]
    keep_groups: Callable[[int, Sequence[Group]], None]
    refused: Callable[[int, Sequence[TrainSample]], None]
    save: Callable[[int], None]
    best: Callable[[int, int | None], None] = lambda step, former: None
    """Keep this step's weights as the best; the former best, if any, is no longer needed."""
    stop: Callable[[], bool] = lambda: False


@dataclass
class Run:
    """Everything one training run is made of, and how far it got."""

    config: Config
    runtime: Runtime
    learner: GRPOLearner
    codec: Codec
    next_tasks: Callable[[int], list[Task]]
    heldout: Sequence[Task]
    hooks: Hooks
    diversity: DiversityGuard = field(default_factory=DiversityGuard)
    step: int = 0
    last_eval: Metrics = field(default_factory=dict)
    last_eval_step: int = -1
    last_metrics: Metrics = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=lambda: {"groups": 0, "samples": 0, "advantages": 0})
    refused_in_a_row: int = 0
    census_logged: bool = False
    lost: Metrics = field(default_factory=dict)
    """Rollouts of this step that cannot be trained on, by reason."""
    guard: HeldOutGuard | None = None
    heldout_metric: str = "eval_accuracy"
    """What the guard watches, and by which the best weights are chosen."""
    between: Between = field(default_factory=Between)
    best: tuple[int, float] | None = None
    """Step and held-out number of the best evaluation after step 0."""
    at_start: float | None = None
    """The same number before the first step; None when nobody looked."""
    began: float = 0.0
    eval_seconds: float = 0.0


def train(run: Run) -> None:
    """Run every planned step; returns when `run.step == config.max_steps`, or early when a soft guard fired."""
    config, run.began = run.config, time.perf_counter()
    run.runtime.publish(run.learner.weights(), run.learner.version)
    if config.eval_on_start:
        evaluate(run)
    while run.step < config.max_steps and not halted(run):
        started = time.perf_counter()
        groups = run.runtime.collect(run.next_tasks(config.tasks_per_step), run.step + 1)  # collect
        collected = time.perf_counter()
        samples = prepare(run, groups)  # sort out, weigh
        for iteration in range(config.num_iterations):
            metrics = learn(run, samples, iteration)  # pack, learn
            learned = time.perf_counter()
            if iteration == config.num_iterations - 1:
                metrics |= run.runtime.publish(run.learner.weights(), run.learner.version)  # publish
            metrics |= group_metrics(groups) | run.lost | _timing(groups, started, collected, learned)
            log(run, metrics, groups)  # log
            started = collected = time.perf_counter()  # a further pass over the same rollouts collects nothing
            if run.step % (config.eval_steps or config.max_steps) == 0 and iteration == config.num_iterations - 1:
                evaluate(run)  # judge
            if config.save_steps and run.step % config.save_steps == 0:
                run.hooks.save(run.step)
            if run.hooks.stop() and not halted(run):
                raise StopRequested
    if run.last_eval_step != run.step:
        evaluate(run)


def prepare(run: Run, groups: Sequence[Group]) -> list[TrainSample]:
    """Scored groups become weighed samples; anything malformed stops here."""
    run.checked["groups"] += invariants.check_groups(
        groups, vocab_size=run.codec.vocab_size, stop_ids=run.codec.stop_ids
    )
    run.diversity.check(groups)
    kept = sort_out(groups, partial=run.config.partial_groups)
    run.lost = {f"failures/{reason}": float(n) for reason, n in kept.dropped.items()}
    samples = weigh(kept.groups, scale=run.config.scale_rewards)
    run.checked["samples"] += invariants.check_samples(samples, kept.groups)
    run.checked["advantages"] += invariants.check_advantages(samples)
    return samples


def learn(run: Run, samples: Sequence[TrainSample], iteration: int) -> Metrics:
    """One optimiser step; a step that is not finite is dumped, counted and, k in a row, the end."""
    report = run.learner.learn(samples, iteration=iteration)
    run.step += 1
    run.refused_in_a_row = 0 if report.applied else run.refused_in_a_row + 1
    if not report.applied:
        run.hooks.refused(run.step, samples)
        if run.refused_in_a_row >= run.config.max_nonfinite_steps:
            raise nonfinite_error(samples, run.refused_in_a_row)
    metrics = dict(report.metrics) | {"version": float(report.version), "steps_refused": float(not report.applied)}
    if run.learner.census is not None and not run.census_logged:
        metrics |= run.learner.census.metrics()
        run.census_logged = run.learner.census.moved > 0
    return metrics


def log(run: Run, metrics: Metrics, groups: Sequence[Group]) -> None:
    """Write the step's numbers on the logging cadence, and the rollouts always."""
    run.last_metrics = metrics
    run.between.step(metrics)
    if run.config.save_rollouts:
        run.hooks.keep_groups(run.step, groups)
    if run.step % run.config.logging_steps == 0 or run.step in (1, run.config.max_steps):
        run.hooks.log(run.step, metrics)
    if run.step == 1:
        for what, remedy in step_one_warnings(metrics, run.learner.census, run.config):
            run.hooks.warn(what, remedy)


def evaluate(run: Run) -> None:
    """Held-out tasks, answered with the published weights; a strict guard that fires saves and ends the run here."""
    if not run.heldout:
        return
    started = time.perf_counter()
    result = run.runtime.evaluate(run.heldout, run.step)
    run.last_eval = result.metrics() | {"timing/eval": time.perf_counter() - started}
    run.last_eval_step = run.step
    run.eval_seconds += run.last_eval["timing/eval"]
    run.last_eval |= fold(run)
    run.hooks.evaluated(run.step, run.last_eval)
    keep_best(run)
    if run.guard is not None and halted(run):
        run.hooks.save(run.step)
        if run.config.guard.mode == "strict":
            assert run.guard.last_status is not None, "a guard that fired has a status"
            raise run.guard.last_status.as_error()


def fold(run: Run) -> Metrics:
    """Tell the guard of this evaluation; what it thinks of it, as metrics, and what looking on has cost."""
    if run.guard is None:
        return {}
    told = run.between.folds(run.step, run.last_eval, run.heldout_metric)
    for step, numbers in told:
        run.guard.update(step, **numbers)
    if not told or run.guard.last_status is None:
        if run.step > 0:
            run.hooks.warn(
                f"step {run.step}: no reward since the last evaluation", "the guard skips it; see failures/*"
            )
        return {}
    share = run.eval_seconds / max(time.perf_counter() - run.began, 1e-9)
    return run.guard.last_status.as_metrics() | {"killswitch/eval_share": share}


def keep_best(run: Run) -> None:
    """Keep the weights when no evaluation was better; what a run began with is no checkpoint of it."""
    value = run.last_eval.get(run.heldout_metric)
    if run.step == 0:
        run.at_start = value
    if value is None or run.step == 0 or (run.best is not None and value <= run.best[1]):
        return
    if run.config.save_best:
        run.hooks.best(run.step, None if run.best is None else run.best[0])
    run.best = (run.step, value)


def halted(run: Run) -> bool:
    """Whether the guard has called for the end."""
    return run.guard is not None and run.guard.should_halt()


def _timing(groups: Sequence[Group], started: float, collected: float, learned: float) -> Metrics:
    now = time.perf_counter()
    tokens = sum(r.sampled_tokens for g in groups for r in g.rollouts)
    return {
        "timing/collect": collected - started,
        "timing/learn": learned - collected,
        "step_time": now - started,
        "tokens_per_second": tokens / max(now - started, 1e-9),
    }
