"""Who gets which task, and what became of it: task order, ledger and journal as one; and the queue that plays in step.

Owns       the order of events between them: planned, leased, played, on the disk, delivered, trained or dropped.
Promises   no task twice in one batch; a group is on the disk as soon as it is graded, and a batch that a crash
           interrupted goes on with it: same groups, same tasks, same places; what was dropped stays dropped; without
           another plan, every task once per epoch.
Never      hands out a held-out task, or an item that is in the weights already.

    draw --> (play) --> delivering: each group on the disk, then delivered --> keep: the batch's composition on the disk
                                                              --> (learn) --> settle: trained, dropped(reason)

Two samplers hand the loop batches out of this: `StepSampler` here, when sampling waits for learning, and
`sampler.AsyncSampler`, when it does not.

Read next: `sampler.py`, the other one; `storage/ledger.py` and `storage/batches.py`, which this joins.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

from surefoot.config import Config
from surefoot.data.curriculum import CurriculumSampler, SuccessCurriculum
from surefoot.data.order import CountedRandom, LevelOrder, Permutation
from surefoot.data.tasks import HeldoutGate, epoch_order, refuse_empty_or_repeated
from surefoot.errors import InvariantError, RewardError, StateError, TaskError, ToolError
from surefoot.learner.samples import cannot_fill, missing_groups
from surefoot.protocols import Runtime, StepBatch
from surefoot.records import REPETITION_COST, Group, Task
from surefoot.runtime.threads import BackgroundGroupWriter
from surefoot.storage.batches import BatchLog, BatchPosition
from surefoot.storage.files import failpoint
from surefoot.storage.ledger import Balance, Dropped, Lease, Ledger, Pending, Visit
from surefoot.system.signals import StopRequested
from surefoot.tracking.live import span

# -- Which tasks come next: four ways to plan, each a function of the ledger, so that a crash changes nothing
# Owns       what is appended to the ledger's queue, and in which order.
# Promises   no task twice in one batch; memory grows with the tasks that were visited; a plan that is made again from
# the
# same ledger (and, for `SuccessPlan`, the same reports) is the same plan.
# Never      remembers anything that the ledger or a checkpoint does not hold.
#
# EpochPlan     every task once per epoch, all in memory
# WindowPlan    the same over a file on the disk, a window at a time
# LevelPlan     levels drawn by shares that move from easy to hard
# SuccessPlan   tasks drawn by how often the policy solves them


WINDOW = 1024
"""Tasks that are planned at once where not all are."""


class TaskPlan(Protocol):
    """Fills the queue."""

    def extend(self, ledger: Ledger, needed: int, held: Sequence[str] = ()) -> None:
        """Plan at least `needed` further items.

        Args:
            held: tasks beside the waiting ones that are not to be among the first `needed`.
        """

    def learned(self, groups: Sequence[Group]) -> None:
        """These were trained on, or dropped; called once for every batch."""

    def metrics(self, tasks: Sequence[Task]) -> dict[str, float]:
        """What there is to say of a step's tasks, before their outcome counts."""


class EpochPlan:
    """All tasks once more, in an order of (seed, epoch), behind those that still wait."""

    def __init__(self, tasks: Mapping[str, Task], seed: int) -> None:
        self.tasks, self.seed = tasks, seed

    def extend(self, ledger: Ledger, needed: int, held: Sequence[str] = ()) -> None:
        """One epoch; a batch over its border has no task twice."""
        epoch = 1 + max((item.occurrence for item in ledger.items()), default=-1)
        order = epoch_order(self.tasks, self.seed, epoch, held=[*_waiting(ledger), *held], needed=needed)
        ledger.plan(Visit(task, epoch) for task in order)

    def learned(self, groups: Sequence[Group]) -> None:
        """Outcomes change nothing."""

    def metrics(self, tasks: Sequence[Task]) -> dict[str, float]:
        """Nothing: every task is like every other."""
        return {}


