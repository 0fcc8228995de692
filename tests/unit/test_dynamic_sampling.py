"""Dynamic sampling: groups without a gradient are dropped and drawn again, counted, bounded, and resumable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot import loop
from surefoot.config import Config
from surefoot.errors import RewardError, TaskError
from surefoot.learner.samples import drop_reasons
from surefoot.loop_state import Hooks, Run
from surefoot.protocols import StepBatch
from surefoot.records import STOP, Group, Rollout, Task, Turn
from surefoot.runtime.task_queue import DurableTaskQueue, MemoryTaskQueue, StepSampler
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(12)]
FLAT = {"t0", "t2", "t3", "t5"}
"""Tasks whose siblings all earn the same."""


def group(task: Task, step: int, position: int) -> Group:
    name = f"train/{step}/{position}"
    rewards = [1.0, 1.0] if task.id in FLAT else [1.0, 0.0]
    turn = Turn((1,), (5, 2), (-0.5, -0.5), 0, finish_reason=STOP)
    rollouts = [Rollout(task.id, name, i, (turn,), reward=r) for i, r in enumerate(rewards)]
    return Group(task, name, tuple(rollouts))


class Players:
    """A runtime that remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], int]] = []

    def collect(self, tasks: Sequence[Task], step: int, first: int = 0, **_: Any) -> list[Group]:
        self.asked.append(([task.id for task in tasks], first))
        return [group(task, step, first + i) for i, task in enumerate(tasks)]


def make(batches: int, queue: Any = None, **keys: Any) -> Run:
    config = Config(model="m", tasks="t", tasks_per_step=2, num_generations=2, dynamic_sampling_batches=batches, **keys)
    left = iter(TASKS)
    hooks, runtime = Hooks(*[lambda *args: None] * 6), Players()
    order = queue or MemoryTaskQueue(lambda n: [next(left) for _ in range(n)])
    return Run(
        config=config, runtime=runtime, learner=SimpleNamespace(), queue=StepSampler(order, runtime, config),
        codec=SimpleNamespace(vocab_size=10, stop_ids=frozenset({2})), heldout=(), hooks=hooks,
    )  # type: ignore[arg-type]  # fmt: skip


def drawn(run: Run) -> tuple[StepBatch, Sequence[Group]]:
    batch = run.queue.next_batch(1, run.config.tasks_per_step)
    return batch, batch.groups


def test_off_a_step_trains_on_whatever_one_batch_gives() -> None:
    run = make(0)
    batch, groups = drawn(run)
    assert run.runtime.asked == [(["t0", "t1"], 0)]  # type: ignore[attr-defined]
    assert {s.item_id for s in loop.prepare(run, groups)} == {"t0", "t1"}
    assert len(batch.tasks) == 2


@pytest.mark.config_key("dynamic_sampling_batches")
def test_batches_are_drawn_until_enough_groups_can_teach() -> None:
    run = make(3)
    batch, groups = drawn(run)
    # t0 flat, t1; t2 flat, t3 flat; t4, t5 flat
    assert run.runtime.asked == [(["t0", "t1"], 0), (["t2", "t3"], 2), (["t4", "t5"], 4)]  # type: ignore[attr-defined]
    assert len({g.id for g in groups}) == 6, "every group of a step has a name of its own"
    samples = loop.prepare(run, groups)
    assert {s.item_id for s in samples} == {"t1", "t4"}
    assert drop_reasons(groups, samples, refused=False) == [
        "equal_rewards",
        None,
        "equal_rewards",
        "equal_rewards",
        None,
        "equal_rewards",
    ]
    assert [task.id for task in batch.tasks] == [g.task.id for g in groups]


def test_what_is_more_than_enough_is_dropped_as_surplus() -> None:
    left = iter([TASKS[1], TASKS[0], TASKS[4], TASKS[6]])
    run = make(2, MemoryTaskQueue(lambda n: [next(left) for _ in range(n)]))
    _, groups = drawn(run)
    samples = loop.prepare(run, groups)
    assert {s.item_id for s in samples} == {"t1", "t4"}
    assert drop_reasons(groups, samples, refused=False) == [None, "equal_rewards", None, "surplus"]


def test_a_step_that_cannot_be_filled_ends_the_run_with_counts() -> None:
    with pytest.raises(
        RewardError, match=r"4 groups in 2 batches.* 1 more with rewards that differ.*3 with reward 1"
    ) as refused:
        drawn(make(2))
    assert refused.value.exit_code == 4


def test_planted_trainer_that_keeps_flat_groups_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.learner.samples.informative", list)
    run = make(3)
    _, groups = drawn(run)
    assert {s.item_id for s in loop.prepare(run, groups)} != {"t1", "t4"}


# -- on disk ------------------------------------------------------------------------------


def books_at(folder: Path, tasks: Sequence[Task] = TASKS) -> DurableTaskQueue:
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    return DurableTaskQueue(Ledger.open(journal), BatchLog(folder), tasks, seed=0)


def test_a_step_that_drew_twice_is_repeated_as_it_was(tmp_path: Path) -> None:
    queue = books_at(tmp_path)
    first = queue.next_batch(1, 4)
    batch = queue.extend_batch(first, 4)
    assert len({task.id for task in batch.tasks}) == 8
    assert batch.tasks[:4] == first.tasks
    groups = [group(task, 1, i) for i, task in enumerate(batch.tasks)]
    queue.record_rollouts(batch, groups)
    queue.batches.close()
    queue = books_at(tmp_path)  # as after a crash
    again = queue.next_batch(1, 4)
    assert (again.tasks, list(again.groups or ())) == (batch.tasks, groups)
    queue.record_rollouts(again, groups)
    queue.close_batch(again, 1, [None] * 2 + ["equal_rewards"] * 3 + ["surplus"] * 3)
    balance = queue.balance()
    assert (balance.trained, balance.dropped) == (2, {"equal_rewards": 3, "surplus": 3})


def test_over_an_epochs_border_no_task_comes_twice_in_a_step(tmp_path: Path) -> None:
    queue = books_at(tmp_path)
    for step in (1, 2):
        batch = queue.next_batch(step, 4)
        queue.record_rollouts(batch, [group(task, step, i) for i, task in enumerate(batch.tasks)])
        queue.close_batch(batch, step, [None] * 4)
    batch = queue.extend_batch(queue.next_batch(3, 3), 3)
    assert len({task.id for task in batch.tasks}) == 6
    batch = queue.extend_batch(batch, 3)
    assert len({task.id for task in batch.tasks}) == 9
    with pytest.raises(TaskError, match="13 different tasks, there are 12"):
        queue.extend_batch(batch, 4)


def test_the_rule_about_sampling_ahead() -> None:
    config = Config(
        model="m", tasks="t", dynamic_sampling_batches=2, max_staleness=1, importance_sampling_correction=True
    )
    assert any("cannot be sampled ahead" in problem for problem in config.problems())
    assert json.dumps(config.dynamic_sampling_batches) == "2"
