"""Batches at random, by curriculum, or one epoch through: nothing lost, shares exact, resumable."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data import loader as module
from surefoot.data.curriculum import CurriculumSampler
from surefoot.data.files import complexity_of
from surefoot.data.loader import TaskDataLoader
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.errors import ConfigError, StateError, TaskError
from surefoot.records import Task

SIZES = {"easy": 30, "medium": 30, "hard": 30}


def tasks(**sizes: int) -> list[Task]:
    return [
        Task(id=f"{level}{i}", prompt=f"{level} {i}", columns={"complexity": level})
        for level, n in (sizes or SIZES).items()
        for i in range(n)
    ]


def streamed(folder: Path) -> StreamingDataset:
    path = folder / "t.jsonl"
    rows = [{"id": t.id, "prompt": t.prompt, "complexity": t.columns["complexity"]} for t in tasks()]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return StreamingDataset(path)


def ids(batch: list[Task]) -> list[str]:
    return [task.id for task in batch]


def levels(batch: list[Task]) -> Counter[str | None]:
    return Counter(complexity_of(task.columns) for task in batch)


@pytest.mark.parametrize("build", [lambda _: tasks(), streamed], ids=["list", "file"])
def test_random_batches_cover_everything_in_as_few_batches_as_possible(build: Any, tmp_path: Path) -> None:
    loader = TaskDataLoader(build(tmp_path), seed=3)
    seen = {task_id for _ in range(math.ceil(90 / 16)) for task_id in ids(loader.random_batch(16))}
    assert len(seen) == 90


@pytest.mark.parametrize("build", [lambda _: tasks(), streamed], ids=["list", "file"])
def test_an_epoch_holds_every_task_once_and_the_next_one_has_another_order(build: Any, tmp_path: Path) -> None:
    loader = TaskDataLoader(build(tmp_path), batch_size=16, seed=3)
    first, second = [[task_id for batch in loader for task_id in ids(batch)] for _ in range(2)]
    assert sorted(first) == sorted(second) == sorted(ids(tasks()))
    assert first != second
    assert loader.epochs_done == 1
    assert [len(batch) for batch in loader.epoch()] == [16] * 5 + [10]


def test_a_curriculum_batch_has_exactly_the_places_of_its_shares(tmp_path: Path) -> None:
    loader = TaskDataLoader(streamed(tmp_path), curriculum=CurriculumSampler())
    assert levels(loader.curriculum_batch(0, 10)) == {"easy": 3, "medium": 5, "hard": 2}
    assert levels(loader.curriculum_batch(10, 10)) == {"easy": 1, "medium": 4, "hard": 5}
    assert len(loader.curriculum_batch(0)) == 16


def test_a_share_of_nothing_gives_none() -> None:
    shares = {"easy": 1.0, "medium": 0.0, "hard": 0.0}
    loader = TaskDataLoader(tasks(), curriculum=CurriculumSampler(shares, shares))
    assert levels(loader.curriculum_batch(0, 7)) == {"easy": 7}
    TaskDataLoader(tasks(easy=3), curriculum=CurriculumSampler(shares, shares))


def drawn_from(loader: TaskDataLoader) -> set[str]:
    """Easy tasks of many curriculum batches."""
    return {name for _ in range(10) for name in ids(loader.curriculum_batch(0, 10)) if name.startswith("easy")}


def test_candidates_come_from_the_whole_level_not_from_its_first_rows() -> None:
    assert drawn_from(TaskDataLoader(tasks(), curriculum=CurriculumSampler())) == {f"easy{i}" for i in range(30)}


def test_planted_bug_candidates_from_the_first_rows_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = TaskDataLoader._tasks_of
    monkeypatch.setattr(TaskDataLoader, "_tasks_of", lambda self, level: plain(self, level)[:20])
    assert len(drawn_from(TaskDataLoader(tasks(), curriculum=CurriculumSampler()))) < 30


def test_planted_bug_at_least_one_of_each_level_breaks_the_share_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {"easy": 1.0, "medium": 0.0, "hard": 0.0}
    sampler = CurriculumSampler(shares, shares)
    monkeypatch.setattr(
        sampler, "counts", lambda n, epoch: {level: max(1, round(s * n)) for level, s in shares.items()}
    )
    assert set(levels(TaskDataLoader(tasks(), curriculum=sampler).curriculum_batch(0, 7))) != {"easy"}


def test_a_level_that_is_through_begins_anew_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    loader = TaskDataLoader(tasks(easy=4, medium=40, hard=40), curriculum=CurriculumSampler())
    with caplog.at_level(logging.INFO, logger=module.__name__):
        batches = [ids(loader.curriculum_batch(0, 10)) for _ in range(2)]
    assert all(len(set(batch)) == 10 for batch in batches)
    assert [record.getMessage() for record in caplog.records] == ["all easy tasks were dealt; pass 2 over them begins"]


def test_what_cannot_be_dealt_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no tasks"):
        TaskDataLoader([])
    with pytest.raises(TaskError, match="asks for 50% hard tasks and there are none"):
        TaskDataLoader(tasks(easy=3, medium=3), curriculum=CurriculumSampler())
    with pytest.raises(ConfigError, match="has no curriculum"):
        TaskDataLoader(tasks()).curriculum_batch(0)
    with pytest.raises(ConfigError, match="batch_size"):
        TaskDataLoader(tasks(), batch_size=0)
    with pytest.raises(TaskError, match="91 different tasks were asked for and there are 90"):
        TaskDataLoader(tasks()).random_batch(91)


def play(loader: TaskDataLoader, steps: list[str]) -> list[list[str]]:
    """One batch per step; `epoch` is left in the middle."""
    batches = []
    for at, step in enumerate(steps):
        if step == "epoch":
            batches.append(ids(next(loader.epoch())))
        else:
            batches.append(ids(loader.random_batch(7) if step == "random" else loader.curriculum_batch(at, 6)))
    return batches


STEPS = st.lists(st.sampled_from(["random", "curriculum", "epoch"]), max_size=12)


@given(before=STEPS, after=STEPS)
def test_a_restored_loader_goes_on_exactly_where_it_stopped(before: list[str], after: list[str]) -> None:
    def fresh() -> TaskDataLoader:
        return TaskDataLoader(tasks(), 16, seed=2, curriculum=CurriculumSampler(seed=2))

    loader, resumed = fresh(), fresh()
    play(loader, before)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert play(resumed, after) == play(loader, after)


@pytest.mark.parametrize(
    "other",
    [
        TaskDataLoader(tasks(easy=30, medium=30, hard=29), seed=2, curriculum=CurriculumSampler()),
        TaskDataLoader(tasks(), seed=9, curriculum=CurriculumSampler()),
        TaskDataLoader(tasks(), seed=2),
        TaskDataLoader(tasks(), seed=2, curriculum=CurriculumSampler(seed=1)),
    ],
    ids=["tasks", "seed", "no curriculum", "other curriculum"],
)
def test_a_foreign_state_is_refused_and_changes_nothing(other: TaskDataLoader) -> None:
    loader = TaskDataLoader(tasks(), seed=2, curriculum=CurriculumSampler())
    play(loader, ["random", "curriculum", "epoch"])
    other_state, before = other.state_dict(), loader.state_dict()
    with pytest.raises(StateError, match="does not fit"):
        loader.load_state_dict(other_state)
    assert loader.state_dict() == before