class WindowPlan(EpochPlan):
    """Every task once per epoch, in an order that nobody stores.

    Args:
        train: what may be trained on; it is asked for one task at a time.
    """

    def __init__(self, train: Sequence[Task], seed: int) -> None:
        self.train, self.seed = train, seed

    def extend(self, ledger: Ledger, needed: int, held: Sequence[str] = ()) -> None:
        """The next tasks of the order; a batch over an epoch's border has no task twice."""
        items = ledger.items()
        epoch = max((item.occurrence for item in items), default=0)
        planned = sum(item.occurrence == epoch for item in items)
        waiting = _waiting(ledger)
        while needed > 0:
            if planned == len(self.train):
                epoch, planned = epoch + 1, 0
            window = self._window(epoch, planned, needed, {*waiting, *held} if planned == 0 and epoch else set())
            ledger.plan(Visit(task, epoch) for task in window)
            planned, needed = planned + len(window), needed - len(window)
            waiting += window

    def _window(self, epoch: int, planned: int, needed: int, elsewhere: set[str]) -> list[str]:
        """Ids of the next positions; at an epoch's beginning those that a batch holds already come last."""
        order = Permutation(len(self.train), self.seed, epoch)
        size = min(max(WINDOW, needed + len(elsewhere)), len(self.train) - planned)
        ids = [self.train[order(planned + place)].id for place in range(size)]
        return [*(i for i in ids if i not in elsewhere), *(i for i in ids if i in elsewhere)] if elsewhere else ids


class LevelPlan:
    """The i-th task of the run has a level drawn by the shares of step i / tasks_per_step.

    Args:
        pools: tasks by level, in memory or on the disk.
        apart: two visits of a task are at least so many tasks of its level apart: the largest batch.
    """

    def __init__(
        self, pools: Mapping[str, Sequence[Task]], sampler: CurriculumSampler, *, seed: int, tasks_per_step: int,
        apart: int,
    ) -> None:  # fmt: skip
        self.sampler, self.seed, self.tasks_per_step = sampler, seed, tasks_per_step
        self.levels = {level: LevelOrder(pool, seed, level, apart=apart) for level, pool in pools.items()}
        self._counted, self._done = 0, Counter[str]()
        """Tasks of the run that are counted, and how many of them each level has: a cache, not a state."""

    def extend(self, ledger: Ledger, needed: int, held: Sequence[str] = ()) -> None:
        """The next window. The orders keep visits of one task apart, so `held` needs no look."""
        planned = len(ledger.items())
        if planned < self._counted:
            self._counted, self._done = 0, Counter()
        while self._counted < planned:
            self._next_level()
        window = []
        for _ in range(max(needed, WINDOW)):
            level = self._next_level()
            order = self.levels[level]
            window.append(Visit(*order.visit(self._done[level] - 1)))
        ledger.plan(window)

    def _next_level(self) -> str:
        step = self._counted // self.tasks_per_step
        level = self.sampler.level_at(step, CountedRandom(self.seed, "levels", self._counted).uniform())
        self._counted += 1
        self._done[level] += 1
        return level

    def learned(self, groups: Sequence[Group]) -> None:
        """Outcomes change nothing."""

    def metrics(self, tasks: Sequence[Task]) -> dict[str, float]:
        """The share of each level in this batch."""
        found = Counter(order.level for task in tasks for order in self.levels.values() if order.holds(task))
        return {f"curriculum/share/{level}": found[level] / len(tasks) for level in self.levels}


class SuccessPlan:
    """Every task of a batch is drawn by its weight: most likely those that the policy solves half of the time.

    Args:
        curriculum: the success rates; a checkpoint holds them.
        metric: the reward function whose score is the outcome; the whole reward when left out.
    """

    def __init__(
        self, tasks: Mapping[str, Task], curriculum: SuccessCurriculum, *, seed: int, metric: str | None
    ) -> None:
        self.tasks, self.curriculum, self.seed, self.metric = tasks, curriculum, seed, metric
        self._counted, self._visits = 0, Counter[str]()
        """Items of the ledger that are counted, and by task: a cache, not a state."""

    def extend(self, ledger: Ledger, needed: int, held: Sequence[str] = ()) -> None:
        """Exactly `needed` tasks: later ones are chosen when more is known."""
        items = ledger.items()
        if len(items) != self._counted:
            self._visits = Counter(item.task for item in items)
        elsewhere = {*_waiting(ledger), *held}
        candidates = [task for task in self.tasks.values() if task.id not in elsewhere]
        # Not the curriculum's own stream: a batch that the journal repeats is not drawn again and would not count.
        random = CountedRandom(self.seed, f"success/{len(items)}")
        drawn = self.curriculum.choose(candidates, needed, random)
        ledger.plan(Visit(task.id, self._visits[task.id]) for task in drawn)
        self._visits.update(task.id for task in drawn)
        self._counted = len(items) + needed

    def learned(self, groups: Sequence[Group]) -> None:
        """Every rollout is one report; one without a verdict is none."""
        for group in groups:
            for rollout in group.rollouts:
                outcome = rollout.reward
                if outcome is not None and self.metric is not None:
                    outcome = rollout.reward_parts[self.metric]  # never `get`: a name that is wrong would be no verdict
                elif outcome is not None and (cost := rollout.reward_parts.get(REPETITION_COST)):
                    outcome = round(
                        outcome - cost, 12
                    )  # a loop costs reward; whether the task was solved is another thing
                self.curriculum.report(group.task.id, outcome)

    def metrics(self, tasks: Sequence[Task]) -> dict[str, float]:
        """The mean success rate of this batch's tasks so far, and the share that nobody had played."""
        rates = [self.curriculum.rate(task.id) for task in tasks]
        known = [rate for rate in rates if rate is not None]
        found = {"curriculum/new_frequency": 1 - len(known) / len(rates)}
        return found | ({"curriculum/success_rate": sum(known) / len(known)} if known else {})


