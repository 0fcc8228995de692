"""Who gets which task, and what became of it: task order, ledger and journal as one.

Owns       the order of events between them: planned, leased, played, on the disk, delivered, trained or dropped.
Promises   no task twice in one batch; a group is on the disk as soon as it is graded, and a batch that a crash
           interrupted goes on with it: same groups, same tasks, same places; what was dropped stays dropped; without
           another plan, every task once per epoch.
Never      hands out a held-out task, or an item that is in the weights already.

    draw --> (play) --> delivering: each group on the disk, then delivered --> keep: the batch's composition on the disk
                                                              --> (learn) --> settle: trained, dropped(reason)

Read next: `plans.py`, which task is next; `store/ledger.py` and `store/batches.py`, which this joins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.data.tasks import Border, refuse_empty_or_repeated
from surefoot.errors import InvariantError, StateError, TaskError
from surefoot.protocols import Assignment, Delivering
from surefoot.records import Group, Task
from surefoot.runtime.deliveries import Deliveries
from surefoot.runtime.plans import EpochPlan, Plan
from surefoot.store.batches import BatchLog, Seat
from surefoot.store.failpoints import failpoint
from surefoot.store.ledger import Balance, Item, Lease, Ledger
from surefoot.store.ledger_records import Dropped, Leased, Pending

HOLDER = "driver"


@dataclass
class _Batch:
    """A batch that is worked on."""

    items: list[Item] = field(default_factory=list)
    leases: dict[int, Lease] = field(default_factory=dict)
    """By position: what this driver leased for it."""
    groups: dict[int, Group] = field(default_factory=dict)
    """By position: what is on the disk of it."""


class RunBooks:
    """`protocols.Books` on disk.

    Args:
        tasks: everything that may be trained on; a mapping by id is not walked over.
        border: refuses what is held out, once more for every batch.
        plan: which task comes next; every task once per epoch, in an order of `seed`, when left out.
    """

    def __init__(
        self, ledger: Ledger, batches: BatchLog, tasks: Sequence[Task] | Mapping[str, Task], *, seed: int,
        border: Border | None = None, plan: Plan | None = None,
    ) -> None:  # fmt: skip
        self.ledger, self.batches, self._border = ledger, batches, border
        self.tasks = tasks if isinstance(tasks, Mapping) else _by_id(tasks, border)
        self.plan: Plan = EpochPlan(self.tasks, seed) if plan is None else plan
        self._played: dict[int, Sequence[Group]] = {}
        self._open: dict[int, _Batch] = {}

    def draw(self, step: int, n: int) -> Assignment:
        """The batch of this step: from the journal if it is there, else the next `n` tasks of the queue.

        Groups that were graded before the run was interrupted come along; only the others are to be played.
        """
        kept = self.batches.find(step)
        if kept is None:
            self._require_groups(step)
            self._open[step] = _Batch()
            return self._fill(step, n)
        leases = self._lease_again(step, kept.items)
        tasks = self.hold(step, kept.items)
        self._open[step].leases.update(leases)
        return Assignment(step, tasks, tuple(self.batches.load(step, self.tasks)))

    def draw_more(self, assignment: Assignment, n: int) -> Assignment:
        """The next `n` tasks of the queue behind those of the batch; none of them is in it already."""
        return self._fill(assignment.step, n)

    def hold(self, step: int, items: Sequence[Item]) -> tuple[Task, ...]:
        """The batch of this step is made of these delivered items; their tasks, none of them held out."""
        self._open[step] = _Batch(list(items))
        return self._tasks_of(items)

    def delivering(self, assignment: Assignment) -> Delivering:
        """While the batch is played: what is graded is on the disk, whatever happens to the rest of the batch."""
        return Deliveries(lambda groups: self._deliver(assignment.step, groups))

    def keep(self, assignment: Assignment, groups: Sequence[Group]) -> None:
        """The composition of the batch is on the disk when this returns; its groups were before."""
        batch = self._open[assignment.step]
        if assignment.groups is None:
            if missing := {position: g for position, g in enumerate(groups) if position not in batch.groups}:
                self._deliver(assignment.step, missing)
            self.batches.compose(assignment.step, batch.items)
        else:
            leases = list(batch.leases.values())
            self._require_accepted(leases, self.ledger.complete(leases))
        self._played[assignment.step] = groups

    def give_back(self, assignment: Assignment, *, unless: Callable[[Group], bool] = lambda group: False) -> None:
        """What was graded in vain, and what was not finished, is played again when the run goes on; the rest stays."""
        batch = self._open.pop(assignment.step)
        stays = {place for place, group in batch.groups.items() if unless(group)}
        again = [item for place, item in enumerate(batch.items) if place not in stays]
        self.ledger.requeue(again, "no_verdict", durable=True)  # before the groups go: never delivered without one
        self.batches.give_up(again)

    def settle(self, assignment: Assignment, step: int, fates: Sequence[str | None]) -> None:
        """Trained since this step, or dropped with a reason; an item that an earlier life dropped stays as it is."""
        items = self._open.pop(assignment.step).items
        reasons: dict[str, list[Item]] = {}
        trained: list[Item] = []
        for item, reason in zip(items, fates, strict=True):
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
        self.plan.learned(self._played.pop(assignment.step, ()))

    def metrics(self) -> dict[str, float]:
        """What the plan says of the batch that is being worked on."""
        batch, *_ = self._open.values()
        return self.plan.metrics([self.tasks[item.task] for item in batch.items])

    def balance(self) -> Balance:
        """Where everything is; raises an `InvariantError` unless it adds up."""
        self.ledger.check()
        return self.ledger.balance()

    def _fill(self, step: int, n: int) -> Assignment:
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
        return Assignment(step, self._tasks_of(batch.items), played=dict(batch.groups))

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
            {items[place]: Seat(step, place) for place in groups},
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

    def _tasks_of(self, items: Sequence[Item]) -> tuple[Task, ...]:
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

    def _lease_again(self, step: int, items: Sequence[Item]) -> dict[int, Lease]:
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


class LooseBooks:
    """`protocols.Books` that keep nothing: for a loop without a disk, in tests and notebooks. No run uses them."""

    def __init__(self, next_tasks: Callable[[int], Sequence[Task]]) -> None:
        self.next_tasks = next_tasks
        self.fates: dict[int, tuple[str | None, ...]] = {}

    def draw(self, step: int, n: int) -> Assignment:
        """The next tasks."""
        return Assignment(step, tuple(self.next_tasks(n)))

    def draw_more(self, assignment: Assignment, n: int) -> Assignment:
        """The next tasks behind those."""
        return Assignment(assignment.step, (*assignment.tasks, *self.next_tasks(n)))

    def delivering(self, assignment: Assignment) -> Delivering:
        """Nothing is written."""
        return Deliveries(lambda groups: None)

    def give_back(self, assignment: Assignment, *, unless: Callable[[Group], bool] = lambda group: False) -> None:
        """Nothing was taken."""

    def keep(self, assignment: Assignment, groups: Sequence[Group]) -> None:
        """Nothing is kept."""

    def settle(self, assignment: Assignment, step: int, fates: Sequence[str | None]) -> None:
        """Remember what became of the batch, for whoever asks."""
        self.fates[step] = tuple(fates)


def _by_id(tasks: Sequence[Task], border: Border | None) -> dict[str, Task]:
    refuse_empty_or_repeated(tasks, "the run")
    if border is not None:
        border.refuse(tasks, near=False)
    return {task.id: task for task in tasks}


def _is_delivered(status: object) -> bool:
    return isinstance(status, Leased) and status.delivered


def _disagree(step: int, what: str) -> StateError:
    return StateError(
        f"journal and ledger disagree about step {step}: {what}", "an item would be lost, or trained on twice",
        "bring the folder journal/ back from one copy",
    )  # fmt: skip
