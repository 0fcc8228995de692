"""One training run inside its folder: start, go, and leave a verdict whatever happens.

Promises   a start that is refused leaves no folder behind; once step 1 has begun there is always
           a verdict.json that says how it ended; the final weights are saved before the verdict, and so are
           those of a run that the guard stopped; the best checkpoint goes only after a better one is complete.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.assemble.inputs import Inputs, RewardFunction, read_inputs
from surefoot.config import Config
from surefoot.config_load import LoadedConfig
from surefoot.data.tasks import TaskStream
from surefoot.envs.reward_pool import RewardPool
from surefoot.errors import CollapseStopError, InvariantError, StoppedError, StorageError, SurefootError
from surefoot.guards.verdict import Judgement, best_facts, guard_facts, judge_run, way_out
from surefoot.records import Group, TrainSample, Verdict
from surefoot.store.durable import write_lines
from surefoot.store.environment import environment_record
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.console import View, batch_arithmetic
from surefoot.tracking.log import MetricsLog
from surefoot.tracking.plan import guard_warning
from surefoot.tracking.view import best_text

if TYPE_CHECKING:
    from surefoot.assemble.build import Parts
    from surefoot.loop import Hooks, Run


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    verdict: Verdict
    reasons: tuple[str, ...]
    run_dir: Path
    exit_code: int
    metrics: Mapping[str, float]
    """The last evaluation's and the last step's."""


def train(
    loaded: LoadedConfig, *, view: View, rows: Sequence[Mapping[str, Any]] | None = None,
    functions: Sequence[RewardFunction] = (),
) -> Outcome:  # fmt: skip
    """Train as the config says; returns the verdict, raises a typed error when the run could not go on."""
    config = loaded.config
    inputs = read_inputs(config, loaded.base, rows=rows, functions=functions)
    output = None if config.output_dir is None else loaded.path(config.output_dir)
    folder = RunFolder.create(output, config.run_name, Path.cwd())
    pool = RewardPool(
        inputs.functions, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
        log_path=folder.logs / "rewards.log",
    )  # fmt: skip
    started = False
    try:
        folder.write_config(loaded.resolved)
        pool.start()  # before torch: a fork of a threaded process is not safe
        parts = _start(loaded, inputs, pool, folder, view)
        run = _make_run(loaded, inputs, parts, folder, view)
        started = True  # from here on the folder stays, with a verdict, however it ends
        return _go(loaded, run, folder, view)
    except BaseException:
        if not started:
            folder.discard()
        raise
    finally:
        pool.close()
        view.close()


def _start(loaded: LoadedConfig, inputs: Inputs, pool: RewardPool, folder: RunFolder, view: View) -> Parts:
    """Load, wire, look at the baseline; everything that can refuse the run before step 1."""
    config = loaded.config
    plan = batch_arithmetic(config, train_tasks=len(inputs.train), heldout_tasks=len(inputs.heldout))
    view.start([*loaded.notes, *plan])
    from surefoot.assemble.build import build  # torch: after the plan is on the screen

    parts = build(config, loaded.base, inputs, pool)
    folder.write_environment(
        environment_record() | {"tasks": inputs.task_set.name, "tasks_sha256": inputs.task_set.fingerprint}
    )
    if parts.left_out:
        view.warn(
            f"{parts.left_out} tasks left out: their prompts have more than {config.max_prompt_length} tokens",
            "raise max_prompt_length to train on them",
        )
    if parts.cramped:
        view.warn(
            f"{parts.cramped} prompts leave less room in the context than max_completion_length: cut sooner",
            "lower max_completion_length, or leave them out with max_prompt_length",
        )
    _warn_of_guard(config, inputs, view)
    if config.preflight_tasks:
        parts.runtime.publish(parts.learner.weights(), 0)
        probe = TaskStream(parts.train, config.seed).take(min(config.preflight_tasks, len(parts.train)))
        parts.runtime.preflight(probe)
    return parts


def _warn_of_guard(config: Config, inputs: Inputs, view: View) -> None:
    if found := guard_warning(config):
        view.warn(*found)
    fell_back = config.guard.metric == "auto" and inputs.heldout_metric == "eval_reward"
    if fell_back and config.guard.mode != "off" and inputs.heldout:
        view.warn(
            "the guard watches eval_reward, the reward itself: these tasks have no metric of their own",
            "give eval_metric, so that a gamed reward can be told from a solved task",
        )


def _make_run(loaded: LoadedConfig, inputs: Inputs, parts: Parts, folder: RunFolder, view: View) -> Run:
    from surefoot.assemble.build import make_guard
    from surefoot.loop import Hooks, Run
    from surefoot.policy.checkpoint import save_checkpoint

    metrics_log = MetricsLog(folder.metrics)

    def log(step: int, metrics: dict[str, float]) -> None:
        metrics_log.log(step, metrics)
        view.step(step, metrics)

    def evaluated(step: int, metrics: dict[str, float]) -> None:
        metrics_log.log(step, metrics)
        view.evaluated(step, metrics)

    def save(step: int) -> None:
        target = folder.checkpoint(step)
        if not target.exists():
            save_checkpoint(
                parts.policy.model, parts.policy.tokenizer, target, step=step, version=parts.learner.version
            )

    def best(step: int, former: int | None) -> None:
        save(step)
        every = loaded.config.save_steps
        if former is not None and not (every and former % every == 0):  # a better one is complete: now, not before
            folder.remove_checkpoint(former)

    hooks = Hooks(
        log=log, evaluated=evaluated, warn=view.warn, save=save, best=best,
        keep_groups=lambda step, groups: write_lines(folder.rollouts(step), _lines(groups)),
        refused=lambda step, samples: write_lines(folder.logs / f"refused_step_{step}.jsonl", _dump(samples)),
    )  # fmt: skip
    stream = TaskStream(parts.train, loaded.config.seed, heldout=inputs.border)
    return Run(
        config=loaded.config, runtime=parts.runtime, learner=parts.learner, codec=parts.codec,
        next_tasks=stream.take, heldout=parts.heldout, hooks=hooks,
        guard=make_guard(loaded.config, parts.heldout), heldout_metric=inputs.heldout_metric,
    )  # fmt: skip


def _go(loaded: LoadedConfig, run: Run, folder: RunFolder, view: View) -> Outcome:
    """The loop, and the verdict on however it ended."""
    from surefoot.loop import StopRequested
    from surefoot.loop import train as run_loop

    began = time.perf_counter()
    try:
        with _stop_on_signals(run.hooks):
            run_loop(run)
    except (StopRequested, KeyboardInterrupt) as stop:
        whole = isinstance(stop, StopRequested)  # a second Ctrl-C lands anywhere: the weights may be half stepped
        if whole:
            run.hooks.save(run.step)
        kept = f"weights are in {folder.checkpoint(run.step)}" if whole else "the step under way was not saved"
        stopped = Judgement(Verdict.INCOMPLETE, (f"stopped on request after step {run.step}; {kept}",))
        _write_verdict(folder, run, stopped, began)
        raise StoppedError(
            f"stopped after step {run.step} of {run.config.max_steps}; {kept}",
            "asked to stop",
            f"surefoot eval {folder.root}" if whole else "earlier checkpoints, if any, are whole; start again",
        ) from stop
    except CollapseStopError as stop:
        with contextlib.suppress(StorageError):  # as below
            _finish(loaded, run, folder, view, began, code=stop.exit_code)
        raise CollapseStopError(
            stop.what, stop.why, way_out(_best(run, folder), run.config.model, folder.root), stop.status
        ) from None
    except Exception as error:
        status = Verdict.FAIL if isinstance(error, InvariantError) or _collapse(run) else Verdict.ERROR
        what = error.what if isinstance(error, SurefootError) else str(error)
        reasons = (f"{type(error).__name__}: {what}", *filter(None, [_collapse(run)]))
        with contextlib.suppress(StorageError):  # the error itself matters more than its record
            _write_verdict(folder, run, Judgement(status, reasons), began)
        raise
    run.hooks.save(run.step)
    return _finish(loaded, run, folder, view, began)


def _finish(
    loaded: LoadedConfig, run: Run, folder: RunFolder, view: View, began: float, code: int | None = None
) -> Outcome:
    """Judge, write the verdict, then show it; `code` is the exit code where the verdict alone does not decide it."""
    target = None if run.config.target_metric is None else (run.config.target_metric, run.config.target_value or 0.0)
    metrics = run.last_metrics | run.last_eval
    judgement = judge_run(
        planned=run.config.max_steps, executed=run.step, target=target, metrics=metrics,
        refused=run.step - run.learner.version, samples=run.checked["samples"],
        moved=0 if run.learner.census is None else run.learner.census.moved, collapse=_collapse(run),
    )  # fmt: skip
    _write_verdict(folder, run, judgement, began, shown_target=loaded.shown_target)
    code = (0 if judgement.status is Verdict.PASS else 1) if code is None else code
    outcome = Outcome(judgement.status, judgement.reasons, folder.root, code, metrics)
    view.note(_notes(run, folder))
    view.finish(outcome)
    return outcome


def _collapse(run: Run) -> str:
    """Why the guard fired; empty while it has not."""
    status = None if run.guard is None else run.guard.last_status
    return status.reason if status is not None and status.fire else ""


def _best(run: Run, folder: RunFolder) -> dict[str, Any] | None:
    """The best evaluation; its weights are named only where they are."""
    kept = run.best and folder.checkpoint(run.best[0]).is_dir()
    return best_facts(run.best, run.heldout_metric, at_start=run.at_start, kept=kept)


def _notes(run: Run, folder: RunFolder) -> list[str]:
    """For the last block: the two curves of a run that the guard stopped, and the best weights."""
    curves = run.guard.curves().splitlines() if run.guard is not None and _collapse(run) else []
    best = _best(run, folder)
    return curves if best is None else [*curves, best_text(best)]


def _write_verdict(
    folder: RunFolder, run: Run, judgement: Judgement, began: float, shown_target: tuple[str, float] | None = None
) -> None:
    folder.write_verdict(judgement.status, judgement.reasons, {
        "planned_steps": run.config.max_steps,
        "executed_steps": run.step,
        "version": run.learner.version,
        "target": None if run.config.target_metric is None else [run.config.target_metric, run.config.target_value],
        "shown_target": None if shown_target is None else list(shown_target),
        "best": _best(run, folder),
        "guard": guard_facts(run.guard, run.config.guard.mode, run.heldout_metric),
        "metrics": run.last_metrics | run.last_eval,
        "invariants_checked": run.checked | {"trained_tokens": run.learner.checked_tokens},
        "seconds": time.perf_counter() - began,
    })  # fmt: skip


@contextmanager
def _stop_on_signals(hooks: Hooks) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop between two steps; a second SIGINT does not wait."""
    asked: list[int] = []

    def stop(signum: int, frame: object) -> None:
        if asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signum)

    hooks.stop = lambda: bool(asked)
    try:
        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller owns the signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _lines(groups: Sequence[Group]) -> Iterator[str]:
    """One JSON object per rollout: everything a later judge needs."""
    for group in groups:
        for r in group.rollouts:
            yield json.dumps({
                "task": r.task_id, "group": r.group, "rollout": r.index, "prompt": group.task.prompt, "text": r.text,
                "reward": r.reward, "reward_parts": dict(r.reward_parts), "failure": r.failure,
                "version": r.version if r.turns else None, "finish_reason": r.finish_reason,
                "prompt_ids": list(r.turns[0].prompt_ids) if r.turns else [],
                "completion_ids": [t for turn in r.turns for t in turn.completion_ids],
                "logprobs": [p for turn in r.turns for p in turn.logprobs],
            }, ensure_ascii=False)  # fmt: skip


def _dump(samples: Sequence[TrainSample]) -> Iterator[str]:
    """The batch of a step that was not applied."""
    for s in samples:
        yield json.dumps({
            "task": s.item_id, "group": s.group, "rollout": s.index, "reward": s.reward, "advantage": s.advantage,
            "prompt_ids": list(s.prompt_ids), "completion_ids": list(s.completion_ids), "logprobs": list(s.logprobs),
        })  # fmt: skip
