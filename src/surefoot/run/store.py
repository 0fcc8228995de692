"""What a run keeps on disk while it goes: lock, journal, ledger, batches; and how it comes back to a checkpoint.

Owns       the order in which these are opened, rewound and closed.
Promises   a folder that holds only a config begins at step 0; one whose journal is gone although it has trained is
           refused, and so is a config that was edited; after `rewind` ledger, metrics and checkpoints tell of the
           same step.
Never      touches the folder without its lock.

Read next: `resume.py`, which brings the learner to the same step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.load import LoadedConfig, load_config
from surefoot.config.own_code import own_specs
from surefoot.data.files import expected_tools
from surefoot.errors import SecurityError, StateError
from surefoot.protocols import EvalResult
from surefoot.records import Group, Rollout, TrainSample
from surefoot.storage.batches import BatchLog
from surefoot.storage.checkpoints import checkpoints_by_step, newest_are_good, prune, sweep
from surefoot.storage.files import Journal, atomic_write, failpoint, write_lines
from surefoot.storage.ledger import Ledger
from surefoot.storage.lock import RunLock
from surefoot.storage.run_folder import RunFolder, refuse_hidden
from surefoot.storage.run_journal import LEDGER, RESUMED, assert_same_run, extensions, is_same_run
from surefoot.system.files import sha256_of, storage_error, sync_folder
from surefoot.system.signals import tick
from surefoot.tracking.metrics import MetricsLog, kind_of, metrics_until

if TYPE_CHECKING:
    from surefoot.loop import Hooks, Run
    from surefoot.run.session import RunContext


Warn = Callable[[str, str], None]


class RunStore:
    """One run's folder, held by this process until `close`."""

    def __init__(self, folder: RunFolder, lock: RunLock) -> None:
        """Open or begin the journal; undelivered leases of a former driver end here."""
        self.folder, self.lock = folder, lock
        self.swept = sweep(folder.root) + folder.sweep()
        with ExitStack() as stack:
            self.journal = stack.enter_context(self._open_journal(folder.journal))
            self.batches = BatchLog(folder.journal)
            stack.callback(self.batches.close)
            assert_same_run(self.journal, "config", {"config_sha256": sha256_of(folder.read_config())})
            self.ledger = Ledger.open(self.journal)
            self._files = stack.pop_all()

    def close(self) -> None:
        """Let go of the files, then of the lock."""
        try:
            self._files.close()
        finally:
            self.lock.close()

    def notes(self) -> list[str]:
        """What a former life of the run left that is worth a line."""
        torn = self.journal.torn_bytes + self.batches.torn_bytes
        return [
            *([self.lock.note] if self.lock.note else []),
            *([f"{torn} bytes of an unfinished journal record were cut off"] if torn else []),
            *([f"unfinished files were swept away: {', '.join(self.swept)}"] if self.swept else []),
        ]

    def require(self, step: int, *, passes: int) -> None:
        """Refuse to go back to `step` unless the ledger knows of it, and every later step can be done once more.

        Args:
            passes: optimiser steps on one batch.
        """
        ahead = self.ledger.step
        if ahead < step - step % passes:
            raise StateError(
                f"the weights are of step {step}, and the ledger knows of step {ahead}",
                "what they were trained on would be handed out and trained on once more",
                "bring journal/ and checkpoints/ back from one copy",
            )
        if ahead > step:
            self._require_batches(step, ahead, passes)

    def rewind(self, step: int, *, evaluated: int, passes: int, logged: Sequence[int] | None = None) -> int:
        """Bring ledger and metrics back to `step`, whose weights are loaded; returns how many batches are repeated.

        Args:
            evaluated: the last evaluation that the loaded state knows; -1 when there is none.
            passes: optimiser steps on one batch.
            logged: steps up to `step` whose numbers have to be in the metrics; None asks for none.
        """
        self.require(step, passes=passes)
        text, _ = metrics_until(self.folder.metrics, train=step, evaluation=evaluated)
        if logged is not None:
            self._require_numbers(text or b"", list(logged), evaluated)
        if text is not None:
            atomic_write(self.folder.metrics, text)
        if self.ledger.step > step:
            self.ledger.rewind(step)
        repeated = sum(first > step for first in self.batches.steps())
        self.journal.append({"event": RESUMED, "step": step, "repeated": repeated})
        self.folder.remove_verdict()
        failpoint("resume.rewound")
        return repeated

    def sync_metrics(self) -> None:
        """The numbers so far are on the disk when this returns: a checkpoint that goes on after them may follow."""
        try:
            if self.folder.metrics.exists():
                sync_folder(self.folder.metrics)  # what makes names durable makes bytes durable
                sync_folder(self.folder.root)
        except OSError as error:
            raise storage_error(self.folder.metrics, error) from error

    def prune(self, save_steps: int, best: int | None, warn: Warn) -> None:
        """After a save: checkpoints outside the rule go, and batches that lie behind two good ones."""
        pruned = prune(self.folder.root, save_steps=save_steps, best=best)
        for step, reason in pruned.damaged.items():
            warn(f"checkpoint step_{step} is not as it was saved: {reason}", "look at the disk; nothing was removed")
        newest = list(checkpoints_by_step(self.folder.root))[-2:]
        if len(newest) == 2 and self.batches.behind(newest[0]) and newest_are_good(self.folder.root):
            self.batches.forget(newest[0])

    def _open_journal(self, folder: Path) -> Journal:
        path = folder / LEDGER
        try:
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
                sync_folder(folder.parent)
        except OSError as error:
            raise storage_error(folder, error) from error
        if path.exists() or path.is_symlink():
            return Journal.open(path)
        refuse_lost_journal(self.folder)
        return Journal.create(path)

    def _require_batches(self, step: int, ahead: int, passes: int) -> None:
        """Every step between the checkpoint and the ledger can be repeated exactly, or the resume is refused."""
        begun = range(step - step % passes + 1, ahead + 1, passes)
        missing = next((first for first in begun if self.batches.find(first) is None), None)
        if missing is not None:  # the first will do: a ledger may claim any number of steps
            raise StateError(
                f"the ledger says step {ahead} was trained, the newest good checkpoint is of step {step}, and the "
                f"journal no longer holds step {missing}",
                "the same steps could not be done once more",
                "bring a newer checkpoint back from a copy, or start a new run from this one (model=...)",
            )

    def _require_numbers(self, text: bytes, logged: list[int], evaluated: int) -> None:
        """What was on the disk before the checkpoint is there still: no number of the run is made up or left out."""
        rows = [json.loads(line) for line in text.splitlines()]
        trained = [row["step"] for row in rows if kind_of(row) == "train"]
        looked = max((row["step"] for row in rows if kind_of(row) == "eval"), default=-1)
        if trained != logged or looked != evaluated:
            lost = sorted(set(logged) ^ set(trained)) or [evaluated]
            raise StateError(
                f"{self.folder.metrics.name} is not what the run wrote: step {lost[0]} is missing or too many",
                "the verdict would rest on numbers with a hole in them",
                "bring it back from a copy; the checkpoints are of no use without it",
            )


