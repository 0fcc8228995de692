"""A batch that is interrupted goes on with what was graded of it: same groups, same places, nothing twice."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_kit import SAMPLING, Box, Graders, Kit, call, codec, collector_of, speaker

from surefoot.errors import InvariantError, StateError
from surefoot.protocols import Request, StepBatch
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.replica_pool import PoolBatchRunner
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.task_queue import DurableTaskQueue
from surefoot.runtime.threads import BackgroundGroupWriter, BackgroundThread, EventLoopThread
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Lease, Ledger
from surefoot.tools.session import ToolEnvironment, ToolLimits

TASKS = [Task(id=f"t{i}", prompt=f"{i}?") for i in range(9)]


def open_books(folder: Path) -> DurableTaskQueue:
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    return DurableTaskQueue(Ledger.open(journal), BatchLog(folder), TASKS, seed=3)


def group(batch: StepBatch, place: int, reward: float | None = 1.0, life: int = 0) -> Group:
    turn, name = Turn((1,), (2, life), (-0.1, -0.2), 0), f"train/{batch.step}/{place}"
    return Group(batch.tasks[place], name, (Rollout(batch.tasks[place].id, name, 0, (turn,), reward),))


def play(queue: DurableTaskQueue, batch: StepBatch, places: Sequence[int], life: int = 0) -> None:
    with queue.recording(batch) as finished:
        for place in places:
            finished(place, group(batch, place, life=life))


def finish(queue: DurableTaskQueue, batch: StepBatch) -> list[Group]:
    missing = [place for place in range(len(batch.tasks)) if place not in batch.played]
    play(queue, batch, missing, life=9)
    groups = {**batch.played, **{place: group(batch, place, life=9) for place in missing}}
    queue.record_rollouts(batch, [groups[place] for place in range(len(batch.tasks))])
    queue.close_batch(batch, batch.step, [None] * len(batch.tasks))
    return [groups[place] for place in range(len(batch.tasks))]


def opened_after_a_death(folder: Path, place: int) -> tuple[StepBatch, DurableTaskQueue]:
    """The driver died between "on the disk" and "delivered" for the group in this place."""
    first = open_books(folder)
    batch = first.next_batch(1, 3)
    first.ledger.complete = lambda leases, durable=True: ["accepted"] * len(leases)  # type: ignore[assignment, method-assign]
    play(first, batch, [place])
    return batch, open_books(folder)


@pytest.mark.parametrize("places", [[0], [3], [1, 2], [3, 0], [2, 0, 1, 3]])
def test_graded_groups_come_back_in_their_places_and_are_not_played_again(tmp_path: Path, places: list[int]) -> None:
    first = open_books(tmp_path)
    batch = first.next_batch(1, 4)
    play(first, batch, places)
    queue = open_books(tmp_path)
    assert queue.balance().delivered == len(places), "the account shows them after the kill"
    again = queue.next_batch(1, 4)
    assert (again.tasks, again.groups) == (batch.tasks, ())
    assert again.played == {place: group(batch, place) for place in places}
    finish(queue, again)
    kept = open_books(tmp_path)
    assert kept.batches.find(1) is not None
    assert [g.task for g in kept.batches.load(1, {t.id: t for t in TASKS})] == list(batch.tasks)
    assert kept.next_batch(2, 4).played == {}


def test_a_group_that_the_ledger_has_not_heard_of_is_taken_over(tmp_path: Path) -> None:
    batch, queue = opened_after_a_death(tmp_path, 1)
    assert queue.balance().delivered == 0
    again = queue.next_batch(1, 3)
    assert sorted(again.played) == [1]
    assert again.tasks == batch.tasks
    assert queue.balance().delivered == 1
    finish(queue, again)


def test_groups_of_earlier_draws_stay_when_a_batch_is_drawn_in_several_pieces(tmp_path: Path) -> None:
    first = open_books(tmp_path)
    batch = first.next_batch(1, 3)
    play(first, batch, [0, 1, 2])
    more = first.extend_batch(batch, 3)
    play(first, more, [4])
    queue = open_books(tmp_path)
    again = queue.next_batch(1, 3)
    assert (again.tasks, sorted(again.played)) == (batch.tasks, [0, 1, 2])
    again = queue.extend_batch(again, 3)
    assert (again.tasks, sorted(again.played)) == (more.tasks, [0, 1, 2, 4])
    finish(queue, again)
    assert queue.balance().lost == 0


def test_what_got_no_verdict_is_played_again_and_the_rest_stays(tmp_path: Path) -> None:
    first = open_books(tmp_path)
    batch = first.next_batch(1, 4)
    with first.recording(batch) as finished:
        finished(0, group(batch, 0))
        finished(2, group(batch, 2, reward=None))
    first.give_back(batch, unless=lambda g: None not in g.rewards)
    queue = open_books(tmp_path)
    again = queue.next_batch(1, 4)
    assert again.tasks == batch.tasks, "every task has its place again"
    assert sorted(again.played) == [0]
    finish(queue, again)
    assert queue.balance().lost == 0


def test_a_group_that_the_ledger_knows_and_the_disk_does_not_is_refused(tmp_path: Path) -> None:
    first = open_books(tmp_path)
    play(first, first.next_batch(1, 2), [0])
    (tmp_path / "batches_0.journal").unlink()
    with pytest.raises(StateError, match=r"disagree about step 1: .* was delivered, and its group is not"):
        open_books(tmp_path).next_batch(1, 2)


def test_a_seat_that_the_queue_gives_to_another_is_refused(tmp_path: Path) -> None:
    _, queue = opened_after_a_death(tmp_path, 0)
    queue.ledger.drop([queue.batches.seated(1)[0]], "somebody else")
    with pytest.raises(StateError, match="disagree about step 1: the queue gives"):
        queue.next_batch(1, 3)


def test_results_of_a_driver_that_was_replaced_are_not_written(tmp_path: Path) -> None:
    queue = open_books(tmp_path)
    batch = queue.next_batch(1, 2)
    queue.ledger.requeue([i for i, s in queue.ledger.items().items() if isinstance(s, Lease)], "expired")
    with pytest.raises(InvariantError, match="1 results are late"):
        play(queue, batch, [1])
    assert queue.batches.delivered() == []


@settings(max_examples=60, deadline=None)
@given(data=st.data(), n=st.integers(1, 4))
def test_over_any_interruptions_a_batch_is_what_it_would_have_been(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, n: int
) -> None:
    """Killed after any groups, any number of times: each group is of the life that graded it first."""
    folder = tmp_path_factory.mktemp("lives")
    whole = open_books(tmp_path_factory.mktemp("whole"))
    for step in range(1, 4):
        wanted = [g.task for g in finish(whole, whole.next_batch(step, n))]
        lives: dict[int, int] = {}
        for life in range(data.draw(st.integers(0, 3))):
            queue = open_books(folder)
            batch = queue.next_batch(step, n)
            places = data.draw(
                st.lists(st.sampled_from([p for p in range(n) if p not in batch.played] or [0]), unique=True)
            )
            places = [place for place in places if place not in batch.played]
            play(queue, batch, places, life)
            lives |= {place: life for place in places if place not in lives}
        queue = open_books(folder)
        batch = queue.next_batch(step, n)
        groups = finish(queue, batch)
        assert [g.task for g in groups] == wanted
        assert [g.rollouts[0].turns[0].completion_ids[1] for g in groups] == [lives.get(p, 9) for p in range(n)]
        queue.balance()


# -- the thread beside ----------------------------------------------------------------------------


def test_what_comes_while_the_disk_is_busy_is_written_together() -> None:
    busy, go_on, written = threading.Event(), threading.Event(), []

    def keep(groups: Mapping[int, Group]) -> None:
        busy.set()
        assert go_on.wait(10)
        written.append(sorted(groups))

    one = Group(TASKS[0], "g", (Rollout("t0", "g", 0, (), failure="lost"),))
    with BackgroundGroupWriter(keep) as finished:
        finished(0, one)
        assert busy.wait(10)
        for place in (3, 1, 2):
            finished(place, one)  # returns at once
        assert written == []
        go_on.set()
    assert written == [[0], [1, 2, 3]]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_was_graded_is_written_however_the_block_ends_and_nothing_later(error: type[BaseException]) -> None:
    written: list[int] = []
    deliveries = BackgroundGroupWriter(lambda groups: (time.sleep(0.05), written.extend(groups))[0])
    one = Group(TASKS[0], "g", (Rollout("t0", "g", 0, (), failure="lost"),))

    def interrupted() -> None:
        with deliveries as finished:
            finished(0, one)
            finished(1, one)
            raise error

    with pytest.raises(error):
        interrupted()
    assert sorted(written) == [0, 1]
    deliveries(2, one)
    time.sleep(0.1)
    assert sorted(written) == [0, 1]


def test_a_disk_that_refuses_is_heard_by_the_next_group_or_at_the_end() -> None:
    def refuse(groups: Mapping[int, Group]) -> None:
        raise OSError("no space")

    one = Group(TASKS[0], "g", (Rollout("t0", "g", 0, (), failure="lost"),))

    def play(groups: int) -> None:
        with BackgroundGroupWriter(refuse) as finished:
            for place in range(groups):
                finished(place, one)
                time.sleep(0.01 if groups > 1 else 0.0)
            assert groups == 1, "no later group was told"

    for groups in (1, 500):
        with pytest.raises(OSError, match="no space"):
            play(groups)


def test_abandoned_work_is_not_begun_and_not_waited_for() -> None:
    began, go_on, done = threading.Event(), threading.Event(), []

    def work(items: Sequence[int]) -> None:
        began.set()
        go_on.wait(10)
        done.extend(items)

    side = BackgroundThread(work, "test")
    side.put(1)
    assert began.wait(10)
    side.put(2)
    side.abandon()
    go_on.set()
    side.close()
    assert done == [1]


# -- who tells of a group -------------------------------------------------------------------------


def test_a_fleet_tells_of_every_group_when_it_comes_not_when_all_are_there() -> None:
    """The slow group is still played when the quick ones are told of, under their places in the step."""
    told: list[tuple[int, str]] = []

    class Fleet:
        complaints: tuple[str, ...] = ()

        async def run(self, order: RolloutRequest) -> RolloutResult:
            if order.position == 4:
                while len(told) < 2:
                    await asyncio.sleep(0.005)
            rollout = Rollout(order.task.id, order.group, 0, (), failure="lost")
            return RolloutResult(Group(order.task, order.group, (rollout,)), (None,))

    thread = EventLoopThread()
    try:
        players = PoolBatchRunner(Fleet(), thread, None, {task.id: (1,) for task in TASKS})  # type: ignore[arg-type]
        played = players.run_rollouts(
            TASKS[:3], Sampling(1, 1.0, 4, 8), purpose="train", step=7, positions=[4, 1, 6],
            finished=lambda place, one: told.append((place, one.id)),
        )  # fmt: skip
    finally:
        thread.close()
    assert [one.group.id for one in played] == ["train/7/4", "train/7/1", "train/7/6"]
    assert told[-1] == (4, "train/7/4")
    assert sorted(told[:2]) == [(1, "train/7/1"), (6, "train/7/6")]


def test_groups_with_tools_are_graded_and_told_of_while_others_still_play() -> None:
    """One group needs two turns more: the other is on its way to the disk before those are spoken."""
    told = threading.Event()

    def says(request: Request, context: str) -> str:
        _, _, position, _, *turn = request.id.split("/")
        return call(turn=int(turn[0]) if turn else 0) if position == "1" and turn != ["2"] else "done"

    def answer(name: str, arguments: Any) -> str:
        assert arguments["turn"] == 0 or told.wait(20), "the group that is over waits for this one"
        return "42"

    class Told(Graders):
        def grade(self, tasks: Any, rollouts: Any, each: Any = None) -> Any:
            grades = super().grade(tasks, rollouts)
            for name in dict.fromkeys(r.group for r in rollouts) if each else ():
                places = [place for place, r in enumerate(rollouts) if r.group == name]
                each(places, [grades[place] for place in places])
            return grades

    tasks = [Task(id=f"t{i}", prompt="6*7?") for i in range(2)]
    made = codec(64)
    environment = ToolEnvironment(Told(), Kit(lambda rollout: Box(answer)), ToolLimits(max_turns=4), lambda: 0.0)  # type: ignore[arg-type]
    collector = collector_of(speaker(says), environment, made, tasks)
    first: list[int] = []

    def finished(place: int, one: Group) -> None:
        first.append(place)
        told.set()

    collector.run_rollouts(tasks, SAMPLING, purpose="train", step=1, finished=finished)
    assert first == [0, 1]
