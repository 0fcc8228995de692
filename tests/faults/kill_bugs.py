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
    from surefoot.policy import checkpoint_read

    real = checkpoint_read.restore

    def restore(learner: Any, state: Any) -> None:
        real(learner, state)
        learner.optimiser.state.clear()

    checkpoint_read.restore = restore


def _reference() -> None:
    from surefoot.policy import checkpoint_read, training_state

    real = checkpoint_read.restore

    def restore(learner: Any, state: Any) -> None:
        real(learner, state)
        fresh = {name: value * 1.5 for name, value in state.reference.items()}
        training_state._copy_into(training_state.weights_of(learner.reference), fresh)

    checkpoint_read.restore = restore


def _without(where: str, name: str, instead: Callable[..., Any] = lambda *args, **kwargs: None) -> Callable[[], None]:
    """A bug that puts `instead` in the place of `where.name`; `where` is a module, or a class in one."""

    def put() -> None:
        module, _, owner = where.partition(":")
        home: Any = importlib.import_module(module)
        setattr(getattr(home, owner) if owner else home, name, instead)

    return put


def _between() -> None:
    from surefoot.assemble import run_state
    from surefoot.loop_notes import Between

    run_state.Between = lambda **kept: Between()  # type: ignore[assignment,misc]


def _lease_dropped() -> None:
    from surefoot.runtime.books import RunBooks

    real = RunBooks._lease_again

    def lease_again(self: Any, step: int, items: Any) -> Any:
        leases = real(self, step, items)
        self.ledger.drop([leases[0].item], "forgotten")
        return leases[1:]

    RunBooks._lease_again = lease_again  # type: ignore[method-assign]


def _other_order() -> None:
    from surefoot.runtime.books import RunBooks

    real = RunBooks.plan_epoch

    def plan_epoch(self: Any, needed: int, held: Any = ()) -> None:
        self.plan.seed += 1
        real(self, needed, held)

    RunBooks.plan_epoch = plan_epoch  # type: ignore[method-assign]


def _other_groups() -> None:
    """Journaled steps are played anew by an engine that still has other weights."""
    from surefoot import loop
    from surefoot.runtime.books import RunBooks

    real = RunBooks.draw

    def draw(self: Any, step: int, n: int) -> Any:
        return real(self, step, n)._replace(groups=None)

    RunBooks.draw = draw  # type: ignore[method-assign]
    RunBooks.keep = lambda self, batch, _: self.ledger.complete(self._open[batch.step][1])  # type: ignore[method-assign]
    loop.publish = lambda run: {}


def _checked_twice() -> None:
    from surefoot.assemble import run_state

    run_state.PLAIN = tuple(name for name in run_state.PLAIN if name != "checked")


def _batch_not_kept() -> None:
    from surefoot.store.batches import BatchLog, Kept

    def append(self: Any, step: int, items: Any, groups: Any) -> None:
        self._current()
        self._kept[step] = Kept(0, tuple(items), ())

    BatchLog.append = append  # type: ignore[method-assign]


def _trained_too_early() -> None:
    from surefoot.runtime.books import RunBooks

    def keep(self: Any, assignment: Any, groups: Any) -> None:
        items, leases = self._open[assignment.step]
        self.ledger.complete(leases)
        self.ledger.trained(assignment.step, items)
        self.batches.append(assignment.step, items, groups)

    RunBooks.keep = keep  # type: ignore[method-assign]
    RunBooks.settle = lambda self, assignment, step, fates: None  # type: ignore[method-assign]


def _no_sync() -> None:
    from surefoot.store.journal import Journal

    def sync(self: Any) -> None:
        self._synced = self._end

    Journal.sync = sync  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "moments_not_restored": _moments,
    "reference_not_restored": _reference,
    "guard_not_restored": _without("surefoot.guards.collapse:HeldOutGuard", "load_state_dict"),
    "between_not_restored": _between,
    "metrics_not_cut": _without("surefoot.assemble.keeper", "metrics_until", lambda *args, **kwargs: (None, 0)),
    "metrics_not_synced": _without("surefoot.assemble.keeper:Keeper", "sync_metrics"),
    "config_not_confirmed": _without("surefoot.assemble.keeper", "confirm"),
    "numbers_not_asked_for": _without("surefoot.assemble.keeper:Keeper", "_require_numbers"),
    "lease_dropped": _lease_dropped,
    "rewind_skipped": _without("surefoot.store.ledger:Ledger", "rewind"),
    "other_order": _other_order,
    "other_groups": _other_groups,
    "checked_twice": _checked_twice,
    "batch_not_kept": _batch_not_kept,
    "trained_too_early": _trained_too_early,
    "no_sync": _no_sync,
}


def forgetful_disk() -> None:
    """Journals live on a disk that keeps only what was synced."""
    from forgetful_disk import ForgetfulFile

    from surefoot.store import journal

    class Forgetful(ForgetfulFile):
        def __init__(self, path: Path, *, readonly: bool = False) -> None:
            super().__init__(random.Random(0), path.read_bytes())
            self.path = path

        def sync(self) -> None:
            super().sync()
            self.path.write_bytes(self.durable)

    journal.SystemFile = Forgetful  # type: ignore[assignment,misc]
