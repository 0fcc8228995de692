"""An asynchronous run in which everything goes wrong, from one seed: real stream, buffer, ledger, journal and router.

64 replicas play groups on a virtual clock: some take very long, some crash, some lose an answer, some serve weights
that are too old; the learner is slow or quick, and the driver dies at any instant, also between two writes, and goes on
from a checkpoint. A second account, kept outside, knows what was promised. A failure names its seed, and the seed
replays it:

    python tests/support/async_simulator.py --seed 17
    python tests/support/async_simulator.py --seeds 10000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virtual_clock import DeadlockError, run_virtually

from surefoot.config import Config
from surefoot.errors import EngineError, FleetError, StalledError, SurefootError
from surefoot.protocols import StepBatch
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.router import LoadAwareRouter
from surefoot.runtime.sampler import AsyncSampler, allowance
from surefoot.storage import batches as batches_module
from surefoot.storage import ledger
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Dropped, Ledger, Trained, Visit
from surefoot.system import journal

REPLICAS = 64
DEADLINE = 1e7
DROPS = {"timeout", "engine_error", "no_contrast"}


class SimulationError(AssertionError):
    """A promise was broken; the text begins with the seed."""


class Killed(KeyboardInterrupt):
    """The driver is dead. A KeyboardInterrupt, because only that leaves an event loop from inside a task."""


@dataclass
class Promise:
    """A group that is on the disk, and so must not be played again while it can be used."""

    payload: int
    version: int


@dataclass
class Outside:
    """What the world was told; it survives every driver."""

    finished: dict[Visit, Promise] = field(default_factory=dict)
    learned: dict[int, tuple[tuple[Visit, ...], tuple[int, ...]]] = field(default_factory=dict)
    """By first step: whom it was made of, and which of their groups."""
    saved: int = 0
    lineage: dict[int, tuple[Visit, ...]] = field(default_factory=dict)
    """By step of a saved checkpoint: everything that is in its weights."""
    counts: Counter[str] = field(default_factory=Counter)


def _config(rng: random.Random) -> Config:
    size, passes = rng.choice([1, 2, 3, 4, 8, 16]), rng.choice([1, 1, 1, 2])
    sync = rng.choice([1, 1, 1, 2 * passes])
    least = 0 if sync == 1 else sync - passes
    staleness = rng.choice([0, 1, 1, 2, 4]) * passes
    batches = rng.randint(4, 12) if size < 8 else rng.randint(3, 5)
    return Config(
        model="m", tasks="t", seed=rng.randrange(1000), tasks_per_step=size, num_generations=2, num_iterations=passes,
        max_staleness=max(staleness, least), weight_sync_steps=sync, max_steps=batches * passes,
        rollout_timeout_s=rng.choice([60.0, 200.0, 1000.0]), importance_sampling_correction=True, eval_steps=0,
    )  # fmt: skip


class World:
    """The clock, the replicas, the learner, and the account outside."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.config = _config(rng)
        n = self.config.tasks_per_step
        self.tasks = [Task(id=f"t{i}", prompt="?") for i in range(n + rng.randint(0, 2 * n))]
        self.outside = Outside()
        self.trouble = rng.choice([0.0, 0.01, 0.03, 0.1])
        self.moving = rng.random() < 0.2
        """The learner's version moves while a batch is waited for; such a run has one life."""
        self.kills = 0 if self.moving else rng.choice([0, 0, 1, 2, 4])
        self.learn_s = rng.choice([0.1, 5.0, 40.0])
        self.serial = 0
        self.counts: Counter[str] = self.outside.counts

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def instant(self, name: str = "") -> None:
        """A moment at which the driver may die; every failpoint of the store is one."""
        if self.kills and self.chance(0.004):
            self.kills -= 1
            self.counts[f"killed at {name}"] += 1
            self.counts["killed"] += 1
            raise Killed(name)

    def fail(self, what: str) -> None:
        raise SimulationError(
            f"seed {self.seed}: {what}\n  replay: python tests/support/async_simulator.py --seed {self.seed}"
        )


