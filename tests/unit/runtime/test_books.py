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
from surefoot.protocols import Assignment
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.books import RunBooks
from surefoot.store.batches import BatchLog
from surefoot.store.journal import Journal
from surefoot.store.ledger import Item, Ledger
from surefoot.store.ledger_records import Dropped, Trained


def tasks(n: int) -> list[Task]:
    return [Task(id=f"t{i}", prompt=f"{i}?") for i in range(n)]


def open_books(folder: Path, known: Sequence[Task], **keys: Any) -> RunBooks:
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    return RunBooks(Ledger.open(journal), BatchLog(folder), known, seed=3, **keys)


def played(batch: Assignment, life: int = 0) -> list[Group]:
    """Groups that tell which life of the run played them."""
    turn = Turn((1,), (2, life), (-0.1, -0.2), 0)
    names = [f"train/{batch.step}/{i}" for i in range(len(batch.tasks))]
    return [Group(t, name, (Rollout(t.id, name, 0, (turn,), 1.0),)) for t, name in zip(batch.tasks, names, strict=True)]


def do(books: RunBooks, step: int, n: int, fates: Sequence[str | None] | None = None) -> list[str]:
    batch = books.draw(step, n)
    groups = list(batch.groups) if batch.groups is not None else played(batch)
    books.keep(batch, groups)
    books.settle(batch, step, fates or [None] * n)
    return [task.id for task in batch.tasks]


@pytest.mark.parametrize(("size", "n"), [(6, 2), (7, 3), (5, 5), (4, 3)])
def test_the_order_is_that_of_the_task_stream_over_every_border(tmp_path: Path, size: int, n: int) -> None:
    books, stream = open_books(tmp_path, tasks(size)), TaskStream(tasks(size), 3)
    for step in range(1, 12):
        assert do(books, step, n) == [task.id for task in stream.take(n)]
    assert books.balance().lost == 0


def test_a_kept_batch_is_given_again_with_the_groups_of_its_first_life(tmp_path: Path) -> None:
    books = open_books(tmp_path, tasks(6))
    do(books, 1, 2)
    batch = books.draw(2, 2)
    first = played(batch)
    books.keep(batch, first)
    again = open_books(tmp_path, tasks(6)).draw(2, 2)
    assert (again.tasks, list(again.groups or [])) == (batch.tasks, first)


def test_a_batch_that_was_not_kept_is_played_again_from_the_same_tasks(tmp_path: Path) -> None:
    first = open_books(tmp_path, tasks(6)).draw(1, 2)
    again = open_books(tmp_path, tasks(6)).draw(1, 2)
    assert again.groups is None
    assert again.tasks == first.tasks


def test_after_a_rewind_the_same_batches_come_in_the_same_order_without_what_was_dropped(tmp_path: Path) -> None:
    books = open_books(tmp_path, tasks(8))
    seen = [do(books, 1, 2), do(books, 2, 2, [None, "partial_group"]), do(books, 3, 2), do(books, 4, 2)]
    books = open_books(tmp_path, tasks(8))
    books.ledger.rewind(1)
    assert [do(books, 2, 2, [None, "partial_group"]), do(books, 3, 2), do(books, 4, 2)] == seen[1:]
    balance = books.balance()
    assert (balance.trained, balance.dropped, balance.lost) == (7, {"partial_group": 1}, 0)


def test_what_was_dropped_is_not_trained_on_by_a_step_that_is_repeated(tmp_path: Path) -> None:
    books = open_books(tmp_path, tasks(4))
    do(books, 1, 2, ["reward_died", None])
    books = open_books(tmp_path, tasks(4))
    books.ledger.rewind(0)
    with pytest.raises(InvariantError, match="was dropped, and step 1 trained on it"):
        do(books, 1, 2)


def test_a_held_out_task_is_never_handed_out(tmp_path: Path) -> None:
    known = tasks(6)
    split = HeldoutSplit(tuple(known[:5]), tuple(known[5:]), near=None)
    with pytest.raises(TaskError):
        open_books(tmp_path, known, border=split)
    books = open_books(tmp_path, known[:5], border=split)
    books.tasks["t0"] = known[5]
    with pytest.raises(TaskError):
        do(books, 1, 5)


