"""The task stream refuses what is held out, when tasks come in and when they go out."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.data import HeldoutLeakError, HeldoutSplit
from surefoot.data.tasks import TaskStream
from surefoot.records import Task

TASKS = [Task(id=f"t{i}", prompt=f"Say the number {i}.", columns={"answer": str(i)}) for i in range(8)]
SPLIT = HeldoutSplit(TASKS[:6], TASKS[6:])


def test_a_clean_stream_deals_the_same_tasks_with_and_without_a_border() -> None:
    plain, guarded = TaskStream(TASKS[:6], 0), TaskStream(TASKS[:6], 0, heldout=SPLIT)
    assert [guarded.take(4) for _ in range(9)] == [plain.take(4) for _ in range(9)]
    assert guarded.state_dict() == plain.state_dict()


@pytest.mark.parametrize(
    "leak",
    [
        TASKS[7],
        Task(id="t7", prompt="something else"),
        Task(id="new", prompt="say  the NUMBER 7.", columns={"answer": 7}),
    ],
    ids=["task", "id", "content"],
)
def test_a_held_out_task_does_not_get_into_the_stream(leak: Task) -> None:
    with pytest.raises(HeldoutLeakError, match="held out"):
        TaskStream([*TASKS[:6], leak], 0, heldout=SPLIT)


def inject(stream: TaskStream, name: str, task: Task) -> None:
    """Change the pool behind the stream's back, as a generator with a bug would."""
    stream._tasks[name] = task


@pytest.mark.parametrize("leak", [TASKS[6], Task(id="t0", prompt=TASKS[6].prompt, columns=TASKS[6].columns)], ids=str)
def test_a_leak_that_appears_later_is_refused_when_it_would_be_dealt(leak: Task) -> None:
    stream = TaskStream(TASKS[:6], 0, heldout=SPLIT)
    stream.take(6)
    inject(stream, "t0", leak)
    with pytest.raises(HeldoutLeakError, match="held out"):
        stream.take(6)


def test_planted_stream_without_its_check_trains_on_the_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: patch the check out, and both tests above go red."""
    monkeypatch.setattr(TaskStream, "_refuse_heldout", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_held_out_task_does_not_get_into_the_stream(TASKS[7])
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_leak_that_appears_later_is_refused_when_it_would_be_dealt(TASKS[6])


def test_what_a_generator_makes_is_checked_before_it_enters_the_pool() -> None:
    def generator() -> Any:
        for i in range(5, 9):
            yield Task(id=f"made/{i}", prompt=f"Say the number  {i}.", columns={"answer": i})

    clean = [task for task in generator() if not SPLIT.leaks([task])]
    assert [task.id for task in clean] == ["made/5", "made/8"]
    with pytest.raises(HeldoutLeakError, match="'made/6' has the content of 't6'; 'made/7'"):
        SPLIT.refuse(generator())
    TaskStream([*TASKS[:5], *clean], 0, heldout=SPLIT)
