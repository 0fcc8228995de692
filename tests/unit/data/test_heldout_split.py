"""HeldoutSplit: nothing on both sides, by id, content or likeness; a split that nothing but the seed moves."""

from __future__ import annotations

import copy
import math
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.data import HeldoutLeakError, HeldoutSplit, heldout
from surefoot.data.heldout import is_heldout, split_heldout, task_id
from surefoot.data.near_duplicates import Content
from surefoot.data.sources import sums_tasks
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

SUMS = sums_tasks(2000, seed=3)
STORY = (
    "A farmer walks to the market with a basket of apples, sells most of them before noon, gives the last few to a "
    "child by the fountain, and walks home along the river. What did the farmer carry home?"
)


@dataclass(frozen=True)
class Foreign:
    """Somebody else's task: known by `task_id`, nothing else."""

    task_id: str
    prompt: str | None = None


def ids(tasks: Any) -> set[str]:
    return {task_id(task) for task in tasks}


# -- by id --------------------------------------------------------------------

SHAPES: dict[str, Callable[[str], Any]] = {
    "bare id": lambda name: name,
    "task": lambda name: Task(id=name, prompt=f"say {name}"),
    "object": Foreign,
    "namespace": lambda name: SimpleNamespace(task_id=name, id="the same for all"),
    "row": lambda name: {"task_id": name, "prompt": f"say {name}"},
    "row with id": lambda name: {"id": name},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_ids_and_objects_are_taken_and_an_overlap_is_refused_with_examples(shape: Callable[[str], Any]) -> None:
    split = HeldoutSplit([shape("apple"), shape("pear")], [shape("moon")])
    assert (split.train_ids, split.heldout_ids) == ({"apple", "pear"}, {"moon"})
    with pytest.raises(HeldoutLeakError, match=r"1 task\(s\) .* held out \(1 by id\): 'moon'") as caught:
        HeldoutSplit([shape("apple"), shape("moon")], [shape("moon"), shape("sun")])
    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_code == 4
    assert [leak.task_id for leak in caught.value.leaks] == ["moon"]


def test_the_error_shows_five_counts_all_and_survives_pickling() -> None:
    with pytest.raises(HeldoutLeakError, match="7 by id") as caught:
        HeldoutSplit(range(20), range(13, 30))
    assert "'13'; '14'; '15'; '16'; '17' and 2 more" in caught.value.what
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.leaks) == (str(caught.value), caught.value.leaks)
    assert copy.copy(caught.value).leaks == caught.value.leaks


def test_a_number_and_its_text_are_one_id() -> None:
    with pytest.raises(HeldoutLeakError):
        HeldoutSplit([1, 2], ["2"])


@pytest.mark.parametrize("side", [("a", "b", "a"), ["1", 1], [Foreign("x"), Foreign("x")]], ids=str)
def test_an_id_twice_on_one_side_is_refused(side: Any) -> None:
    with pytest.raises(TaskError, match="more than once"):
        HeldoutSplit(side, ["z"])
    with pytest.raises(TaskError, match="more than once"):
        HeldoutSplit(["z"], side)


@pytest.mark.parametrize(
    "task",
    ["", "  ", None, True, 1.5, b"a", {}, {"task_id": None}, {"task_id": ""}, Foreign(""), object()],
    ids=lambda task: type(task).__name__,  # the same in every worker; an address is not
)
def test_a_missing_id_is_refused(task: Any) -> None:
    with pytest.raises(ValueError, match="has no id"):
        HeldoutSplit([task], ["z"])


@pytest.mark.parametrize("sides", [([], ["a"]), (["a"], []), ([], [])], ids=str)
def test_an_empty_side_is_refused(sides: tuple[list[str], list[str]]) -> None:
    with pytest.raises(TaskError, match="has no tasks"):
        HeldoutSplit(*sides)


@pytest.mark.parametrize("side", ["abc", b"abc", {"id": "a"}], ids=str)
def test_one_task_in_place_of_a_list_is_refused(side: Any) -> None:
    """A text would otherwise be read as one id per letter."""
    with pytest.raises(TaskError, match="its parts are not tasks"):
        HeldoutSplit(side, ["z"])


