"""What a run keeps on disk while it goes: lock, journal, ledger, batches; and how it comes back to a checkpoint.

Owns       the order in which these are opened, rewound and closed.
Promises   a folder that holds only a config begins at step 0; one whose journal is gone although it has trained is
           refused, and so is a config that was edited; after `rewind` ledger, metrics and checkpoints tell of the
           same step.
Never      touches the folder without its lock.

Read next: `resume.py`, which brings the learner to the same step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from surefoot.errors import StateError
from surefoot.store.account import LEDGER
from surefoot.store.batches import BatchLog
from surefoot.store.durable import atomic_write, storage_error, sync_folder
from surefoot.store.failpoints import failpoint
from surefoot.store.identity import RESUMED, confirm
from surefoot.store.journal import Journal
from surefoot.store.ledger import Ledger
from surefoot.store.lock import RunLock
from surefoot.store.retention import checkpoints_by_step, newest_are_good, prune, sweep
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.log import kind_of, metrics_until

Warn = Callable[[str, str], None]


class Keeper:
    """One run's folder, held by this process until `close`."""

    def __init__(self, folder: RunFolder, lock: RunLock) -> None:
        """Open or begin the journal; undelivered leases of a former driver end here."""
        self.folder, self.lock = folder, lock
        self.swept = sweep(folder.root) + folder.sweep()
        with ExitStack() as stack:
            self.journal = stack.enter_context(self._open_journal(folder.journal))
            self.batches = BatchLog(folder.journal)
            stack.callback(self.batches.close)
            confirm(self.journal, "config", {"config_sha256": hashlib.sha256(folder.read_config()).hexdigest()})
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
        if missing := [first for first in begun if self.batches.find(first) is None]:
            raise StateError(
                f"the ledger says step {ahead} was trained, the newest good checkpoint is of step {step}, and the "
                f"journal no longer holds step {missing[0]}",
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
