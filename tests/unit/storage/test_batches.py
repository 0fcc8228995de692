"""Batches are there whole or not at all, once per step, until two good checkpoints lie behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.errors import InvariantError, StateError
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.storage.batches import BatchLog, group_record
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Visit

TASKS = {name: Task(id=name, prompt="?") for name in "abcdef"}


def a_group(task: str, step: int) -> Group:
    turn = Turn((1, 2), (3, step), (-0.1, -0.25), step)
    return Group(TASKS[task], f"train/{step}/{task}", (Rollout(task, f"train/{step}/{task}", 0, (turn,), 1.0),))


def add(log: BatchLog, step: int, names: str = "ab") -> list[Group]:
    groups = {Visit(name, step): a_group(name, step) for name in names}
    log.deliver(groups)
    log.compose(step, list(groups))
    return list(groups.values())


def write_as_before(folder: Path, step: int, names: str) -> list[Group]:
    """A batch as older versions wrote it: its groups and their composition at once."""
    groups, path = [a_group(name, step) for name in names], folder / "batches_0.journal"
    with Journal.open(path) if path.exists() else Journal.create(path) as journal:
        batch = {"event": "batch", "step": step, "items": [[name, step] for name in names]}
        journal.append_all([*map(group_record, groups), batch])
    return groups


def test_batches_of_older_versions_are_read_and_new_ones_may_follow(tmp_path: Path) -> None:
    old = write_as_before(tmp_path, 1, "ab")
    log = BatchLog(tmp_path)
    new = add(log, 2, "c")
    log.close()
    older = write_as_before(tmp_path, 3, "def")
    again = BatchLog(tmp_path)
    assert [again.load(step, TASKS) for step in (1, 2, 3)] == [old, new, older]
    assert again.delivered() == []


def test_a_batch_is_there_after_the_log_was_left_open(tmp_path: Path) -> None:
    written = add(BatchLog(tmp_path), 1), add(log := BatchLog(tmp_path), 2, "c")
    again = BatchLog(tmp_path)
    assert again.steps() == [1, 2]
    assert (again.load(1, TASKS), again.load(2, TASKS)) == written
    assert again.find(2) == log.find(2)
    assert again.find(3) is None


def test_groups_without_their_batch_are_what_a_crash_left_and_count_for_nothing(tmp_path: Path) -> None:
    write_as_before(tmp_path, 1, "a")
    with Journal.open(tmp_path / "batches_0.journal") as journal:
        journal.append(group_record(a_group("e", 9)))
        journal.append(group_record(a_group("f", 9)))
    log = BatchLog(tmp_path)
    assert log.steps() == [1]
    written = add(log, 2, "ab")
    assert BatchLog(tmp_path).load(2, TASKS) == written


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_a_torn_batch_is_cut_and_counted(tmp_path: Path, cut: int) -> None:
    add(BatchLog(tmp_path), 1)
    path = tmp_path / "batches_0.journal"
    size = path.stat().st_size
    add(BatchLog(tmp_path), 2)
    with path.open("r+b") as file:
        file.truncate(max(size + 1, path.stat().st_size - cut))
    log = BatchLog(tmp_path)
    assert log.steps() == [1]
    assert log.torn_bytes > 0


def test_a_step_has_one_batch(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    add(log, 1)
    with pytest.raises(InvariantError, match="step 1 has a batch"):
        add(log, 1)
    with pytest.raises(InvariantError, match="was delivered with a group of a"):
        log.deliver({Visit("b", 0): a_group("a", 2)})
    assert BatchLog(tmp_path).steps() == [1]


def test_files_go_only_when_every_step_in_them_lies_behind(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    for step in range(1, 7):
        written = add(log, step)
        if step % 2 == 0:
            log.roll(step)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"batches_{n}.journal" for n in (0, 2, 4, 6)]
    assert log.forget(3) == ["batches_0.journal"], "step 4 may still be repeated from a checkpoint of step 3"
    assert log.steps() == BatchLog(tmp_path).steps() == [3, 4, 5, 6]
    assert log.load(6, TASKS) == written
    assert log.forget(6) == ["batches_2.journal", "batches_4.journal"]
    add(log, 7)
    assert BatchLog(tmp_path).steps() == [7]


def test_a_new_file_begins_with_every_checkpoint_and_the_old_one_is_still_read(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.roll(0)
    assert list(tmp_path.iterdir()) == [], "nothing to separate yet"
    first = add(log, 1)
    log.roll(1)
    log.roll(1)
    assert log.load(1, TASKS) == first


@pytest.mark.parametrize(
    "record",
    [
        {"event": "batch", "step": 1, "items": [["a", 0]]},
        {"event": "batch", "step": "7", "items": []},
        {"event": "batch", "step": 7, "items": [["a", 0], ["b", 0]]},
        {"event": "batch", "step": 7},
        {"event": "else"},
        {},
    ],
)
def test_a_record_that_is_no_batch_is_refused(tmp_path: Path, record: dict[str, object]) -> None:
    add(BatchLog(tmp_path), 1, "a")
    with Journal.open(tmp_path / "batches_0.journal") as journal:
        journal.append(record)
    with pytest.raises(StateError, match=r"batches_0.journal: record"):
        BatchLog(tmp_path)
