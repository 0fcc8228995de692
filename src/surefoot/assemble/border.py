"""What a run's keys say of the border between what is trained on and what is held out. Read before torch is.

Read next: `data/twins.py`, the check itself; `inputs.py`, where a run makes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.config import Config
from surefoot.data.files import SUFFIXES, read_task_file
from surefoot.data.heldout import HeldoutSplit
from surefoot.data.sources import is_generated
from surefoot.data.tasks import Border
from surefoot.data.twins import Mode, Twins, refuse_pairs
from surefoot.errors import TaskError
from surefoot.records import Task


def near_mode(config: Config) -> Mode:
    """`heldout_near`, resolved: what somebody wrote is refused to its face, what a program made is left out."""
    if config.heldout_near == "auto":
        return "drop" if is_generated(config.tasks) else "refuse"
    return config.heldout_near


def refuse_too_few(config: Config, train: int, twins: Twins | None) -> None:
    """Raise unless a step can be filled with different tasks."""
    if train >= config.tasks_per_step:
        return
    dropped = len(twins.found) if twins is not None and twins.mode == "drop" else 0
    left_out = f", {dropped} were left out as twins of held-out tasks" if dropped else ""
    raise TaskError(
        f"{train} tasks are left to train on, tasks_per_step is {config.tasks_per_step}{left_out}",
        "a step would hold the same task twice",
        "bring more tasks, or lower tasks_per_step or heldout_fraction",
    )


def check_pairs(config: Config, base: Path, border: Border | None) -> None:
    """Refuse `replay_pairs` that would train on what is held out; nothing to do for a run that replays nothing."""
    if config.beta_replay > 0 and config.replay_pairs is not None and isinstance(border, HeldoutSplit):
        refuse_pairs(pair_rows(config.replay_pairs, base), border.heldout, near_mode(config))


def pair_rows(source: str, base: Path) -> Sequence[Task]:
    """The rows of `replay_pairs`: a prompt each, and the columns chosen and rejected."""
    path = base / Path(source).expanduser()
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise TaskError(
            f"replay_pairs = {source!r} is not a file that ends in {', '.join(SUFFIXES)}",
            f"it was looked for as {path}",
            'write one {"prompt": ..., "chosen": ..., "rejected": ...} per line',
        )
    return read_task_file(path)
