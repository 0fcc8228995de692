"""GRPO on one screen. Read this first.

    next batch -> collect -> samples -> record -> learn -> publish -> log -> close batch -> evaluate -> save

What is left out, and where it went: who generates and where (`runtime`), what counts as right (`rewards`), which task
is next and what became of it (`runtime.task_queue`), the loss (`maths.losses`), how a step is cut and applied
(`learner.grpo`), what must hold (`guards`). What this loop adds is the order, that every planned step is accounted
for, and that a run which hurts the model ends: the guard hears of every evaluation, once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from surefoot.config import Config
from surefoot.config.rules import HELDOUT
from surefoot.errors import RewardError, ToolError
from surefoot.guards import invariants
from surefoot.learner.nonfinite import nonfinite_error
from surefoot.learner.samples import ComparableGroups, drop_ungraded, informative, to_samples
from surefoot.loop_state import Hooks, Metrics, Run, cannot_fill, no_metric, step_one_warnings
from surefoot.protocols import EvalResult, Runtime, StepBatch
from surefoot.records import Group, Task, TrainSample
from surefoot.rewards.rules import EvalSet
from surefoot.storage.failpoints import failpoint
from surefoot.system.signals import StopRequested
from surefoot.tracking.summary import dataset_metrics, group_metrics, looping_share
from surefoot.tracking.timeline import span

__all__ = ["Hooks", "Metrics", "Run", "StopRequested", "train"]


def train(run: Run) -> None:
    """Run every planned step; returns when `run.step == config.max_steps`, or early when a soft guard fired.

    A resumed run comes here with the step it goes on from; a batch that the journal holds is learned from once more.
    """
    config, passes, run.began = run.config, run.config.num_iterations, run.began or time.perf_counter()
    landmarks = run.landmarks
    publish(run)
    if run.step % passes and landmarks:  # a run that never stopped would not have published between two passes
        run.landmarks = run.runtime.landmarks = landmarks
    if evaluation_due(run):  # before the first step, or where it was interrupted before the resume
        evaluate(run)
    while run.step < config.max_steps and not guard_fired(run):
        started, done = time.perf_counter(), run.step % passes
        batch = next_batch(run, run.step - done + 1)
        batch, groups = collect(run, batch)  # collect
        if run.hooks.stop() and batch.groups is None:  # nothing is learned yet: the resume finds the groups on the disk
            raise StopRequested
        collected = time.perf_counter()
        samples = prepare(run, groups, again=done > 0)  # drop ungraded, to samples
        with keeping(run):
            run.queue.record_rollouts(batch, groups)  # from here on this step can be repeated
        ready = time.perf_counter()
        for iteration in range(done, passes):
            last = iteration == passes - 1
            metrics = learn(run, samples, iteration)  # pack, learn
            learned = time.perf_counter()
            if last and sync_due(run):
                metrics |= publish(run)  # publish
            metrics |= batch_metrics(run, groups) | _timing(groups, started, collected - started, learned - ready)
            log(run, metrics, groups)  # log
            started = collected = ready = time.perf_counter()  # a further pass over the same rollouts collects nothing
            if last:
                with keeping(run):
                    run.queue.close_batch(batch, run.step, drop_reasons(run, groups, samples))
            if evaluation_due(run):
                evaluate(run)  # judge
            finish_step(run)
    if run.last_eval_step != run.step:
        if not sync_due(run):
            publish(run)
        evaluate(run)
    stop_if_guard_fired(run)


def next_batch(run: Run, step: int) -> StepBatch:
    """The batch that begins at `step`; when it comes with its groups, waiting for them was collecting, not keeping."""
    started = time.perf_counter()
    with span("draw"):  # asynchronous: waiting for groups
        batch = run.queue.next_batch(step, run.config.tasks_per_step)
    if batch.groups is None:
        run.keep_seconds += time.perf_counter() - started
    return batch


def collect(run: Run, batch: StepBatch) -> tuple[StepBatch, Sequence[Group]]:
    """Play what was not played before an interruption; with dynamic sampling, more until enough can teach."""
    failpoint("loop.before_collect")
    if batch.groups is not None:
        return batch, batch.groups
    with run.hooks.phase("collect"):
        groups = run_rollouts(run, batch, 0)
        while wanting := missing_informative_groups(run, groups):
            if len(groups) >= run.config.dynamic_sampling_batches * run.config.tasks_per_step:
                run.queue.give_back(batch)  # a grader that is mended meanwhile judges them anew
                raise cannot_fill(groups, wanting, run.config.dynamic_sampling_batches)
            batch = run.queue.extend_batch(batch, run.config.tasks_per_step)
            groups = [*groups, *run_rollouts(run, batch, len(groups))]
    failpoint("loop.after_collect")
    return batch, groups


def run_rollouts(run: Run, batch: StepBatch, first: int) -> list[Group]:
    """The groups of the batch from position `first` on; each is on the disk as soon as it is graded."""
    delivering = run.queue.recording(batch)
    try:
        with delivering as finished:
            return run.runtime.collect(batch.tasks[first:], batch.step, first, played=batch.played, finished=finished)
    except (RewardError, ToolError):
        run.queue.give_back(batch, unless=lambda group: None not in group.rewards)
        raise
    finally:
        run.keep_seconds += delivering.waited_s


def missing_informative_groups(run: Run, groups: Sequence[Group]) -> int:
    """How many groups with rewards that differ a step still lacks; 0 without dynamic sampling."""
    if not run.config.dynamic_sampling_batches:
        return 0
    kept = drop_ungraded(groups, partial=run.config.partial_groups).groups
    return max(0, run.config.tasks_per_step - len(informative(kept)))


def select_training_groups(run: Run, groups: Sequence[Group]) -> ComparableGroups:
    """What is trained on: with dynamic sampling the first `tasks_per_step` groups whose rewards differ."""
    kept = drop_ungraded(groups, partial=run.config.partial_groups)
    if not run.config.dynamic_sampling_batches:
        return kept
    return ComparableGroups(informative(kept.groups)[: run.config.tasks_per_step], kept.dropped)


def publish(run: Run) -> Metrics:
    """Hand the engines the weights, with proof."""
    failpoint("loop.before_publish")
    with run.hooks.phase("publish"):
        metrics = dict(run.runtime.publish(run.learner.weights(), run.learner.version))
    run.landmarks = run.runtime.landmarks
    run.hooks.published(run.learner.version)
    failpoint("loop.after_publish")
    return metrics


def sync_due(run: Run) -> bool:
    """Whether the engines get the weights after this step: on the cadence, and before every look at them."""
    return run.step % run.config.weight_sync_steps == 0 or evaluation_due(run)


def prepare(run: Run, groups: Sequence[Group], *, again: bool = False) -> list[TrainSample]:
    """Scored groups become weighed samples; anything malformed stops here.

    Args:
        again: a resumed run goes on between two passes over these groups, which it has looked at already.
    """
    if again:
        return to_samples(select_training_groups(run, groups).groups, scale=run.config.scale_rewards)
    run.checked["groups"] += invariants.check_groups(
        groups, vocab_size=run.codec.vocab_size, stop_ids=run.codec.stop_ids
    )
    run.diversity.check(groups)
    kept = select_training_groups(run, groups)
    run.lost = {f"failures/{reason}": float(n) for reason, n in kept.dropped.items()}
    samples = to_samples(kept.groups, scale=run.config.scale_rewards)
    run.checked["samples"] += invariants.check_samples(samples, kept.groups)
    run.checked["advantages"] += invariants.check_advantages(samples)
    run.differing += len(informative(kept.groups))
    return samples


def drop_reasons(run: Run, groups: Sequence[Group], samples: Sequence[TrainSample]) -> list[str | None]:
    """Per group, None when it was trained on, else why not."""
    trained = {sample.group for sample in samples}
    if run.refused_in_a_row >= run.config.num_iterations:  # not one pass over this batch was applied
        return ["nonfinite_step" if group.id in trained else _drop_reason(group) for group in groups]
    return [None if group.id in trained else _drop_reason(group) for group in groups]


def _drop_reason(group: Group) -> str:
    reasons = sorted({r.failure or "no_verdict" for r in group.rollouts if r.reward is None})
    if not reasons:  # only dynamic sampling leaves out a group that is whole
        return "surplus" if informative([group]) else "equal_rewards"
    return reasons[0]


def learn(run: Run, samples: Sequence[TrainSample], iteration: int) -> Metrics:
    """One optimiser step; a step that is not finite is dumped, counted and, k in a row, the end."""
    failpoint("loop.before_learn")
    with run.hooks.phase("learn"):
        report = run.learner.learn(samples, iteration=iteration)
    failpoint("loop.after_learn")
    for what, remedy in report.notes:
        run.hooks.warn(what, remedy)
    run.step += 1
    run.refused_in_a_row = 0 if report.applied else run.refused_in_a_row + 1
    run.refused_steps += not report.applied
    invariants.check_steps(run.step, run.learner.version, run.refused_steps)
    if not report.applied:
        run.hooks.refused(run.step, samples, report.suspects)
        if run.refused_in_a_row >= run.config.max_nonfinite_steps:
            raise nonfinite_error(samples, run.refused_in_a_row, report.suspects)
    metrics = dict(report.metrics) | {"version": float(report.version), "steps_refused": float(not report.applied)}
    rows = {word: report.trained_rows.get(name, 0) for name, word in run.datasets.items()}
    metrics |= {f"datasets/{word}/trained_rows": float(count) for word, count in rows.items()}
    if run.learner.census is not None and not run.census_logged:
        metrics |= run.learner.census.metrics()
        run.census_logged = run.learner.census.moved > 0
    return metrics


def batch_metrics(run: Run, groups: Sequence[Group]) -> Metrics:
    """What the step's groups look like, as a whole and by data set, and what of them was lost."""
    loops = {} if run.config.repetition == "off" else looping_share(groups)
    return group_metrics(groups) | dataset_metrics(groups, run.datasets) | loops | run.lost