def test_generators_are_read_once_and_order_is_kept() -> None:
    split = HeldoutSplit((name for name in ["b", "a"]), (name for name in ["d", "c"]))
    assert (split.train, split.heldout) == (("b", "a"), ("d", "c"))


# -- by content ---------------------------------------------------------------


def test_the_same_task_under_a_new_id_is_caught() -> None:
    train, held = Task(id="new", prompt=" WHAT is\n2+2 ?", columns={"answer": 4}), Task(
        id="old", prompt="What is 2+2 ?", columns={"answer": "4"}
    )  # fmt: skip
    with pytest.raises(HeldoutLeakError, match=r"1 by content\): 'new' has the content of 'old'"):
        HeldoutSplit([train], [held], near=None)


def test_reordered_targets_are_caught_and_another_target_is_another_task() -> None:
    def task(name: str, *targets: str) -> Task:
        return Task(id=name, prompt="Make the failing tests pass.", columns={"targets": list(targets)})

    with pytest.raises(HeldoutLeakError, match="by content"):
        HeldoutSplit([task("a", "test_x", "test_y")], [task("b", "test_y", "test_x")])
    HeldoutSplit([task("a", "test_x", "test_y")], [task("b", "test_y", "test_z")])
    HeldoutSplit([task("a", "test_x", "test_y")], [task("b", "test_y")])


def test_a_copy_without_its_target_is_caught() -> None:
    """A generator may repeat a question and leave the answer out."""
    with pytest.raises(HeldoutLeakError, match="by content"):
        HeldoutSplit([Task(id="a", prompt=STORY)], [Task(id="b", prompt=STORY, columns={"answer": "x"})], near=None)
    with pytest.raises(HeldoutLeakError, match="by content"):
        HeldoutSplit([Task(id="a", prompt=STORY, columns={"answer": "x"})], [Task(id="b", prompt=STORY)], near=None)


def test_a_view_of_ones_own_decides_what_is_compared() -> None:
    rows = [{"id": 1, "question": "who?"}, {"id": 2, "question": "Who?"}]
    assert HeldoutSplit(rows[:1], rows[1:]).describe().count("contents compared: 0 of 2") == 1
    with pytest.raises(HeldoutLeakError, match="by content"):
        HeldoutSplit(rows[:1], rows[1:], content=lambda row: row["question"])
    HeldoutSplit(rows[:1], rows[1:], content=lambda row: Content.of(row["question"], row["id"]))
    same = [Task(id="a", prompt="x"), Task(id="b", prompt="x")]
    HeldoutSplit(same[:1], same[1:], content=None)


def test_a_near_duplicate_is_caught_unless_switched_off() -> None:
    near = STORY.replace("noon", "dusk")
    with pytest.raises(HeldoutLeakError, match=r"1 by likeness\): 'a' is 9\d% like 'b'") as caught:
        HeldoutSplit([Task(id="a", prompt=near)], [Task(id="b", prompt=STORY)])
    assert 0.8 < caught.value.leaks[0].overlap < 1
    HeldoutSplit([Task(id="a", prompt=near)], [Task(id="b", prompt=STORY)], near=None)
    HeldoutSplit([Task(id="a", prompt=near)], [Task(id="b", prompt=STORY)], near=0.99)


@pytest.mark.parametrize("near", [0.0, -1.0, 1.1, math.nan])
def test_a_threshold_that_is_no_overlap_is_refused(near: float) -> None:
    with pytest.raises(ConfigError, match="near"):
        HeldoutSplit([Task(id="a", prompt="x")], [Task(id="b", prompt="y")], near=near)


def test_describe_says_what_was_compared_and_what_was_not() -> None:
    assert HeldoutSplit(["a"], ["b"]).describe() == (
        "1 tasks to train on, 1 held out; no id on both sides; contents compared: 0 of 2; near-duplicates: not searched"
    )
    whole = HeldoutSplit([Task(id="a", prompt="x")], [Task(id="b", prompt="y")]).describe()
    assert whole.endswith("contents compared: 2 of 2; near-duplicates: none from an overlap of 0.8 on")


