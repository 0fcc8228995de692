"""A run in which everything goes wrong, from one seed: the real journal and ledger, a fake clock, network and disk.

Workers get leases over a network that drops, doubles, delays and cuts off; the driver writes to a disk that fills up,
fails and forgets what was not synced; and the driver dies at any instant, also while it recovers. A second account,
kept outside, knows what was promised. At the end every planned item is in the weights exactly once, or dropped for a
reason. A failure names its seed, and the seed replays it:

    python tests/support/store_simulator.py --seed 17
    python tests/support/store_simulator.py --seeds 10000
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from forgetful_disk import Crash, Fault, ForgetfulFile

from surefoot.errors import StorageError, SurefootError
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Dropped, Lease, Ledger, Trained, Visit
from surefoot.system.journal import Header


class SimulationError(AssertionError):
    """A promise was broken; the text begins with the seed."""


@dataclass
class Promises:
    """What the outside world was told, and may rely on."""

    planned: set[Visit] = field(default_factory=set)
    delivered: dict[Visit, Lease] = field(default_factory=dict)
    trained: dict[Visit, int] = field(default_factory=dict)
    dropped: dict[Visit, str] = field(default_factory=dict)
    payload: dict[tuple[Visit, Any], str] = field(default_factory=dict)
    current: dict[Visit, Lease] = field(default_factory=dict)
    applied: dict[int, tuple[tuple[Visit, ...], str]] = field(default_factory=dict)
    """For each step whose result may have been seen: its items, and the weights after it."""


@dataclass(frozen=True)
class Weights:
    """A model, as far as an accountant cares: which step it is at, and a hash of all that went in, in order."""

    step: int = 0
    value: str = "start"
    lineage: tuple[Visit, ...] = ()

    def learn(self, items: list[Visit], payloads: list[str]) -> Weights:
        text = f"{self.value}/{self.step + 1}/{[str(i) for i in items]}/{payloads}"
        return Weights(self.step + 1, hashlib.sha256(text.encode()).hexdigest(), (*self.lineage, *items))


class World:
    """The clock, the network, the workers, the disk, and the account outside."""

    def __init__(self, seed: int, *, learn_first: bool = False) -> None:
        self.seed, self.rng, self.learn_first = seed, random.Random(seed), learn_first
        rng = self.rng
        self.now, self.queue, self.order = 0.0, [], 0
        self.workers = rng.randint(1, 3)
        self.tasks, self.epochs, self.batch = rng.randint(2, 6), rng.randint(1, 3), rng.randint(1, 3)
        self.trouble = rng.choice([0.0, 0.005, 0.02, 0.05])
        self.unrest_until = rng.uniform(50, 400)
        self.cut_off: dict[int, float] = {}
        self.counts: Counter[str] = Counter()
        self.promises = Promises()
        self.saved: list[tuple[Weights, dict[str, Any]]] = []
        self.file = ForgetfulFile(rng, Header(seed.to_bytes(16, "little")).pack(), self.fault)
        self.queue: list[tuple[float, int, str, Any]] = []

    @property
    def unrest(self) -> bool:
        return self.now < self.unrest_until

    def chance(self, share: float) -> bool:
        return self.unrest and self.rng.random() < share

    def fault(self, call: str) -> Fault:
        """Asked by the disk at every call."""
        if not self.chance(self.trouble):
            return None
        fault: Fault = self.rng.choice(["crash", "crash", "full", "eio"])
        self.counts[f"disk {fault}"] += 1
        return fault

    def instant(self) -> None:
        """A moment at which the driver may die."""
        if self.chance(self.trouble):
            self.counts["killed"] += 1
            raise Crash

    def later(self, delay: float, what: str, about: Any) -> None:
        self.order += 1
        heapq.heappush(self.queue, (self.now + delay, self.order, what, about))

    def send(self, worker: int, what: str, about: Any) -> None:
        """Over the network, in either direction."""
        if self.chance(0.02):
            self.cut_off[worker] = self.now + self.rng.expovariate(1 / 30)
            self.counts["partition"] += 1
        if self.chance(0.1) or (self.unrest and self.cut_off.get(worker, 0) > self.now):
            self.counts["lost message"] += 1
            return
        for _ in range(2 if self.chance(0.15) else 1):
            slow = self.rng.expovariate(1 / 40) if self.chance(0.1) else 0
            self.later(self.rng.expovariate(1) + slow, what, about)

    def work(self, worker: int, lease: Lease) -> None:
        """A worker has got a lease: it answers after a while, perhaps more than once, perhaps never."""
        if self.chance(0.05):
            self.counts["worker died"] += 1
            return
        payload = f"{lease.item} by {worker} in {lease.epoch}, {self.rng.random()}"
        for _ in range(self.rng.choice([1, 1, 2])):
            self.later(self.rng.expovariate(1 / 5), "post", (worker, lease, payload))

    def fail(self, what: str) -> None:
        raise SimulationError(
            f"seed {self.seed}: {what}\n  replay: python tests/support/store_simulator.py --seed {self.seed}"
        )

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.fail(what)

    def run(self) -> Counter[str]:
        """Start drivers until one finishes."""
        for _ in range(2000):
            try:
                self.counts["drivers"] += 1
                driver = Driver(self)
                driver.drive()
                self.judge(driver)
                return self.counts
            except StorageError:  # the driver stops, the machine lives on
                self.counts["stopped by the disk"] += 1
                self.file = self.file.after_kill()
            except Crash:
                power = self.rng.random() < 0.5
                self.counts["power loss" if power else "process killed"] += 1
                self.file = self.file.after_power_loss() if power else self.file.after_kill()
            except SurefootError as error:
                self.fail(f"a crash led to {type(error).__name__}: {error.what}")
        self.fail("it never came to an end")
        raise AssertionError("unreachable")

    def judge(self, driver: Driver) -> None:
        """At the end: 0 lost, 0 trained twice, and the books tell the same as the weights."""
        lineage, planned = driver.weights.lineage, self.promises.planned
        twice = [str(item) for item, n in Counter(lineage).items() if n > 1]
        self.require(not twice, f"trained twice: {twice}")
        statuses = driver.ledger.items()
        trained = {item for item, status in statuses.items() if isinstance(status, Trained)}
        dropped = {item for item, status in statuses.items() if isinstance(status, Dropped)}
        self.require(trained == set(lineage), "the books and the weights name different items")
        lost = [str(item) for item in planned - trained - dropped]
        self.require(not lost and planned == set(statuses), f"lost: {lost}")
        again = Ledger.read(Journal(self.file.after_kill()))
        self.require(again.digest() == driver.ledger.digest(), "replaying the journal gives another ledger")
        self.counts |= Counter({f"fenced {k}": n for k, n in driver.ledger.balance().fenced.items()})
        self.counts["items"] += len(planned)


class Driver:
    """One life of the driver: recover, then go on until done or dead."""

    def __init__(self, world: World) -> None:
        self.world, self.born, self.promises = world, world.now, world.promises
        self.journal = Journal(world.file)
        self.ledger = Ledger.open(self.journal, self.a_snapshot())
        self.groups = {(Visit(*e.record["item"]), tuple(e.record["epoch"])): str(e.record["text"])
                       for e in self.journal.records() if e.record["event"] == "group"}  # fmt: skip
        self.keeps_promises()
        self.weights = self.restore()
        world.later(0, "tick", self)

    def a_snapshot(self) -> dict[str, Any] | None:
        """Sometimes from a saved account and the rest of the journal; it must not matter."""
        if not self.world.saved or self.world.rng.random() < 0.5:
            return None
        snapshot = self.world.rng.choice(self.world.saved)[1]
        same = Ledger.read(self.journal, snapshot).digest() == Ledger.read(self.journal).digest()
        self.world.require(same, "a snapshot and the rest of the journal give another ledger")
        return snapshot

    def keeps_promises(self) -> None:
        """Whatever an earlier driver was told has happened, has happened."""
        told, status = self.promises, self.ledger.status
        self.ledger.check()
        require = self.world.require
        require(told.planned <= set(self.ledger.items()), "a planned item is gone")
        for item, lease in told.delivered.items():
            now = status(item)
            kept = isinstance(now, Lease) and now.delivered and now.epoch == lease.epoch
            require(kept or isinstance(now, Trained | Dropped), f"the finished result of {item} is lost: {now}")
        for item, step in told.trained.items():
            now = status(item)
            require(isinstance(now, Trained) and now.step == step, f"{item} was trained in step {step}, now {now}")
        require(all(status(item) == Dropped(reason) for item, reason in told.dropped.items()), "a drop is undone")
        told.planned |= set(self.ledger.items())
        old = [str(item) for item, s in self.ledger.items().items() if isinstance(s, Lease) and not s.delivered]
        require(not old, f"leases of a dead driver are still open: {old}")

    def restore(self) -> Weights:
        """The last saved weights, and every journaled step since, again."""
        saved = [weights for weights, _ in self.world.saved]
        weights = saved[-1] if saved else Weights()
        if saved and self.world.chance(0.1):  # an older one on request: what came after it is trained anew
            weights = self.world.rng.choice(saved)
            self.rewind(weights.step)
        batches = {e.record["step"]: e.record["items"] for e in self.journal.records() if e.record["event"] == "batch"}
        while weights.step < self.ledger.step:
            weights = self.learn(weights, batches[weights.step + 1])
        return self.redo(weights, batches.get(weights.step + 1, []))

    def redo(self, weights: Weights, batch: list[Any]) -> Weights:
        """A step whose batch is journaled and which is not yet booked: the same step once more."""
        waiting = {(lease.item, tuple(lease.epoch)) for lease in self.ledger.delivered()}
        if not batch or not all((Visit(*item), tuple(epoch)) in waiting for item, epoch in batch):
            return weights
        self.world.counts["step redone"] += 1
        weights = self.learn(weights, batch)
        self.book(weights.step, [Visit(*item) for item, _ in batch])
        return weights

    def rewind(self, step: int) -> None:
        told = self.promises
        told.applied = {s: what for s, what in told.applied.items() if s <= step}
        told.trained = {item: s for item, s in told.trained.items() if s <= step}
        told.delivered = {}
        self.world.saved = [pair for pair in self.world.saved if pair[0].step <= step]  # first: see Ledger.rewind
        self.ledger.rewind(step)
        self.world.counts["rewind"] += 1

    def drive(self) -> None:
        """Take what the clock brings, until everything is done."""
        world = self.world
        for _ in range(20_000):
            world.now, _, what, about = heapq.heappop(world.queue)
            if what == "tick" and about is self:
                self.tick()
                if self.done():
                    return
                world.later(2, "tick", self)
            elif what == "work":
                world.work(*about)
            elif what == "post":
                world.send(about[0], "result", about)
            elif what == "result":
                world.instant()
                self.result(about[1], about[2])
        world.fail("a driver runs and nothing moves")

    def done(self) -> bool:
        balance = self.ledger.balance()
        return not balance.pending + balance.leased and balance.planned == self.world.tasks * self.world.epochs

    def tick(self) -> None:
        world, clock = self.world, self.world.now - self.born  # a clock that starts with the process
        world.instant()
        self.ledger.expire(clock)
        planned = len(self.ledger.items())
        if not self.ledger.pending and planned < world.tasks * world.epochs:
            items = [Visit(f"t{i}", planned // world.tasks) for i in range(world.tasks)]
            self.ledger.plan(items)
            self.promises.planned |= set(items)
        for worker in range(world.workers):
            for lease in self.ledger.lease(world.rng.randint(0, 2), holder=f"worker {worker}", until=clock + 20):
                self.promises.current[lease.item] = lease
                world.send(worker, "work", (worker, lease))
        self.train()

    def result(self, lease: Lease, payload: str) -> None:
        """An acceptable group goes into the journal first; one sync covers both."""
        record = {"event": "group", "item": list(lease.item), "epoch": list(lease.epoch), "text": payload}
        if self.ledger.outcome(lease) == "accepted":
            self.journal.append(record, durable=False)
        (outcome,) = self.ledger.complete([lease])
        if outcome == "accepted":
            asked = self.promises.current[lease.item]
            self.world.require(asked.epoch == lease.epoch, f"a late result of {lease.item} was believed")
            self.groups[lease.item, tuple(lease.epoch)] = payload
            self.promises.delivered[lease.item] = lease
        self.world.counts[f"result {outcome}"] += 1

    def train(self) -> None:
        """A step, when there is enough for one, or when nothing more will come."""
        world, waiting = self.world, self.ledger.delivered()
        waiting = [lease for lease in waiting if not self.sort_out(lease)]
        left = self.ledger.balance()
        last = not left.pending and left.leased == left.delivered
        if not waiting or (len(waiting) < world.batch and not last):
            return
        batch = [[list(lease.item), list(lease.epoch)] for lease in waiting[: world.batch]]
        items = [lease.item for lease in waiting[: world.batch]]
        if world.learn_first:
            self.learn(self.weights, batch)
            world.instant()
        self.journal.append({"event": "batch", "step": self.weights.step + 1, "items": batch})
        world.instant()
        self.weights = self.learn(self.weights, batch)
        self.book(self.weights.step, items)
        if world.rng.random() < 0.3:
            world.saved.append((self.weights, self.ledger.snapshot()))

    def sort_out(self, lease: Lease) -> bool:
        """Now and then a group is filtered, or has become too old."""
        item, luck = lease.item, self.world.rng.random()
        if luck < 0.03:
            self.ledger.drop([item], "filtered")
            self.promises.dropped[item] = "filtered"
        elif self.world.unrest and luck < 0.08:
            self.ledger.requeue([item], "stale")
        else:
            return False
        self.promises.delivered.pop(item, None)
        return True

    def learn(self, weights: Weights, batch: list[Any]) -> Weights:
        """One step; if this step was ever done before, it must be the very same."""
        items = [Visit(*item) for item, _ in batch]
        after = weights.learn(items, [self.groups[Visit(*item), tuple(epoch)] for item, epoch in batch])
        before = self.promises.applied.setdefault(after.step, (tuple(items), after.value))
        self.world.require(before == (tuple(items), after.value), f"step {after.step} was repeated with other data")
        return after

    def book(self, step: int, items: list[Visit]) -> None:
        self.world.instant()
        self.ledger.trained(step, items)
        self.promises.trained |= dict.fromkeys(items, step)
        for item in items:
            self.promises.delivered.pop(item, None)


def simulate(seed: int, *, learn_first: bool = False) -> Counter[str]:
    """One run; returns what happened in it, raises `SimulationError` when a promise was broken."""
    return World(seed, learn_first=learn_first).run()


def main() -> int:
    """Run many seeds, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many, from --start on")
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, help="only this one")
    words = parser.parse_args()
    seeds = [words.seed] if words.seed is not None else range(words.start, words.start + words.seeds)
    began, total, failed = time.perf_counter(), Counter[str](), 0
    for seed in seeds:
        try:
            total += simulate(seed)
        except SimulationError as error:
            failed += 1
            print(error, file=sys.stderr)
    print(f"{len(seeds)} seeds, {failed} failed, {time.perf_counter() - began:.1f} s")
    print("\n".join(f"  {n:>9,}  {name}" for name, n in sorted(total.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