def refuse_small_levels(pools: Mapping[str, Sequence[Task]], apart: int) -> None:
    """Raise unless every level could fill a batch."""
    small = {level: len(pool) for level, pool in pools.items() if len(pool) < apart}
    if small:
        raise TaskError(
            f"levels with fewer tasks than one step may need ({apart}): {small}",
            "a step would hold the same task twice", "bring more of them, or lower tasks_per_step",
        )  # fmt: skip


def _waiting(ledger: Ledger) -> list[str]:
    return [item.task for item, status in ledger.items().items() if isinstance(status, Pending)]


# -- Who gets which task, and what became of it: task order, ledger and journal as one ------------


HOLDER = "driver"


@dataclass
class _OpenBatch:
    """A batch that is worked on."""

    items: list[Visit] = field(default_factory=list)
    leases: dict[int, Lease] = field(default_factory=dict)
    """By position: what this driver leased for it."""
    groups: dict[int, Group] = field(default_factory=dict)
    """By position: what is on the disk of it."""


class DurableTaskQueue:
    """Who gets which task, on disk; `StepSampler` and `AsyncSampler` have its batches played.

    Args:
        tasks: everything that may be trained on; a mapping by id is not walked over.
        border: refuses what is held out, once more for every batch.
        plan: which task comes next; every task once per epoch, in an order of `seed`, when left out.
    """

    def __init__(
        self, ledger: Ledger, batches: BatchLog, tasks: Sequence[Task] | Mapping[str, Task], *, seed: int,
        border: HeldoutGate | None = None, plan: TaskPlan | None = None,
    ) -> None:  # fmt: skip
        self.ledger, self.batches, self._border = ledger, batches, border
        self.tasks = tasks if isinstance(tasks, Mapping) else _by_id(tasks, border)
        self.plan: TaskPlan = EpochPlan(self.tasks, seed) if plan is None else plan
        self._played: dict[int, Sequence[Group]] = {}
        self._open: dict[int, _OpenBatch] = {}

    def next_batch(self, step: int, n: int) -> StepBatch:
        """The batch of this step: from the journal if it is there, else the next `n` tasks of the queue.

        Groups that were graded before the run was interrupted come along; only the others are to be played.
        """
        kept = self.batches.find(step)
        if kept is None:
            self._require_groups(step)
            self._open[step] = _OpenBatch()
            return self._fill(step, n)
        leases = self._lease_again(step, kept.items)
        tasks = self.hold(step, kept.items)
        self._open[step].leases.update(leases)
        return StepBatch(step, tasks, tuple(self.batches.load(step, self.tasks)))

    def extend_batch(self, step_batch: StepBatch, n: int) -> StepBatch:
        """The next `n` tasks of the queue behind those of the batch; none of them is in it already."""
        return self._fill(step_batch.step, n)

    def hold(self, step: int, items: Sequence[Visit]) -> tuple[Task, ...]:
        """The batch of this step is made of these delivered items; their tasks, none of them held out."""
        self._open[step] = _OpenBatch(list(items))
        return self._tasks_of(items)

    def recording(self, step_batch: StepBatch) -> BackgroundGroupWriter:
        """While the batch is played: what is graded is on the disk, whatever happens to the rest of the batch."""
        return BackgroundGroupWriter(lambda groups: self._deliver(step_batch.step, groups))

    def record_rollouts(self, step_batch: StepBatch, groups: Sequence[Group]) -> None:
        """The composition of the batch is on the disk when this returns; its groups were before."""
        batch = self._open[step_batch.step]
        if self.batches.find(step_batch.step) is None:
            if missing := {position: g for position, g in enumerate(groups) if position not in batch.groups}:
                self._deliver(step_batch.step, missing)
            self.batches.compose(step_batch.step, batch.items)
        else:
            leases = list(batch.leases.values())
            self._require_accepted(leases, self.ledger.complete(leases))
        self._played[step_batch.step] = groups

    def give_back(self, step_batch: StepBatch, *, unless: Callable[[Group], bool] = lambda group: False) -> None:
        """What was graded in vain, and what was not finished, is played again when the run goes on; the rest stays."""
        batch = self._open.pop(step_batch.step)
        stays = {place for place, group in batch.groups.items() if unless(group)}
        again = [item for place, item in enumerate(batch.items) if place not in stays]
        self.ledger.requeue(again, "no_verdict", durable=True)  # before the groups go: never delivered without one
        self.batches.give_up(again)

    def close_batch(self, step_batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None:
        """Trained since this step, or dropped with a reason; an item that an earlier life dropped stays as it is."""
        items = self._open.pop(step_batch.step).items
        reasons: dict[str, list[Visit]] = {}
        trained: list[Visit] = []
        for item, reason in zip(items, drop_reasons, strict=True):
            dropped = isinstance(self.ledger.status(item), Dropped)
            if reason is None and not dropped:
                trained.append(item)
            elif reason is None:
                raise InvariantError(
                    f"{item} was dropped, and step {step} trained on it",
                    "the step that was repeated is not the step that was journaled", "report it with the run folder",
                )  # fmt: skip
            elif not dropped:
                reasons.setdefault(reason, []).append(item)
        for reason, lost in reasons.items():
            self.ledger.drop(lost, reason)
        self.ledger.trained(step, trained)
        self.plan.learned(self._played.pop(step_batch.step, ()))

    def metrics(self) -> dict[str, float]:
        """What the plan says of the batch that is being worked on."""
        batch, *_ = self._open.values()
        return self.plan.metrics([self.tasks[item.task] for item in batch.items])

    def balance(self) -> Balance:
        """Where everything is; raises an `InvariantError` unless it adds up."""
        self.ledger.check()
        return self.ledger.balance()

    def _fill(self, step: int, n: int) -> StepBatch:
        """Seat `n` further items: those that were graded before an interruption where they were, others around them."""
        batch = self._open[step]
        places = range(len(batch.items), len(batch.items) + n)
        seated = {place: item for place, item in self.batches.seated(step).items() if place in places}
        graded = {place: item for place, item in seated.items() if _is_delivered(self.ledger.status(item))}
        held = [item.task for item in (*batch.items, *graded.values())]
        free = [place for place in places if place not in graded]
        leases = dict(zip(free, self._lease(len(free), held), strict=True)) if free else {}
        for place, lease in leases.items():
            if place in seated and seated[place] != lease.item:
                raise _disagree(step, f"the queue gives {lease.item} in the place of {seated[place]}")
        batch.items += [graded[place] if place in graded else leases[place].item for place in places]
        batch.leases.update({place: lease for place, lease in leases.items() if place not in seated})
        # On the disk, and the driver died before the ledger heard of it: these are delivered now.
        orphans = [lease for place, lease in leases.items() if place in seated]
        self._require_accepted(orphans, self.ledger.complete(orphans))
        found = self.batches.read_delivered(list(seated.values()), self.tasks)
        batch.groups.update(zip(seated, found, strict=True))
        return StepBatch(step, self._tasks_of(batch.items), played=dict(batch.groups))

    def _deliver(self, step: int, groups: Mapping[int, Group]) -> None:
        """First the groups are on the disk, then they count as delivered: never the other way round.

        The ledger's word need not be on the disk: whoever finds the groups gives it again.
        """
        batch = self._open[step]
        leases = {place: batch.leases[place] for place in groups}
        self._require_accepted(list(leases.values()), [self.ledger.outcome(lease) for lease in leases.values()])
        items = {place: lease.item for place, lease in leases.items()}
        self.batches.deliver(
            {items[place]: group for place, group in groups.items()},
            {items[place]: BatchPosition(step, place) for place in groups},
        )
        failpoint("books.on_disk")
        self._require_accepted(list(leases.values()), self.ledger.complete(list(leases.values()), durable=False))
        batch.groups.update(groups)
        failpoint("books.delivered")

    def _require_groups(self, step: int) -> None:
        """Whatever the ledger holds for delivered before this batch begins is on the disk, as a part of it."""
        delivered = {lease.item for lease in self.ledger.delivered()}
        if lost := delivered - set(self.batches.seated(step).values()):
            raise _disagree(step, f"{min(lost)} was delivered, and its group is not in the journal")

    def _tasks_of(self, items: Sequence[Visit]) -> tuple[Task, ...]:
        tasks = tuple(self.tasks[item.task] for item in items)
        if self._border is not None:
            self._border.refuse(tasks, near=False)
        return tasks

    def _lease(self, n: int, held: Sequence[str] = ()) -> list[Lease]:
        if len(held) + n > len(self.tasks):
            raise TaskError(
                f"one step needs {len(held) + n} different tasks, there are {len(self.tasks)}",
                "a task twice in a step would be two groups of the same question",
                "bring more tasks, or lower tasks_per_step or dynamic_sampling_batches",
            )
        if self.ledger.pending < n:
            self.plan_epoch(needed=n - self.ledger.pending, held=held)
        return self.ledger.lease(n, holder=HOLDER)

    def plan_epoch(self, needed: int, held: Sequence[str] = ()) -> None:
        """Fill the queue with at least `needed` further items, none of the first of them `held` or waiting."""
        self.plan.extend(self.ledger, needed, held)

    def _lease_again(self, step: int, items: Sequence[Visit]) -> dict[int, Lease]:
        """Leases for what an interrupted life of the run returned to the queue."""
        unknown = [item for item in items if item.task not in self.tasks]
        statuses = {item: self.ledger.status(item) for item in items}
        odd = [i for i, s in statuses.items() if not (isinstance(s, Pending | Dropped) or _is_delivered(s))]
        if unknown or odd:
            raise _disagree(step, f"{[*unknown, *odd][0]} is {statuses[[*unknown, *odd][0]]}")
        pending = [item for item, status in statuses.items() if isinstance(status, Pending)]
        leases = self.ledger.lease(len(pending), holder=HOLDER) if pending else []
        if [lease.item for lease in leases] != pending:
            raise _disagree(step, f"the queue gives {[str(lease.item) for lease in leases][:3]}")
        return {items.index(lease.item): lease for lease in leases}

    def _require_accepted(self, leases: Sequence[Lease], outcomes: Sequence[str]) -> None:
        refused = [(lease, word) for lease, word in zip(leases, outcomes, strict=True) if word != "accepted"]
        if refused:
            raise InvariantError(
                f"{len(refused)} results are {refused[0][1]}, first {refused[0][0].item}",
                "somebody else has worked on these items", "is a second driver writing to this run?",
            )  # fmt: skip


class MemoryTaskQueue:
    """The same without a disk, for a loop in tests and notebooks: nothing is kept. No run uses it."""

    def __init__(self, next_tasks: Callable[[int], Sequence[Task]]) -> None:
        self.next_tasks = next_tasks
        self.drop_reasons: dict[int, tuple[str | None, ...]] = {}

    def next_batch(self, step: int, n: int) -> StepBatch:
        """The next tasks."""
        return StepBatch(step, tuple(self.next_tasks(n)))

    def extend_batch(self, step_batch: StepBatch, n: int) -> StepBatch:
        """The next tasks behind those."""
        return StepBatch(step_batch.step, (*step_batch.tasks, *self.next_tasks(n)))

    def recording(self, step_batch: StepBatch) -> BackgroundGroupWriter:
        """Nothing is written."""
        return BackgroundGroupWriter(lambda groups: None)

    def give_back(self, step_batch: StepBatch, *, unless: Callable[[Group], bool] = lambda group: False) -> None:
        """Nothing was taken."""

    def record_rollouts(self, step_batch: StepBatch, groups: Sequence[Group]) -> None:
        """Nothing is kept."""

    def close_batch(self, step_batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None:
        """Remember what became of the batch, for whoever asks."""
        self.drop_reasons[step] = tuple(drop_reasons)

    def metrics(self) -> dict[str, float]:
        """Nothing is known of the tasks."""
        return {}


# -- The queue of a run that does not sample ahead ------------------------------------------------


def _no_phase(name: str) -> AbstractContextManager[object]:
    return nullcontext()


class StepSampler:
    """`protocols.TaskQueue` with `max_staleness = 0`: sampling waits for learning, and the other way round.

    A batch is drawn when its step begins, its rollouts are run by the newest weights, and each group is on the disk as
    soon as it is graded. With dynamic sampling it grows until enough groups can teach.

    Args:
        queue: which tasks are next, and what becomes of them.
        runtime: who runs the rollouts.
        stop: whether somebody asked to stop.
        phase: entered while rollouts run, by name.
    """

    def __init__(
        self, queue: DurableTaskQueue | MemoryTaskQueue, runtime: Runtime, config: Config, *,
        stop: Callable[[], bool] = lambda: False, phase: Callable[[str], AbstractContextManager[object]] = _no_phase,
    ) -> None:  # fmt: skip
        self.queue, self.runtime, self.config, self.stop, self.phase = queue, runtime, config, stop, phase

    def next_batch(self, step: int, n: int) -> StepBatch:
        """The batch of this step: from the journal if it is there, else sampled now."""
        started = time.perf_counter()
        with span("draw"):
            batch = self.queue.next_batch(step, n)
        drawn_s = time.perf_counter() - started
        failpoint("loop.before_collect")
        if batch.groups:
            return batch
        with self.phase("collect"):
            batch = self._collect(batch, n)
        failpoint("loop.after_collect")
        if self.stop():  # nothing is learned yet: the resume finds the groups on the disk
            raise StopRequested
        return replace(batch, keeping_s=drawn_s + batch.keeping_s)

    def record_rollouts(self, batch: StepBatch) -> None:
        """The composition of the batch is on the disk when this returns; its groups were before."""
        self.queue.record_rollouts(batch, batch.groups)

    def close_batch(self, batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None:
        """The batch is done with."""
        self.queue.close_batch(batch, step, drop_reasons)

    def metrics(self) -> dict[str, float]:
        """What the plan says of the batch that is being worked on."""
        return self.queue.metrics()

    def advance(self, version: int) -> None:
        """Nothing is asked for ahead of the learner: the version makes no difference here."""

    def graders_failed(self) -> None:
        """No group waits here: what was graded in vain is given back with its batch."""

    def close(self) -> None:
        """Nothing is under way between two batches."""

    def _collect(self, batch: StepBatch, n: int) -> StepBatch:
        """Sample and grade what is not on the disk; with dynamic sampling, more until enough can teach."""
        config = self.config
        wanted = n if config.dynamic_sampling_batches else None
        batch = self._run_rollouts(batch)
        while missing := missing_groups(batch.groups, partial=config.partial_groups, wanted=wanted):
            if len(batch.groups) >= config.dynamic_sampling_batches * n:
                self.queue.give_back(batch)  # a grader that is mended meanwhile judges them anew
                raise cannot_fill(batch.groups, missing, config.dynamic_sampling_batches)
            longer = self.queue.extend_batch(batch, n)
            batch = self._run_rollouts(replace(longer, groups=batch.groups, keeping_s=batch.keeping_s))
        return batch

    def _run_rollouts(self, batch: StepBatch) -> StepBatch:
        """With groups for the tasks that have none; each is on the disk as soon as it is graded."""
        writer, first = self.queue.recording(batch), len(batch.groups)
        try:
            with writer as finished:
                new = self.runtime.collect(
                    batch.tasks[first:], batch.step, first, played=batch.played, finished=finished
                )
        except (RewardError, ToolError):
            self.queue.give_back(batch, unless=lambda group: None not in group.rewards)
            raise
        return replace(batch, groups=(*batch.groups, *new), keeping_s=batch.keeping_s + writer.waited_s)


def _by_id(tasks: Sequence[Task], border: HeldoutGate | None) -> dict[str, Task]:
    refuse_empty_or_repeated(tasks, "the run")
    if border is not None:
        border.refuse(tasks, near=False)
    return {task.id: task for task in tasks}


def _is_delivered(status: object) -> bool:
    return isinstance(status, Lease) and status.delivered


def _disagree(step: int, what: str) -> StateError:
    return StateError(
        f"journal and ledger disagree about step {step}: {what}", "an item would be lost, or trained on twice",
        "bring the folder journal/ back from one copy",
    )  # fmt: skip
