"""Which task comes next, in every way of planning: none twice in a batch, the same after a crash."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from surefoot.data.curriculum import CurriculumSampler, SuccessCurriculum
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import HeldoutRule, TasksById
from surefoot.data.order import LevelOrder
from surefoot.errors import InputError
from surefoot.records import STOP, Group, Rollout, Task, Turn
from surefoot.runtime import task_queue
from surefoot.runtime.task_queue import DurableTaskQueue, LevelPlan, SuccessPlan, TaskPlan, WindowPlan
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger


def dataset(folder: Path, n: int) -> StreamingDataset:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps({"id": f"t{i}", "prompt": f"{i}?"}) + "\n" for i in range(n)))
    return StreamingDataset(path)


def queue(folder: Path, data: StreamingDataset, seed: int = 3) -> DurableTaskQueue:
    return planned(folder, TasksById(data), WindowPlan(data, seed))


def planned(folder: Path, tasks: Mapping[str, Task], plan: TaskPlan) -> DurableTaskQueue:
    folder.mkdir(exist_ok=True)
    path = folder / "ledger.journal"
    journal = Journal.open(path) if path.exists() else Journal.create(path)
    return DurableTaskQueue(Ledger.open(journal), BatchLog(folder), tasks, seed=3, plan=plan)


def group(task: Task, step: int, position: int, rewards: Sequence[float | None] = (1.0,)) -> Group:
    turn = Turn((1,), (5, 2), (-0.5, -0.5), 0, finish_reason=STOP)
    name = f"train/{step}/{position}"
    siblings = [
        Rollout(task.id, name, i, (turn,), reward=reward, failure="timeout" if reward is None else None)
        for i, reward in enumerate(rewards)
    ]
    return Group(task, name, tuple(siblings))


def go(
    of: DurableTaskQueue, step: int, n: int, rewards: Callable[[Task], Sequence[float | None]] = lambda _: (1.0,)
) -> list[str]:
    batch = of.next_batch(step, n)
    of.record_rollouts(
        batch, batch.groups or [group(task, step, i, rewards(task)) for i, task in enumerate(batch.tasks)]
    )
    of.close_batch(batch, step, [None] * n)
    return [task.id for task in batch.tasks]


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_every_task_once_per_epoch_and_none_twice_in_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(task_queue, "WINDOW", window)
    mine = queue(tmp_path, dataset(tmp_path, 20))
    batches = [go(mine, step, 3) for step in range(1, 41)]
    assert all(len(set(batch)) == 3 for batch in batches)
    assert set(Counter(task for batch in batches for task in batch).values()) == {6}, "120 visits of 20 tasks"
    assert mine.balance().trained == 120


def test_the_order_depends_on_the_seed_and_differs_from_epoch_to_epoch(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    data = dataset(tmp_path, 20)
    one, other = queue(tmp_path / "a", data, seed=1), queue(tmp_path / "b", data, seed=2)
    first, second = ([go(one, step, 10) for step in steps] for steps in ((1, 2), (3, 4)))
    assert sorted(task for batch in first for task in batch) == sorted(task for batch in second for task in batch)
    assert first != second
    assert first != [go(other, step, 10) for step in (1, 2)]


def test_only_what_is_near_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_queue, "WINDOW", 50)
    mine = queue(tmp_path, dataset(tmp_path, 2000))
    for step in range(1, 11):
        go(mine, step, 4)
    assert len(mine.ledger.items()) == 50, "the ledger grows with the tasks that were visited"


@pytest.mark.parametrize("after", [1, 4, 6, 9])
def test_after_a_crash_it_goes_on_with_the_same_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(task_queue, "WINDOW", 5)
    data = dataset(tmp_path, 14)
    for name in ("whole", "torn"):
        (tmp_path / name).mkdir()
    whole = queue(tmp_path / "whole", data)
    wanted = [go(whole, step, 4) for step in range(1, 13)]
    torn = queue(tmp_path / "torn", data)
    seen = [go(torn, step, 4) for step in range(1, after + 1)]
    torn.next_batch(after + 1, 4)  # leased and never delivered
    again = queue(tmp_path / "torn", data)
    seen += [go(again, step, 4) for step in range(after + 1, 13)]
    assert seen == wanted


def test_a_held_out_task_is_never_handed_out(tmp_path: Path) -> None:
    data = dataset(tmp_path, 200)
    train, heldout = data.split_heldout(0.2)
    mine = queue(tmp_path, train)
    mine._border = HeldoutRule(0.2)
    seen = {task for step in range(1, 6) for task in go(mine, step, 30)}
    assert not seen & {task.id for task in heldout}
    (tmp_path / "planted").mkdir()
    planted = queue(tmp_path / "planted", data)
    planted._border = HeldoutRule(0.2)
    with pytest.raises(InputError, match="are held out"):
        go(planted, 1, 150)


# -- levels ----------------------------------------------------------------------------------


LEVELS = {"easy": 30, "medium": 50, "hard": 12}
SAMPLER = {"start": {"easy": 0.6, "medium": 0.4, "hard": 0.0}, "end": {"easy": 0.0, "medium": 0.4, "hard": 0.6}}


def leveled(sizes: Mapping[str, int] = LEVELS) -> dict[str, list[Task]]:
    return {
        level: [Task(id=f"{level}{i}", prompt="?", columns={"complexity": level}) for i in range(n)]
        for level, n in sizes.items()
    }


def level_books(folder: Path, *, steps: int = 60, seed: int = 3, sizes: Mapping[str, int] = LEVELS) -> DurableTaskQueue:
    pools = leveled(sizes)
    sampler = CurriculumSampler(SAMPLER["start"], SAMPLER["end"], steps, seed)
    plan = LevelPlan(pools, sampler, seed=seed, tasks_per_step=4, apart=4)
    return planned(folder, {task.id: task for pool in pools.values() for task in pool}, plan)


def test_levels_follow_their_shares_from_the_start_to_the_end_and_no_batch_has_a_task_twice(tmp_path: Path) -> None:
    mine = level_books(tmp_path)
    batches = [go(mine, step, 4) for step in range(1, 181)]
    assert all(len(set(batch)) == 4 for batch in batches)

    def share(level: str, of: list[list[str]]) -> float:
        return sum(task.startswith(level) for batch in of for task in batch) / sum(map(len, of))

    assert share("hard", batches[:3]) == 0, "a share of 0 is none"
    assert share("easy", batches[:10]) > 0.4
    assert share("easy", batches[60:]) == 0
    assert abs(share("hard", batches[60:]) - 0.6) < 0.08, "480 draws"
    assert abs(share("medium", batches) - 0.4) < 0.06, "720 draws"
    visits = Counter(task for batch in batches for task in batch if task.startswith("hard"))
    assert max(visits.values()) - min(visits.values()) <= 1, "every one of a level before any comes again"


@pytest.mark.parametrize("after", [1, 7, 25, 60])
def test_levels_go_on_after_a_crash_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(task_queue, "WINDOW", 10)
    whole = level_books(tmp_path / "whole")
    wanted = [go(whole, step, 4) for step in range(1, 71)]
    torn = level_books(tmp_path / "torn")
    seen = [go(torn, step, 4) for step in range(1, after + 1)]
    torn.next_batch(after + 1, 4)  # leased and never delivered
    again = level_books(tmp_path / "torn")
    assert seen + [go(again, step, 4) for step in range(after + 1, 71)] == wanted
    assert wanted[0] != go(level_books(tmp_path / "other", seed=4), 1, 4)


@pytest.mark.parametrize("window", [1, 4, 1000])
def test_how_far_ahead_levels_are_planned_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    near = level_books(tmp_path / "near")
    wanted = [go(near, step, 4) for step in range(1, 31)]
    monkeypatch.setattr(task_queue, "WINDOW", window)
    far = level_books(tmp_path / "far")
    assert [go(far, step, 4) for step in range(1, 31)] == wanted


def test_the_share_of_each_level_in_a_batch_is_told(tmp_path: Path) -> None:
    mine = level_books(tmp_path)
    batch = mine.next_batch(1, 4)
    told = mine.metrics()
    assert told == {
        f"curriculum/share/{level}": sum(task.id.startswith(level) for task in batch.tasks) / 4 for level in LEVELS
    }
    assert sum(told.values()) == 1


@pytest.mark.parametrize(("size", "apart"), [(1, 1), (4, 4), (5, 4), (11, 4), (12, 4), (13, 4), (40, 4), (1500, 300)])
def test_visits_of_one_task_are_apart_and_every_pass_is_whole(size: int, apart: int) -> None:
    order = LevelOrder([Task(id=str(i), prompt="?") for i in range(size)], 7, "easy", apart=apart)
    visits = [order.visit(k) for k in range(4 * size)]
    for number in range(4):
        one = visits[number * size : (number + 1) * size]
        assert {visit.task for visit in one} == set(map(str, range(size)))
        assert {visit.occurrence for visit in one} == {number}
    last: dict[str, int] = {}
    for k, visit in enumerate(visits):
        assert k - last.get(visit.task, -apart) >= apart, (k, visit)
        last[visit.task] = k
    assert [order.visit(k) for k in (2 * size, 0, 3 * size - 1)] == [visits[k] for k in (2 * size, 0, 3 * size - 1)]


def test_planted_without_the_head_visits_come_too_soon() -> None:
    order = LevelOrder([Task(id=str(i), prompt="?") for i in range(12)], 7, "easy", apart=4)
    order._begin = lambda number: (  # type: ignore[method-assign]
        setattr(order, "_pass", number), setattr(order, "_order", task_queue.Permutation(12, 7, number)), None)[-1]  # fmt: skip
    visits = [order.visit(k).task for k in range(600)]
    assert any(len(set(visits[k : k + 4])) < 4 for k in range(596)), "otherwise the test above shows nothing"


# -- success ---------------------------------------------------------------------------------

TASKS = {f"{kind}{i}": Task(id=f"{kind}{i}", prompt="?") for kind in ("always", "half", "never") for i in range(10)}


def rewards_of(task: Task) -> tuple[float, ...]:
    return {"a": (1.0,) * 4, "h": (1.0, 0.0, 1.0, 0.0), "n": (0.0,) * 4}[task.id[0]]


def success_books(folder: Path, curriculum: SuccessCurriculum) -> DurableTaskQueue:
    return planned(folder, TASKS, SuccessPlan(TASKS, curriculum, seed=5, metric=None))


def test_tasks_that_are_solved_half_of_the_time_come_more_often_and_no_others_vanish(tmp_path: Path) -> None:
    mine = success_books(tmp_path, SuccessCurriculum(5))
    batches = [go(mine, step, 3, rewards_of) for step in range(1, 301)]
    assert all(len(set(batch)) == 3 for batch in batches)
    late = Counter(task.rstrip("0123456789") for batch in batches[100:] for task in batch)
    assert late["half"] > 3 * max(late["always"], late["never"]), late
    assert set(TASKS) == {task for batch in batches for task in batch}
    assert mine.balance().trained == 900


@pytest.mark.parametrize(("saved", "killed"), [(4, 4), (4, 9), (10, 11), (1, 30)])
def test_a_run_that_goes_on_from_a_checkpoint_chooses_the_same(tmp_path: Path, saved: int, killed: int) -> None:
    """The journal repeats what was played after the checkpoint; what was not is drawn as it would have been."""
    straight = SuccessCurriculum(5)
    whole = success_books(tmp_path / "whole", straight)
    wanted = [go(whole, step, 3, rewards_of) for step in range(1, 41)]
    before = SuccessCurriculum(5)
    torn = success_books(tmp_path / "torn", before)
    for step in range(1, killed + 1):
        go(torn, step, 3, rewards_of)
        if step == saved:
            state = before.state_dict()
    torn.next_batch(killed + 1, 3)
    after = SuccessCurriculum(5)
    after.load_state_dict(state)
    again = success_books(tmp_path / "torn", after)
    again.ledger.rewind(saved)
    assert [go(again, step, 3, rewards_of) for step in range(saved + 1, 41)] == wanted[saved:]
    assert after.state_dict() == straight.state_dict()


def test_planted_rates_that_a_checkpoint_does_not_hold_change_the_run(tmp_path: Path) -> None:
    whole = success_books(tmp_path / "whole", SuccessCurriculum(5))
    wanted = [go(whole, step, 3, rewards_of) for step in range(1, 61)]
    torn = success_books(tmp_path / "torn", SuccessCurriculum(5))
    for step in range(1, 21):
        go(torn, step, 3, rewards_of)
    forgetful = success_books(tmp_path / "torn", SuccessCurriculum(5))
    assert [go(forgetful, step, 3, rewards_of) for step in range(21, 61)] != wanted[20:]


def test_a_rollout_without_a_verdict_is_not_a_failure_of_the_policy(tmp_path: Path) -> None:
    curriculum = SuccessCurriculum(5)
    mine = success_books(tmp_path, curriculum)
    (task, *_) = go(mine, 1, 1, lambda _: (1.0, None))
    assert (curriculum.rate(task), curriculum.unjudged) == (1.0, 1)


def test_a_metric_decides_where_there_is_one_and_what_is_no_share_is_refused(tmp_path: Path) -> None:
    curriculum = SuccessCurriculum(5)
    plan = SuccessPlan(TASKS, curriculum, seed=5, metric="accuracy")
    one = group(TASKS["half1"], 1, 0)
    rollout = dataclasses.replace(one.rollouts[0], reward=7.0, reward_parts={"accuracy": 0.25})
    plan.learned([Group(one.task, one.id, (rollout,))])
    assert curriculum.rate("half1") == 0.25
    plain = SuccessPlan(TASKS, curriculum, seed=5, metric=None)
    with pytest.raises(InputError, match="numbers from 0 to 1"):
        plain.learned([Group(one.task, one.id, (rollout,))])


def test_what_a_loop_costs_is_not_taken_for_a_task_that_was_not_solved(tmp_path: Path) -> None:
    curriculum = SuccessCurriculum(5)
    one = group(TASKS["half1"], 1, 0)
    looped = dataclasses.replace(one.rollouts[0], reward=0.7, reward_parts={"f": 1.0, "repetition-cost": -0.3})
    SuccessPlan(TASKS, curriculum, seed=5, metric=None).learned([Group(one.task, one.id, (looped,))])
    assert curriculum.rate("half1") == 1.0


def test_what_the_plan_knows_of_a_batch_is_told(tmp_path: Path) -> None:
    mine = success_books(tmp_path, SuccessCurriculum(5))
    mine.next_batch(1, 3)
    assert mine.metrics() == {"curriculum/new_frequency": 1.0}
