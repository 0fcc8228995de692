"""Groups are asked for, played, kept and batched while the learner learns.

Owns       which group is asked for when, what becomes of it when it comes or does not come, and which groups make up a
           batch. One event loop owns all of it: ledger, journal and buffer are touched by nobody else.
Promises   a finished group is on the disk before it counts, and is not lost by a crash; none is trained on twice, or
           when it is more than `max_staleness` versions old: looked at again when the batch forms; no more groups are
           under way than can be used in time; a slow group holds a step only if it would be too old for the next one,
           and never longer than `rollout_timeout_s`; a failed one costs itself; whatever cannot go on ends the wait.
Never      prefers short answers: whatever was asked for is trained on, quick or slow, the oldest weights' first, and
           what was given up is asked again with the same random numbers, for drawing anew until it is quick would.

    ledger --lease--> in flight --played--> on the disk, delivered --> buffer --draw--> in hand --settle--> trained
      ^                  |                                               |
      +--- failed, timeout (three times, then dropped) ------------------+--- too old: to the front

Read next: `async_queue.py`, the same for a loop without an event loop; `sampler.py`, how many may be under way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from surefoot.config import Config
from surefoot.config.schedule import require_count
from surefoot.data.tasks import HeldoutGate
from surefoot.errors import (
    EngineError,
    FleetError,
    InvariantError,
    RewardError,
    StalledError,
    StateError,
    StorageError,
    ToolError,
)
from surefoot.protocols import StepBatch
from surefoot.records import Group, Rollout, Task
from surefoot.runtime.buffer import GroupBuffer, StaleGroups
from surefoot.runtime.requests import RolloutRequest, RolloutRunner
from surefoot.runtime.task_queue import DurableTaskQueue
from surefoot.storage.batches import BatchLog
from surefoot.storage.ledger import Lease, Ledger, Pending, Visit

# -- How far sampling may run ahead: arithmetic on whole numbers ----------------------------------


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
    require_count("behind", behind, least=0)
    require_count("num_iterations", config.num_iterations, least=1)
    spare = config.max_staleness - behind
    return config.tasks_per_step * (1 + spare // config.num_iterations) if spare >= 0 else 0


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
        require_count("the age of a group", age, least=0)
        seated += counts[age]
        later = max(0, (config.max_staleness - age) // config.num_iterations)
        if seated > later * config.tasks_per_step:
            debts.append((seated - later * config.tasks_per_step, age))
    return debts


# -- What the stream remembers of groups in flight and of batches, its numbers, and its ways to end


RETRIED: dict[type[Exception], str] = {
    TimeoutError: "timeout",
    StalledError: "timeout",
    EngineError: "engine_error",
    RewardError: "reward_error",
}
"""What one group may fail of without ending the run, and the word that the ledger keeps for it."""


@dataclass(eq=False)
class InFlightGroup:
    """One group that somebody plays."""

    lease: Lease
    version: int
    """Weights in force when it was asked for; its tokens cannot be older."""
    task: asyncio.Task[None] | None = None

    @property
    def item(self) -> Visit:
        """Whom it is played for."""
        return self.lease.item


class FinishedGroup(NamedTuple):
    """A group that was played, on its way to the disk."""

    flight: InFlightGroup
    group: Group
    kept: asyncio.Future[None]


def oldest_version(group: Group, default: int) -> int:
    """The oldest weights that drew a token of it; `default` when it has none."""
    return min((turn.version for rollout in group.rollouts for turn in rollout.turns), default=default)


@dataclass
class SamplerStats:
    """Counts since this life of the run began, and the numbers of the batch that was drawn last."""

    began: float | None = None
    """When sampling began."""
    drawn: float | None = None
    """When the last batch was asked for."""
    groups: int = 0
    tokens: int = 0
    wasted: int = 0
    """Groups that became too old before anybody trained on them."""
    late: int = 0
    """Results that came after their lease had ended."""
    given_up: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    """Wasted and given up, as of the batch before."""
    last: dict[str, float] = field(default_factory=dict)

    def delivered(self, group: Group) -> None:
        """One more group is on the disk."""
        self.groups += 1
        self.tokens += sum(rollout.sampled_tokens for rollout in group.rollouts)

    def batch(self, groups: Sequence[Group], version: int, asked: float, now: float) -> None:
        """The batch that was asked for at `asked` is complete, for a learner at `version`."""
        ages = [version - oldest_version(group, version) for group in groups]
        turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
        off = [version - turn.version for turn in turns] or [0]
        mixed = sum(turn.version_end != turn.version for turn in turns)
        since = asked if self.drawn is None else self.drawn
        self.last = {
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": float(max(ages)),
            "async/wasted": float(self.wasted - self.told["wasted"]),
            "async/given_up": float(self.given_up.total() - self.told["given_up"]),
            "async/wait_s": now - asked,
            "async/idle_share": (now - asked) / (now - since) if now > since else 0.0,
            "off_policy/mean": sum(off) / len(off),
            "off_policy/max": float(max(off)),
            "off_policy/mixed_share": mixed / len(turns) if turns else 0.0,
        }
        self.drawn, self.told = now, Counter(wasted=self.wasted, given_up=self.given_up.total())

    def rates(self, now: float) -> dict[str, Any]:
        """Throughput since sampling began."""
        seconds = 0.0 if self.began is None else now - self.began
        return {
            "groups": self.groups, "tokens": self.tokens, "wasted": self.wasted, "late": self.late,
            "given_up": dict(self.given_up), "seconds": seconds,
            "groups_per_second": self.groups / seconds if seconds > 0 else None,
            "tokens_per_second": self.tokens / seconds if seconds > 0 else None,
        }  # fmt: skip


def nothing_happened(seconds: float, n: int, status: Mapping[str, Any]) -> StalledError:
    """A wait has come to its end."""
    return StalledError(
        f"waited {seconds:g} s for {n} groups and nothing happened: {status['queue']} are here, {status['in_flight']} "
        f"in flight, {status['pending']} in the queue; the learner is at version {status['version']}, engines at "
        f"{status['published']}",
        "who plays them does not answer, not even to being cancelled",
        "look at the engines' and workers' logs; the run can be resumed",
    )


def all_too_old(wasted: int, n: int, max_staleness: int, status: Mapping[str, Any]) -> StalledError:
    """Engines speak with old weights, whatever they are told."""
    return StalledError(
        f"{wasted} groups came too old while {n} were waited for: the learner is at version {status['version']}, "
        f"engines were given {status['published']}, max_staleness is {max_staleness}",
        "they sample from other weights than those they were given, or for longer than these are of use",
        "look at the engines' logs, lower max_completion_length, or raise max_staleness",
    )


def all_too_slow(failed: int, timeout_s: float) -> StalledError:
    """Not one group in time."""
    return StalledError(
        f"{failed} groups in a row took longer than rollout_timeout_s = {timeout_s:g}",
        "nobody has answered in time since the last group that came",
        "raise rollout_timeout_s, or look at what engines, tools and graders wait for",
    )


# -- Groups that an earlier life of the run delivered and did not train on: they come back, or their tasks do


HOLDER = "stream"


def restore_groups(
    ledger: Ledger, batches: BatchLog, tasks: Mapping[str, Task], usable: Callable[[Group], bool]
) -> list[tuple[Visit, Group]]:
    """Finished groups that no batch has, in the order of delivery; call it when every journaled batch is done.

    Args:
        usable: whether a group may still be trained on, as far as its weights are concerned.
    """
    on_disk = batches.delivered()
    known = [lease.item for lease in ledger.delivered()]
    if missing := set(known) - set(on_disk):
        raise StateError(
            f"the ledger says that {min(missing)} was delivered, and its group is not in the journal",
            "a finished group would be lost without a trace",
            "bring the folder journal/ back from one copy",
        )
    groups = dict(zip(on_disk, batches.read_delivered(on_disk, tasks), strict=True))
    fit = {item: group for item, group in groups.items() if usable(group)}
    ledger.requeue([item for item in known if item not in fit], "stale")
    mine = {item for item in known if item in fit}
    mine |= _adopt(ledger, [item for item in fit if isinstance(ledger.status(item), Pending)], search=len(on_disk))
    batches.release([item for item in on_disk if item not in mine])
    return [(item, group) for item, group in fit.items() if item in mine]


def _adopt(ledger: Ledger, orphans: Sequence[Visit], search: int) -> set[Visit]:
    """The driver died between "on the disk" and "delivered": these count as delivered now.

    Their leases have ended, so their items are at the front of the queue, among those of other such leases.
    """
    missing, others, adopted = set(orphans), list[Visit](), set[Visit]()
    while missing and ledger.pending and len(others) <= 1000 + search:
        (lease,) = ledger.lease(1, holder=HOLDER)
        if lease.item in missing:
            ledger.complete([lease])
            missing.discard(lease.item)
            adopted.add(lease.item)
        else:
            others.append(lease.item)
    ledger.requeue(others, "restart")
    return adopted


# -- Groups are asked for, played, kept and batched while the learner learns ----------------------


TRIES = 3
"""How often one item is asked for before it is dropped."""
WASTE = 50
"""How many groups per seat of a batch may come too old while it is waited for."""
SILENCE_S = 10.0
"""How much longer than half as long again as any group may take nothing may happen."""


class AsyncSampler:
    """The sampler that runs ahead of the learner. Made anywhere; used inside one event loop.

    Args:
        request_for: (task, visit, position) -> what has to be known to run it; visit and position name the group.
        trained: the learner's version, now.
        judge: refuses a batch in which too many rollouts lack a verdict; (rollouts, when).
    """

    def __init__(
        self, ledger: Ledger, batches: BatchLog, tasks: Sequence[Task], runner: RolloutRunner,
        request_for: Callable[[Task, int, int], RolloutRequest], *, config: Config, trained: Callable[[], int],
        judge: Callable[[Sequence[Rollout], str], None] | None = None, border: HeldoutGate | None = None,
    ) -> None:  # fmt: skip
        self.queue = DurableTaskQueue(ledger, batches, tasks, seed=config.seed, border=border)
        self.ledger, self.batches, self.runner, self.config = ledger, batches, runner, config
        self.trained, self.published, self.figures = trained, 0, SamplerStats()
        self._request_for, self._judge = request_for, judge
        self._tasks = {task.id: (position, task) for position, task in enumerate(tasks)}
        room = allowance(config, 0) + 2 * config.tasks_per_step
        self.buffer = GroupBuffer(max_size=room, max_staleness=config.max_staleness, oldest_version_first=True)
        self._flights: dict[Visit, InFlightGroup] = {}
        self._arrived: list[FinishedGroup] = []
        """Played, and not on the disk yet."""
        self._hand: tuple[Visit, ...] = ()
        self._base = 0
        """The learner's version before the first pass over the batch in hand."""
        self._next_step = 1
        self._live = False
        """Whether groups are asked for: not while journaled batches are repeated."""
        self._tries: Counter[Visit] = Counter()
        self._failed_in_a_row = 0
        self._fatal: Exception | None = None
        self._failed = False
        """Whether the run ends because graders failed."""
        self._news = asyncio.Event()
        self.progress = 0
        """Grows with everything that happens."""

    # -- protocols.TaskQueue ----------------------------------------------------------------

    async def next_batch(self, step: int, n: int) -> StepBatch:
        """The batch of this step: from the journal if it is there, else the next one that is complete."""
        self._next_step, asked = step, self._now()
        kept = self.batches.find(step)
        if kept is None:
            self._go_live()
            batch = await self._next_batch(step, n)
        else:
            batch = self.queue.next_batch(step, n)
        self._next_step = step + self.config.num_iterations
        self.figures.batch(batch.groups, self.trained(), asked, self._now())
        self._fill()
        return batch

    def record_rollouts(self, batch: StepBatch) -> None:
        """The composition is on the disk when this returns; the groups were before."""
        if self._hand:
            self.batches.compose(batch.step, self._hand)
        else:
            self.queue.record_rollouts(batch, batch.groups)

    def close_batch(self, batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None:
        """Trained since this step, or dropped with a reason; there is room for more."""
        self.queue.close_batch(batch, step, drop_reasons)
        for item, fate in zip(self._hand, drop_reasons, strict=True) if self._hand else ():
            self.buffer.settle([item], "used" if fate is None else "failed" if fate == "nonfinite_step" else "filtered")
        self._hand = ()
        self._fill()

    # -- what the stream is told ----------------------------------------------------------

    def advance(self, version: int) -> None:
        """Engines serve this version from now on."""
        self.published = version
        self._fill()

    def graders_failed(self) -> None:
        """The run ends for that reason: `close` gives back what waits without a verdict."""
        self._failed = True

    async def close(self) -> None:
        """Nobody is asked any more; what was in flight goes back to the queue."""
        self._live = False
        self._keep_arrived()
        flights = list(self._flights.values())
        for flight in flights:
            if flight.task is not None:
                flight.task.cancel()
        await asyncio.gather(*(f.task for f in flights if f.task is not None), return_exceptions=True)
        left = [flight.item for flight in flights if self.ledger.outcome(flight.lease) == "accepted"]
        with contextlib.suppress(StorageError, StateError):  # the next driver returns them anyway
            self.ledger.requeue(left, "stopped")
            if self._failed:
                self._give_back_failed()
        self._flights.clear()

    def _give_back_failed(self) -> None:
        """The run ends because graders failed: what else waits without a verdict is asked for again when it goes on."""
        items = [lease.item for lease in self.ledger.delivered() if lease.item in set(self.batches.delivered())]
        groups = self.batches.read_delivered(items, self.queue.tasks)
        failed = [item for item, group in zip(items, groups, strict=True) if None in group.rewards]
        self.ledger.requeue(failed, "no_verdict", durable=True)
        self.batches.give_up(failed)

    # -- questions ----------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Of the batch that was drawn last, and of now."""
        return self.figures.last | {
            "async/queue": float(self.buffer.tally().waiting), "async/in_flight": float(len(self._flights)),
        }  # fmt: skip

    def status(self) -> dict[str, Any]:
        """Where everything is, as plain data for people."""
        tally = self.buffer.tally()
        return {
            "version": self.trained(), "published": self.published, "pending": self.ledger.pending,
            "in_flight": len(self._flights), "queue": tally.waiting, "in_hand": tally.in_hand,
            "queue_by_version": dict(tally.versions), "sampling": self._live,
            "staleness_mean": self.figures.last.get("async/staleness_mean"),
            "staleness_max": self.figures.last.get("async/staleness_max"), **self.figures.rates(self._now()),
        }  # fmt: skip

    # -- batches ------------------------------------------------------------------------

    async def _next_batch(self, step: int, n: int) -> StepBatch:
        wasted = self.figures.wasted
        while True:
            self._raise_if_over()
            version = self.trained()  # anew after every wait: a group ages while the batch fills
            self._send_back(self.buffer.evict(version))
            self._refuse_waste(self.figures.wasted - wasted, n)
            self._fill()
            if self._is_complete(n, version):
                break
            await self._wait(n)
        taken = self.buffer.take(n, version)
        if taken is None or taken.aged or len(taken.batch) != n:
            raise InvariantError(f"step {step}: a complete batch of {n} came as {taken}", "nothing may age here", "-")
        self._hand, self._base = tuple(waiting.item for waiting in taken.batch), version
        groups = tuple(waiting.group for waiting in taken.batch)
        self._refuse_failures(step, groups)
        return StepBatch(step, self.queue.hold(step, self._hand), groups)

    def _is_complete(self, n: int, version: int) -> bool:
        """Enough groups are here, and everybody who would be too old for a later batch is among them."""
        waiting = [version - v for v, count in self.buffer.tally().versions.items() for _ in range(count)]
        if len(waiting) < n:
            return False
        in_flight = [version - flight.version for flight in self._flights.values()]
        usable = [age for age in in_flight if age <= self.config.max_staleness]
        debts = owed([max(0, age) for age in (*waiting, *usable)], self.config)
        return all(sum(a >= age for a in waiting) >= min(number, n) for number, age in debts)

    def _refuse_waste(self, wasted: int, n: int) -> None:
        """Engines that speak with old weights whatever they are told would be asked for ever."""
        if wasted > WASTE * n:
            raise all_too_old(wasted, n, self.config.max_staleness, self.status())

    def _refuse_failures(self, step: int, groups: Sequence[Group]) -> None:
        if self._judge is None:
            return
        try:
            self._judge([rollout for group in groups for rollout in group.rollouts], f"step {step}")
        except (RewardError, ToolError):  # asked for once more when the run goes on, with what was mended meanwhile
            self.buffer.settle(self._hand, "failed")
            self.ledger.requeue(self._hand, "no_verdict", durable=True)
            self.batches.give_up(self._hand)  # also for a resume, which would bring them back as they are
            self._hand = ()
            raise

    async def _wait(self, n: int) -> None:
        """Until something happens; every flight ends within `rollout_timeout_s`, so silence means that nobody flies."""
        patience = 1.5 * self.config.rollout_timeout_s + SILENCE_S
        self._news.clear()
        try:
            async with asyncio.timeout(patience):
                await self._news.wait()
        except TimeoutError as error:
            raise nothing_happened(patience, n, self.status()) from error

    def _raise_if_over(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _send_back(self, aged: StaleGroups) -> None:
        self.figures.wasted += len(aged.back)
        self._return(aged.back, "stale")

    def _return(self, items: Sequence[Visit], reason: str) -> None:
        self.ledger.requeue(items, reason)
        self.batches.release(items)

    # -- asking -------------------------------------------------------------------------

    def _fill(self) -> None:
        """Ask for as many groups as there is room for."""
        while self._live and self._fatal is None and self._room() > 0:
            lease = self._lease()
            flight = InFlightGroup(lease, self.published)
            self._flights[lease.item] = flight
            position, task = self._tasks[lease.item.task]
            request = self._request_for(task, lease.item.occurrence, position)
            flight.task = asyncio.get_running_loop().create_task(
                self._fly(flight, request), name=f"rollouts {lease.item}"
            )

    def _room(self) -> int:
        """By age, by what is left of the run, and by who can play."""
        config, waiting = self.config, self.buffer.tally().waiting
        behind = (self._base if self._hand else self.trained()) - self.published
        ahead = len(self._flights) + waiting
        in_hand = config.tasks_per_step if self._hand else 0
        steps_left = max(0, config.max_steps - self._next_step + 1)
        draws_left = -(-steps_left // config.num_iterations)
        return min(
            allowance(config, max(0, behind)) - ahead - in_hand, config.tasks_per_step * draws_left - ahead,
            self.runner.capacity - len(self._flights),
        )  # fmt: skip

    def _lease(self) -> Lease:
        if not self.ledger.pending:
            tally = self.buffer.tally()
            outside = [item.task for item in (*self._flights, *self.buffer.items())] if tally.left else []
            self.queue.plan_epoch(needed=self.config.tasks_per_step, held=outside)
        return self.ledger.lease(1, holder=HOLDER)[0]

    async def _fly(self, flight: InFlightGroup, request: RolloutRequest) -> None:
        """Have one group played; whatever comes of it is dealt with here."""
        try:
            async with asyncio.timeout(self.config.rollout_timeout_s):
                played = await self.runner.run(request)
            await self._deliver(flight, played.group)
        except FleetError as error:
            self._fatal = error
        except tuple(RETRIED) as error:
            self._give_up(flight, error)
        except Exception as error:  # noqa: BLE001 - it ends the run: the next look of `draw` raises it
            self._fatal = error
        finally:
            self._flights.pop(flight.item, None)
            self.progress += 1
            self._news.set()
        self._fill()

    def _deliver(self, flight: InFlightGroup, group: Group) -> asyncio.Future[None]:
        """Kept together with whatever else comes in this moment: one sync of the disk for all of them."""
        loop = asyncio.get_running_loop()
        if not self._arrived:
            loop.call_soon(self._keep_arrived)
        self._arrived.append(FinishedGroup(flight, group, loop.create_future()))
        return self._arrived[-1].kept

    def _keep_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        try:
            self._keep_groups([(arrival.flight, arrival.group) for arrival in arrived])
        except Exception as error:  # noqa: BLE001 - it ends the run, by way of those whose groups these are
            self._fatal = error
        for arrival in arrived:
            if not arrival.kept.done():
                arrival.kept.set_result(None)

    def _keep_groups(self, arrived: Sequence[tuple[InFlightGroup, Group]]) -> None:
        """First on the disk, then delivered: never the other way round. What comes late is only counted."""
        good = [pair for pair in arrived if self.ledger.outcome(pair[0].lease) == "accepted"]
        late = [flight.lease for flight, _ in arrived if self.ledger.outcome(flight.lease) != "accepted"]
        self.figures.late += len(late)
        if good:
            self.batches.deliver({flight.item: group for flight, group in good})
        self.ledger.complete([*late, *(flight.lease for flight, _ in good)])
        for flight, group in good:
            self._put(flight.item, group, flight.version)
            self._failed_in_a_row = 0
            del self._tries[flight.item]
            self.figures.delivered(group)

    def _put(self, item: Visit, group: Group, version: int) -> None:
        if self.buffer.put(item, oldest_version(group, version), group) != "kept":
            raise InvariantError(
                f"no room for {item}: {self.buffer.tally()}", "more was asked for than fits", "report it"
            )

    def _give_up(self, flight: InFlightGroup, error: Exception) -> None:
        """Asked again later, with the same random numbers; dropped after the third time."""
        reason = next(word for kind, word in RETRIED.items() if isinstance(error, kind))
        self.figures.given_up[reason] += 1
        self._tries[flight.item] += 1
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= TRIES * self.config.tasks_per_step:
            slow = isinstance(error, TimeoutError)
            self._fatal = all_too_slow(self._failed_in_a_row, self.config.rollout_timeout_s) if slow else error
        if self._tries[flight.item] < TRIES:
            self.ledger.requeue([flight.item], reason)
        else:
            self.ledger.drop([flight.item], reason)
            del self._tries[flight.item]

    def _go_live(self) -> None:
        """The journaled steps are done: groups that an earlier life delivered come back, and sampling begins."""
        if self._live:
            return
        self._live, self.figures.began = True, self._now()
        for item, group in restore_groups(self.ledger, self.batches, self.queue.tasks, self._is_usable):
            self._put(item, group, self.published)

    def _is_usable(self, group: Group) -> bool:
        """Neither too old, nor from weights that the learner has not yet."""
        age = self.trained() - oldest_version(group, self.trained())
        return 0 <= age <= self.config.max_staleness

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
