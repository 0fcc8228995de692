"""When weights are published, and how far sampling may run ahead: arithmetic on whole numbers.

Owns       the cadences of a run, what staleness they need, and how many groups may be under way.
Promises   a cadence that cannot keep `max_staleness` is refused with all numbers, before anything starts; nothing is
           ever rounded: sizes that do not divide are refused with both. With no more groups under way than `allowance`
           says, and batches taken in order of asking (or as `owed` says), no group is too old when it is trained on.
Never      looks at a clock, or guesses how long anything takes.

Words, all counted in weight versions, of which an optimiser step makes one:

    passes     k = num_iterations: a batch makes k versions, and its groups' age is looked at before the first
    cadence    N: engines get new weights every N steps, between two batches, so k divides N
    behind     how far the engines are behind the learner when a batch begins: 0, k, 2k ... N - k

A group that is asked for when the engines are `behind`, and that is in the j-th batch from there (the batch that is
being trained on, or if there is none the next, is the 0th), is `behind + j k` versions old when that batch begins.
Everything below is this one line, solved for the number that is asked for.

Read next: `buffer.py`, which looks at the age of every group anyway, twice; `stream.py`, which asks for groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from surefoot.config import Config
from surefoot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Schedule:
    """The cadences of a run, in optimiser steps."""

    accumulation_steps: int | None
    """Forward and backward passes of one step, at most; None when the learner decides by the tokens of each step."""
    sync_every: int
    """Steps between two weight syncs."""
    reference_every: int | None
    """Steps between two refreshes of the reference; None for never."""
    required_staleness: int
    """Versions that the last batch before a sync is old when it begins, even if nothing ever waits."""


def compute_schedule(
    *,
    tasks_per_sync: int,
    tasks_per_reference_sync: int | None,
    tasks_per_step: int,
    tasks_per_microbatch: int,
    max_staleness: int,
    num_iterations: int = 1,
) -> Schedule:
    """Cadences from numbers of tasks.

    Between two syncs lie `tasks_per_sync / tasks_per_step` batches. The last of them begins after all the others made
    their versions, on samples from the weights of the sync: with one pass per batch and a sync every N steps that is
    N - 1 versions, and no timing makes it less. A `max_staleness` below that is refused.

    Args:
        tasks_per_sync: tasks trained on between two weight syncs.
        tasks_per_reference_sync: the same for the reference; None for never.
        tasks_per_step: tasks of one batch.
        tasks_per_microbatch: tasks of one forward and backward.
        num_iterations: optimiser steps on each batch.

    Example:
        >>> compute_schedule(tasks_per_sync=32, tasks_per_reference_sync=None, tasks_per_step=8,
        ...                  tasks_per_microbatch=4, max_staleness=3)
        Schedule(accumulation_steps=2, sync_every=4, reference_every=None, required_staleness=3)
    """
    sizes = dict(
        tasks_per_sync=tasks_per_sync, tasks_per_step=tasks_per_step, tasks_per_microbatch=tasks_per_microbatch,
        num_iterations=num_iterations,
    )  # fmt: skip
    if tasks_per_reference_sync is not None:
        sizes["tasks_per_reference_sync"] = tasks_per_reference_sync
    for name, value in sizes.items():
        _require(name, value, least=1)
    _require("max_staleness", max_staleness, least=0)
    accumulation = _whole("tasks_per_step", tasks_per_step, "tasks_per_microbatch", tasks_per_microbatch)
    batches = _whole("tasks_per_sync", tasks_per_sync, "tasks_per_step", tasks_per_step)
    reference = None
    if tasks_per_reference_sync is not None:
        reference = _whole("tasks_per_reference_sync", tasks_per_reference_sync, "tasks_per_step", tasks_per_step)
    schedule = Schedule(
        accumulation_steps=accumulation,
        sync_every=batches * num_iterations,
        reference_every=None if reference is None else reference * num_iterations,
        required_staleness=(batches - 1) * num_iterations,
    )
    if schedule.required_staleness > max_staleness:
        raise _too_seldom(schedule, max_staleness, ", ".join(f"{name} = {value}" for name, value in sizes.items()))
    return schedule


def schedule_of(config: Config) -> Schedule:
    """The cadences that a config asks for; refused when they cannot keep its `max_staleness`.

    The loop publishes between two batches, never between two passes over one. So `weight_sync_steps = 1` means after
    every batch, which is every `num_iterations` steps; anything above 1 has to be a multiple of `num_iterations`, for
    else engines would get new weights less often than it says. With N steps between syncs and k passes per batch, the
    last batch before a sync begins N - k versions after the weights that its samples come from. What further passes
    add to the age of a batch does not count: its samples are looked at before the first, and `epsilon` bounds the rest.
    """
    passes, sync = config.num_iterations, config.weight_sync_steps
    _require("num_iterations", passes, least=1)
    _require("weight_sync_steps", sync, least=1)
    batches = 1 if sync == 1 else _whole("weight_sync_steps", sync, "num_iterations", passes)
    tasks = config.tasks_per_step
    try:
        schedule = compute_schedule(
            tasks_per_sync=batches * tasks, tasks_per_reference_sync=None, tasks_per_step=tasks,
            tasks_per_microbatch=tasks, max_staleness=config.max_staleness, num_iterations=passes,
        )  # fmt: skip
    except ConfigError as error:  # the same numbers, by the names of the keys
        raise ConfigError(
            f"weight_sync_steps = {sync} with max_staleness = {config.max_staleness}, num_iterations = {passes} and "
            f"tasks_per_step = {tasks}: {error.what}",
            error.why,
            f"set max_staleness = {(batches - 1) * passes} or more, or weight_sync_steps = 1",
        ) from error
    reference, size = config.reference_sync_steps, config.microbatch_size
    return replace(
        schedule,
        accumulation_steps=_whole("rollouts per step", config.rollouts_per_step, "microbatch_size", size)
        if size
        else None,
        reference_every=None if reference == "never" else reference,
    )


def allowance(config: Config, behind: int) -> int:
    """Groups that may be under way while the engines are `behind`, so that none of them has to age.

    Under way is a group from the moment it is asked for until the update it took part in is done, and published where
    that is due: in flight, waiting, and in the learner's hands. A batch in hand counts as `tasks_per_step`, also when
    it has fewer groups. Ask for a new group only while fewer than this are under way.

    With L under way, the newest is in batch (L - 1) // tasks_per_step, counted from the one in hand, so it is
    `behind + k ((L - 1) // tasks_per_step)` versions old when that begins. The largest L that keeps this within
    `max_staleness` is the answer; 0 while nothing that is asked for now can be used.

    Args:
        behind: the learner's version before the first pass over the batch in hand (over the next one, when none is),
            less the version that the engines sample from.
    """
    _require("behind", behind, least=0)
    _require("num_iterations", config.num_iterations, least=1)
    spare = config.max_staleness - behind
    return config.tasks_per_step * (1 + spare // config.num_iterations) if spare >= 0 else 0


def lead(config: Config) -> int:
    """Groups that may be under way at any time of the run: what `allowance` says when engines are furthest behind.

    One number, for whoever sizes a buffer or does not follow versions. With a sync after every batch it is all there
    is to say: tasks_per_step x (1 + max_staleness // num_iterations). With fewer syncs `allowance` lets more be asked
    for right after one.
    """
    return allowance(config, schedule_of(config).required_staleness)


def owed(ages: Iterable[int], config: Config) -> list[tuple[int, int]]:
    """What this batch must have so that no group ages later: pairs (n, age), n groups that are `age` or older.

    For whoever lets fast groups overtake slow ones. A group of age a can wait for `(max_staleness - a) // k` more
    batches, each with `tasks_per_step` seats. Where more groups have to be seated by then than there are seats, the
    rest is owed to this batch. Wait until for every pair n such groups are finished, and a whole batch in all; then
    take the oldest finished first: this pays every debt. An n above `tasks_per_step` cannot be paid, and does not come
    up while no more groups are under way than `allowance` allows.

    Args:
        ages: of every group under way that is in no batch yet, in flight or waiting; in versions, counted from the
            learner's version before this batch's first pass.

    Example:
        >>> owed([2, 2, 1], Config(model="pebble", tasks="builtin:sums", tasks_per_step=1, max_staleness=3))
        [(1, 2), (1, 1)]
    """
    counts, seated, debts = Counter(ages), 0, []
    for age in sorted(counts, reverse=True):
        _require("the age of a group", age, least=0)
        seated += counts[age]
        later = max(0, (config.max_staleness - age) // config.num_iterations)
        if seated > later * config.tasks_per_step:
            debts.append((seated - later * config.tasks_per_step, age))
    return debts


def _whole(name: str, value: int, by_name: str, by: int) -> int:
    """`value / by`, refused when there is a rest."""
    if value % by:
        raise ConfigError(
            f"{name} = {value} is not a multiple of {by_name} = {by}: {value % by} would be left over",
            "rounding would train on another schedule than the one that was asked for",
            f"use {name} = {(value // by + 1) * by}, or another {by_name}",
        )
    return value // by


def _require(name: str, value: int, *, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(
            f"{name} = {value!r}: must be a whole number of at least {least}",
            "sizes and cadences are counted in whole tasks and versions",
            f"give {name} a whole number of at least {least}",
        )


def _too_seldom(schedule: Schedule, max_staleness: int, sizes: str) -> ConfigError:
    return ConfigError(
        f"a sync every {schedule.sync_every} steps needs max_staleness of at least {schedule.required_staleness}, and "
        f"it is {max_staleness} ({sizes})",
        "the last batch before a sync is sampled from weights that are this many versions old, whatever the timing",
        f"set max_staleness = {schedule.required_staleness} or more, or sync more often",
    )