def test_tasks_of_a_journaled_batch_that_are_gone_are_refused(tmp_path: Path) -> None:
    books = open_books(tmp_path, tasks(4))
    books.keep(batch := books.draw(1, 4), played(batch))
    with pytest.raises(StateError, match="disagree about step 1"):
        open_books(tmp_path, tasks(3)).draw(1, 4)


def test_a_step_that_is_in_the_weights_is_not_repeated(tmp_path: Path) -> None:
    books = open_books(tmp_path, tasks(4))
    do(books, 1, 2)
    with pytest.raises(StateError, match="disagree about step 1"):
        books.draw(1, 2)


def test_results_of_a_driver_that_was_replaced_are_not_kept(tmp_path: Path) -> None:
    books = open_books(tmp_path, tasks(4))
    batch = books.draw(1, 2)
    books.ledger.requeue([lease.item for lease in books._open[1].leases.values()], "expired")
    with pytest.raises(InvariantError, match="2 results are late"):
        books.keep(batch, played(batch))
    assert books.batches.find(1) is None, "nothing was journaled for them"


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(3, 7), n=st.integers(1, 3))
def test_over_any_crashes_every_task_is_trained_or_dropped_once_per_epoch(
    tmp_path_factory: pytest.TempPathFactory, data: Any, size: int, n: int
) -> None:
    """Crash anywhere between two calls, go back to any checkpoint; the composition of every step stays what it was."""
    folder = tmp_path_factory.mktemp("books")
    books, step, saved, lives = open_books(folder, tasks(size)), 0, 0, 0
    composition: dict[int, tuple[str, ...]] = {}
    while step < 6:
        stages = ["none", "save", "draw", "keep", "settle"] if lives < 5 else ["none"]
        stage = data.draw(st.sampled_from(stages))
        batch = books.draw(step + 1, n)
        ids = tuple(task.id for task in batch.tasks)
        if stage != "draw":
            books.keep(batch, list(batch.groups) if batch.groups is not None else played(batch, lives))
            assert composition.setdefault(step + 1, ids) == ids
        if stage not in ("draw", "keep"):
            books.settle(batch, step + 1, ["partial_group" if hash_of(i) else None for i in ids])
            step += 1
            saved = step if stage == "save" else saved
        if stage in ("draw", "keep", "settle"):
            books, step, lives = open_books(folder, tasks(size)), saved, lives + 1
            if books.ledger.step > saved:
                books.ledger.rewind(saved)
    visits = Counter(
        item.task for item, s in books.ledger.items().items() if isinstance(s, Trained | Dropped)
    )  # fmt: skip
    assert sum(visits.values()) == 6 * n
    assert max(visits.values()) - min([visits[t.id] for t in tasks(size)]) <= 1, "a task twice before another came once"
    assert books.balance().lost == 0


def hash_of(task: str) -> bool:
    return task.endswith("1")


# -- planted bugs ---------------------------------------------------------------------------------


def check(folder: Path) -> None:
    """What the tests above claim, small: crash after the batch was delivered, go on, nothing twice, nothing lost."""
    books = open_books(folder, tasks(6))
    do(books, 1, 2)
    books.keep(batch := books.draw(2, 2), played(batch))
    books = open_books(folder, tasks(6))
    books.ledger.rewind(0)
    seen = [do(books, step, 2) for step in (1, 2)]
    with books.delivering(batch := books.draw(3, 2)) as finished:
        finished(1, graded := played(batch)[1])
    books = open_books(folder, tasks(6))
    assert books.draw(3, 2).played == {1: graded}
    seen.append(do(open_books(folder, tasks(6)), 3, 2))
    books = open_books(folder, tasks(6))
    assert sorted(task for ids in seen for task in ids) == [f"t{i}" for i in range(6)]
    assert books.balance().leased == 0
    statuses = books.ledger.items()
    assert all(isinstance(statuses[Item(f"t{i}", 0)], Trained) for i in range(6))


def test_the_check_that_the_planted_bugs_break_is_green(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (RunBooks, "_lease_again", lambda self, step, items: {}),
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
