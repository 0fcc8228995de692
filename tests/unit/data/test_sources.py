"""`tasks = ...`: each kind of source, and what a wrong one is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.data import sources
from surefoot.data.sources import load_tasks
from surefoot.data.tasks import TaskSet
from surefoot.errors import TaskError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tasks"


def load(source: str, base: Path = FIXTURES, num_tasks: int = 20, seed: int = 0) -> TaskSet:
    return load_tasks(source, base=base, num_tasks=num_tasks, seed=seed)


# -- built in and files ---------------------------------------------------------


def test_the_builtin_sums_come_with_exact_scoring() -> None:
    tasks = load("builtin:sums", num_tasks=30)
    assert (tasks.name, tasks.scorer, len(tasks.tasks)) == ("builtin:sums", "exact", 30)


def test_the_fingerprint_tells_seeds_apart_and_repeats_itself() -> None:
    assert load("builtin:sums").fingerprint == load("builtin:sums").fingerprint
    assert load("builtin:sums").fingerprint != load("builtin:sums", seed=1).fingerprint


def test_a_file_is_read_whole_relative_to_base_and_has_no_scorer() -> None:
    tasks = load("tasks/good.jsonl", base=FIXTURES.parent, num_tasks=1)
    assert (tasks.name, tasks.scorer, len(tasks.tasks)) == ("good", None, 3)


def test_an_absolute_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert len(load(str(FIXTURES / "good.json"), base=tmp_path).tasks) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("god.jsonl", "does not exist; near it: good.jsonl"),
        ("nowhere/good.jsonl", "does not exist"),
        ("../tasks", "is a folder"),
        ("", "is a folder"),
        ("builtin:sum", "no built-in tasks 'sum'; did you mean sums?"),
        ("builtin:", "no built-in tasks ''"),
    ],
)
def test_a_wrong_name_is_answered_with_near_ones(source: str, message: str) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        load(source)
    assert caught.value.exit_code == 4


def test_an_unknown_ending_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text("prompt\n")
    with pytest.raises(TaskError, match=r"ends in '\.csv'") as caught:
        load("tasks.csv", base=tmp_path)
    assert ".jsonl, .json, .parquet" in caught.value.why


def test_a_file_the_system_refuses_is_a_task_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sources, "read_task_file", refuse)
    with pytest.raises(TaskError, match="cannot be read: Permission denied"):
        load("good.jsonl")


# -- reasoning-gym --------------------------------------------------------------


@pytest.fixture
def gym() -> Any:
    return pytest.importorskip("reasoning_gym", reason="reasoning-gym is an extra")


def test_gym_tasks_can_be_scored_with_what_their_columns_carry(gym: Any) -> None:
    tasks = load("reasoning_gym:chain_sum", num_tasks=10)
    assert tasks.scorer == "reasoning_gym"
    assert len(tasks.tasks) == 10
    for task in tasks.tasks:
        score = gym.get_score_answer_fn(task.columns["reasoning_gym"])
        assert score(task.columns["answer"], task.columns["entry"]) == 1.0
        assert score("no idea", task.columns["entry"]) < 1.0
        json.dumps(dict(task.columns))


def test_gym_tasks_are_different_and_repeat_with_the_seed(gym: Any) -> None:
    first = load("reasoning_gym:coin_flip", num_tasks=40)
    assert len({task.prompt for task in first.tasks}) == 40
    assert first == load("reasoning_gym:coin_flip", num_tasks=40)
    assert first.fingerprint != load("reasoning_gym:coin_flip", num_tasks=40, seed=77).fingerprint


def test_a_generator_that_runs_dry_says_how_many_tasks_it_has(gym: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Three:
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": f"q{index % 3}", "answer": "a", "metadata": {}}

    monkeypatch.setattr(gym, "create_dataset", lambda name, size, seed: Three())
    with pytest.raises(TaskError, match="3 different tasks in 16 draws; num_tasks = 4"):
        load("reasoning_gym:chain_sum", num_tasks=4)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"answer": "a"}, "without a question"),
        ({"question": " ", "answer": "a"}, "without a question"),
        ({"question": "q", "answer": "a", "metadata": object()}, "not plain data"),
    ],
    ids=["no question", "blank question", "not plain"],
)
def test_an_odd_entry_is_refused(gym: Any, monkeypatch: pytest.MonkeyPatch, entry: Any, message: str) -> None:
    monkeypatch.setattr(gym, "create_dataset", lambda name, size, seed: [entry] * size)
    with pytest.raises(TaskError, match=message):
        load("reasoning_gym:chain_sum")


def test_an_unknown_dataset_is_answered_with_near_names(gym: Any) -> None:
    with pytest.raises(TaskError, match="no dataset 'chain_sums'; did you mean chain_sum"):
        load("reasoning_gym:chain_sums")


def test_a_dataset_that_cannot_be_made_from_its_name_is_a_task_error(gym: Any) -> None:
    with pytest.raises(TaskError, match="could not make 'composite'"):
        load("reasoning_gym:composite")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"pip install surefoot\[tasks\]"):
        load("reasoning_gym:chain_sum")


def test_loading_tasks_imports_neither_torch_nor_a_generator() -> None:
    code = (
        "import sys, pathlib; from surefoot.data.sources import load_tasks; import surefoot.data.tasks;"
        "load_tasks('builtin:sums', base=pathlib.Path(), num_tasks=5, seed=0);"
        "print([m for m in ('torch', 'reasoning_gym', 'pyarrow', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
