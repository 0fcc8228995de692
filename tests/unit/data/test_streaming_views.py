"""Shards, filters, statistics, and the stream that deals them: disjoint, complete, resumable."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming_kit import ids, row, write

from surefoot.data.heldout import HeldoutLeakError
from surefoot.data.on_disk import build, dataset
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.index import id_hash
from surefoot.data.on_disk.stream import HeldoutRule, LargeTaskStream, TasksById
from surefoot.errors import StateError, TaskError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "odd name ü.jsonl", [row(i) for i in range(60)])


# -- views ------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(num=st.integers(1, 9))
def test_shards_are_disjoint_complete_and_the_same_for_everybody(num: int, path: Path) -> None:
    data = StreamingDataset(path)
    shards = [ids(data.shard(i, num)) for i in range(num)]
    assert sorted(task_id for shard in shards for task_id in shard) == sorted(ids(data))
    assert [ids(StreamingDataset(path, shard_id=i, num_shards=num)) for i in range(num)] == shards
    assert shards[0] == [task.id for task in data if id_hash(task.id) % num == 0]


def test_a_task_keeps_its_shard_when_others_come_and_go(path: Path, tmp_path: Path) -> None:
    fewer = write(tmp_path / "fewer.jsonl", [row(i) for i in range(59, 0, -2)])
    assert set(ids(StreamingDataset(fewer).shard(1, 3))) <= set(ids(StreamingDataset(path).shard(1, 3)))


def test_planted_bug_shards_by_pythons_hash_differ_between_processes() -> None:
    import subprocess
    import sys

    code = "print(sorted(i for i in range(60) if hash(f't{i}') % 3 == 1))"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 2


@pytest.mark.parametrize(("shard", "num"), [(3, 3), (4, 3), (-1, 3), (0, 0), (0, -1), (True, 2), (0.0, 2)])
def test_a_shard_that_does_not_exist_is_a_value_error(shard: Any, num: Any, path: Path) -> None:
    with pytest.raises(ValueError, match="shard_id"):
        StreamingDataset(path, shard_id=shard, num_shards=num)
    with pytest.raises(ValueError, match="shard_id"):
        StreamingDataset(path).shard(shard, num)


def test_filters_are_what_they_say_also_one_after_another(path: Path) -> None:
    data = StreamingDataset(path)
    everything = list(data)
    easy = data.filter(complexity="easy")
    assert list(easy) == [t for t in everything if t.columns["complexity"] == "easy"]
    both = data.filter(complexity=["easy", "hard"], category="c1")
    assert list(both) == [
        t for t in everything if t.columns["complexity"] != "medium" and t.columns["category"] == "c1"
    ]
    assert list(easy.filter(category="c1")) == [t for t in easy if t.columns["category"] == "c1"]
    late = data.filter(predicate=lambda task: int(task.columns["answer"]) > 50)
    assert ids(late) == [f"t{i}" for i in range(51, 60)]
    assert len(data.filter(complexity="unheard of")) == 0
    assert easy.get("t0") is not None
    assert easy.get("t1") is None
    assert len(data.level(None)) == 0
    assert len({view.fingerprint for view in (data, easy, both, late)}) == 4


def test_statistics_are_those_of_the_view(path: Path) -> None:
    data = StreamingDataset(path)
    whole = data.statistics()
    assert (whole.tasks, whole.complexity) == (60, {"easy": 20, "medium": 20, "hard": 20})
    assert whole.category == {"c0": 30, "c1": 30}
    assert whole.bytes == path.stat().st_size - 60
    part = data.filter(category="c0").statistics()
    assert (part.tasks, part.complexity, part.category) == (30, {"easy": 10, "medium": 10, "hard": 10}, {"c0": 30})


def test_a_view_outlives_the_data_set_it_was_cut_from(path: Path) -> None:
    view = StreamingDataset(path).filter(complexity="hard").shard(0, 2)
    assert all(task.columns["complexity"] == "hard" for task in view)


def test_an_index_out_of_range_is_an_index_error(path: Path) -> None:
    data = StreamingDataset(path)
    for position in (60, -61):
        with pytest.raises(IndexError):
            data[position]


def test_too_many_levels_are_refused_because_no_curriculum_could_use_them(tmp_path: Path) -> None:
    made = write(tmp_path / "t.jsonl", [row(i, complexity=f"l{i}") for i in range(66)])
    with pytest.raises(TaskError, match="at most 64 different ones"):
        StreamingDataset(made)


def test_a_held_out_side_may_not_be_empty(path: Path) -> None:
    data = StreamingDataset(path)
    with pytest.raises(TaskError, match="splits 60 tasks into"):
        data.split_heldout(1e-9)
    train, heldout = data.split_heldout(0.0)
    assert (len(train), len(heldout)) == (60, 0)
    with pytest.raises(ValueError, match="heldout_fraction"):
        data.split_heldout(1.5)


# -- dealt as a stream ---------------------------------------------------------------------------------


class Forbid:
    """A border that knows one id."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    def refuse(self, tasks: Any, *, near: bool = True) -> None:
        if any(task.id == self.task_id for task in tasks):
            raise TaskError(f"{self.task_id} is held out", "-", "-")