def refuse_lost_journal(folder: RunFolder) -> None:
    """Raise where the run has trained and its journal is gone."""
    path = folder.journal / LEDGER
    trained = [*checkpoints_by_step(folder.root), *folder.journal.glob("batches_*")]
    if trained and not path.exists() and not path.is_symlink():
        raise StateError(
            f"{path} is missing, and the run has trained",
            "without it nobody knows what is in the weights already", "bring it back from a copy",
        )  # fmt: skip


# -- What the loop says and keeps, carried to files and screen ------------------------------------


def make_hooks(ctx: RunContext) -> Hooks:
    """Hooks of a run; `save` is set by `keep_checkpoints`, once there is something to save."""
    from surefoot.loop import Hooks

    folder, sinks, view, monitor = ctx.keeper.folder, ctx.sinks, ctx.view, ctx.monitor

    @cache
    def metrics_log() -> MetricsLog:
        return MetricsLog(folder.metrics)  # opened with the first number: a resume cuts the file before that

    def log(step: int, metrics: dict[str, float]) -> None:
        metrics_log().log(step, metrics)
        sinks.log(step, metrics)
        view.step(step, metrics)
        monitor.step(step, metrics)

    def evaluated(step: int, metrics: dict[str, float]) -> None:
        metrics_log().log(step, metrics)
        sinks.log(step, metrics)
        view.evaluated(step, metrics)
        monitor.evaluated(step, metrics)

    return Hooks(
        log=log, evaluated=evaluated, warn=view.warn, save=lambda step: None, stop=lambda: ctx.stop.asked,
        phase=monitor.phase(ctx.stop.part), step_finished=monitor.finished,
        save_rollouts=lambda step, groups: write_lines(folder.rollouts(step), _lines(groups)),
        save_answers=lambda step, results: write_lines(folder.answers(step), answer_lines(results)),
        step_refused=lambda step, samples, suspects: write_lines(
            folder.logs / f"refused_step_{step}.jsonl", _dump(samples, suspects)
        ),
    )  # fmt: skip