def test_the_leaks_among_new_tasks_are_named_each_once_with_the_closest_match() -> None:
    split = HeldoutSplit([Task(id="t", prompt="Sing.")], [Task(id="h", prompt=STORY), Task(id="i", prompt="Dance!")])
    new = [
        Task(id="h", prompt="anything"), Task(id="n1", prompt=STORY.upper()), Task(id="n2", prompt=STORY + " Think."),
        Task(id="n3", prompt="Whistle."), Task(id="t", prompt="Sing."),
    ]  # fmt: skip
    assert [(leak.task_id, leak.heldout_id, leak.how) for leak in split.leaks(new)] == [
        ("h", "h", "id"), ("n1", "h", "content"), ("n2", "h", "near"),
    ]  # fmt: skip
    split.refuse(new[3:])
    with pytest.raises(HeldoutLeakError, match="1 by likeness"):
        split.refuse(new[2:])
    split.refuse(new[2:], near=False)


@pytest.mark.parametrize("method", ["_copy_of", "_near_leaks"])
def test_planted_missing_check_is_seen(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Teeth: with either safeguard out, the list of leaks above is not the one it must be."""
    monkeypatch.setattr(HeldoutSplit, method, lambda *_: None if method == "_copy_of" else [])
    with pytest.raises(AssertionError):
        test_the_leaks_among_new_tasks_are_named_each_once_with_the_closest_match()


# -- split --------------------------------------------------------------------


def test_a_split_is_disjoint_complete_and_of_the_size_asked_for() -> None:
    split = HeldoutSplit.split(SUMS, 0.2, 7)
    assert split.train_ids.isdisjoint(split.heldout_ids)
    assert split.train_ids | split.heldout_ids == ids(SUMS)
    assert abs(len(split.heldout) / len(SUMS) - 0.2) < 3 * math.sqrt(0.2 * 0.8 / len(SUMS))


def test_a_permutation_of_the_input_gives_the_very_same_split() -> None:
    shuffled = random.Random(1).sample(SUMS, len(SUMS))
    one, other = HeldoutSplit.split(SUMS, 0.2, 7), HeldoutSplit.split(shuffled, 0.2, 7)
    assert (one.train, one.heldout) == (other.train, other.heldout)


def test_added_tasks_never_move_old_ones() -> None:
    before, after = HeldoutSplit.split(SUMS[:500], 0.2, 7), HeldoutSplit.split(SUMS, 0.2, 7)
    assert before.heldout_ids == after.heldout_ids & ids(SUMS[:500])


def test_another_seed_is_another_split_and_seed_zero_is_the_rule_of_the_config() -> None:
    assert HeldoutSplit.split(SUMS, 0.2, 1).heldout_ids != HeldoutSplit.split(SUMS, 0.2, 2).heldout_ids
    assert HeldoutSplit.split(SUMS, 0.2).heldout_ids == ids(split_heldout(SUMS, 0.2)[1])


def test_another_process_with_another_hash_seed_splits_alike() -> None:
    code = (
        "from surefoot.data import HeldoutSplit\n"
        "print(*HeldoutSplit.split([f'täsk {i}' for i in range(60)], 0.3, 5, group=lambda t: t[-1]).heldout, sep='|')"
    )
    outputs = set()
    for hash_seed in ("0", "1"):
        env = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "utf-8"}
        outputs.add(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True).stdout)
    assert len(outputs) == 1
    assert outputs.pop().strip()


def test_a_group_stays_on_one_side_whether_it_is_a_column_or_a_function() -> None:
    rows = [{"task_id": f"{repo}/{i}", "repo": repo} for repo in "abcdefghij" for i in range(5)]
    by_column = HeldoutSplit.split(rows, 0.3, 2, group="repo")
    by_function = HeldoutSplit.split(rows, 0.3, 2, group=lambda row: row["repo"])
    assert by_column.heldout == by_function.heldout
    assert {row["repo"] for row in by_column.train}.isdisjoint(row["repo"] for row in by_column.heldout)
    tasks = [Task(id=row["task_id"], prompt=f"{i} {row['repo']}", columns=row) for i, row in enumerate(rows)]
    assert HeldoutSplit.split(tasks, 0.3, 2, group="repo").heldout_ids == by_column.heldout_ids


def test_planted_split_that_ignores_the_group_is_seen() -> None:
    """Teeth: by id alone, the same rows have repositories on both sides."""
    rows = [{"task_id": f"{repo}/{i}", "repo": repo} for repo in "abcdefghij" for i in range(5)]
    plain = HeldoutSplit.split(rows, 0.3, 2)
    assert {row["repo"] for row in plain.train} & {row["repo"] for row in plain.heldout}


@pytest.mark.parametrize("value", [None, "", 1.5, True, ("a", "b")], ids=repr)
def test_a_group_that_is_no_name_is_refused(value: Any) -> None:
    with pytest.raises(TaskError, match="task 'a' has the group"):
        HeldoutSplit.split(["a", "b"], 0.5, group=lambda _: value)


@pytest.mark.parametrize("fraction", [0, 1, 0.0, 1.0, -0.1, 1.1, math.nan, math.inf, True, "0.1", None], ids=repr)
def test_a_share_outside_the_open_interval_is_refused(fraction: Any) -> None:
    with pytest.raises(ValueError, match="holdout_frac"):
        HeldoutSplit.split(SUMS, fraction)


@pytest.mark.parametrize("seed", [1.0, "1", None, True], ids=repr)
def test_a_seed_that_is_no_whole_number_is_refused(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed"):
        HeldoutSplit.split(SUMS, 0.1, seed)


@pytest.mark.parametrize(
    ("fraction", "group"),
    [(1e-9, None), (1 - 1e-9, None), (0.5, lambda _: "all")],
    ids=["nothing held out", "all held out", "one group"],
)
def test_a_split_with_an_empty_side_is_refused(fraction: float, group: Any) -> None:
    with pytest.raises(TaskError, match=r"splits 9 tasks \(\d ids or groups\) into \d to train on and \d held out"):
        HeldoutSplit.split([str(i) for i in range(9)], fraction, group=group)


def test_a_split_with_repeated_ids_or_copies_across_the_border_is_refused() -> None:
    with pytest.raises(TaskError, match="more than once"):
        HeldoutSplit.split(["a", "b", "a"], 0.5)
    twins = [Task(id=f"{i}{side}", prompt=f"{STORY} {i}") for i in range(20) for side in "ab"]
    with pytest.raises(HeldoutLeakError, match="by content"):
        HeldoutSplit.split(twins, 0.5)
    HeldoutSplit.split(twins, 0.5, group=lambda task: task.id[:-1])


def test_the_built_in_sums_are_never_refused() -> None:
    """10,000 prompts that differ in their numbers alone."""
    whole = HeldoutSplit.split(sums_tasks(10_000, seed=0), 0.1)
    assert "contents compared: 10000 of 10000" in whole.describe()


def test_half_a_surrogate_pair_in_an_id_or_a_prompt_is_text_like_any_other() -> None:
    broken = Task(id="a\ud800", prompt="b\udfff")
    assert is_heldout(broken.id, 1.0)
    with pytest.raises(HeldoutLeakError, match="by content"):
        HeldoutSplit([broken], [Task(id="other", prompt="B\udfff")])


def test_planted_split_by_position_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: let the side depend on how many were asked before, and permutation moves tasks."""
    asked: list[str] = []

    def by_count(key: str, fraction: float, seed: int = 0) -> bool:
        asked.append(key)
        return len(asked) % 5 == 0

    monkeypatch.setattr(heldout, "is_heldout", by_count)
    with pytest.raises(AssertionError):
        test_added_tasks_never_move_old_ones()
