"""The product's own stream, books and journal around parts that only take time: for `overlap.py` and `long_tail.py`.

A group occupies a generator for so long, then waits for its tool; a step occupies the learner for so long. Devices that
are elsewhere look like this from the driver: they take time and none of its processor.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.config import Config
from surefoot.protocols import StepBatch
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.sampler import AsyncSampler
from surefoot.runtime.task_queue import DurableTaskQueue
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger


def config_of(*, tasks: int, steps: int, staleness: int) -> Config:
    """What the stream reads of a config."""
    return Config(
        model="none", tasks="none", tasks_per_step=tasks, num_generations=2, max_steps=steps, max_staleness=staleness,
        importance_sampling_correction=staleness > 0, rollout_timeout_s=1e6,
    )  # fmt: skip


@dataclass
class Crew:
    """Generators, and a tool that anybody may wait for; knows when each was busy."""

    generators: int
    seconds: Sequence[float]
    """By task: how long its group occupies a generator."""
    tool: float = 0.0
    capacity: int = 1_000_000
    version: int = 0
    busy: float = 0.0
    finished: list[float] = field(default_factory=list)
    """Seconds of every group that was played to its end, in that order."""

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.generators)

    async def run(self, order: RolloutRequest) -> RolloutResult:
        """One group: a generator for its time, then the tool."""
        seconds = self.seconds[order.position]
        async with self._generator():
            version = self.version
            await asyncio.sleep(seconds)
            self.busy += seconds
        if self.tool:
            await asyncio.sleep(self.tool)
        self.finished.append(seconds)
        turn = Turn((1,), (2, order.position), (-0.5, -0.5), version, version_end=self.version)
        rollouts = tuple(Rollout(order.task.id, order.group, i, (turn,), float(i)) for i in range(2))
        return RolloutResult(Group(order.task, order.group, rollouts), (None, None))

    @asynccontextmanager
    async def _generator(self) -> AsyncIterator[None]:
        async with self._free:
            yield


def order_of(task: Task, visit: int, position: int) -> RolloutRequest:
    """Names alone: nobody decodes."""
    return RolloutRequest(task, (1,), Sampling(2, 1.0, 2, 4), "train", visit, position)


def make_tasks(n: int) -> list[Task]:
    """As many different ones as a run visits, so that each is visited once."""
    return [Task(id=f"t{i}", prompt="?") for i in range(n)]


def position_of(group: Group) -> int:
    """Which task it is of."""
    return group.rollouts[0].turns[0].completion_ids[1]


@dataclass
class Trained:
    """What a run did."""

    positions: list[int] = field(default_factory=list)
    ages: list[float] = field(default_factory=list)
    wasted: int = 0
    seconds: float = 0.0
    at: list[float] = field(default_factory=list)
    """When each step was done."""


Learn = Callable[[], Awaitable[None]]


async def ahead(folder: Path, config: Config, crew: Crew, learn: Learn) -> Trained:
    """The asynchronous run: real stream, ledger and journal."""
    tasks, version, done = make_tasks(len(crew.seconds)), 0, Trained()
    journal = Journal.create(folder / "ledger.journal")
    batches = BatchLog(folder)
    stream = AsyncSampler(Ledger.open(journal), batches, tasks, crew, order_of, config=config, trained=lambda: version)
    now = asyncio.get_running_loop().time
    began = now()
    for step in range(1, config.max_steps + 1):
        batch = await stream.next_batch(step, config.tasks_per_step)
        stream.record_rollouts(batch)
        await learn()
        version = crew.version = step
        stream.advance(step)
        stream.close_batch(batch, step, [None] * len(batch.tasks))
        _note(done, batch, stream.metrics()["async/staleness_mean"], now() - began)
    done.wasted, done.seconds = stream.figures.wasted, now() - began
    await stream.close()
    batches.close()
    journal.close()
    return done


async def in_turns(folder: Path, config: Config, crew: Crew, learn: Learn, *, extra: float = 0.0) -> Trained:
    """The synchronous run: everything of a step is asked for at once and waited for, then learned from.

    Args:
        extra: ask for this share more than a step needs, train on those who finish first and throw the rest away.
    """
    tasks, done = make_tasks(len(crew.seconds)), Trained()
    journal = Journal.create(folder / "ledger.journal")
    batches = BatchLog(folder)
    queue = DurableTaskQueue(Ledger.open(journal), batches, tasks, seed=config.seed)
    now = asyncio.get_running_loop().time
    began, n = now(), config.tasks_per_step
    for step in range(1, config.max_steps + 1):
        asked = queue.next_batch(step, math.ceil(n * (1 + extra)))
        plays = [asyncio.ensure_future(crew.run(order_of(t, 0, int(t.id[1:])))) for t in asked.tasks]
        finished = [await play for play in await _first(plays, n)]
        by_task = {played.group.task.id: played.group for played in finished}
        if not extra:
            queue.record_rollouts(asked, [by_task[task.id] for task in asked.tasks])
        await learn()
        crew.version = step
        if not extra:
            queue.close_batch(asked, step, [None] * n)
        _note(done, StepBatch(step, (), tuple(by_task.values())), 0.0, now() - began)
    done.seconds = now() - began
    batches.close()
    journal.close()
    return done


async def _first(plays: list[Any], n: int) -> list[Any]:
    """The first `n` that finish; the others are given up."""
    pending = set(plays)
    finished: list[Any] = []
    while len(finished) < n:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finished += sorted(done, key=plays.index)
    for play in [*pending, *finished[n:]]:
        play.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    return finished[:n]


def _note(done: Trained, batch: StepBatch, age: float, now: float) -> None:
    done.positions += [position_of(group) for group in batch.groups or ()]
    done.ages.append(age)
    done.at.append(now)


def tail(n: int, seed: int, *, share: float = 0.05, factor: float = 8.0) -> list[float]:
    """Replayed lengths: around 1, and a share of them `factor` times as long."""
    dice = random.Random(seed)
    return [dice.uniform(0.7, 1.3) * (factor if dice.random() < share else 1.0) for _ in range(n)]


def ks_p_value(one: Sequence[float], two: Sequence[float]) -> float:
    """Two-sample Kolmogorov-Smirnov: how likely a difference as large as this is, if both come from one source."""
    a, b = sorted(one), sorted(two)
    i = j = 0
    gap = 0.0
    while i < len(a) and j < len(b):
        value = min(a[i], b[j])
        while i < len(a) and a[i] <= value:
            i += 1
        while j < len(b) and b[j] <= value:
            j += 1
        gap = max(gap, abs(i / len(a) - j / len(b)))
    size = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    x = (size + 0.12 + 0.11 / size) * gap
    if x < 0.2:  # the series converges slowly there, and its sum is 1 to ten digits
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))))
