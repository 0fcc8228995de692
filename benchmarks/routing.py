"""Routing over 2 to 64 replicas: how close to the bound does the router come, and how often is a prefix warm?

    python benchmarks/routing.py [--quick] [--seeds 3] [--replicas 2,4,8,16,32,64]

The router is the product's own, on a simulated clock: an event loop that jumps to the next event instead of waiting.
The peers run through the same loop on the same seeded groups: round robin and random choose a replica on arrival, and
the group waits there; least-loaded is our router without prefixes. The bound is max(work / slots, longest group).

    stream     everything is asked for at once, 128 groups per slot, as in an asynchronous run that never stops sampling
    heavy      the same with a much longer tail: the last group to end is alone for a long time
    one step   4 groups per slot, then a barrier: what a synchronous step looks like. Nobody who does not know how long
               a group will take can reach the bound here; beside it, longest first, which does know
    70 % busy  groups arrive at random and slots are free: a warm prefix saves its prefill, and there is a choice

Every number but the last row is a count on the simulated clock: a busy machine changes nothing. The last row is two
replicas in real time.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import selectors
import statistics
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from load import LoadProbe
from method import Journal
from report import Row, common_arguments, publish

from surefoot.runtime.router import LoadAwareRouter

SLOTS, CACHED, FAMILIES = 4, 16, 64
"""Groups side by side on a replica; prefixes that its cache holds; different prefixes in the whole work."""
PREFILL = 0.25
"""Of the median group's time: what a cold prefix costs."""
TAIL, HEAVY = (0.8, 8.0), (1.2, 32.0)
"""Sigma of the log-normal durations, and where they are cut, in medians: the limit on a completion's length."""
REPLICAS = (2, 4, 8, 16, 32, 64)
WITHIN = 1.05
NOTE = (
    f"simulated clock, seeded; {SLOTS} groups side by side on a replica; durations log-normal (sigma {TAIL[0]}, cut at "
    f"{TAIL[1]:g} medians; heavy: sigma {HEAVY[0]}, cut at {HEAVY[1]:g}). Ratio: makespan over max(work / slots, "
    "longest), median over seeds. Whoever is never idle while somebody waits is at most one longest group above "
    "work / slots, so 5 % are kept wherever the longest is below 5 % of a slot's work: in a stream, not in one step "
    "and not under a heavy tail, where only who knows the durations keeps them; no such goal is set there. "
    "Least-loaded is our router without prefixes; by load the two never differ: a prefix decides between equals only, "
    f"so where all slots are taken it seldom has a say. 70 % busy: {FAMILIES} prefixes, Zipf, {CACHED} in a replica's "
    f"cache, a cold one costs {PREFILL:g} of a median group; the oracle misses each prefix once."
)


# -- a clock that jumps ------------------------------------------------------------------