class Replicas:
    """A crew of 64 behind the real router; what it says carries which replica, which version and a serial number."""

    def __init__(self, world: World, life: Life) -> None:
        self.world, self.life = world, life
        self.router = LoadAwareRouter(REPLICAS, world.rng.choice([1, 2]))
        self.versions = [0] * REPLICAS
        self.in_play = 0

    @property
    def capacity(self) -> int:
        return REPLICAS * (self.router.capacity or 1)

    def publish(self, version: int) -> None:
        """Every replica but those that missed it; they hear of it a version later."""
        for i in range(REPLICAS):
            if self.world.chance(self.world.trouble / 4):
                self.world.counts["stale weights"] += 1
            else:
                self.versions[i] = version

    async def run(self, order: RolloutRequest) -> RolloutResult:
        world = self.world
        self.life.asked(order)
        self.in_play += 1
        try:
            async with self.router.slot(order.task.id) as (replica, _):
                return await self._played(order, replica)
        except asyncio.CancelledError:
            world.counts["cancelled"] += 1
            raise
        finally:
            self.in_play -= 1

    async def _played(self, order: RolloutRequest, replica: int) -> RolloutResult:
        world, rng = self.world, self.world.rng
        version = self.versions[replica]
        duration = rng.lognormvariate(0.0, 0.5) * (8.0 if world.chance(0.05) else 1.0)
        if world.chance(world.trouble):
            world.counts["answer lost"] += 1
            duration = 1e6
        await asyncio.sleep(duration)
        if world.chance(world.trouble):
            world.counts["replica crashed"] += 1
            raise EngineError(f"replica {replica} is gone", "it crashed", "ask another")
        if world.chance(world.trouble / 50):
            world.counts["fleet gone"] += 1
            raise FleetError("nobody is left", "they all crashed", "start again")
        world.serial += 1
        end = self.versions[replica]
        return RolloutResult(_group(order, world.serial, version, end), (None, None))


def _group(order: RolloutRequest, payload: int, version: int, end: int) -> Group:
    turn = Turn((1,), (2, payload), (-0.5, -0.5), version, version_end=end)
    return Group(
        order.task, order.group, tuple(Rollout(order.task.id, order.group, i, (turn,), float(i)) for i in range(2))
    )


def payload_of(group: Group) -> int:
    return group.rollouts[0].turns[0].completion_ids[1]


class WatchedLedger(Ledger):
    """Tells the account outside what is given back and what is dropped."""

    life: Life

    def requeue(self, items: Any, reason: str) -> None:
        named = list(items)
        super().requeue(named, reason)
        for item in named if reason == "stale" else ():
            self.life.stale(item)

    def drop(self, items: Any, reason: str) -> None:
        named = list(items)
        super().drop(named, reason)
        if reason not in DROPS:
            self.life.world.fail(f"{named} were dropped: {reason}")


class WatchedBatches(BatchLog):
    """Tells the account outside what is on the disk."""

    life: Life

    def deliver(self, groups: Mapping[Visit, Group]) -> None:
        super().deliver(groups)
        for item, group in groups.items():
            self.life.finished(item, group)


