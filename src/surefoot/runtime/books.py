"""Who gets which task, and what became of it: task order, ledger and journal as one.

Owns       the order of events between them: planned, leased, played, on the disk, delivered, trained or dropped.
Promises   no task twice in one batch; a batch that was on the disk before a crash is done again with the same groups
           and the same tasks; what was dropped stays dropped; without another plan, every task once per epoch.
Never      hands out a held-out task, or an item that is in the weights already.

    draw --> (play) --> keep: groups on the disk, then delivered --> (learn) --> settle: trained, dropped(reason)

Read next: `plans.py`, which task is next; `store/ledger.py` and `store/batches.py`, which this joins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from surefoot.data.tasks import Border, refuse_empty_or_repeated
from surefoot.errors import InvariantError, StateError, TaskError
from surefoot.protocols import Assignment
from surefoot.records import Group, Task
from surefoot.runtime.plans import EpochPlan, Plan
from surefoot.store.batches import BatchLog
from surefoot.store.ledger import Balance, Item, Lease, Ledger
from surefoot.store.ledger_records import Dropped, Leased, Pending

HOLDER = "driver"


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
        self._open: dict[int, tuple[list[Item], list[Lease]]] = {}

    def draw(self, step: int, n: int) -> Assignment:
        """The batch of this step: from the journal if it is there, else the next `n` tasks of the queue."""
        kept = self.batches.find(step)
        if kept is None:
            leases = self._lease(n)
            items = [lease.item for lease in leases]
        else:
            items, leases = list(kept.items), self._lease_again(step, kept.items)
        tasks = self.hold(step, items)
        self._open[step] = items, leases
        groups = None if kept is None else tuple(self.batches.load(step, self.tasks))
        return Assignment(step, tasks, groups)

    def draw_more(self, assignment: Assignment, n: int) -> Assignment:
        """The next `n` tasks of the queue behind those of the batch; none of them is in it already."""
        items, leases = self._open[assignment.step]
        more = self._lease(n, held=[item.task for item in items])
        items, leases = [*items, *(lease.item for lease in more)], [*leases, *more]
        tasks = self.hold(assignment.step, items)
        self._open[assignment.step] = items, leases
        return Assignment(assignment.step, tasks)

    def hold(self, step: int, items: Sequence[Item]) -> tuple[Task, ...]:
        """The batch of this step is made of these delivered items; their tasks, none of them held out."""
        self._open[step] = list(items), []
        tasks = tuple(self.tasks[item.task] for item in items)
        if self._border is not None:
            self._border.refuse(tasks, near=False)
        return tasks

    def keep(self, assignment: Assignment, groups: Sequence[Group]) -> None:
        """First the groups are on the disk, then they count as delivered: never the other way round."""
        items, leases = self._open[assignment.step]
        self._require_accepted(leases, [self.ledger.outcome(lease) for lease in leases])
        if assignment.groups is None:
            self.batches.append(assignment.step, items, groups)
        self._require_accepted(leases, self.ledger.complete(leases))
        self._played[assignment.step] = groups

    def settle(self, assignment: Assignment, step: int, fates: Sequence[str | None]) -> None:
        """Trained since this step, or dropped with a reason; an item that an earlier life dropped stays as it is."""
        items, _ = self._open.pop(assignment.step)
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
        (items, _), *_ = self._open.values()
        return self.plan.metrics([self.tasks[item.task] for item in items])

    def balance(self) -> Balance:
        """Where everything is; raises an `InvariantError` unless it adds up."""
        self.ledger.check()
        return self.ledger.balance()

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

    def _lease_again(self, step: int, items: Sequence[Item]) -> list[Lease]:
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
        return leases

    def _require_accepted(self, leases: Sequence[Lease], outcomes: Sequence[str]) -> None:
        refused = [(lease, word) for lease, word in zip(leases, outcomes, strict=True) if word != "accepted"]
        if refused:
            raise InvariantError(
                f"{len(refused)} results are {refused[0][1]}, first {refused[0][0].item}",
                "somebody else has worked on these items", "is a second driver writing to this run?",
            )  # fmt: skip


class LooseBooks:
    """`protocols.Books` that keep nothing: for a loop without a disk, in tests and notebooks."""

    def __init__(self, next_tasks: Callable[[int], Sequence[Task]]) -> None:
        self.next_tasks = next_tasks
        self.fates: dict[int, tuple[str | None, ...]] = {}

    def draw(self, step: int, n: int) -> Assignment:
        """The next tasks."""
        return Assignment(step, tuple(self.next_tasks(n)))

    def draw_more(self, assignment: Assignment, n: int) -> Assignment:
        """The next tasks behind those."""
        return Assignment(assignment.step, (*assignment.tasks, *self.next_tasks(n)))

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
