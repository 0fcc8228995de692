"""Silent failure 39: held-out tasks are also training tasks, so that held-out accuracy measures memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from surefoot.config import Config
from surefoot.data import heldout
from surefoot.data.heldout import repeated_prompts, split_heldout
from surefoot.data.sources import sums_tasks
from surefoot.errors import TaskError
from surefoot.records import Task
from surefoot.run import inputs
from surefoot.run.inputs import FromPython, Inputs, read_inputs

RIVERS = "Danube Rhine Elbe Oder Vistula Seine Loire Rhone Tiber Arno Ebro Tagus Douro Thames Severn Volga".split()
Split = Callable[[Sequence[Task], float], tuple[tuple[Task, ...], tuple[Task, ...]]]
TASKS = sums_tasks(500, seed=0)


def first_percent(tasks: Sequence[Task], fraction: float) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """The planted bug: the head of the training set is evaluated on, and stays in it."""
    return tuple(tasks), tuple(tasks[: int(len(tasks) * fraction)])


def by_position(tasks: Sequence[Task], fraction: float) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """The planted bug: sides depend on the order, so a reshuffled or resumed run trains on what was held out."""
    border = int(len(tasks) * fraction)
    return tuple(tasks[border:]), tuple(tasks[:border])


def check(split: Split) -> None:
    train, held = split(TASKS, 0.1)
    assert 20 < len(held) < 80
    assert not {t.id for t in train} & {t.id for t in held}
    assert not repeated_prompts(train, held)
    again, held_again = split(TASKS[::-1], 0.1)
    assert {t.id for t in held_again} == {t.id for t in held}, "the side of a task depends on nothing but its id"
    assert len(train) == len(again) == len(TASKS) - len(held)


def test_no_task_is_on_both_sides_whatever_the_order() -> None:
    check(split_heldout)


@pytest.mark.parametrize("split", [first_percent, by_position])
def test_planted_split_is_seen(split: Split) -> None:
    with pytest.raises(AssertionError):
        check(split)


def test_planted_repeated_prompt_under_another_id_is_refused(tmp_path: Path) -> None:
    """Each question twice, differing in case and spacing only: some pair falls on both sides."""
    rows = [
        {"id": f"{copy}{i}", "prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(60) for copy in "ab"
    ]
    for row in rows[1::2]:
        row["prompt"] = row["prompt"].upper().replace(" ", "  ")
    config = Config(model="pebble", tasks="python", heldout_fraction=0.3)
    sides = [heldout.is_heldout(row["id"], 0.3) for row in rows]
    assert any(a != b for a, b in zip(sides[::2], sides[1::2], strict=True)), "no pair is split: nothing would show"
    with pytest.raises(TaskError, match="held-out prompts are also training prompts"):
        read_inputs(config, tmp_path, FromPython(rows, [lambda completions, **_: [1.0] * len(completions)]))


# -- twins: the same question in nearly the same words, through what every run reads its tasks with ---------------


def reworded() -> list[dict[str, str]]:
    """Each question twice, the second time with another sign at its end: some pair falls on both sides."""
    asked = [f"Through which countries does the river {river} run, and where does it end" for river in RIVERS]
    return [{"id": f"{sign}{i}", "prompt": text + sign} for i, text in enumerate(asked) for sign in "?."]


def read(folder: Path, near: str) -> Inputs:
    config = Config(model="pebble", tasks="python", heldout_fraction=0.3, heldout_near=near)  # type: ignore[arg-type]
    return read_inputs(config, folder, FromPython(reworded(), [lambda completions, **_: [1.0] * len(completions)]))


def crossing(found: Inputs) -> set[str]:
    """Questions that are on both sides, whatever the sign."""
    held = {task.id[1:] for task in found.heldout}
    assert held, "nothing is held out: nothing would show"
    return {task.id[1:] for task in found.train} & held


def test_a_run_refuses_twins_or_leaves_them_out(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="training tasks are nearly held-out tasks"):
        read(tmp_path, "auto")
    dropped = read(tmp_path, "drop")
    assert not crossing(dropped)
    assert dropped.twins is not None
    assert len(dropped.twins.found) > 0
    assert len(crossing(read(tmp_path, "allow"))) == len(dropped.twins.found), "and says how many it allows"


def test_planted_run_that_compares_ids_alone_trains_on_twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "keep_apart", lambda train, held, mode: (train, None))
    assert crossing(read(tmp_path, "drop")), "the same question is trained on and measured"