def log(run: Run, metrics: Metrics, groups: Sequence[Group]) -> None:
    """Write the step's numbers on the logging cadence, and the rollouts always."""
    failpoint("loop.before_log")
    metrics |= run.hooks.gauges()
    metrics["timing/keep"], run.keep_seconds = run.keep_seconds, 0.0
    run.last_metrics = metrics
    run.between.step(metrics)
    if run.config.save_rollouts:
        run.hooks.keep_groups(run.step, groups)
    if logging_due(run.config, run.step, run.ends):
        run.hooks.log(run.step, metrics)
    first = step_one_warnings(metrics, run.learner.census, run.config) if run.step == 1 else ()
    new = (
        () if run.step % run.config.num_iterations else groups
    )  # every pass over a batch ends here, its calls count once
    for what, remedy in (*first, *run.tool_alarms.step(metrics, new)):
        run.hooks.warn(what, remedy)


def logging_due(config: Config, step: int, ends: Collection[int] = ()) -> bool:
    """Whether this step's numbers are written: on the cadence, and the first and the last always."""
    return step % config.logging_steps == 0 or step in (1, config.max_steps) or step in ends


def evaluation_due(run: Run) -> bool:
    """Whether the weights after this step are to be looked at, and were not; they are published after the last pass."""
    if run.last_eval_step == run.step or run.step % run.config.num_iterations:
        return False
    return run.step in run.ends or run.cadence.due(run.step)  # `ends`: the run was over here once, and was made longer