def keep_checkpoints(run: Run, keeper: RunStore) -> None:
    """From here on the run saves: weights, optimiser and its own state, durably; then prunes."""
    from surefoot.loop_state import run_state

    config, saved = run.config, time.monotonic()

    def save(step: int) -> None:
        nonlocal saved
        saved, target = time.monotonic(), keeper.folder.checkpoint(step)
        if target.exists():
            return
        tick("saving a checkpoint")
        failpoint("session.before_save")
        with run.hooks.phase("save"):
            state = run_state(run, keeper.journal.id)
            keeper.sync_metrics()  # a power cut must not take numbers that a resume would not write again
            run.learner.save(target, step=step, extra=state)
            failpoint("session.after_save")
            keeper.batches.roll(step)
            keeper.prune(config.save_steps, None if run.best is None else run.best[0], run.hooks.warn)

    run.hooks.save = save
    run.hooks.save_is_due = lambda: config.save_minutes > 0 and time.monotonic() - saved >= 60 * config.save_minutes


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


# -- The config of a run folder: data until its hash was compared, and no code of the folder's own unless it is allowed
# Promises   an edited config.toml is refused before anything that it names is imported or started, and so is code that
# lies inside the run folder; the bytes that were compared are those that are parsed.
# Never      vouches for whoever made the folder: a journal can be forged, as docs/store.md says.


def read_run_config(folder: RunFolder, words: Sequence[str] = (), *, data: bytes | None = None) -> LoadedConfig:
    """The config of the run as data, every key of it; one of which a part was hidden is refused. Nothing is compared.

    Args:
        words: overrides of its keys.
        data: the bytes of config.toml, where somebody has read them already.
    """
    data = folder.read_config() if data is None else data
    refuse_hidden(data.decode("utf-8", errors="replace"))
    return load_config(folder.config, words, data=data)


def load_run_config(folder: RunFolder) -> LoadedConfig:
    """The same, if it is the config that the run began with; a `StateError` if it was edited since.

    A run that died before it told anybody what its config was has nothing to compare with.
    """
    data = folder.read_config()
    is_as_told(folder, data)
    return read_run_config(folder, data=data)


def is_as_told(folder: RunFolder, data: bytes) -> bool:
    """Whether the journal knows this text of config.toml; False when it knows none, a `StateError` for another one."""
    path = folder.journal / LEDGER
    if not path.exists() and not path.is_symlink():
        return False
    digest = sha256_of(data)
    with Journal.open(path, readonly=True) as journal:
        changed = extensions(journal, whole=True)
        if changed and changed[-1].get("before_sha256") == digest:
            return True  # killed between the journal and the file: the next resume writes the file
        return is_same_run(journal, "config", {"config_sha256": digest})


def refuse_code(
    folder: RunFolder, config: Config, *, allow_code: bool, used: Config | None = None, known: bool = True
) -> None:
    """Raise unless everything that would be imported or started lies outside the run folder, or it is allowed.

    Args:
        config: of the run.
        used: the same with what the caller changed: code that the caller names is the caller's business.
        known: the journal knows this config; where it does not, no code at all is run without being allowed.
    """
    wanted = set(named_code(used or config))
    found = [] if allow_code else [each for each in named_code(config) if each in wanted]
    if inside := [(key, text) for key, text in found if _is_inside(text, folder.root)]:
        key, text = inside[0]
        raise SecurityError(
            f"{folder.root}: {key} = {text!r} names code in the run folder itself",
            "a run folder is data: it may come from anywhere, and no run puts code there",
            "look at that file; if you trust it, say so with --allow-code (in Python allow_code=True)",
        )
    if found and not known:
        key, text = found[0]
        raise SecurityError(
            f"{folder.root}: {key} = {text!r} names code, and no journal says that this is the config of the run",
            "it may have been edited by anybody",
            "bring journal/ back from a copy; or look at config.toml, and if you trust it, say so with --allow-code "
            "(in Python allow_code=True)",
        )


def named_code(config: Config) -> Iterator[tuple[str, str]]:
    """(key, value) of everything in a config that names a file of code, or a file that names commands."""
    for key, values in (("reward_funcs", config.reward_funcs), ("tools.functions", config.tools.functions)):
        yield from ((key, value) for value in values if not value.startswith("builtin:"))
    yield from own_specs(config)
    metrics = {"eval_metric": config.eval_metric}
    metrics |= {f"eval_sets.{name}.metric": keys.metric for name, keys in config.eval_sets.items()}
    yield from ((key, value) for key, value in metrics.items() if ":" in value)
    for key, value in (("tools.environment", config.tools.environment), ("tools.servers", config.tools.servers)):
        if value is not None:
            yield key, value


def _is_inside(text: str, root: Path) -> bool:
    """Whether `file.py:name` or a file lies in the folder, by name or behind links; a relative one is meant there."""
    file = text.rpartition(":")[0] or text
    if not os.path.isabs(file):
        return True  # a run keeps absolute paths: somebody else wrote this one
    roots = {os.path.abspath(root), os.path.realpath(root)}
    forms = {os.path.normpath(file), os.path.realpath(file), os.path.normpath(text), os.path.realpath(text)}
    return any(Path(form).is_relative_to(place) for form in forms for place in roots)
