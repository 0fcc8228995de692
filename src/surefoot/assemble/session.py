"""One training run inside its folder: start, go, and leave a verdict whatever happens.

Promises   a start that is refused leaves no folder behind; once step 1 has begun there is always
           a verdict.json that says how it ended; the final weights are saved before the verdict.
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
from surefoot.config_load import LoadedConfig
from surefoot.data.tasks import TaskStream
from surefoot.envs.reward_pool import RewardPool
from surefoot.errors import InvariantError, StoppedError, StorageError, SurefootError
from surefoot.guards.verdict import Judgement, judge_run
from surefoot.records import Group, TrainSample, Verdict
from surefoot.store.durable import write_lines
from surefoot.store.environment import environment_record
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.console import View, batch_arithmetic
from surefoot.tracking.log import MetricsLog

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
        run = _make_run(loaded, parts, folder, view)
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
    if config.preflight_tasks:
        parts.runtime.publish(parts.learner.weights(), 0)
        probe = TaskStream(parts.train, config.seed).take(min(config.preflight_tasks, len(parts.train)))
        parts.runtime.preflight(probe)
    return parts


def _make_run(loaded: LoadedConfig, parts: Parts, folder: RunFolder, view: View) -> Run:
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

    hooks = Hooks(
        log=log, evaluated=evaluated, warn=view.warn, save=save,
        keep_groups=lambda step, groups: write_lines(folder.rollouts(step), _lines(groups)),
        refused=lambda step, samples: write_lines(folder.logs / f"refused_step_{step}.jsonl", _dump(samples)),
    )  # fmt: skip
    stream = TaskStream(parts.train, loaded.config.seed)
    return Run(
        config=loaded.config, runtime=parts.runtime, learner=parts.learner, codec=parts.codec,
        next_tasks=stream.take, heldout=parts.heldout, hooks=hooks,
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
    except Exception as error:
        status = Verdict.FAIL if isinstance(error, InvariantError) else Verdict.ERROR
        what = error.what if isinstance(error, SurefootError) else str(error)
        with contextlib.suppress(StorageError):  # the error itself matters more than its record
            _write_verdict(folder, run, Judgement(status, (f"{type(error).__name__}: {what}",)), began)
        raise
    run.hooks.save(run.step)
    target = None if run.config.target_metric is None else (run.config.target_metric, run.config.target_value or 0.0)
    metrics = run.last_metrics | run.last_eval
    judgement = judge_run(
        planned=run.config.max_steps, executed=run.step, target=target, metrics=metrics,
        refused=run.step - run.learner.version, samples=run.checked["samples"],
        moved=0 if run.learner.census is None else run.learner.census.moved,
    )  # fmt: skip
    _write_verdict(folder, run, judgement, began, shown_target=loaded.shown_target)
    outcome = Outcome(
        judgement.status, judgement.reasons, folder.root, 0 if judgement.status is Verdict.PASS else 1, metrics
    )
    view.finish(outcome)
    return outcome


def _write_verdict(
    folder: RunFolder, run: Run, judgement: Judgement, began: float, shown_target: tuple[str, float] | None = None
) -> None:
    folder.write_verdict(judgement.status, judgement.reasons, {
        "planned_steps": run.config.max_steps,
        "executed_steps": run.step,
        "version": run.learner.version,
        "target": None if run.config.target_metric is None else [run.config.target_metric, run.config.target_value],
        "shown_target": None if shown_target is None else list(shown_target),
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
