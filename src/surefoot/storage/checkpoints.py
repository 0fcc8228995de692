"""Which checkpoints stay, which one to resume from, and how the others go.

Owns       the rule: the two newest good ones, the best, and every one on the `save_steps` cadence stay.
Promises   before an older one goes, two newer ones were read through and found as they were saved; a name is gone
           from the disk before its files are, so no crash leaves half a checkpoint under a good name; a damaged one
           is reported and left as it is.
Never      leaves a run without a good checkpoint that had one, and never calls unreadable state a fresh start.

Whoever calls this holds the run's lock.

Read next: `files.py`, what "good" means and how a checkpoint comes to be.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.errors import StateError
from surefoot.storage.files import failpoint, read_manifest, verify_folder
from surefoot.system.files import storage_error, sync_folder

SCHEMA = 2
"""The form of a training state. 1 was the first edition's, without what a verdict has needed since."""
NEWEST = 2
"""Good ones that stay whatever else holds: one may turn out bad on the day it is needed."""
LEFTOVER = re.compile(r"\.step_[0-9]+\.(partial|removed)")

Verify = Callable[[Path], object]
"""Raises `StateError` when a checkpoint is not as it was saved."""


@dataclass(frozen=True)
class Pruned:
    """What one round of pruning did."""

    removed: tuple[int, ...] = ()
    damaged: dict[int, str] = field(default_factory=dict)
    """Steps whose checkpoints are not as they were saved, with the reason; they were left alone."""


@dataclass(frozen=True)
class GoodCheckpoint:
    """The checkpoint to go on from, and why newer ones were passed over."""

    path: Path | None
    """None only when the run has no checkpoint at all."""
    refused: dict[int, str] = field(default_factory=dict)

    def notes(self) -> list[str]:
        """One line for each checkpoint that was passed over, newest first."""
        return [f"checkpoint step_{step} was passed over: {reason}" for step, reason in self.refused.items()]


def may_go(steps: Collection[int], *, save_steps: int, best: int | None) -> list[int]:
    """Steps outside the rule, oldest first, if the newest ones are good.

    Args:
        save_steps: the cadence; 0 when there is none.
        best: step of the best checkpoint by held-out metric, if there is one.

    Example:
        >>> may_go([3, 10, 14, 17, 19], save_steps=10, best=3)
        [14]
    """
    ordered = sorted(steps)
    return [
        step for step in ordered[:-NEWEST] if step != best and not (save_steps and step > 0 and step % save_steps == 0)
    ]


def prune(root: Path, *, save_steps: int, best: int | None, verify: Verify = verify_folder) -> Pruned:
    """Take away what the rule does not keep, once two newer checkpoints are known to be good.

    Args:
        root: the run folder; checkpoints are `root/checkpoints/step_N`.
    """
    paths = checkpoints_by_step(root)
    if not may_go(paths, save_steps=save_steps, best=best):
        return Pruned()
    good, damaged = _newest_good(paths, NEWEST, verify)
    if len(good) < NEWEST:
        return Pruned((), damaged)
    alive = paths.keys() - damaged.keys()
    doomed = [step for step in may_go(alive, save_steps=save_steps, best=best) if step < min(good)]
    for step in doomed:
        failpoint("retention.verified")
        remove(paths[step])
    return Pruned(tuple(doomed), damaged)


def newest_good(root: Path, *, verify: Verify = verify_folder) -> GoodCheckpoint:
    """The newest checkpoint that is as it was saved; with checkpoints but no good one, a `StateError`."""
    paths = checkpoints_by_step(root)
    if not paths:
        return GoodCheckpoint(None)
    good, damaged = _newest_good(paths, 1, verify)
    if not good:
        first = next(iter(damaged.values()))
        raise StateError(
            f"none of the {len(paths)} checkpoints in {root} can be trusted; the newest: {first}",
            "starting over from nothing would look like a resume and be none",
            "bring back a checkpoint from a copy, or start a new run",
        )
    return GoodCheckpoint(paths[good[0]], damaged)


def newest_are_good(root: Path, *, verify: Verify = verify_folder) -> bool:
    """Whether the newest `NEWEST` checkpoints are there and were read through just now."""
    paths = checkpoints_by_step(root)
    good, damaged = _newest_good(paths, NEWEST, verify)
    return len(good) == NEWEST and not damaged


def remove(path: Path) -> None:
    """Take away one checkpoint: first its name, durably, then its files."""
    doomed = path.with_name(f".{path.name}.removed")
    try:
        shutil.rmtree(doomed, ignore_errors=True)  # what an earlier round did not finish
        path.rename(doomed)
        failpoint("retention.after_rename")
        sync_folder(path.parent)
        shutil.rmtree(doomed)
    except OSError as error:
        raise storage_error(path, error) from error


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint another name: kept for looking at, never to be resumed from."""
    aside = path.with_name(f"damaged_{path.name}")
    try:
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error
    return aside


def sweep(root: Path) -> list[str]:
    """Take away what a crash left half written or half removed; returns the names. Links are never followed."""
    folder, swept = root / "checkpoints", []
    try:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            if LEFTOVER.fullmatch(path.name):
                path.unlink() if path.is_symlink() or not path.is_dir() else shutil.rmtree(path)
                swept.append(path.name)
    except OSError as error:
        raise storage_error(folder, error) from error
    return swept


def checkpoints_by_step(root: Path) -> dict[int, Path]:
    """Every `checkpoints/step_N` of a run by N, oldest first; a name such as `step_07` is nobody's."""
    folder = root / "checkpoints"
    paths = folder.iterdir() if folder.is_dir() else ()
    found = {int(m[1]): p for p in paths if (m := re.fullmatch(r"step_(0|[1-9][0-9]{0,14})", p.name))}
    return dict(sorted(found.items()))


def refuse_older_format(root: Path) -> None:
    """Refuse to go on with a run whose newest checkpoint an older surefoot wrote; it can still be looked at."""
    for path in reversed(checkpoints_by_step(root).values()):
        try:
            schema = read_manifest(path).facts.get("schema")
        except StateError:
            continue  # a damaged one: whoever resumes says so, and takes the one before it
        if isinstance(schema, int) and schema < SCHEMA:
            raise older_format(path, schema)
        return


def older_format(path: Path, schema: int) -> StateError:
    """What is said of a checkpoint in the form of an older surefoot."""
    return StateError(
        f"{path} is of format {schema}, and this surefoot goes on from format {SCHEMA}",
        "an older surefoot wrote it, without the evidence that a verdict needs today: how many entries were changed, "
        "in how many groups the rewards differed",
        f"finish the run with the surefoot that began it, or train on from its weights: model = {path}",
    )


def _newest_good(paths: dict[int, Path], wanted: int, verify: Verify) -> tuple[list[int], dict[int, str]]:
    """The newest `wanted` good steps, newest first, and those on the way there that are not, with the reason."""
    good: list[int] = []
    damaged: dict[int, str] = {}
    for step in reversed(paths):
        try:
            verify(paths[step])
        except StateError as error:
            damaged[step] = error.what
            continue
        good.append(step)
        if len(good) == wanted:
            break
    return good, damaged
