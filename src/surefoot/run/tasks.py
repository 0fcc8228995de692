"""What a run's keys say of the border between what is trained on and what is held out. Read before torch is.

Read next: `data/heldout.py`, the check itself; `inputs.py`, where a run makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from surefoot.config import Config
from surefoot.config.schedule import most_tasks
from surefoot.data.files import SUFFIXES, read_task_file
from surefoot.data.heldout import ContentGate, HeldoutSplit, Mode, Twins, refuse_pairs
from surefoot.data.lru import MISS, LRUCache
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import HeldoutRule, LargeTaskStream, keep_apart_on_disk
from surefoot.data.sources import is_generated, scorer_of
from surefoot.data.tasks import HeldoutGate, TaskSet
from surefoot.errors import ConfigError, TaskError
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


def check_pairs(config: Config, base: Path, border: HeldoutGate | None) -> None:
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


# -- A run from a task file that is not held in memory: what stands in for lists and dictionaries of all tasks
# Promises   memory does not grow with the file; a prompt that is longer than max_prompt_length is refused by the task's
# name when its turn comes, because nobody read it before.


PREVIEW_TASKS = 1000
"""Tasks that graders are shown before training; of the others they say so when they come."""
KEPT_PROMPTS = 4096


class Large(NamedTuple):
    """A task file on the disk, divided."""

    preview: TaskSet
    """The first tasks, for graders to look at."""
    train: StreamingDataset
    heldout: tuple[Task, ...]
    """Those that are evaluated: at most `eval_tasks`, chosen by hash."""
    border: HeldoutRule | None
    held_out: int
    """All of them."""
    twins: Twins | None
    """What was found when both sides were compared; None when nothing is held out."""


def open_large(config: Config, base: Path, cache_dir: Path | None = None, never_trained: Sequence[Task] = ()) -> Large:
    """The file that `tasks` names; its index is made now if there is none.

    Args:
        cache_dir: where the index goes; beside the file when left out.
        never_trained: tasks of evaluation sets, which lie elsewhere.
    """
    path = base / Path(config.tasks).expanduser()
    if path.suffix not in SUFFIXES:
        raise ConfigError(
            f"stream_tasks = true with tasks = {config.tasks!r}",
            f"a file is streamed, one of {', '.join(SUFFIXES)}", "name a file, or set stream_tasks = false",
        )  # fmt: skip
    data = StreamingDataset(path, max_bad_rows=config.max_bad_rows, cache_dir=cache_dir)
    train, chosen, border, twins = _divide(config, data, never_trained)
    refuse_too_few(config, len(train), twins)
    first = tuple(data[: min(PREVIEW_TASKS, len(data))])
    tasks = TaskSet(path.stem, first, scorer_of(first), data.fingerprint)
    left_out = 0 if twins is None or twins.mode != "drop" else len(twins.found)
    return Large(tasks, train, chosen, border, len(data) - len(train) - left_out, twins)


def _divide(
    config: Config, data: StreamingDataset, never_trained: Sequence[Task]
) -> tuple[StreamingDataset, tuple[Task, ...], HeldoutRule | None, Twins | None]:
    """Training tasks, held-out tasks to evaluate, the border, and what was found across it."""
    if config.heldout_fraction == 0:
        if not never_trained:
            return data, (), None, None
        train, twins = keep_apart_on_disk(data, data, None, never_trained, near_mode(config))
        return train, (), None, twins
    fraction, seed, group = config.heldout_fraction, config.heldout_seed, config.heldout_group
    train, heldout = data.sides(fraction, seed=seed, group=group)
    chosen = tuple(heldout.smallest(most_tasks(config)))
    train, twins = keep_apart_on_disk(data, train, heldout, (*chosen, *never_trained), near_mode(config))
    return train, chosen, HeldoutRule(fraction, seed=seed, group=group), twins


def streamed_border(
    border: HeldoutGate | None, train: StreamingDataset, never_trained: Sequence[Task]
) -> HeldoutGate | None:
    """The border of a streamed file with the tasks of evaluation sets added; every row is held against those, once."""
    if not never_trained:
        return border
    whole = ContentGate(never_trained, border)
    LargeTaskStream(train, 0, heldout=whole, check_all=True)
    return whole


class LargePrompts(Mapping[str, tuple[int, ...]]):
    """Token ids of prompts, encoded when they are asked for; the last few thousand are kept.

    Args:
        encode: a task's prompt as tokens; refuses what is too long.
    """

    def __init__(
        self, train: StreamingDataset, heldout: Sequence[Task], encode: Callable[[Task], tuple[int, ...]]
    ) -> None:
        self._train, self._encode = train, encode
        self._heldout = {task.id: task for task in heldout}
        self._kept: LRUCache[str, tuple[int, ...]] = LRUCache(KEPT_PROMPTS)

    def __getitem__(self, task_id: str) -> tuple[int, ...]:
        kept = self._kept.get(task_id)
        if kept is not MISS:
            return kept
        task = self._heldout.get(task_id) or self._train.get(task_id)
        if task is None:
            raise KeyError(task_id)
        ids = self._encode(task)
        self._kept.put(task_id, ids)
        return ids

    def __len__(self) -> int:
        return len(self._train) + len(self._heldout)

    def __iter__(self) -> Iterator[str]:
        yield from self._heldout
        yield from (task.id for task in self._train)


def within(task: Task, ids: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """These tokens, unless they are more than a streamed prompt may have."""
    if len(ids) > limit:
        raise TaskError(
            f"the prompt of {task.id} has {len(ids)} tokens, max_prompt_length is {limit}",
            "a streamed file is not read whole before training, so long prompts cannot be left out beforehand",
            "raise max_prompt_length, remove the task, or set stream_tasks = false",
        )
    return ids