class _NoWaiting(selectors.SelectSelector):
    """Instead of sleeping, says how long it would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("nothing will ever happen: everybody waits for somebody")
        if not ready and timeout:
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only while nobody can run."""

    def __init__(self) -> None:
        self._clock = _NoWaiting()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulated(story: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine on the simulated clock."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(story())


# -- the work ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One group to play."""

    prefix: int
    seconds: float
    arrives: float = 0.0


def draw_jobs(n: int, dice: random.Random, *, rate: float | None = None, tail: tuple[float, float] = TAIL) -> list[Job]:
    """Seeded groups; with `rate`, arriving at random so many per second."""
    weights = [1 / (rank + 1) for rank in range(FAMILIES)]
    prefixes = dice.choices(range(FAMILIES), weights, k=n)
    arrivals, now = [], 0.0
    for _ in range(n):
        now += dice.expovariate(rate) if rate else 0.0
        arrivals.append(now)
    return [
        Job(prefix, min(dice.lognormvariate(0.0, tail[0]), tail[1]), arrives)
        for prefix, arrives in zip(prefixes, arrivals, strict=True)
    ]


# -- who decides ---------------------------------------------------------------------------


class Router(Protocol):
    """What a policy has to offer."""

    def slot(self, prefix: Hashable | None = None) -> AbstractAsyncContextManager[tuple[int, int]]: ...


class WithoutPrefixes:
    """Least-loaded and nothing else: our router, told nothing."""

    def __init__(self, replicas: int) -> None:
        self.router = LoadAwareRouter(replicas, SLOTS)

    def slot(self, prefix: Hashable | None = None) -> AbstractAsyncContextManager[tuple[int, int]]:
        return self.router.slot()


class OnArrival:
    """A replica is chosen without looking; whoever is sent there waits there."""

    def __init__(self, replicas: int, choose: Callable[[], int]) -> None:
        self.choose, self.slots = choose, [asyncio.Semaphore(SLOTS) for _ in range(replicas)]

    @asynccontextmanager
    async def slot(self, prefix: Hashable | None = None) -> AsyncIterator[tuple[int, int]]:
        replica = self.choose()
        async with self.slots[replica]:
            yield replica, 0


def policies(replicas: int, seed: int) -> dict[str, Callable[[], Router]]:
    dice, turn = random.Random(f"random/{seed}"), count()
    return {
        "ours": lambda: LoadAwareRouter(replicas, SLOTS, remember=CACHED),
        "least-loaded": lambda: WithoutPrefixes(replicas),
        "round robin": lambda: OnArrival(replicas, lambda: next(turn) % replicas),
        "random": lambda: OnArrival(replicas, lambda: dice.randrange(replicas)),
    }


# -- playing it ------------------------------------------------------------------------------


class Cache:
    """The prefixes that a replica has warm, the most recently used ones."""

    def __init__(self) -> None:
        self.warm: OrderedDict[int, None] = OrderedDict()

    def use(self, prefix: int) -> bool:
        hit = prefix in self.warm
        self.warm[prefix] = None
        self.warm.move_to_end(prefix)
        if len(self.warm) > CACHED:
            self.warm.popitem(last=False)
        return hit


@dataclass(frozen=True)
class Outcome:
    """One policy on one list of groups."""

    makespan: float
    hits: float
    mean_time: float
    """From arrival to the end of a group, on average."""
    done: int
    work: float
    """Seconds of playing, prefills left out: the same for every policy, or they did not do the same."""


async def play(make: Callable[[], Router], jobs: Sequence[Job], replicas: int, prefill: float) -> Outcome:
    clock = asyncio.get_running_loop().time
    router, caches = make(), [Cache() for _ in range(replicas)]
    hits, spent, work, began = 0, 0.0, 0.0, clock()

    async def one(job: Job) -> None:
        nonlocal hits, spent, work
        await asyncio.sleep(job.arrives)
        async with router.slot(job.prefix) as (replica, _):
            hit = caches[replica].use(job.prefix)
            await asyncio.sleep(job.seconds + (0.0 if hit else prefill))
        hits, spent, work = hits + hit, spent + clock() - began - job.arrives, work + job.seconds

    await asyncio.gather(*(one(job) for job in jobs))
    n = len(jobs)
    return Outcome(clock() - began, hits / n, spent / n, n, work)


def compare_policies(jobs: Sequence[Job], replicas: int, seed: int, prefill: float = 0.0) -> dict[str, Outcome]:
    found = {
        name: simulated(lambda make=make: play(make, jobs, replicas, prefill))  # type: ignore[misc]
        for name, make in policies(replicas, seed).items()
    }
    works = {(outcome.done, round(outcome.work, 6)) for outcome in found.values()}
    if len(works) != 1:
        raise RuntimeError(f"the policies did not do the same work: {works}")
    return found


def bound(jobs: Sequence[Job], replicas: int) -> float:
    return max(sum(job.seconds for job in jobs) / (replicas * SLOTS), max(job.seconds for job in jobs))


def longest_first(jobs: Sequence[Job], replicas: int) -> float:
    """Makespan of who knows every duration and begins with the longest."""
    free = [0.0] * (replicas * SLOTS)
    for seconds in sorted((job.seconds for job in jobs), reverse=True):
        heapq.heapreplace(free, free[0] + seconds)
    return max(free)


# -- cells -------------------------------------------------------------------------------------


def median_of(outcomes: Sequence[dict[str, Outcome]], name: str, what: Callable[[Outcome], float]) -> float:
    return statistics.median(what(outcome[name]) for outcome in outcomes)


def makespan_row(kind: str, replicas: int, seeds: int, journal: Journal) -> Row:
    """Everything is asked for at once."""
    depth, tail = (4 if kind == "one step" else 128), (HEAVY if kind == "heavy" else TAIL)
    ratios: dict[str, list[float]] = {}
    knowing, worst = [], 0.0
    for seed in range(seeds):
        jobs = draw_jobs(replicas * SLOTS * depth, random.Random(f"{kind}/{replicas}/{seed}"), tail=tail)
        limit, found = bound(jobs, replicas), compare_policies(jobs, replicas, seed)
        for name, outcome in found.items():
            ratios.setdefault(name, []).append(outcome.makespan / limit)
        knowing.append(longest_first(jobs, replicas) / limit)
        worst = max(worst, found["ours"].makespan / found["least-loaded"].makespan)
        journal.write("makespan", {"cell": kind, "replicas": replicas, "seed": seed, "bound": limit, "found": found})
    mid = {name: statistics.median(values) for name, values in ratios.items()}
    stream = kind == "stream"
    return Row(
        "routing",
        f"{replicas} replicas, {kind} ({depth} groups per slot)",
        f"{mid['ours']:.3f} x bound (worst seed {max(ratios['ours']):.3f})",
        ", ".join(f"{name} {mid[name]:.3f}" for name in ("least-loaded", "round robin", "random")),
        f"{1 / worst:.3f} least-loaded / ours, worst seed",
        f"<= {WITHIN} x bound, never worse than least-loaded" if stream else "never worse than least-loaded",
        (max(ratios["ours"]) <= WITHIN or not stream) and worst <= 1 + 1e-9,
        f"1; longest first {statistics.median(knowing):.3f}",
        NOTE,
    )


def prefix_row(replicas: int, seeds: int, journal: Journal, *, groups: int = 3000) -> Row:
    """Slots are free, so that there is a choice between equals."""
    rate = 0.7 * replicas * SLOTS / 1.5  # a group takes 1.3 on average, and some of a prefill
    outcomes = []
    for seed in range(seeds):
        jobs = draw_jobs(groups, random.Random(f"prefix/{replicas}/{seed}"), rate=rate)
        outcomes.append(compare_policies(jobs, replicas, seed, PREFILL))
        journal.write("prefix", {"replicas": replicas, "seed": seed, "rate": rate, "found": outcomes[-1]})
    hits = {name: median_of(outcomes, name, lambda o: o.hits) for name in outcomes[0]}
    times = {name: median_of(outcomes, name, lambda o: o.mean_time) for name in outcomes[0]}
    worst = max(found["ours"].mean_time / found["least-loaded"].mean_time for found in outcomes)
    return Row(
        "routing",
        f"{replicas} replicas, 70 % busy",
        f"{hits['ours']:.0%} warm, {times['ours']:.3f} per group",
        ", ".join(f"{name} {hits[name]:.0%}, {times[name]:.3f}" for name in hits if name != "ours"),
        f"{1 / worst:.3f} least-loaded / ours, worst seed",
        "never slower than least-loaded, nor colder",
        worst <= 1.0 and all(found["ours"].hits >= found["least-loaded"].hits for found in outcomes),
        f"{1 - FAMILIES / groups:.0%} warm (oracle)",
        NOTE,
    )


def real_row(journal: Journal, *, depth: int) -> Row:
    """Two replicas by the clock on the wall: what the simulation leaves out is what asyncio itself costs."""
    scale, replicas, probe = 0.01, 2, LoadProbe()
    jobs = [
        Job(j.prefix, scale * j.seconds) for j in draw_jobs(replicas * SLOTS * depth, random.Random("two for real"))
    ]
    mark, started = probe.mark(), time.perf_counter()
    outcome = asyncio.run(play(policies(replicas, 0)["ours"], jobs, replicas, 0.0))
    seconds, load, limit = time.perf_counter() - started, probe.since(mark), bound(jobs, replicas)
    journal.write("real", {"replicas": replicas, "seconds": seconds, "bound": limit, "load": load, "found": outcome})
    dirty = f", dirty: others used {load.share:.0%}" if load.dirty else ""
    return Row(
        "routing", f"2 replicas, real time ({depth} groups per slot)", f"{outcome.makespan / limit:.3f} x bound{dirty}",
        limit="1", note=NOTE,
    )  # fmt: skip


def main() -> int:
    parser = common_arguments(__doc__, pairs=0)
    parser.add_argument("--quick", action="store_true", help="does it run? 2 and 8 replicas, one seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--replicas", default=",".join(map(str, REPLICAS)))
    arguments = parser.parse_args()
    seeds = 1 if arguments.quick else arguments.seeds
    sizes = [2, 8] if arguments.quick else [int(word) for word in arguments.replicas.split(",")]
    journal = Journal("routing", {"seeds": seeds, "replicas": sizes, "slots": SLOTS, "cached": CACHED})
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        print(" | ".join(row.cells()), flush=True)

    for kind in ("stream", "heavy", "one step"):
        for replicas in sizes if kind != "heavy" else (sizes[0], sizes[-1]):
            add(makespan_row(kind, replicas, seeds, journal))
    for replicas in sizes:
        add(prefix_row(replicas, seeds, journal, groups=600 if arguments.quick else 3000))
    add(real_row(journal, depth=8 if arguments.quick else 64))
    return publish(rows, arguments.rows)


if __name__ == "__main__":
    raise SystemExit(main())
