"""Arithmetic and simulation behind `sizing.py`: what a GPU can do, who gets how many, and what then waits for what.

The product's own router and schedule (`LoadAwareRouter`, `allowance`, `owed`) on a simulated clock, with durations from
arithmetic: what a GPU can read and compute, times the share of it that is usually reached.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from surefoot.config import Config
from surefoot.config.schedule import schedule_of
from surefoot.runtime.router import LoadAwareRouter
from surefoot.runtime.sampler import allowance, owed

STEPS, WARM = 18, 6
"""Steps that are simulated, and how many of them are left out of the figures."""


@dataclass(frozen=True)
class Machine:
    """One GPU and what connects it; an H200 as we measured it, the rest assumed."""

    bandwidth: float = 4.3e12
    """Bytes per second of its memory."""
    flops: float = 780e12
    """bf16 operations per second of a large matrix product."""
    memory: float = 139 * 2**30
    decode_share: float = 0.5
    """Of what bandwidth and operations allow, reached by an engine."""
    train_share: float = 0.4
    """Of the operations, reached by the learner, communication between its GPUs included."""
    network: float = 25e9
    """Bytes per second into one engine's GPU at a sync; all engines at once."""
    proof: float = 0.5
    """Seconds that a sync's proof takes, whatever the size."""


@dataclass(frozen=True)
class Model:
    """A decoder, by the numbers that matter here."""

    name: str
    parameters: float
    layers: int
    kv_width: int
    """KV heads times their width."""

    @property
    def weight_bytes(self) -> float:
        return 2 * self.parameters

    def engine_gpus(self, machine: Machine) -> int:
        """Weights take at most 60 % of the memory, the cache needs the rest; a power of two."""
        return 1 << max(0, math.ceil(math.log2(self.weight_bytes / (0.6 * machine.memory))))

    def learner_gpus(self, machine: Machine) -> int:
        """16 bytes per parameter (weights, gradients, float32 master and Adam) in 60 % of the memory."""
        return math.ceil(16 * self.parameters / (0.6 * machine.memory))


MODELS = (
    Model("1.5B", 1.5e9, 28, 256),
    Model("8B", 8e9, 32, 1024),
    Model("32B", 32e9, 64, 1024),
    Model("70B", 70e9, 80, 1024),
)


@dataclass(frozen=True)
class Work:
    """What is asked for."""

    prompt: int = 512
    tokens: int = 2000
    """Median completion; log-normal with sigma 0.6, cut at `longest`."""
    longest: int = 8192
    group: int = 16
    rows: int = 128
    """Rollouts decoded side by side in one engine."""
    staleness: int = 4

    def lengths(self, dice: random.Random) -> list[int]:
        return [min(self.longest, max(1, round(self.tokens * dice.lognormvariate(0, 0.6)))) for _ in range(self.group)]

    def mean_length(self) -> float:
        return sum(map(sum, self._many())) / (500 * self.group)

    def groups_per_engine(self) -> int:
        """So many fill its rows: a group is there until its slowest sibling ends, and most rows are free before."""
        spread = sum(map(max, self._many())) / 500 / self.mean_length()
        return math.ceil(spread * self.rows / self.group)

    def _many(self) -> list[list[int]]:
        dice = random.Random("many groups")
        return [self.lengths(dice) for _ in range(500)]


def seconds_per_token(machine: Machine, model: Model, work: Work) -> float:
    """One decode step of a full engine: weights and caches are read, or the products take longer."""
    gpus = model.engine_gpus(machine)
    context = work.prompt + work.mean_length() / 2
    cache = work.rows * context * model.layers * model.kv_width * 2 * 2  # keys and values, two bytes each
    if model.weight_bytes + cache > 0.9 * gpus * machine.memory:
        raise ValueError(f"{model.name}: {work.rows} rows of {context:.0f} tokens do not fit into {gpus} GPUs")
    reading = (model.weight_bytes + cache) / machine.bandwidth
    computing = work.rows * 2 * model.parameters / machine.flops
    return max(reading, computing) / gpus / machine.decode_share


def seconds_to_learn(machine: Machine, model: Model, tokens: float, gpus: int) -> float:
    """Forward and backward (6 N) and one scoring pass (2 N) over every token."""
    return 8 * model.parameters * tokens / (machine.flops * machine.train_share * gpus)


def seconds_to_sync(machine: Machine, model: Model) -> float:
    """All engines read their part at once; then the proof."""
    return model.weight_bytes / model.engine_gpus(machine) / machine.network + machine.proof


# -- the split ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """Who gets how many GPUs, and how large a step is."""

    model: Model
    work: Work
    gpus: int
    engines: int
    learner: int
    tasks: int


def plan(machine: Machine, model: Model, work: Work, gpus: int, *, tasks: int | None = None) -> Plan | None:
    """The split with the fastest slower side; None when the model does not fit.

    Tasks per step: `tasks x staleness` groups are under way beside the batch in hand. Half of them fill the engines,
    the other half have ended and wait for their turn.
    """
    per_engine, least = model.engine_gpus(machine), model.learner_gpus(machine)
    most = (gpus - least) // per_engine
    if most < 1:
        return None
    mean = work.mean_length()
    sampling = work.rows / seconds_per_token(machine, model, work)  # tokens per second and engine
    learning = mean / seconds_to_learn(machine, model, work.prompt / work.group + mean, 1)  # sampled ones, per GPU
    engines = max(range(1, most + 1), key=lambda n: min(n * sampling, (gpus - n * per_engine) * learning))
    full = math.ceil(2 * engines * work.groups_per_engine() / max(1, work.staleness))
    return Plan(model, work, gpus, engines, gpus - engines * per_engine, tasks or max(8, full))