def test_a_stream_deals_every_task_once_per_epoch_and_goes_on_after_a_resume(path: Path) -> None:
    data = StreamingDataset(path)
    stream = LargeTaskStream(data, seed=5)
    first = [task_id for _ in range(6) for task_id in ids(stream.take(10))]
    assert sorted(first) == sorted(ids(data))
    assert first != ids(data)
    stream.take(7)
    resumed = LargeTaskStream(StreamingDataset(path), seed=5)
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert ids(resumed.take(20)) == ids(stream.take(20))
    assert resumed.epoch == 1
    assert resumed.left == 60 - 27


def test_a_state_is_refused_when_one_row_of_the_file_was_edited(path: Path) -> None:
    state = LargeTaskStream(StreamingDataset(path), seed=5).state_dict()
    write(path, [row(i, **({"answer": "other"} if i == 30 else {})) for i in range(60)])
    with pytest.raises(StateError, match="tasks"):
        LargeTaskStream(StreamingDataset(path), seed=5).load_state_dict(state)


def test_planted_bug_a_fingerprint_of_ids_alone_misses_the_edit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "task_bytes", lambda task: task.id.encode())
    state = LargeTaskStream(StreamingDataset(path), seed=5).state_dict()
    write(path, [row(i, **({"answer": "other"} if i == 30 else {})) for i in range(60)])
    edited = LargeTaskStream(StreamingDataset(path), seed=5)
    edited.load_state_dict(state)
    assert edited.state_dict() == state, "the edit went unnoticed"


def test_a_held_out_task_is_refused_when_it_is_dealt_and_at_once_when_asked(path: Path) -> None:
    data = StreamingDataset(path)
    stream = LargeTaskStream(data, seed=5, heldout=Forbid("t33"))
    with pytest.raises(TaskError, match="t33 is held out"):
        stream.take(60)
    with pytest.raises(TaskError, match="t33 is held out"):
        LargeTaskStream(data, seed=5, heldout=Forbid("t33"), check_all=True)
    LargeTaskStream(data, seed=5, heldout=Forbid("t99"), check_all=True)


def test_a_stream_of_no_tasks_is_refused(path: Path) -> None:
    with pytest.raises(TaskError, match="no tasks"):
        LargeTaskStream(StreamingDataset(path).filter(complexity="none"), seed=0)


def test_nothing_but_the_standard_library_is_needed() -> None:
    assert not {"numpy", "pyarrow", "datasets"} & set(vars(dataset))


def test_the_rule_alone_refuses_what_the_split_holds_out(path: Path) -> None:
    train, heldout = StreamingDataset(path).split_heldout(0.3)
    LargeTaskStream(train, seed=5, heldout=HeldoutRule(0.3), check_all=True)
    with pytest.raises(HeldoutLeakError, match="are held out") as caught:
        LargeTaskStream(heldout, seed=5, heldout=HeldoutRule(0.3)).take(2)
    assert len(caught.value.leaks) == 2


def test_the_tasks_with_the_smallest_hashes_are_the_same_however_they_are_asked_for(path: Path) -> None:
    data = StreamingDataset(path)
    expected = sorted(ids(data), key=lambda task_id: hashlib.sha256(task_id.encode()).digest())
    assert ids(data.smallest(7)) == expected[:7]
    assert ids(data.smallest(99)) == expected
    easy = data.filter(complexity="easy")
    assert ids(easy.smallest(3)) == [task_id for task_id in expected if task_id in set(ids(easy))][:3]


def test_a_mapping_by_id_holds_no_tasks_and_finds_all(path: Path) -> None:
    train, heldout = StreamingDataset(path).split_heldout(0.3)
    by_id = TasksById(train)
    assert {task_id: by_id[task_id] for task_id in by_id} == {task.id: task for task in train}
    assert len(by_id) == len(train)
    stranger = heldout[0].id
    assert stranger not in by_id
    with pytest.raises(KeyError):
        by_id[stranger]
    assert [train.position(task.id) for task in train] == list(range(len(train)))
    assert train.position(stranger) is None
