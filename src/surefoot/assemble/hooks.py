"""What the loop says and keeps, carried to files and screen."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from surefoot.assemble.keeper import Keeper
from surefoot.data.task_format import expected_tools
from surefoot.protocols import EvalResult
from surefoot.pulse import beat
from surefoot.records import Group, Rollout, TrainSample
from surefoot.store.durable import write_lines
from surefoot.store.failpoints import failpoint
from surefoot.tracking.log import MetricsLog

if TYPE_CHECKING:
    from surefoot.assemble.build import Parts
    from surefoot.assemble.surroundings import Surroundings
    from surefoot.loop import Hooks, Run


def make_hooks(around: Surroundings) -> Hooks:
    """Hooks of a run; `save` is set by `keep_checkpoints`, once there is something to save."""
    from surefoot.loop import Hooks

    folder, sinks, view, lookout = around.keeper.folder, around.sinks, around.view, around.lookout

    @cache
    def metrics_log() -> MetricsLog:
        return MetricsLog(folder.metrics)  # opened with the first number: a resume cuts the file before that

    def log(step: int, metrics: dict[str, float]) -> None:
        metrics_log().log(step, metrics)
        sinks.log(step, metrics)
        view.step(step, metrics)
        lookout.step(step, metrics)

    def evaluated(step: int, metrics: dict[str, float]) -> None:
        metrics_log().log(step, metrics)
        sinks.log(step, metrics)
        view.evaluated(step, metrics)
        lookout.evaluated(step, metrics)

    return Hooks(
        log=log, evaluated=evaluated, warn=view.warn, save=lambda step: None, stop=lambda: around.stop.asked,
        phase=lookout.phase(around.stop.part), finished=lookout.finished,
        keep_groups=lambda step, groups: write_lines(folder.rollouts(step), _lines(groups)),
        keep_answers=lambda step, results: write_lines(folder.answers(step), answer_lines(results)),
        refused=lambda step, samples, suspects: write_lines(
            folder.logs / f"refused_step_{step}.jsonl", _dump(samples, suspects)
        ),
    )  # fmt: skip


def keep_checkpoints(run: Run, parts: Parts, keeper: Keeper) -> None:
    """From here on the run saves: weights, optimiser and its own state, durably; then prunes."""
    from surefoot.assemble.run_state import run_state

    config, saved = run.config, time.monotonic()

    def save(step: int) -> None:
        nonlocal saved
        saved, target = time.monotonic(), keeper.folder.checkpoint(step)
        if target.exists():
            return
        beat("saving a checkpoint")
        failpoint("session.before_save")
        with run.hooks.phase("save"):
            state = run_state(run, keeper.journal.id)
            keeper.sync_metrics()  # a power cut must not take numbers that a resume would not write again
            parts.checkpoints.save(target, step=step, extra=state)
            failpoint("session.after_save")
            keeper.batches.roll(step)
            keeper.prune(config.save_steps, None if run.best is None else run.best[0], run.hooks.warn)

    run.hooks.save = save
    run.hooks.due = lambda: config.save_minutes > 0 and time.monotonic() - saved >= 60 * config.save_minutes


def _lines(groups: Sequence[Group]) -> Iterator[str]:
    """One JSON object per rollout: everything a later judge needs."""
    for group in groups:
        for r in group.rollouts:
            yield json.dumps(rollout_row(group, r), ensure_ascii=False)


def answer_rows(results: Mapping[str, EvalResult]) -> Iterator[dict[str, Any]]:
    """The same for every answer of an evaluation, with the name of its set and what the task metric said."""
    for name, result in results.items():
        for group, correct in zip(result.groups, result.correct, strict=True):
            for rollout, solved in zip(group.rollouts, correct, strict=True):
                yield {"set": name, "correct": solved, **rollout_row(group, rollout)}


def answer_lines(results: Mapping[str, EvalResult]) -> Iterator[str]:
    """`answer_rows`, one line each."""
    return (json.dumps(row, ensure_ascii=False) for row in answer_rows(results))


def rollout_row(group: Group, r: Rollout) -> dict[str, Any]:
    """One rollout as it is kept."""
    return {
        "task": r.task_id, "group": r.group, "rollout": r.index, "prompt": group.task.prompt, "text": r.text,
        "reward": r.reward, "reward_parts": dict(r.reward_parts), "failure": r.failure,
        "version": r.version if r.turns else None, "finish_reason": r.finish_reason,
        "prompt_ids": list(r.turns[0].prompt_ids) if r.turns else [],
        "completion_ids": [t for turn in r.turns for t in turn.completion_ids],
        "logprobs": [p for turn in r.turns for p in turn.logprobs],
        "seconds": r.seconds, "grading_seconds": dict(r.grading_seconds),
    } | (_with_tools(group, r) if r.ended else {})  # fmt: skip


def _with_tools(group: Group, rollout: Rollout) -> dict[str, Any]:
    """The turns one by one: what was read between them, and every call with its answer; tools used and expected."""
    turns, seen = [], len(rollout.turns[0].prompt_ids) if rollout.turns else 0
    for turn in rollout.turns:
        turns.append({
            "read_ids": list(turn.prompt_ids[seen:]), "completion_ids": list(turn.completion_ids), "text": turn.text,
            "finish_reason": turn.finish_reason, "version": turn.version,
            "calls": [dataclasses.asdict(call) for call in turn.calls],
        })  # fmt: skip
        seen = len(turn.prompt_ids) + len(turn.completion_ids)
    used = dict.fromkeys(call.name for turn in rollout.turns for call in turn.calls if call.outcome != "refused")
    return {
        "ended": rollout.ended, "own_reward": rollout.own_reward, "tools_used": list(used),
        "tools_expected": expected_tools(group.task.columns), "turns": turns,
    }  # fmt: skip


def _dump(samples: Sequence[TrainSample], suspects: Sequence[str]) -> Iterator[str]:
    """The batch of a step that was not applied; who is to blame comes first."""
    yield json.dumps({"suspects": list(suspects)})
    for s in samples:
        yield json.dumps({
            "task": s.item_id, "group": s.group, "rollout": s.index, "reward": s.reward, "advantage": s.advantage,
            "prompt_ids": list(s.prompt_ids), "completion_ids": list(s.completion_ids), "logprobs": list(s.logprobs),
        })  # fmt: skip