def evaluate(run: Run) -> None:
    """Held-out tasks, answered with the published weights, and what the guard thinks of it."""
    if not run.heldout and not run.eval_sets:
        return
    failpoint("loop.before_evaluate")
    started = time.perf_counter()
    with run.hooks.phase("evaluate"):
        results = answer(run.runtime, run.heldout, run.eval_sets, run.step)
    if run.config.save_rollouts:
        run.hooks.keep_answers(run.step, results)
    run.last_eval = eval_metrics(results) | {"timing/eval": time.perf_counter() - started}
    run.last_eval_step, run.scores = run.step, eval_scores(results, run.heldout_metric)
    run.eval_seconds += run.last_eval["timing/eval"]
    run.last_eval |= update_guard(run)
    run.hooks.evaluated(run.step, run.last_eval)
    keep_best(run)
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
    """The watched metric, task by task; empty when nobody measured it."""
    for name, result in results.items():
        scores = result.named_scores(None if name == HELDOUT else name)
        if metric in scores:
            return list(scores[metric])
    return []


def finish_step(run: Run) -> None:
    """Between two steps, and only here: save what is due, obey the guard, obey who asked to stop."""
    every = run.config.save_steps
    is_best = run.config.save_best and run.best is not None and run.best[0] == run.step
    if is_best or (every and run.step % every == 0) or run.hooks.due():
        with keeping(run):
            run.hooks.save(run.step)
    run.hooks.finished(run.step)
    stop_if_guard_fired(run)
    if run.hooks.stop() and not guard_fired(run):
        raise StopRequested


def stop_if_guard_fired(run: Run) -> None:
    """A guard that fired: the weights are saved, and a strict one ends the run here."""
    if run.guard is None or not guard_fired(run):
        return
    run.hooks.save(run.step)
    if run.config.guard.mode == "strict":
        assert run.guard.last_status is not None, "a guard that fired has a status"
        raise run.guard.last_status.as_error()


def update_guard(run: Run) -> Metrics:
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
    share = run.eval_seconds / max(run.seconds, 1e-9)
    return run.guard.last_status.as_metrics() | {"killswitch/eval_share": share}


def keep_best(run: Run) -> None:
    """Remember the best evaluation; one that is no better than what the run began with is none."""
    value = run.last_eval.get(run.heldout_metric)
    if run.step == 0:
        run.at_start, run.scores_at_start = value, run.scores
        return
    bar = run.at_start if run.best is None else run.best[1]
    if value is not None and (bar is None or value > bar):
        run.best = (run.step, value)


@contextmanager
def keeping(run: Run) -> Iterator[None]:
    """What durability costs is measured where it is paid."""
    started = time.perf_counter()
    try:
        yield
    finally:
        run.keep_seconds += time.perf_counter() - started


def guard_fired(run: Run) -> bool:
    """Whether the guard has called for the end."""
    return run.guard is not None and run.guard.should_halt()


def _timing(groups: Sequence[Group], started: float, collecting: float, learning: float) -> Metrics:
    now = time.perf_counter()
    tokens = sum(r.sampled_tokens for g in groups for r in g.rollouts)
    return {
        "timing/collect": collecting,
        "timing/learn": learning,
        "step_time": now - started,
        "tokens_per_second": tokens / max(now - started, 1e-9),
    }