class Life:
    """One driver, from its start to its death or to the end of the run."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.config, self.folder = world, world.config, folder
        path = folder / "ledger.journal"
        self.journal = Journal.open(path) if path.exists() else Journal.create(path)
        self.ledger = WatchedLedger.open(self.journal)
        self.ledger.life = self
        self.batches = WatchedBatches(folder)
        self.batches.life = self
        self.step = world.outside.saved
        self.version = self.step
        self.in_weights = world.outside.lineage.get(self.step, ())
        if self.ledger.step > self.step:
            self.ledger.rewind(self.step)
            world.counts["rewind"] += 1
        self.crew = Replicas(world, self)
        self.stream = AsyncSampler(
            self.ledger, self.batches, world.tasks, self.crew, _order, config=self.config, trained=lambda: self.version
        )

    def close(self) -> None:
        self.batches.close()
        self.journal.close()

    # -- the account outside --------------------------------------------------------------

    def finished(self, item: Visit, group: Group) -> None:
        self.world.outside.finished[item] = Promise(payload_of(group), group.rollouts[0].turns[0].version)

    def stale(self, item: Visit) -> None:
        promise = self.world.outside.finished.pop(item, None)
        if promise is not None and self.version - promise.version <= self.config.max_staleness:
            self.world.fail(f"{item} of version {promise.version} was called too old for a learner at {self.version}")
        self.world.counts["stale"] += 1

    def asked(self, order: RolloutRequest) -> None:
        """A group is asked for: it may not be here already, and there has to be use for it."""
        item, stream, config = Visit(order.task.id, order.step), self.stream, self.config
        promise = self.world.outside.finished.get(item)
        if promise is not None and self.version - promise.version <= config.max_staleness:
            self.world.fail(f"{item} is asked for again, and its group of version {promise.version} was finished")
        hand = config.tasks_per_step if stream._hand else 0
        under_way = len(stream._flights) + stream.buffer.tally().waiting + hand
        if under_way > allowance(config, 0) or len(stream._flights) > self.crew.capacity:
            self.world.fail(f"{under_way} groups are under way, {allowance(config, 0)} are allowed")

    # -- the learner ----------------------------------------------------------------------

    async def train(self) -> None:
        world, config, stream = self.world, self.config, self.stream
        self._publish()
        while self.step < config.max_steps:
            world.instant("before draw")
            mover = asyncio.create_task(self._move()) if world.moving else None
            batch = await stream.next_batch(self.step + 1, config.tasks_per_step)
            if mover is not None:
                mover.cancel()
            self._look(batch)
            world.instant("drawn")
            stream.record_rollouts(batch)
            self._remember(batch)
            await asyncio.sleep(world.learn_s * world.rng.random())
            self._learn(batch)
            world.instant("settled")
        await stream.close()
        self._finish()

    async def _move(self) -> None:
        """The learner's version moves on its own: whoever looks only once looks too early."""
        while True:
            await asyncio.sleep(self.world.rng.expovariate(1 / 8))
            if self.version - self.stream.published < self.config.max_staleness and self.world.chance(0.2):
                self.version += 1
                self.world.counts["moved while waiting"] += 1
                if self.world.chance(0.5):
                    self._publish()

    def _publish(self) -> None:
        self.crew.publish(self.version)
        self.stream.advance(self.version)

    def _look(self, batch: StepBatch) -> None:
        world, groups = self.world, batch.groups or ()
        if len(groups) != self.config.tasks_per_step:
            world.fail(f"step {batch.step} got {len(groups)} groups of {self.config.tasks_per_step}")
        ages = [self.version - turn.version for group in groups for r in group.rollouts for turn in r.turns]
        if not 0 <= min(ages) <= max(ages) <= self.config.max_staleness:
            world.fail(f"step {batch.step} is trained on ages {ages}, max_staleness is {self.config.max_staleness}")
        world.counts["old"] += max(ages) > 0

    def _remember(self, batch: StepBatch) -> None:
        """From here on the step may have been seen: it is this one, for ever."""
        items = self.stream.queue._open[batch.step].items
        mine = tuple(items), tuple(payload_of(group) for group in batch.groups or ())
        before = self.world.outside.learned.setdefault(batch.step, mine)
        if before != mine:
            self.world.fail(f"step {batch.step} was {before} and is repeated as {mine}")
        for item, payload in zip(*mine, strict=True):
            promise = self.world.outside.finished.pop(item, None)
            if promise is not None and promise.payload != payload:
                self.world.fail(f"{item} was finished as {promise.payload} and is trained on as {payload}")
        if twice := set(items) & set(self.in_weights):
            self.world.fail(f"step {batch.step} trains {sorted(twice)} once more")

    def _learn(self, batch: StepBatch) -> None:
        world, config = self.world, self.config
        items = self.stream.queue._open[batch.step].items
        self.step += config.num_iterations
        self.version += config.num_iterations
        if self.step % config.weight_sync_steps == 0 or self.step == config.max_steps:
            self._publish()
        fates = ["no_contrast" if zlib.crc32(str(item).encode()) % 9 == 0 else None for item in items]
        self.stream.close_batch(batch, self.step, fates)
        self.in_weights = (*self.in_weights, *(i for i, fate in zip(items, fates, strict=True) if fate is None))
        self.ledger.check()
        if self.ledger.balance().lost:
            world.fail(f"the ledger does not add up: {self.ledger.balance()}")
        self.stream.buffer.tally()
        if world.chance(0.3):
            world.outside.lineage[self.step], world.outside.saved = self.in_weights, self.step
            world.instant("saved")
            self.batches.roll(self.step)
            self.batches.forget(self.step)
            world.counts["saved"] += 1

    def _finish(self) -> None:
        world, balance = self.world, self.ledger.balance()
        self.ledger.check()
        trained = [item for item, status in self.ledger.items().items() if isinstance(status, Trained)]
        if sorted(trained) != sorted(self.in_weights) or len(set(trained)) != len(trained):
            world.fail(f"{len(trained)} trained by the ledger, {len(self.in_weights)} in the weights")
        if balance.leased != balance.delivered or self.crew.in_play or any(self.crew.router.loads):
            world.fail(f"it is over, and somebody still plays: {balance}, {self.crew.in_play} in play")
        waiting = self.stream.buffer.tally().waiting
        if balance.delivered != waiting:
            world.fail(f"{balance.delivered} delivered, {waiting} wait to be trained on")
        gone = [item for item, status in self.ledger.items().items() if isinstance(status, Dropped)]
        world.counts["dropped"] += len(gone)


