"""GRPO on one screen. Read this first.

    next_batch -> to_samples -> record -> learn -> publish -> log -> close_batch -> evaluate -> save

What is left out, and where it is: which task is next, when its rollouts are sampled and what became of it (the queue:
`runtime.task_queue`, `runtime.sampler`), who generates and where (`runtime`), what counts as right (`rewards`), how
groups become samples (`learner.samples`), the loss (`maths.losses`), how a step is cut and applied (`learner.grpo`),
held-out tasks and the guard (`evaluation`), what a run remembers (`loop_state`). This file adds the order, and that
every planned step is accounted for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surefoot.evaluation import evaluate, guard_fired, stop_if_guard_fired
from surefoot.learner.nonfinite import nonfinite_error
from surefoot.learner.samples import drop_reasons, select_training_groups, to_samples
from surefoot.loop_state import Hooks, Metrics, Run, logging_due, step_metrics, warnings_of
from surefoot.protocols import StepBatch
from surefoot.records import Group, TrainSample
from surefoot.storage.files import failpoint
from surefoot.system.signals import StopRequested
from surefoot.tracking.metrics import batch_metrics

__all__ = ["Hooks", "Metrics", "Run", "StopRequested", "steps", "train"]


def train(run: Run) -> None:
    """Run every planned step; returns when `run.step == config.max_steps`, or early when a soft guard fired."""
    for _ in steps(run):
        pass


def steps(run: Run) -> Iterator[int]:
    """One planned step at a time: the number of the step before the first, then that of each step that is over.

    The last evaluation comes after the last of them.
    A resumed run comes here with the step it goes on from; a batch that the journal holds is learned from once more.
    """
    passes = run.config.num_iterations
    run.clock.start_run()
    publish(run)
    if run.evaluation_due:  # before the first step, or where it was interrupted before the resume
        evaluate(run)
    yield run.step
    while run.step < run.config.max_steps and not guard_fired(run):
        run.clock.start_step()
        done = run.step % passes  # passes over this batch before a resume
        with run.clock.measure("collect"):
            batch = run.queue.next_batch(run.step - done + 1, run.config.tasks_per_step)
        run.clock.add("keep", batch.keeping_s)
        samples = prepare(run, batch.groups, again=done > 0)
        with run.clock.measure("keep"):
            run.queue.record_rollouts(batch)  # from here on this step can be repeated
        for iteration in range(done, passes):
            metrics, is_last = learn(run, samples, iteration), iteration == passes - 1
            if is_last and run.sync_due:
                metrics |= publish(run)
            log(run, metrics, batch.groups)
            if is_last:
                close_batch(run, batch, samples)
            if run.evaluation_due:
                evaluate(run)
            finish_step(run)
            yield run.step
    if run.last_eval_step != run.step:
        if not run.sync_due:
            publish(run)
        evaluate(run)
    stop_if_guard_fired(run)


def prepare(run: Run, groups: Sequence[Group], *, again: bool = False) -> list[TrainSample]:
    """Graded groups become samples with advantages; anything malformed stops here.

    Args:
        again: a resumed run goes on between two passes over these groups, which were checked and counted before.
    """
    if not again:
        run.check_groups(groups)
    kept = select_training_groups(groups, partial=run.config.partial_groups, wanted=run.informative_groups)
    samples = to_samples(kept.groups, scale=run.config.scale_rewards)
    if not again:
        run.check_samples(samples, kept.groups)
        run.differing += kept.differing
        run.lost = {f"failures/{reason}": float(n) for reason, n in kept.dropped.items()}
    return samples


def learn(run: Run, samples: Sequence[TrainSample], iteration: int) -> Metrics:
    """One optimiser step; one that is not finite is dumped and counted, too many of them in a row end the run."""
    failpoint("loop.before_learn")
    with run.hooks.phase("learn"), run.clock.measure("learn"):
        report = run.learner.learn(samples, iteration=iteration)
    failpoint("loop.after_learn")
    for what, remedy in report.notes:
        run.hooks.warn(what, remedy)
    run.count_step(applied=report.applied)
    if not report.applied:
        run.hooks.step_refused(run.step, samples, report.suspects)
        if run.refused_in_a_row >= run.config.max_nonfinite_steps:
            raise nonfinite_error(samples, run.refused_in_a_row, report.suspects)
    return step_metrics(run, report)


def publish(run: Run) -> Metrics:
    """Hand the engines the weights, with proof that they arrived."""
    failpoint("loop.before_publish")
    with run.hooks.phase("publish"):
        weights, version = run.learner.published()
        metrics = dict(run.runtime.publish(weights, version))
    run.hooks.published(version)
    failpoint("loop.after_publish")
    return metrics


def log(run: Run, metrics: Metrics, groups: Sequence[Group]) -> None:
    """Write the step's numbers on the logging cadence, and its rollouts always."""
    failpoint("loop.before_log")
    metrics |= batch_metrics(groups, run.datasets, loops=run.config.repetition != "off") | run.lost
    metrics |= run.clock.line(metrics["num_tokens"]) | run.hooks.extra_metrics()
    run.last_metrics = metrics
    run.guard_inputs.step(metrics)
    if run.config.save_rollouts:
        run.hooks.save_rollouts(run.step, groups)
    if logging_due(run.config, run.step, run.ends):
        run.hooks.log(run.step, metrics)
    for what, remedy in warnings_of(run, metrics, groups):
        run.hooks.warn(what, remedy)
    run.clock.start_step()  # a further pass over the same rollouts collects nothing


def close_batch(run: Run, batch: StepBatch, samples: Sequence[TrainSample]) -> None:
    """Tell the queue what became of every group: trained, or dropped and why."""
    is_refused = run.refused_in_a_row >= run.config.num_iterations  # not one pass over this batch was applied
    with run.clock.measure("keep"):
        run.queue.close_batch(batch, run.step, drop_reasons(batch.groups, samples, refused=is_refused))


def finish_step(run: Run) -> None:
    """Between two steps, and only here: save what is due, then end where the guard or a person asked for it."""
    every = run.config.save_steps
    is_best = run.config.save_best and run.best is not None and run.best[0] == run.step
    if is_best or (every and run.step % every == 0) or run.hooks.save_is_due():
        with run.clock.measure("keep"):
            run.hooks.save(run.step)
    run.hooks.step_finished(run.step)
    stop_if_guard_fired(run)
    if run.hooks.stop() and not guard_fired(run):
        raise StopRequested
