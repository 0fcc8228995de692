"""Which tasks come next: four ways to plan, each a function of the ledger, so that a crash changes nothing.

Owns       what is appended to the ledger's queue, and in which order.
Promises   no task twice in one batch; memory grows with the tasks that were visited; a plan that is made again from the
           same ledger (and, for `SuccessPlan`, the same reports) is the same plan.
Never      remembers anything that the ledger or a checkpoint does not hold.

    EpochPlan     every task once per epoch, all in memory
    WindowPlan    the same over a file on the disk, a window at a time
    LevelPlan     levels drawn by shares that move from easy to hard
    SuccessPlan   tasks drawn by how often the policy solves them

Read next: `books.py`, which leases what is planned here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from surefoot.data.curriculum import CurriculumSampler
from surefoot.data.large.order import CountedRandom, Permutation
from surefoot.data.level_order import LevelOrder
from surefoot.data.success_curriculum import SuccessCurriculum
from surefoot.data.tasks import epoch_order
from surefoot.errors import TaskError
from surefoot.records import REPETITION_COST, Group, Task
from surefoot.store.ledger import Item, Ledger
from surefoot.store.ledger_records import Pending

WINDOW = 1024
"""Tasks that are planned at once where not all are."""


class Plan(Protocol):
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
        ledger.plan(Item(task, epoch) for task in order)

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
            ledger.plan(Item(task, epoch) for task in window)
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
            window.append(Item(*order.visit(self._done[level] - 1)))
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
        ledger.plan(Item(task.id, self._visits[task.id]) for task in drawn)
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