def _order(task: Task, visit: int, position: int) -> RolloutRequest:
    return RolloutRequest(task, (1,), Sampling(2, 1.0, 4, 8), "train", visit, position)


@contextlib.contextmanager
def _deadly(world: World) -> Iterator[None]:
    """Every failpoint of the store is a moment at which the driver may die. Nobody loses power, so nothing is synced."""
    modules: Sequence[Any] = (batches_module, ledger)
    before = [module.failpoint for module in modules]
    sync = journal.SystemFile.sync
    try:
        journal.SystemFile.sync = lambda self: None  # type: ignore[method-assign]
        for module in modules:
            module.failpoint = world.instant
        yield
    finally:
        journal.SystemFile.sync = sync  # type: ignore[method-assign]
        for module, real in zip(modules, before, strict=True):
            module.failpoint = real


def simulate(seed: int) -> Counter[str]:
    """One run to its end, over as many drivers as it takes; what happened, counted."""
    world = World(seed)
    place = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=place) as name, _deadly(world):
        for lives in range(60):
            life = None
            try:
                life = Life(world, Path(name))
                run_virtually(life.train(), deadline=DEADLINE)
                world.counts["lives"] += lives + 1
                return world.counts
            except Killed:
                pass
            except (FleetError, EngineError, StalledError) as error:
                world.counts[f"ended by {type(error).__name__}"] += 1
                world.trouble /= 2
                if world.moving:  # its versions do not follow from its steps, so nobody could go on
                    return world.counts
            except DeadlockError as error:
                world.fail(f"deadlock: {error}")
            except SurefootError as error:
                world.fail(f"{type(error).__name__}: {error}")
            finally:
                if life is not None:
                    life.close()
        world.fail("sixty drivers did not bring it to its end")
    return world.counts


def main() -> int:
    """One seed or many; the first that fails ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", type=int, default=200)
    args = parser.parse_args()
    seen: Counter[str] = Counter()
    for seed in range(args.seeds) if args.seed is None else [args.seed]:
        seen += simulate(seed)
    for name, number in sorted(seen.items()):
        print(f"{number:8d}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
