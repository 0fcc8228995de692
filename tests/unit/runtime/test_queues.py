"""The one contract of both samplers: a batch comes with its groups, one per task, in step or ahead of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from surefoot.config import Config
from surefoot.errors import RewardError
from surefoot.protocols import GroupFinished, StepBatch, TaskQueue
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.async_queue import AsyncTaskQueue
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.sampler import AsyncSampler
from surefoot.runtime.task_queue import DurableTaskQueue, StepSampler
from surefoot.runtime.threads import EventLoopThread
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger
from surefoot.system.signals import StopRequested

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(8)]
KEYS: dict[str, Any] = {"model": "m", "tasks": "t", "tasks_per_step": 2, "num_generations": 2, "max_steps": 9}


def group(task: Task, name: str, reward: float | None = 1.0) -> Group:
    turn = Turn((1,), (2, 3), (-0.1, -0.2), 0)
    siblings = [Rollout(task.id, name, i, (turn,), r, failure=None if r is not None else "down")
                for i, r in enumerate((0.0, reward))]  # fmt: skip
    return Group(task, name, tuple(siblings))


class Players:
    """Plays for both: a runtime that collects, and a runner that is asked group by group."""

    capacity = 8

    def __init__(self, verdicts: Callable[[str], float | None] = lambda task: 1.0) -> None:
        self.verdicts = verdicts
        self.asked: list[str] = []

    def collect(
        self, tasks: Sequence[Task], step: int, first: int = 0, *, played: Mapping[int, Group],
        finished: GroupFinished,
    ) -> list[Group]:  # fmt: skip
        groups = []
        for place, task in enumerate(tasks, first):
            if place in played:
                groups.append(played[place])
                continue
            self.asked.append(task.id)
            groups.append(group(task, f"train/{step}/{place}", self.verdicts(task.id)))
            finished(place, groups[-1])
        if any(None in each.rewards for each in groups):
            raise RewardError("a grader failed", "why", "fix")
        return groups

    async def run(self, request: RolloutRequest) -> RolloutResult:
        self.asked.append(request.task.id)
        return RolloutResult(group(request.task, request.group), (None, None))


def in_step(folder: Path, players: Players, **keys: Any) -> StepSampler:
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    order = DurableTaskQueue(Ledger.open(journal), BatchLog(folder), TASKS, seed=3)
    stop = keys.pop("stop", lambda: False)
    runtime: Any = players
    return StepSampler(order, runtime, Config(**KEYS, **keys), stop=stop)


@contextlib.contextmanager
def ahead(folder: Path, players: Players) -> Iterator[AsyncTaskQueue]:
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    config = Config(**KEYS, max_staleness=1, importance_sampling_correction=True)

    def request(task: Task, visit: int, position: int) -> RolloutRequest:
        return RolloutRequest(task, (4,), Sampling(2, 1.0, 4, 9), "train", visit, position)

    stream = AsyncSampler(
        Ledger.open(journal), BatchLog(folder), TASKS, players, request, config=config, trained=lambda: 0
    )
    queue = AsyncTaskQueue(stream, EventLoopThread())
    try:
        yield queue
    finally:
        queue.close()
        queue.thread.close()


def whole(batch: StepBatch) -> bool:
    return len(batch.groups) == len(batch.tasks) > 0 and [g.task for g in batch.groups] == list(batch.tasks)


def step_through(queue: TaskQueue) -> list[StepBatch]:
    batches = []
    for step in (1, 2, 3):
        batches.append(queue.next_batch(step, 2))
        queue.record_rollouts(batches[-1])
        assert isinstance(queue.metrics(), dict)
        queue.close_batch(batches[-1], step, [None, None])
        queue.advance(0)
    return batches


@pytest.mark.parametrize("kind", ["in step", "ahead"])
def test_every_batch_comes_with_a_group_for_each_of_its_tasks_and_a_journaled_one_too(
    tmp_path: Path, kind: str
) -> None:
    def driver(players: Players) -> Any:
        return contextlib.nullcontext(in_step(tmp_path, players)) if kind == "in step" else ahead(tmp_path, players)

    with driver(Players()) as queue:
        first = step_through(queue)
    assert all(whole(batch) for batch in first)
    assert len({task.id for batch in first for task in batch.tasks}) == 6, "no task twice in an epoch"
    nobody = Players(lambda task: None)  # whoever asks it again gets no verdict
    with driver(nobody) as queue:
        sampler: Any = queue if kind == "in step" else queue.stream
        sampler.queue.ledger.rewind(1)
        again = [queue.next_batch(step, 2) for step in (2, 3)]
        assert [batch.groups for batch in again] == [batch.groups for batch in first[1:]]
        assert nobody.asked == []
        queue.record_rollouts(again[0])
        queue.close_batch(again[0], 2, [None, None])


def test_a_stop_while_groups_are_collected_loses_none_of_them(tmp_path: Path) -> None:
    first = Players()
    with pytest.raises(StopRequested):
        in_step(tmp_path, first, stop=lambda: True).next_batch(1, 2)
    assert len(first.asked) == 2
    second = Players()
    resumed = in_step(tmp_path, second)
    batch = resumed.next_batch(1, 2)
    assert (second.asked, whole(batch), [task.id for task in batch.tasks]) == ([], True, first.asked)


def fail_and_go_on(folder: Path) -> None:
    """A grader fails on the second task; the run that goes on asks for that one again, and for no other."""
    first = Players(lambda task: None if len(first.asked) == 2 else 1.0)
    with pytest.raises(RewardError):
        in_step(folder, first).next_batch(1, 2)
    second = Players()
    batch = in_step(folder, second).next_batch(1, 2)
    assert [task.id for task in batch.tasks] == first.asked
    assert second.asked == first.asked[1:]


def test_what_got_no_verdict_is_asked_again_and_what_did_stays(tmp_path: Path) -> None:
    fail_and_go_on(tmp_path)


def test_planted_sampler_that_keeps_failures_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DurableTaskQueue, "give_back", lambda *_, **__: None)
    with pytest.raises((AssertionError, RewardError)):
        fail_and_go_on(tmp_path)


def test_a_batch_that_cannot_be_filled_gives_all_of_it_back(tmp_path: Path) -> None:
    flat = Players(lambda task: 0.0)
    with pytest.raises(RewardError, match="4 groups in 2 batches"):
        in_step(tmp_path, flat, dynamic_sampling_batches=2).next_batch(1, 2)
    second = Players()
    batch = in_step(tmp_path, second, dynamic_sampling_batches=2).next_batch(1, 2)
    assert (second.asked, whole(batch)) == (flat.asked[:2], True)
    assert batch.played == {}


def test_planted_sampler_that_forgets_to_collect_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepSampler, "_collect", lambda self, batch, n: batch)
    assert not whole(in_step(tmp_path, Players()).next_batch(1, 2))
