"""Bugs on purpose, put into a forked child before it becomes the command: what a resume must not survive unseen.

Read next: `test_planted_losses.py`.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _moments() -> None:
    from surefoot.learner import checkpoint

    real = checkpoint.restore

    def restore(learner: Any, state: Any) -> None:
        real(learner, state)
        learner.optimiser.state.clear()

    checkpoint.restore = restore


def _reference() -> None:
    from surefoot.learner import checkpoint

    real = checkpoint.restore

    def restore(learner: Any, state: Any) -> None:
        real(learner, state)
        fresh = {name: value * 1.5 for name, value in state.reference.items()}
        checkpoint._copy_into(checkpoint.weights_of(learner.reference), fresh)

    checkpoint.restore = restore


def _without(where: str, name: str, instead: Callable[..., Any] = lambda *args, **kwargs: None) -> Callable[[], None]:
    """A bug that puts `instead` in the place of `where.name`; `where` is a module, or a class in one."""

    def put() -> None:
        module, _, owner = where.partition(":")
        home: Any = importlib.import_module(module)
        place = getattr(home, owner) if owner else home
        assert hasattr(place, name), f"{where} has no {name}: a bug that is planted nowhere shows nothing"
        setattr(place, name, instead)

    return put


def _config_not_confirmed() -> None:
    """Neither before anything is imported nor when the run goes on."""
    _without("surefoot.run.store", "is_same_run", lambda *args, **kwargs: True)()
    _without("surefoot.run.store", "assert_same_run")()


def _between() -> None:
    from surefoot import loop_state
    from surefoot.loop_state import GuardInputs

    loop_state.GuardInputs = lambda **kept: GuardInputs()  # type: ignore[assignment,misc]


def _lease_dropped() -> None:
    from surefoot.runtime.task_queue import DurableTaskQueue

    real = DurableTaskQueue._lease_again

    def lease_again(self: Any, step: int, items: Any) -> Any:
        first, *others = real(self, step, items).items()
        self.ledger.drop([first[1].item], "forgotten")
        return dict(others)

    DurableTaskQueue._lease_again = lease_again  # type: ignore[method-assign]


def _other_order() -> None:
    from surefoot.runtime.task_queue import DurableTaskQueue

    real = DurableTaskQueue.plan_epoch

    def plan_epoch(self: Any, needed: int, held: Any = ()) -> None:
        self.plan.seed += 1
        real(self, needed, held)

    DurableTaskQueue.plan_epoch = plan_epoch  # type: ignore[method-assign]


def _other_groups() -> None:
    """Journaled steps are played anew by an engine that still has other weights."""
    from dataclasses import replace

    from surefoot import loop
    from surefoot.runtime.task_queue import DurableTaskQueue, MemoryTaskQueue

    real = DurableTaskQueue.next_batch

    def next_batch(self: Any, step: int, n: int) -> Any:
        return replace(real(self, step, n), groups=())

    DurableTaskQueue.next_batch = next_batch  # type: ignore[method-assign]
    DurableTaskQueue.recording = MemoryTaskQueue.recording  # type: ignore[assignment, method-assign]

    def keep(self: Any, batch: Any, _: Any) -> None:
        self.ledger.complete(list(self._open[batch.step].leases.values()))

    DurableTaskQueue.record_rollouts = keep  # type: ignore[method-assign]
    loop.publish = lambda run: {}


def _checked_twice() -> None:
    from surefoot import loop_state

    loop_state.PLAIN = {name: key for name, key in loop_state.PLAIN.items() if name != "checked"}


def _batch_not_kept() -> None:
    from surefoot.storage.batches import BatchLog, JournaledBatch

    def compose(self: Any, step: int, items: Any) -> None:
        self._current()
        self._kept[step] = JournaledBatch(0, tuple(items), ())
        self.release(items)

    BatchLog.compose = compose  # type: ignore[method-assign]


def _other_sequence() -> None:
    """A batch that is repeated has its groups the other way round."""
    from surefoot.storage.batches import BatchLog

    real = BatchLog.load
    BatchLog.load = lambda self, step, tasks: real(self, step, tasks)[::-1]  # type: ignore[method-assign]


def _never_finished() -> None:
    """A resume does not ask whether the run is over."""
    from surefoot.run import session

    session.final_verdict = lambda folder, config: None  # type: ignore[assignment]


def _forgets_the_old_end() -> None:
    """A run that was made longer does not know where it ended before."""
    home: Any = importlib.import_module("surefoot.run.resume")
    home.former_ends = lambda keeper, extension: frozenset()


def _config_first() -> None:
    """A new length is in config.toml before the journal knows of it."""
    from surefoot.storage.files import failpoint

    home: Any = importlib.import_module("surefoot.run.resume")  # the package's own `resume` is a function
    real = home.write_extension

    def write(keeper: Any, extension: Any, version: int) -> None:
        home.atomic_write(keeper.folder.config, home.config_text(extension.loaded.resolved))
        failpoint("extend.journaled")
        real(keeper, extension, version)

    home.write_extension = write


def _given_up_in_memory() -> None:
    """Groups without a verdict are forgotten, and not on the disk."""
    from surefoot.storage.batches import BatchLog

    BatchLog.give_up = BatchLog.release  # type: ignore[method-assign]


def _journaled_at_the_end() -> None:
    """Groups are written when their batch is whole, and no sooner: what the loop hands on is cut."""
    from surefoot.runtime.task_queue import DurableTaskQueue, MemoryTaskQueue

    DurableTaskQueue.recording = MemoryTaskQueue.recording  # type: ignore[assignment, method-assign]


def _trained_too_early() -> None:
    from surefoot.runtime.task_queue import DurableTaskQueue

    real = DurableTaskQueue.record_rollouts

    def keep(self: Any, assignment: Any, groups: Any) -> None:
        batch = self._open[assignment.step]
        if self.batches.find(assignment.step) is None and len(batch.groups) == len(batch.items):
            self.ledger.trained(assignment.step, batch.items)
            self.batches.compose(assignment.step, batch.items)
        else:
            real(self, assignment, groups)
            self.ledger.trained(assignment.step, batch.items)

    DurableTaskQueue.record_rollouts = keep  # type: ignore[method-assign]
    DurableTaskQueue.close_batch = lambda self, assignment, step, fates: None  # type: ignore[method-assign]


def _no_sync() -> None:
    from surefoot.storage.files import Journal

    def sync(self: Any) -> None:
        self._synced = self._end

    Journal.sync = sync  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "moments_not_restored": _moments,
    "reference_not_restored": _reference,
    "guard_not_restored": _without("surefoot.guards.collapse:HeldOutGuard", "load_state_dict"),
    "between_not_restored": _between,
    "metrics_not_cut": _without("surefoot.run.store", "metrics_until", lambda *args, **kwargs: (None, 0)),
    "metrics_not_synced": _without("surefoot.run.store:RunStore", "sync_metrics"),
    "config_not_confirmed": _config_not_confirmed,
    "numbers_not_asked_for": _without("surefoot.run.store:RunStore", "_require_numbers"),
    "lease_dropped": _lease_dropped,
    "rewind_skipped": _without("surefoot.storage.ledger:Ledger", "rewind"),
    "other_order": _other_order,
    "other_groups": _other_groups,
    "checked_twice": _checked_twice,
    "batch_not_kept": _batch_not_kept,
    "trained_too_early": _trained_too_early,
    "journaled_at_the_end": _journaled_at_the_end,
    "other_sequence": _other_sequence,
    "given_up_in_memory": _given_up_in_memory,
    "never_finished": _never_finished,
    "forgets_the_old_end": _forgets_the_old_end,
    "config_first": _config_first,
    "no_sync": _no_sync,
    "stop_without_limit": _without("surefoot.system.signals:StopSignals", "hard_s", float("inf")),  # type: ignore[arg-type]
}


def forgetful_disk() -> None:
    """Journals live on a disk that keeps only what was synced."""
    from forgetful_disk import ForgetfulFile

    from surefoot.system import journal

    class Forgetful(ForgetfulFile):
        def __init__(self, path: Path, *, readonly: bool = False) -> None:
            super().__init__(random.Random(0), path.read_bytes())
            self.path = path

        def sync(self) -> None:
            super().sync()
            self.path.write_bytes(self.durable)

    journal.SystemFile = Forgetful  # type: ignore[assignment,misc]