# -- the simulation ----------------------------------------------------------------------


@dataclass
class Figures:
    """What was counted, after the warm-up."""

    seconds: float = 0.0
    tokens: int = 0
    row_seconds: float = 0.0
    learning: float = 0.0
    syncing: float = 0.0
    ages: list[int] = field(default_factory=list)


class Rows:
    """The rows of one engine: a rollout takes the first that comes free, in the order of asking."""

    def __init__(self, rows: int) -> None:
        self.free, self.work = [0.0] * rows, 0.0

    def enter(self, now: float, seconds: Sequence[float]) -> float:
        """When the last of these rollouts will be finished."""
        ends = []
        for length in seconds:
            ends.append(max(now, self.free[0]) + length)
            heapq.heapreplace(self.free, ends[-1])
        self.work += sum(seconds)
        return max(ends)

    def done(self, now: float) -> float:
        """Row seconds of decoding so far."""
        return self.work - sum(max(0.0, free - now) for free in self.free)


class Simulation:
    """One run: groups are asked for, played, trained on, weights synced; in versions, as the product counts."""

    def __init__(self, machine: Machine, what: Plan) -> None:
        self.machine, self.plan, self.figures = machine, what, Figures()
        self.config = Config(
            model="pebble", tasks="builtin:sums", tasks_per_step=what.tasks, num_generations=what.work.group,
            max_staleness=what.work.staleness, importance_sampling_correction=True,
        )  # fmt: skip
        if schedule_of(self.config).sync_every != 1:
            raise RuntimeError("the simulation syncs after every step")
        self.router = LoadAwareRouter(what.engines, what.work.groups_per_engine())
        self.rows = [Rows(what.work.rows) for _ in range(what.engines)]
        self.step_seconds = seconds_per_token(machine, what.model, what.work)
        self.dice = random.Random(f"{what.model.name}/{what.gpus}/{what.work.staleness}/{what.tasks}")
        self.version = self.published = self.hand = 0
        self.waiting: list[tuple[int, int, int]] = []  # version, order of arrival, tokens
        self.out: Counter[int] = Counter()  # groups in no batch yet, in flight or waiting, by version
        self.ready: Counter[int] = Counter()  # those of them that wait, by version
        self.arrived = 0
        self.changed = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    async def play(self, version: int) -> None:
        lengths, clock = self.plan.work.lengths(self.dice), asyncio.get_running_loop().time
        async with self.router.slot() as (engine, _):
            ends = self.rows[engine].enter(clock(), [length * self.step_seconds for length in lengths])
            await asyncio.sleep(ends - clock())
        self.arrived += 1
        self.waiting.append((version, self.arrived, sum(lengths)))
        self.ready[version] += 1
        self.changed.set()

    def ask(self) -> None:
        """As many as the schedule allows; their age counts from now on."""
        room = allowance(self.config, self.version - self.published) - self.hand - self.out.total()
        for _ in range(room):
            self.out[self.published] += 1
            task = asyncio.create_task(self.play(self.published))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def batch(self) -> list[tuple[int, int, int]]:
        """Wait until a batch is there that leaves nobody behind; oldest first."""
        self.ask()
        debts = owed((self.version - version for version in self.out.elements()), self.config)
        while len(self.waiting) < self.plan.tasks or any(n > self.finished(age) for n, age in debts):
            self.changed.clear()
            await self.changed.wait()
        self.waiting.sort()
        chosen, self.waiting = self.waiting[: self.plan.tasks], self.waiting[self.plan.tasks :]
        taken = Counter(version for version, _, _ in chosen)
        self.out, self.ready = self.out - taken, self.ready - taken
        return chosen

    def finished(self, age: int) -> int:
        """Groups that wait and are this old or older."""
        return sum(n for version, n in self.ready.items() if self.version - version >= age)

    async def run(self) -> Figures:
        clock, began, before = asyncio.get_running_loop().time, 0.0, 0.0
        for step in range(STEPS):
            if step == WARM:
                self.figures, began, before = Figures(), clock(), sum(rows.done(clock()) for rows in self.rows)
            chosen = await self.batch()
            self.hand = self.plan.tasks
            self.ask()
            tokens = sum(tokens for _, _, tokens in chosen)
            work = self.plan.work
            learning = seconds_to_learn(
                self.machine, self.plan.model, tokens + work.prompt * len(chosen), self.plan.learner
            )
            syncing = seconds_to_sync(self.machine, self.plan.model)
            await asyncio.sleep(learning + syncing)
            self.figures.learning += learning
            self.figures.syncing += syncing
            self.figures.tokens += tokens
            self.figures.ages += [self.version - version for version, _, _ in chosen]
            self.version, self.published, self.hand = self.version + 1, self.version + 1, 0
        self.figures.seconds = clock() - began
        self.figures.row_seconds = sum(rows.done(clock()) for rows in self.rows) - before
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        return self.figures
