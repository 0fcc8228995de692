"""Every task once per epoch, every batch repeatable, nothing lost and nothing trained twice: over any crash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data.heldout import HeldoutSplit
from surefoot.data.tasks import TaskStream
from surefoot.errors import InvariantError, StateError, TaskError
from surefoot.protocols import StepBatch
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.task_queue import DurableTaskQueue
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Dropped, Ledger, Trained, Visit


def tasks(n: int) -> list[Task]:
    return [Task(id=f"t{i}", prompt=f"{i}?") for i in range(n)]


def open_books(folder: Path, known: Sequence[Task], **keys: Any) -> DurableTaskQueue:
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    return DurableTaskQueue(Ledger.open(journal), BatchLog(folder), known, seed=3, **keys)


def played(batch: StepBatch, life: int = 0) -> list[Group]:
    """Groups that tell which life of the run played them."""
    turn = Turn((1,), (2, life), (-0.1, -0.2), 0)
    names = [f"train/{batch.step}/{i}" for i in range(len(batch.tasks))]
    return [Group(t, name, (Rollout(t.id, name, 0, (turn,), 1.0),)) for t, name in zip(batch.tasks, names, strict=True)]


def do(queue: DurableTaskQueue, step: int, n: int, fates: Sequence[str | None] | None = None) -> list[str]:
    batch = queue.next_batch(step, n)
    groups = list(batch.groups) or played(batch)
    queue.record_rollouts(batch, groups)
    queue.close_batch(batch, step, fates or [None] * n)
    return [task.id for task in batch.tasks]


@pytest.mark.parametrize(("size", "n"), [(6, 2), (7, 3), (5, 5), (4, 3)])
def test_the_order_is_that_of_the_task_stream_over_every_border(tmp_path: Path, size: int, n: int) -> None:
    queue, stream = open_books(tmp_path, tasks(size)), TaskStream(tasks(size), 3)
    for step in range(1, 12):
        assert do(queue, step, n) == [task.id for task in stream.take(n)]
    assert queue.balance().lost == 0


def test_a_kept_batch_is_given_again_with_the_groups_of_its_first_life(tmp_path: Path) -> None:
    queue = open_books(tmp_path, tasks(6))
    do(queue, 1, 2)
    batch = queue.next_batch(2, 2)
    first = played(batch)
    queue.record_rollouts(batch, first)
    again = open_books(tmp_path, tasks(6)).next_batch(2, 2)
    assert (again.tasks, list(again.groups)) == (batch.tasks, first)


def test_a_batch_that_was_not_kept_is_played_again_from_the_same_tasks(tmp_path: Path) -> None:
    first = open_books(tmp_path, tasks(6)).next_batch(1, 2)
    again = open_books(tmp_path, tasks(6)).next_batch(1, 2)
    assert again.groups == ()
    assert again.tasks == first.tasks


def test_after_a_rewind_the_same_batches_come_in_the_same_order_without_what_was_dropped(tmp_path: Path) -> None:
    queue = open_books(tmp_path, tasks(8))
    seen = [do(queue, 1, 2), do(queue, 2, 2, [None, "partial_group"]), do(queue, 3, 2), do(queue, 4, 2)]
    queue = open_books(tmp_path, tasks(8))
    queue.ledger.rewind(1)
    assert [do(queue, 2, 2, [None, "partial_group"]), do(queue, 3, 2), do(queue, 4, 2)] == seen[1:]
    balance = queue.balance()
    assert (balance.trained, balance.dropped, balance.lost) == (7, {"partial_group": 1}, 0)


def test_what_was_dropped_is_not_trained_on_by_a_step_that_is_repeated(tmp_path: Path) -> None:
    queue = open_books(tmp_path, tasks(4))
    do(queue, 1, 2, ["reward_died", None])
    queue = open_books(tmp_path, tasks(4))
    queue.ledger.rewind(0)
    with pytest.raises(InvariantError, match="was dropped, and step 1 trained on it"):
        do(queue, 1, 2)


def test_a_held_out_task_is_never_handed_out(tmp_path: Path) -> None:
    known = tasks(6)
    split = HeldoutSplit(tuple(known[:5]), tuple(known[5:]), near=None)
    with pytest.raises(TaskError):
        open_books(tmp_path, known, border=split)
    queue = open_books(tmp_path, known[:5], border=split)
    queue.tasks["t0"] = known[5]
    with pytest.raises(TaskError):
        do(queue, 1, 5)


def test_tasks_of_a_journaled_batch_that_are_gone_are_refused(tmp_path: Path) -> None:
    queue = open_books(tmp_path, tasks(4))
    queue.record_rollouts(batch := queue.next_batch(1, 4), played(batch))
    with pytest.raises(StateError, match="disagree about step 1"):
        open_books(tmp_path, tasks(3)).next_batch(1, 4)


def test_a_step_that_is_in_the_weights_is_not_repeated(tmp_path: Path) -> None:
    queue = open_books(tmp_path, tasks(4))
    do(queue, 1, 2)
    with pytest.raises(StateError, match="disagree about step 1"):
        queue.next_batch(1, 2)


def test_results_of_a_driver_that_was_replaced_are_not_kept(tmp_path: Path) -> None:
    queue = open_books(tmp_path, tasks(4))
    batch = queue.next_batch(1, 2)
    queue.ledger.requeue([lease.item for lease in queue._open[1].leases.values()], "expired")
    with pytest.raises(InvariantError, match="2 results are late"):
        queue.record_rollouts(batch, played(batch))
    assert queue.batches.find(1) is None, "nothing was journaled for them"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(3, 7), n=st.integers(1, 3))
def test_over_any_crashes_every_task_is_trained_or_dropped_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, data: Any, size: int, n: int
) -> None:
    """Crash anywhere between two calls, go back to any checkpoint; the composition of every step stays what it was."""
    folder = tmp_path_factory.mktemp("books")
    queue, step, saved, lives = open_books(folder, tasks(size)), 0, 0, 0
    composition: dict[int, tuple[str, ...]] = {}
    while step < 6:
        stages = ["none", "save", "draw", "keep", "settle"] if lives < 5 else ["none"]
        stage = data.draw(st.sampled_from(stages))
        batch = queue.next_batch(step + 1, n)
        ids = tuple(task.id for task in batch.tasks)
        if stage != "draw":
            queue.record_rollouts(batch, list(batch.groups) or played(batch, lives))
            assert composition.setdefault(step + 1, ids) == ids
        if stage not in ("draw", "keep"):
            queue.close_batch(batch, step + 1, ["partial_group" if hash_of(i) else None for i in ids])
            step += 1
            saved = step if stage == "save" else saved
        if stage in ("draw", "keep", "settle"):
            queue, step, lives = open_books(folder, tasks(size)), saved, lives + 1
            if queue.ledger.step > saved:
                queue.ledger.rewind(saved)
    visits = Counter(
        item.task for item, s in queue.ledger.items().items() if isinstance(s, Trained | Dropped)
    )  # fmt: skip
    assert sum(visits.values()) == 6 * n
    assert max(visits.values()) - min([visits[t.id] for t in tasks(size)]) <= 1, "a task twice before another came once"
    assert queue.balance().lost == 0


def hash_of(task: str) -> bool:
    return task.endswith("1")


# -- planted bugs ---------------------------------------------------------------------------------


def check(folder: Path) -> None:
    """What the tests above claim, small: crash after the batch was delivered, go on, nothing twice, nothing lost."""
    queue = open_books(folder, tasks(6))
    do(queue, 1, 2)
    queue.record_rollouts(batch := queue.next_batch(2, 2), played(batch))
    queue = open_books(folder, tasks(6))
    queue.ledger.rewind(0)
    seen = [do(queue, step, 2) for step in (1, 2)]
    with queue.recording(batch := queue.next_batch(3, 2)) as finished:
        finished(1, graded := played(batch)[1])
    queue = open_books(folder, tasks(6))
    assert queue.next_batch(3, 2).played == {1: graded}
    seen.append(do(open_books(folder, tasks(6)), 3, 2))
    queue = open_books(folder, tasks(6))
    assert sorted(task for ids in seen for task in ids) == [f"t{i}" for i in range(6)]
    assert queue.balance().leased == 0
    statuses = queue.ledger.items()
    assert all(isinstance(statuses[Visit(f"t{i}", 0)], Trained) for i in range(6))


def test_the_check_that_the_planted_bugs_break_is_green(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (DurableTaskQueue, "_lease_again", lambda self, step, items: {}),
        (BatchLog, "seated", lambda self, step: {}),
        (BatchLog, "find", lambda self, step: None),
        (Ledger, "rewind", lambda self, step: []),
        (Ledger, "complete", lambda self, leases, durable=True: ["accepted"] * len(leases)),
    ],
    ids=[
        "a lease dropped on resume",
        "graded groups are forgotten",
        "the journal is not asked",
        "no rewind",
        "nothing is delivered",
    ],
)
def test_planted_bugs_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: type, name: str, bug: Any
) -> None:
    monkeypatch.setattr(where, name, bug)
    broken = False
    with suppress(AssertionError, InvariantError, StateError):
        check(tmp_path)
        broken = True
    assert not broken, "the planted bug was not noticed"
