"""Groups that come one by one, and batches that are made of them: on the disk, found again, and kept while needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.errors import InvariantError, StateError
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.storage.batches import BatchLog, BatchPosition, group_record
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Visit

TASKS = {f"t{i}": Task(id=f"t{i}", prompt="?") for i in range(9)}


def item(i: int, visit: int = 0) -> Visit:
    return Visit(f"t{i}", visit)


def group(i: int, payload: int = 0) -> Group:
    turn = Turn((1, i), (2, payload), (-0.1, -0.25), 3, version_end=4)
    return Group(TASKS[f"t{i}"], f"train/0/{i}", (Rollout(f"t{i}", f"train/0/{i}", 0, (turn,), 1.0),))


def test_a_group_is_there_after_a_crash_before_any_batch_has_it(tmp_path: Path) -> None:
    BatchLog(tmp_path).deliver({item(3): group(3)})
    again = BatchLog(tmp_path)
    assert again.delivered() == [item(3)]
    assert again.read_delivered([item(3)], TASKS) == [group(3)]
    assert again.steps() == []


def test_a_batch_of_delivered_groups_is_found_again_in_its_own_order(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    for i in (4, 1, 2, 7):
        log.deliver({item(i): group(i)})
    log.compose(1, [item(2), item(4)])
    for seen in (log, BatchLog(tmp_path)):
        assert seen.find(1) is not None
        assert seen.load(1, TASKS) == [group(2), group(4)]
        assert seen.delivered() == [item(1), item(7)]


def test_the_last_delivery_of_an_item_counts(tmp_path: Path) -> None:
    """The first one became too old, and its task was played again."""
    log = BatchLog(tmp_path)
    log.deliver({item(1): group(1, payload=5)})
    log.release([item(1)])
    log.deliver({item(2): group(2)})
    log.deliver({item(1): group(1, payload=6)})
    log.compose(1, [item(1), item(2)])
    assert BatchLog(tmp_path).load(1, TASKS) == [group(1, payload=6), group(2)]


def test_groups_of_a_batch_that_is_not_whole_keep_their_seats(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.deliver({item(2): group(2), item(0): group(0)}, {item(2): BatchPosition(5, 1), item(0): BatchPosition(5, 3)})
    log.deliver({item(7): group(7)})
    for seen in (log, BatchLog(tmp_path)):
        assert seen.seated(5) == {1: item(2), 3: item(0)}
        assert seen.seated(4) == {}
        assert seen.read_delivered([item(0)], TASKS) == [group(0)]
    log.compose(5, [item(2), item(0)])
    assert log.seated(5) == BatchLog(tmp_path).seated(5) == {}


def test_what_was_given_up_stays_so_and_may_come_again(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.deliver(
        {item(1): group(1, payload=5), item(2): group(2)}, {item(1): BatchPosition(3, 0), item(2): BatchPosition(3, 1)}
    )
    log.give_up([item(1), item(6)])
    for seen in (log, BatchLog(tmp_path)):
        assert (seen.delivered(), seen.seated(3)) == ([item(2)], {1: item(2)})
    log.deliver({item(1): group(1, payload=6)}, {item(1): BatchPosition(3, 0)})
    log.compose(3, [item(1), item(2)])
    assert BatchLog(tmp_path).load(3, TASKS) == [group(1, payload=6), group(2)]


@pytest.mark.parametrize("seat", [[1], [1, 2, 3], ["1", 0], [-1, 0], None])
def test_a_seat_that_is_none_is_refused(tmp_path: Path, seat: object) -> None:
    BatchLog(tmp_path).deliver({item(1): group(1)})
    with Journal.open(tmp_path / "batches_0.journal") as journal:
        journal.append(group_record(group(2)) | {"item": list(item(2)), "seat": seat})
    with pytest.raises(StateError):
        BatchLog(tmp_path)


def test_what_was_never_delivered_and_a_second_batch_for_a_step_are_refused(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.deliver({item(1): group(1)})
    with pytest.raises(InvariantError, match="t2#0 was never delivered"):
        log.compose(1, [item(1), item(2)])
    log.compose(1, [item(1)])
    with pytest.raises(InvariantError, match="step 1 has a batch already"):
        log.compose(1, [item(1)])
    with pytest.raises(InvariantError, match="with a group of t2"):
        log.deliver({item(1): group(2)})


def test_a_file_stays_while_a_group_in_it_waits_or_belongs_to_a_later_batch(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    for i in (1, 2, 3):
        log.deliver({item(i): group(i)})
    log.compose(1, [item(1)])
    log.roll(1)
    log.compose(2, [item(2)])
    log.roll(2)
    assert log.forget(2) == ["batches_1.journal"], "item 3 waits in the first file"
    log.compose(3, [item(3)])
    assert log.forget(2) == []
    assert BatchLog(tmp_path).load(3, TASKS) == [group(3)]
    log.roll(3)
    assert log.forget(3) == ["batches_0.journal", "batches_2.journal"]
    assert log.steps() == BatchLog(tmp_path).steps() == []


def test_a_file_whose_groups_nobody_wants_any_more_goes(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.deliver({item(1): group(1)})
    log.roll(4)
    assert log.forget(4) == []
    log.release([item(1)])
    assert log.forget(4) == ["batches_0.journal"]


def test_a_batch_that_leans_on_a_file_that_is_gone_is_nobodys_and_the_rest_is_read(tmp_path: Path) -> None:
    """A later file may outlive an earlier one, because a group in it is still needed."""
    log = BatchLog(tmp_path)
    log.deliver({item(1): group(1)})
    log.roll(1)
    log.deliver({item(2): group(2)})
    log.compose(2, [item(1)])
    log.roll(2)
    assert log.forget(2) == ["batches_0.journal"]
    for seen in (log, BatchLog(tmp_path)):
        assert seen.steps() == []
        assert seen.read_delivered([item(2)], TASKS) == [group(2)]


def test_a_save_while_journaled_steps_are_repeated_takes_none_of_them_away(tmp_path: Path) -> None:
    """The run died after step 4 without a checkpoint; going on, it saves after step 1 and after step 2."""
    log = BatchLog(tmp_path)
    for i in range(1, 5):
        log.deliver({item(i): group(i)})
        log.compose(i, [item(i)])
    again = BatchLog(tmp_path)
    for step in (1, 2):
        again.roll(step)
        again.forget(step)
    assert [again.load(step, TASKS) for step in (3, 4)] == [[group(3)], [group(4)]]
    assert BatchLog(tmp_path).steps()[-2:] == [3, 4]


def lies(place: object) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        with Journal.open(folder / "batches_0.journal") as journal:
            journal.append({"event": "batch", "step": 2, "items": [["t1", 0]], "places": [place]})

    return write


@pytest.mark.parametrize("place", [[0, 2], [0, 99], "here", [0], [0, -1], [0, 1.5]])
def test_a_batch_that_names_a_wrong_place_is_refused(place: object, tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.deliver({item(1): group(1)})
    log.deliver({item(2): group(2)})
    log.close()
    lies(place)(tmp_path)
    with pytest.raises(StateError):
        BatchLog(tmp_path)


def test_a_group_under_another_items_name_is_refused(tmp_path: Path) -> None:
    log = BatchLog(tmp_path)
    log.deliver({item(1): group(1)})
    log.close()
    with Journal.open(tmp_path / "batches_0.journal") as journal:
        record = next(iter(journal.records())).record
        journal.append(record | {"item": ["t2", 0]})
    with pytest.raises(StateError, match="under the name t2#0"):
        BatchLog(tmp_path)
